"""The SGLang policy, driven as SGLang's controller drives one. The real controller: `make test-sglang`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import pytest

from adaptspec.serving import sglang
from adaptspec.serving.sglang import AdaptiveSpecPolicy, has_section, protocol_problem

CONFIG = {
    "1": {"candidate_steps": [0, 1, 3, 5], "ema_alpha": 0.2},
    "8": {"candidate_steps": [0, 1]},
    "warmup_batches": 10,
    "adaptspec": {"strategy": "hedge", "guard": 0.05, "seed": 3},
}


class Theirs(Protocol):
    """SGLang 0.5.23's protocol."""

    @property
    def candidate_steps(self) -> list[int]: ...

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None: ...

    def get_steps_for_batch(self, batch_size: int) -> int: ...

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> int | None: ...

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None: ...


class Params:
    """SGLang's own implementation is made like this."""

    def __init__(self, initial_steps: int, cfg_path: str | None = None) -> None: ...


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that tests let pass."""
    now = [0.0]
    monkeypatch.setattr(sglang, "perf_counter", lambda: now[0])
    return now


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "adaptive.json"
    path.write_text(json.dumps(CONFIG))
    return path


def run(policy: AdaptiveSpecPolicy, clock: list[float], *, rows: int, right: int, batches: int, price: float) -> list:
    """Batches of which each draft is right for `right` tokens; a pass takes 10 ms and `price` per step and row."""
    played = []
    for _ in range(batches):
        steps = policy.get_steps_for_batch(rows)
        clock[0] += 0.010 + price * steps * rows
        assert policy.on_verify_complete([min(steps, right)] * rows, rows) is None
        played.append(steps)
    return played


def test_it_is_what_sglang_asks_for(config: Path) -> None:
    policy = AdaptiveSpecPolicy(3, config)
    assert policy.candidate_steps == [0, 1, 3, 5]
    assert policy.cuda_graph_bs_for_step(3) is None
    policy.set_cuda_graph_bs([16, 1, 2, 8])
    assert [policy.cuda_graph_bs_for_step(steps) for steps in (0, 1, 3, 5)] == [
        [1, 2, 8, 16],
        [1, 2, 8, 16],
        [1, 2],
        [1, 2],
    ]
    policy.set_cuda_graph_bs(None)
    assert policy.cuda_graph_bs_for_step(1) is None


def test_long_drafts_where_they_pay_and_none_where_they_do_not(config: Path, clock: list[float]) -> None:
    good = run(AdaptiveSpecPolicy(3, config), clock, rows=1, right=5, batches=150, price=0.0002)
    assert good[-50:].count(5) > 40
    bad = run(AdaptiveSpecPolicy(3, config), clock, rows=1, right=0, batches=150, price=0.002)
    assert bad[-50:].count(0) > 40


def test_only_steps_that_the_batch_has_graphs_for(config: Path, clock: list[float]) -> None:
    policy = AdaptiveSpecPolicy(3, config)
    policy.set_cuda_graph_bs([4, 8])
    played = run(policy, clock, rows=5, right=5, batches=60, price=0.0)  # padded to 8
    assert set(played) <= {0, 1} and 1 in played


def test_overlapping_batches_are_settled_in_order(config: Path, clock: list[float]) -> None:
    """SGLang launches the next batch before the result of the last one is in."""
    policy = AdaptiveSpecPolicy(3, config)
    told: list[tuple[int, int, float]] = []
    policy.policy.observe = lambda decision, outcome: told.append(  # type: ignore[method-assign]
        (len(decision), int(outcome.accepted.sum()), round(outcome.seconds, 3))
    )
    policy.get_steps_for_batch(2)
    clock[0] += 0.010
    policy.get_steps_for_batch(3)
    clock[0] += 0.002
    policy.on_verify_complete([0, 0], 2)
    clock[0] += 0.008
    policy.on_verify_complete([0, 0, 0], 3)
    policy.on_verify_complete([0], 1)  # nobody decided that
    assert told == [(2, 0, 0.012), (3, 0, 0.008)]


def test_ranks_follow_the_first(config: Path) -> None:
    sent: list[int | None] = []

    def leads(steps: int | None) -> int:
        sent.append(steps)
        assert steps is not None
        return steps

    first = AdaptiveSpecPolicy(3, config, agree=leads)
    second = AdaptiveSpecPolicy(3, config, agree=lambda steps: 5 if steps is None else -1, decides=False)
    assert first.get_steps_for_batch(4) == sent[0]
    assert second.get_steps_for_batch(4) == 5
    assert second.on_verify_complete([1, 1, 1, 1], 4) is None


def test_registration_checks_what_it_replaces() -> None:
    assert protocol_problem(Params, Theirs) is None

    class Renamed(Theirs, Protocol):
        def get_steps(self) -> int: ...

    class Made:
        def __init__(self, config: Any) -> None: ...

    class Other(Protocol):
        candidate_steps = None

        def set_cuda_graph_bs(self, sizes: list[int]) -> None: ...

        get_steps_for_batch = Theirs.get_steps_for_batch
        on_verify_complete = Theirs.on_verify_complete
        cuda_graph_bs_for_step = Theirs.cuda_graph_bs_for_step

    assert "is made with (self, config)" in str(protocol_problem(Made, Theirs))
    assert "the protocol has get_steps" in str(protocol_problem(Params, Renamed))
    assert "set_cuda_graph_bs takes (self, sizes)" in str(protocol_problem(Params, Other))


def test_without_a_section_sglang_keeps_its_own_rule(config: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps({"1": {"candidate_steps": [1]}}))
    assert has_section(config) and not has_section(plain) and not has_section(None)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"adaptspec": {}}, "must hold steps > 0"),
        ({"1": {"candidate_steps": [0]}, "adaptspec": {}}, "must hold steps > 0"),
        ({"1": {"candidate_steps": [1, -1]}}, r"must be whole numbers >= 0, got \[1, -1\]"),
        ({"1": {"candidate_steps": [1]}, "adaptspec": {"gard": 0.1}}, "did you mean 'guard'"),
        ({"1": {"candidate_steps": [1]}, "adaptspec": "hedge"}, "must be an object, got 'hedge'"),
        ([], "must hold an object"),
    ],
)
def test_configs_that_make_no_sense(tmp_path: Path, config: Any, problem: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=problem):
        AdaptiveSpecPolicy(3, path)
    with pytest.raises(ValueError, match="cfg_path must name a file"):
        AdaptiveSpecPolicy(3)
