"""`adaptspec replay` on small traces made up for it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from adaptspec.cli import main
from adaptspec.cli.replay_report import COMPARATORS, Plays
from adaptspec.control.cost import CostModel
from adaptspec.control.regret import UNITS
from adaptspec.control.trace_file import write_trace
from tests.cli.test_main import ROOT, error_of
from tests.control.replay_cases import random_trace


def measured() -> dict[str, Any]:
    model = CostModel()
    for _ in range(4):
        for nodes, seconds in ((0, 0.030), (4, 0.034)):
            model.observe_verify(nodes, seconds, context=20)
        for drafter in ("a", "b"):
            model.observe_draft(drafter, 4, 0.0002)
        model.observe_overhead(0.001)
    return model.state_dict()


@pytest.fixture(scope="module")
def trace_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six requests of two domains with the drafters a and b at 4 nodes."""
    path = tmp_path_factory.mktemp("traces") / "small.parquet"
    trace = random_trace(11, lengths=[30, 20, 1, 25, 30, 15])
    write_trace(path, replace(trace, costs=measured(), fingerprint="device=test", provenance={"seed": 11}))
    return path


def report_of(trace: Path, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "out.json"
    assert main(["replay", str(trace), "--json", str(out), "--force", "--quiet", *arguments]) == 0
    return json.loads(out.read_text(encoding="utf-8"))


def test_end_to_end(trace_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "regret.png"
    names = "hedge,ucb,mixture,fixed:a@2"
    report = report_of(trace_path, tmp_path, "--strategies", names, "--seeds", "3", "--plot", str(plot))
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [f"wrote {tmp_path / 'out.json'}", f"picture: {plot}"]
    for word in (*names.split(","), *COMPARATORS, "of fixed", "of step", "3 seeds"):
        assert word in captured.out
    assert plot.read_bytes().startswith(b"\x89PNG")

    assert report["seeds"] == [0, 1, 2] and not report["interrupted"]
    assert report["stream"] == {"requests": 6, "tokens": 115, "domains": {"law": 3, "code": 3}}
    assert report["options"]["arms"] == ["ar", "a@4", "b@4"]
    assert report["provenance"]["trace"]["fingerprint"] == "device=test"
    assert report["provenance"]["trace"]["provenance"] == {"seed": 11}
    assert [run["name"] for run in report["comparators"]] == ["ar", *COMPARATORS]
    assert [run["name"] for run in report["runs"]] == names.split(",")


def test_numbers_fit_together(trace_path: Path, tmp_path: Path) -> None:
    report = report_of(trace_path, tmp_path, "--strategies", "hedge,fixed:b@4", "--budgets", "1,2,4", "--seeds", "2")
    comparators = {run["name"]: run for run in report["comparators"]}
    speeds = [comparators[name]["tokens_per_second"] for name in ("best-fixed", "best-switching", "best-per-step")]
    assert all(slower <= faster + 1e-9 for slower, faster in pairwise(speeds))
    domains = [comparators[name]["tokens_per_second"] for name in COMPARATORS if "switching" not in name]
    assert all(slower <= faster + 1e-9 for slower, faster in pairwise(domains))
    for run in (*report["comparators"], *report["runs"]):
        assert len(run["tokens_per_second_seeds"]) == 2
        assert sum(run["arms"].values()) == pytest.approx(1.0)
        assert run["tokens_per_second"] == pytest.approx(2 * 115 / sum(run["seconds_seeds"]))
        assert run["mean_accepted_length"] == pytest.approx(2 * 115 / sum(run["rounds_seeds"]))
        for name, best in comparators.items():
            if name == "ar":
                continue
            assert run["against"][name] == pytest.approx(run["tokens_per_second"] / best["tokens_per_second"])
            lost = run["regret"][name]
            assert lost["position"][-1] == 115
            seconds = (sum(run["seconds_seeds"]) - sum(best["seconds_seeds"])) / 2
            assert lost["seconds"]["mean"][-1] == pytest.approx(seconds, rel=1e-4, abs=1e-6)
            for unit in UNITS:
                for low, mean, high in zip(*(lost[unit][key] for key in ("low", "mean", "high")), strict=True):
                    assert low <= mean + 1e-6 and mean <= high + 1e-6
    played, best = report["runs"][1], comparators["best-fixed"]
    if best["arms"] == {"b@4": 1.0}:
        assert played["seconds_seeds"] == pytest.approx(best["seconds_seeds"])


def test_the_best_fixed_arm_replayed_has_no_regret(trace_path: Path, tmp_path: Path) -> None:
    plot = tmp_path / "comparators.png"
    arguments = ("--seeds", "1", "--cost", "cpu-bf16")
    first = report_of(trace_path, tmp_path, "--strategies", "none", *arguments, "--plot", str(plot))
    assert first["runs"] == [] and plot.read_bytes().startswith(b"\x89PNG")
    (arm,) = next(run for run in first["comparators"] if run["name"] == "best-fixed")["arms"]
    second = report_of(trace_path, tmp_path, "--strategies", f"fixed:{arm}", *arguments)
    run = second["runs"][0]
    assert run["against"]["best-fixed"] == pytest.approx(1.0)
    assert [run["regret"]["best-fixed"][unit]["mean"][-1] for unit in UNITS] == pytest.approx([0.0] * 3, abs=1e-6)


def test_every_strategy_can_be_replayed(trace_path: Path, tmp_path: Path) -> None:
    from adaptspec.control.strategies import strategy_names

    report = report_of(trace_path, tmp_path, "--strategies", "all", "--seeds", "1")
    assert sorted(run["name"] for run in report["runs"]) == list(strategy_names())
    assert all(run["tokens_per_second_seeds"][0] > 0 for run in report["runs"])


def test_a_replay_is_reproducible(trace_path: Path, tmp_path: Path) -> None:
    arguments = ("--strategies", "exp3,mixture", "--seeds", "2", "--order", "blocks", "--seed", "4")
    reports = [report_of(trace_path, tmp_path, *arguments) for _ in range(2)]
    for report in reports:
        assert report.pop("provenance")["seed"] == 4
        for run in (*report["comparators"], *report["runs"]):
            del run["deciding_seconds_per_step"], run["tokens_per_second_deciding_charged"]
    assert reports[0] == reports[1]
    assert reports[0]["seeds"] == [4, 5]


def test_drafters_budgets_and_costs(trace_path: Path, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"verify": [[0, 1.0], [4, 9.0]], "draft": {"b": 3.0}, "overhead": 0.5}))
    arguments = ("--strategies", "fixed:b@1", "--drafters", "b", "--budgets", "1", "--seeds", "1", "--cost", str(costs))
    report = report_of(trace_path, tmp_path, *arguments)
    assert report["options"]["arms"] == ["ar", "b@1"]
    assert report["options"]["cost"] == str(costs)
    ar = report["comparators"][0]
    assert ar["tokens_per_second"] == pytest.approx(1.0 / 1.5)
    steps = report["runs"][0]["rounds_seeds"][0]
    verified = report["runs"][0]["mean_verified"] * steps
    # Every step is drafted: no request reached the longest output.
    assert report["runs"][0]["seconds_seeds"][0] == pytest.approx(steps * (1.0 + 3.0 + 0.5) + 2.0 * verified)


def test_noise_is_the_same_for_the_same_seed(trace_path: Path, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"noise": 0.3, "changes": [{"from_token": 40, "factor": 3.0}]}))
    arguments = ("--strategies", "fixed:b@2", "--seeds", "2", "--order", "as-recorded", "--cost", str(costs))
    reports = [report_of(trace_path, tmp_path, *arguments) for _ in range(2)]
    seconds = reports[0]["runs"][0]["seconds_seeds"]
    assert seconds == reports[1]["runs"][0]["seconds_seeds"]
    assert seconds[0] != seconds[1]


def test_an_interrupted_replay_keeps_the_finished_seeds(
    trace_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play = Plays.play

    def impatient(self: Plays, seed: int, progress: Any) -> None:
        if seed == 2:
            raise KeyboardInterrupt
        play(self, seed, progress)

    monkeypatch.setattr(Plays, "play", impatient)
    out = tmp_path / "out.json"
    assert main(["replay", str(trace_path), "--strategies", "ucb", "--json", str(out), "--quiet"]) == 130
    assert "interrupted after 2 finished seeds" in capsys.readouterr().err
    report = json.loads(out.read_text())
    assert report["interrupted"] and report["seeds"] == [0, 1]


def test_interrupted_before_anything_is_finished(
    trace_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def impatient(self: Plays, seed: int, progress: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Plays, "play", impatient)
    plot = tmp_path / "out.png"
    assert main(["replay", str(trace_path), "--strategies", "ucb", "--plot", str(plot), "--quiet"]) == 130
    assert capsys.readouterr().out == ""
    assert not plot.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--strategies hegde", "unknown strategy 'hegde'; did you mean 'hedge'"),
        ("--strategies fixed:c@2", "which is not in the pool"),
        ("--strategies fixed:a@9", "budget of a@9 must be a number <= 4, which was recorded"),
        ("--drafters c", "unknown drafter in the trace 'c'"),
        ("--drafters b --strategies fixed:a@2", "which is not in the pool"),
        ("--budgets 8", "budgets must be at most 4, which was recorded, got 8"),
        ("--budgets eight", "budgets must be whole numbers"),
        ("--cost h10", "did you mean 'h100'"),
        ("--seeds 0", "seeds must be >= 1, got 0"),
        ("--seed -1", "seed must be >= 0, got -1"),
        ("--switches -1", "switches must be >= 0, got -1"),
        ("--order shufle", "unknown order 'shufle'; did you mean 'shuffle'"),
        ("--guard 2", "guard must be in (0, 1) or None, got 2.0"),
        ("--json no-such-folder/out.json", "the folder no-such-folder to write out.json into does not exist"),
        ("--plot no-such-folder/out.png", "the folder no-such-folder to write out.png into does not exist"),
    ],
)
def test_bad_input(trace_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    assert message in error_of(capsys, "replay", str(trace_path), *arguments.split())


def test_bad_files(trace_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no-such" in error_of(capsys, "replay", "no-such.parquet")
    broken = tmp_path / "broken"
    broken.write_text("{")
    assert "broken" in error_of(capsys, "replay", str(broken))
    assert "is not a file of costs" in error_of(capsys, "replay", str(trace_path), "--cost", str(broken))
    assert "already exists" in error_of(capsys, "replay", str(trace_path), "--json", str(broken))
    assert broken.read_text() == "{"
    nothing = tmp_path / "nothing.parquet"
    write_trace(nothing, replace(random_trace(1, lengths=[1]), costs=measured()))
    assert "no request with a step in it" in error_of(capsys, "replay", str(nothing))


def test_no_model_library_is_loaded(trace_path: Path) -> None:
    code = (
        "import sys; from adaptspec.cli import main; "
        f"status = main(['replay', {str(trace_path)!r}, '--strategies', 'hedge', '--seeds', '1', '--quiet']); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "hedge" in done.stdout
