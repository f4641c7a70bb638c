"""Sweeps as data: names, seeds, order, and what is refused; the project's own ones are sound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.cluster import Node
from experiments.run import choose
from experiments.sweeps import Configuration, Sweep, drafter_slug, experiment_names, find_experiment, load_work


def test_the_seven_experiments_are_there() -> None:
    names = ("drift", "regret", "scale", "specbench", "strategies", "trees", "vocabulary")
    assert experiment_names() == names


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("name", experiment_names())
def test_sweeps_are_plain_data_that_can_be_run(name: str, quick: bool) -> None:
    experiment = find_experiment(name)
    found = experiment.sweep(quick=quick).configurations()
    assert len({c.id for c in found}) == len(found) > 5
    done: set[str] = set()
    for configuration in found:
        json.dumps(dict(configuration.parameters))
        assert set(configuration.needs) <= done  # what is needed comes first
        done.add(configuration.id)
    for work in {c.work for c in found}:
        assert callable(load_work(work))
    assert (experiment.folder / "README.md").read_text(encoding="utf-8").startswith(f"# {name}")
    for function in ("score", "tables", "plots"):
        assert callable(getattr(experiment.analysis, function))


def test_seeds_are_expanded_and_needs_follow_them() -> None:
    sweep = Sweep(
        (
            Configuration("play", "m:f", needs=("trace", "oracle")),
            Configuration("oracle", "m:f", needs=("trace",)),
            Configuration("trace", "m:f", seeded=False),
        ),
        seeds=2,
    )
    found = sweep.configurations()
    assert [c.id for c in found] == ["trace", "oracle-s0", "oracle-s1", "play-s0", "play-s1"]
    assert found[-1].needs == ("trace", "oracle-s1") and found[-1].seed == 1
    assert len(sweep.configurations(5)) == 11


@pytest.mark.parametrize(
    ("points", "problem"),
    [
        ([Configuration("a", "m:f"), Configuration("a", "m:f")], "ids must be unique, got 'a' twice"),
        ([Configuration("A b", "m:f")], "ids must be lower-case letters"),
        ([Configuration("a", "m:f", cpus=-1.0)], "cpus of configuration 'a-s0' must be >= 0, got -1.0"),
        ([Configuration("a", "m:f", needs=("b",))], "'a-s0' needs 'b', which is not in the sweep"),
        ([Configuration("a", "m:f", needs=("b",)), Configuration("b", "m:f", needs=("a",))], "round in a circle"),
        ([Configuration("a", "m:f", needs=("b",), seeded=False), Configuration("b", "m:f")], "has no seed"),
    ],
)
def test_impossible_sweeps_are_refused(points: list[Configuration], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Sweep(tuple(points)).configurations()


def test_only_keeps_what_is_needed_and_needs_are_overridden_for_models_alone() -> None:
    sweep = find_experiment("regret").sweep(quick=True)
    found = choose(sweep, seeds=1, only="hedge-h100-shuffle", cpus=2.0, gpus=0.5)
    ids = ["trace-0", "trace-1", "oracles-h100-shuffle-s0"]
    assert [c.id for c in found] == [*ids, "hedge-h100-shuffle-s0", "adahedge-h100-shuffle-s0"] or (
        [c.id for c in found][:3] == ids and "normal-hedge-h100-shuffle-s0" in {c.id for c in found}
    )
    assert {(c.cpus, c.gpus) for c in found if c.id.startswith("trace")} == {(2.0, 0.5)}
    assert {(c.cpus, c.gpus) for c in found if not c.id.startswith("trace")} == {(1.0, 0.0)}
    with pytest.raises(ValueError, match="only must be part of an id like 'mixture-loaded-blocks-s0', got 'nonsense'"):
        choose(sweep, seeds=1, only="nonsense", cpus=None, gpus=None)


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="unknown experiment 'regrets'; did you mean 'regret'"):
        find_experiment("regrets")
    with pytest.raises(ValueError, match="work must be 'module:name'"):
        load_work("experiments.replaying:play")


def test_slots_and_slugs() -> None:
    assert Node(4.0, 2.0).fits(cpus=1.0, gpus=0.5) == 4
    assert Node(4.0, 2.0).fits(cpus=1.5, gpus=0.0) == 2
    assert Node(4.0, 0.0).fits(cpus=1.0, gpus=0.1) == 0
    assert drafter_slug("EAGLE3@32/fr:16384") == "eagle3@32-fr16384"


def test_the_package_is_light_to_look_through() -> None:
    """Sweeps and the runner may be read without a model's libraries."""
    import subprocess
    import sys

    code = "import experiments.run, sys; print(sorted({'torch', 'ray', 'pandas', 'matplotlib'} & set(sys.modules)))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
