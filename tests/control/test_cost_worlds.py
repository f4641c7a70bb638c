"""Costs of the world: recorded, named, from files, and changing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaptspec.control.cost import CostModel
from adaptspec.control.cost_world_file import read_costs
from adaptspec.control.cost_worlds import CostPhases, StepCosts, profile_costs, recorded_costs
from adaptspec.types import Arm

RECORDED = StepCosts(
    0.02 + 0.001 * np.arange(1025.0), draft={"suffix": 0.0002, "head": np.full(1025, 0.004)}, overhead=0.0005
)


def learnt() -> CostModel:
    model = CostModel()
    for _ in range(5):
        for nodes, seconds in ((0, 0.030), (16, 0.046)):
            model.observe_verify(nodes, seconds, context=300)
            model.observe_verify(nodes, 2 * seconds, context=3000)
        model.observe_draft("suffix", 16, 0.0003)
        model.observe_draft("head", 16, 0.004)
        model.observe_catch_up("head", 16, 0.032)
        model.observe_overhead(0.001)
    return model


def test_recorded_costs_are_what_the_model_has_learnt() -> None:
    model = learnt()
    costs = recorded_costs(model.state_dict())
    for context in (1, 300, 512, 513, 2048, 3000, 4096, 100_000):
        for nodes in (0, 3, 16, 64):
            assert costs.verify_seconds(nodes, context=context) == model.verify_seconds(nodes, context=context)
    assert costs.verify_seconds(8, context=300) == pytest.approx(0.038)
    assert costs.verify_seconds(8, context=3000) == pytest.approx(0.076)
    assert costs.draft_seconds("suffix", 4) == model.draft_seconds("suffix", 4)
    assert (costs.overhead, costs.noise) == (0.001, 0.0)
    assert dict(costs.catch_up_per_token) == {"head": pytest.approx(0.002)}
    assert sorted(costs.draft) == ["head", "suffix"]
    with pytest.raises(ValueError, match="hold no verification"):
        recorded_costs(CostModel().state_dict())
    with pytest.raises(ValueError, match="must be a mapping"):
        recorded_costs([])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "one_row", "rows_64"),
    [("cpu-bf16", 0.037, 0.060), ("cpu-fp32", 0.036, 0.130), ("h100", 0.010, 0.012), ("loaded", 0.030, 0.660)],
)
def test_named_profiles(name: str, one_row: float, rows_64: float) -> None:
    costs = profile_costs(name, RECORDED)
    assert costs.verify_seconds(0, context=99) == pytest.approx(one_row)
    assert costs.verify_seconds(63, context=99) == pytest.approx(rows_64)
    assert costs.draft is RECORDED.draft and costs.overhead == 0.0
    with pytest.raises(ValueError, match="unknown cost profile 'h10'; did you mean 'h100'"):
        profile_costs("h10", RECORDED)


def test_arrays_agree_with_single_values() -> None:
    costs = StepCosts(np.arange(1.0, 11.0).reshape(2, 5), (100, 200))
    contexts = np.array([1, 100, 101, 200, 999])
    nodes = np.array([[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]])
    seconds = costs.verify_seconds_of(nodes, contexts)
    for row in range(2):
        for column, context in enumerate(contexts.tolist()):
            one = costs.verify_seconds(int(nodes[row, column]), context=context)
            assert seconds[row, column] == one == 1.0 + nodes[row, column] + (5.0 if context > 100 else 0.0)


def test_a_step() -> None:
    step = RECORDED.step(3, context=5, asked=[Arm("suffix", 8), Arm("head", 2)])
    assert (step.verify, dict(step.draft), step.overhead) == (0.023, {"suffix": 0.0002, "head": 0.004}, 0.0005)
    double = RECORDED.scaled(2.0).step(3, context=5, asked=[Arm("suffix", 8), Arm("head", 2)])
    assert (double.verify, dict(double.draft), double.overhead) == (0.046, {"suffix": 0.0004, "head": 0.008}, 0.001)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"verify": np.zeros(3)}, "verify must be finite seconds > 0"),
        ({"verify": np.array([1.0, np.inf])}, "verify must be finite seconds > 0"),
        ({"verify": np.ones((2, 3))}, "one curve for each of 1 contexts"),
        ({"verify": np.ones((2, 3)), "contexts": (5, 5)}, "contexts must rise"),
        ({"verify": np.ones(3), "draft": {"a": np.ones(2)}}, "draft of 'a' must have 3 entries"),
        ({"verify": np.ones(3), "draft": {"a": -1.0}}, "draft of 'a' must be a finite number >= 0, got -1"),
        ({"verify": np.ones(3), "noise": float("nan")}, "noise must be a finite number >= 0"),
        ({"verify": np.ones(3), "catch_up_per_token": {"a": -1.0}}, "catch_up_per_token of 'a' must be a finite"),
    ],
)
def test_impossible_costs(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepCosts(**fields)


def test_phases_begin_at_the_start_and_rise() -> None:
    for phases in ((), ((1, RECORDED),), ((0, RECORDED), (5, RECORDED), (5, RECORDED))):
        with pytest.raises(ValueError, match="phases must begin at token 0 and rise"):
            CostPhases(phases)
    with pytest.raises(ValueError, match="factor must be > 0 and finite, got 0"):
        RECORDED.scaled(0.0)


def written(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "costs.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_a_file_by_hand(tmp_path: Path) -> None:
    content = {
        "verify": [[0, 0.037], [63, 0.1]],
        "draft": {"suffix": 0.001, "eagle3": [[8, 0.010], [32, 0.022]]},
        "overhead": 0.002,
        "noise": 0.1,
        "catch_up_per_token": {"eagle3": 0.003},
        "prefill_per_token": 0.001,
        "changes": [{"from_token": 50, "factor": 2.0}, {"from_token": 90, "verify": [[0, 0.01]], "noise": 0}],
    }
    costs = read_costs(written(tmp_path, content), RECORDED)
    first, second, third = (costs.at(token) for token in (49, 50, 90))
    assert first.verify_seconds(0, context=9) == 0.037
    assert first.verify_seconds(126, context=9) == pytest.approx(0.163)  # beyond the last pair, its slope goes on
    assert first.draft_seconds("suffix", 9) == 0.001
    assert [first.draft_seconds("eagle3", budget) for budget in (1, 20, 56)] == pytest.approx([0.010, 0.016, 0.034])
    assert first.draft_seconds("head", 9) == 0.004  # as recorded
    assert (first.overhead, first.noise, first.prefill_per_token) == (0.002, 0.1, 0.001)
    assert (second.verify_seconds(0, context=9), second.overhead, second.noise) == (0.074, 0.004, 0.1)
    assert (third.verify_seconds(900, context=9), third.overhead, third.noise) == (0.01, 0.002, 0.0)


def test_a_file_that_leaves_everything_out_is_the_recording(tmp_path: Path) -> None:
    costs = read_costs(written(tmp_path, {}), RECORDED)
    assert isinstance(costs, StepCosts)
    assert costs.verify.tolist() == RECORDED.verify.tolist() and costs.draft == RECORDED.draft


def test_curves_by_context(tmp_path: Path) -> None:
    content = {"verify": {"8192": [[0, 0.2]], "1024": [[0, 0.1]]}}
    costs = read_costs(written(tmp_path, content), RECORDED).at(0)
    assert [costs.verify_seconds(5, context=c) for c in (1, 1024, 1025, 9999)] == [0.1, 0.1, 0.2, 0.2]


def test_a_profile_of_a_cost_model(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    model = CostModel()
    model.observe_verify(0, 0.5)
    model.observe_draft("head", 4, 0.25)
    model.save_profile(path, fingerprint="device=elsewhere")
    costs = read_costs(path, RECORDED).at(0)
    assert costs.verify_seconds(0, context=1) == 0.5
    assert costs.draft_seconds("head", 4) == 0.25
    assert costs.draft_seconds("suffix", 4) == 0.0002  # what the profile does not know is as recorded


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nonsense", "not readable as JSON"),
        ("[1]", r"the file must be a JSON object, got \[1\]"),
        ('{"fingerprint": "x", "state": {}}', "of the costs is missing"),
        ({"verfy": []}, "unknown field of the file 'verfy'; did you mean 'verify'"),
        ({"verify": []}, r"verify must be a list of pairs \[nodes, seconds\], got \[\]"),
        ({"verify": [[0, 1], [1]]}, "verify must be a list of pairs"),
        ({"verify": [[0, "x"]]}, "verify must be a finite number >= 0, got 'x'"),
        ({"verify": [[0.5, 1]]}, r"nodes of verify must be whole numbers in \[0, 1024\], got 0.5"),
        ({"verify": [[5, 1], [5, 2]]}, r"nodes of verify must rise, got \[5, 5\]"),
        ({"verify": [[0, 2], [5, 1]]}, r"seconds of verify must not fall, got \[2.0, 1.0\]"),
        ({"verify": [[0, 0]]}, "verify must be finite seconds > 0"),
        ({"verify": {"x": [[0, 1]]}}, "contexts of verify must be whole numbers > 0, got 'x'"),
        ({"verify": {}}, "verify must be an object that is not empty"),
        ({"draft": 3}, "draft must be an object that is not empty, got 3"),
        ({"draft": {"a": -1}}, "draft of a must be a finite number >= 0, got -1"),
        ({"overhead": None}, "overhead must be a finite number >= 0, got None"),
        ({"changes": {}}, r"changes must be a list, got \{\}"),
        ({"changes": [{"factor": 2}]}, "from_token must be a whole number >= 1, got None"),
        ({"changes": [{"from_token": 5, "factor": 0}]}, "factor must be > 0 and finite, got 0.0"),
        ({"changes": [{"from_token": 5, "factor": "2"}]}, "factor must be a number > 0, got '2'"),
        (
            {"changes": [{"from_token": 5}, {"from_token": 5}]},
            r"phases must begin at token 0 and rise, got \[0, 5, 5\]",
        ),
        ({"changes": [{"from_token": 5, "speed": 2}]}, "unknown field of a change 'speed'"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path: Path, content: Any, message: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ValueError, match=message) as caught:
        read_costs(path, RECORDED)
    assert str(path) in str(caught.value)
