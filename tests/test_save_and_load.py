"""A saved object goes on as if it had never stopped; files that are foreign or damaged are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adaptspec import AdaptiveSpec
from adaptspec.bandits import make_policy
from adaptspec.drafters import make_drafter
from adaptspec.state_file import load_state, save_state
from tests.lossless.test_greedy import prompt
from tests.target.families import FAMILIES

POOL = ("ngram-cache", "rest", "sam", "suffix", "token-recycling", "prompt-lookup")


@pytest.fixture(scope="module")
def model() -> Any:
    return FAMILIES["llama"]("sdpa")


@pytest.fixture(autouse=True)
def steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured times decide; here every call of the clock takes a millisecond."""
    ticks = iter(range(10**9))
    monkeypatch.setattr("adaptspec.session.perf_counter", lambda: next(ticks) * 1e-3)


@pytest.mark.parametrize(
    "strategy", ["hedge", "ucb", "exp3", "thompson", "mixture", "draft-then-choose", "fixed:suffix@8"]
)
def test_decisions_go_on_as_before(strategy: str, model: Any, tmp_path: Path) -> None:
    spec = AdaptiveSpec(POOL, strategy, budgets=(2, 8), seed=3)
    for request in range(2):
        spec.generate(model, prompt(20 + request), max_new_tokens=30, temperature=0.8)
    spec.save(tmp_path / "state.json")
    restored = AdaptiveSpec.load(tmp_path / "state.json")
    for request in range(2):
        old, new = (
            s.generate(model, prompt(25 + request), max_new_tokens=30, temperature=0.8) for s in (spec, restored)
        )
        assert torch.equal(old.sequences, new.sequences)
        arms = [[(record.arm, record.verified, record.accepted) for record in result.trace] for result in (old, new)]
        assert arms[0] == arms[1]


def test_objects_must_be_given_again(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    AdaptiveSpec([make_drafter("suffix")], make_policy("ucb", n_arms=2), budgets=(8,), guard=None).save(path)
    with pytest.raises(ValueError, match="objects in pool; pass pool="):
        AdaptiveSpec.load(path)
    with pytest.raises(ValueError, match="objects in strategy; pass strategy="):
        AdaptiveSpec.load(path, pool=["suffix"])
    with pytest.raises(ValueError, match="holds the drafters suffix, the pool has sam"):
        AdaptiveSpec.load(path, pool=["sam"], strategy="ucb")
    assert AdaptiveSpec.load(path, pool=["suffix"], strategy="ucb").drafters.keys() == {"suffix"}
    with pytest.raises(ValueError, match="ucb"):
        AdaptiveSpec.load(path, pool=["suffix"], strategy="exp3")


def test_foreign_and_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    with pytest.raises(FileNotFoundError):
        AdaptiveSpec.load(path)
    spec = AdaptiveSpec(["token-recycling"], "hedge")
    spec.save(path)
    whole = json.loads(path.read_text())
    for text, message in (
        ("not json", "not a state file of adaptspec, or damaged"),
        ("[1, 2]", "not a state file of adaptspec"),
        (json.dumps({**whole, "format": "other"}), "not a state file of adaptspec"),
        (json.dumps({**whole, "version": 99}), "version must be 1, got 99"),
        (path.read_text()[:-40], "damaged"),
        (json.dumps({key: value for key, value in whole.items() if key != "drafters"}), "lacks drafters"),
        (path.read_text().replace('"array": "', '"array": "!'), "damaged"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            AdaptiveSpec.load(path)


def test_arrays_and_nesting_come_back(tmp_path: Path) -> None:
    content = {
        "a": {"b": [1, 2.5, None, True, "x"], "array": np.arange(6, dtype=np.int32).reshape(2, 3)},
        "c": np.array([np.nan, np.inf]),
    }
    save_state(tmp_path / "f", content)
    back = load_state(tmp_path / "f")
    assert back["a"]["b"] == content["a"]["b"]  # type: ignore[index]
    assert np.array_equal(back["a"]["array"], content["a"]["array"])  # type: ignore[index]
    assert back["a"]["array"].dtype == np.int32
    assert np.array_equal(back["c"], content["c"], equal_nan=True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cannot save a set"):
        save_state(tmp_path / "f", {"a": {1, 2}})
    assert load_state(tmp_path / "f").keys() == {"a", "c"}  # the older file is still there


def test_replicas_merge(model: Any, tmp_path: Path) -> None:
    files = []
    for seed in (1, 2):
        spec = AdaptiveSpec(["suffix", "prompt-lookup"], "hedge", budgets=(2, 8), seed=seed)
        spec.generate(model, prompt(20 + seed), max_new_tokens=30)
        files.append(tmp_path / f"{seed}.json")
        spec.save(files[-1])
    AdaptiveSpec.merge(files, tmp_path / "merged.json")
    merged = AdaptiveSpec.load(tmp_path / "merged.json")
    rounds = [AdaptiveSpec.load(file).engine.controller.policy.policy.rounds for file in files]
    assert merged.engine.controller.policy.policy.rounds == pytest.approx(sum(rounds))
    merged.generate(model, prompt(20), max_new_tokens=10)
    AdaptiveSpec.merge([tmp_path / "merged.json"], tmp_path / "same.json", base=tmp_path / "merged.json")
    assert AdaptiveSpec.load(tmp_path / "same.json").engine.controller.policy.policy.rounds == sum(rounds)
    AdaptiveSpec(["suffix"], "hedge", budgets=(2, 8)).save(tmp_path / "other.json")
    with pytest.raises(ValueError, match=r"other.json was saved with other settings than .*1.json"):
        AdaptiveSpec.merge([files[0], tmp_path / "other.json"], tmp_path / "never.json")
    with pytest.raises(ValueError, match="paths must be a list of one or more state files"):
        AdaptiveSpec.merge([], tmp_path / "never.json")
    assert not (tmp_path / "never.json").exists()
