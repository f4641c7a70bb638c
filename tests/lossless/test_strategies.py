"""Whatever a policy decides, the output is the target's, and every step says what was decided."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adaptspec import AdaptiveSpec
from adaptspec.bandits import make_policy
from adaptspec.control.strategies import strategy_names
from adaptspec.drafters.draft_model import DraftModel
from tests.lossless.test_greedy import prompt, reference
from tests.target.families import FAMILIES, VOCAB

POOL = ("prompt-lookup", "suffix", "token-recycling", "lookahead")


@pytest.fixture(scope="module")
def model() -> Any:
    return FAMILIES["llama"]("sdpa")


@pytest.mark.parametrize("guard", [None, 0.05])
@pytest.mark.parametrize("strategy", strategy_names())
def test_greedy_output_is_the_targets(strategy: str, guard: float | None, model: Any) -> None:
    spec = AdaptiveSpec(POOL, strategy, budgets=(2, 8), guard=guard)
    for request in range(2):
        input_ids = prompt(20 + request)
        result = spec.generate(model, input_ids, max_new_tokens=40)
        assert torch.equal(result.sequences, reference(model, input_ids, max_new_tokens=40))
        assert sum(result.stats.arms.values()) == result.stats.steps
        assert result.stats.set_aside == {}
        labels = {"mixture@auto", *(f"{name}@auto" for name in POOL), *(str(arm) for arm in spec.arms)}
        for record in result.trace:
            assert record.arm in labels
            assert 0.0 < record.propensity <= 1.0
            assert record.verified <= 8


@pytest.mark.parametrize("strategy", ["hedge", "ucb", "exp3"])
def test_a_seed_gives_the_same_samples_as_no_speculation(strategy: str, model: Any) -> None:
    outputs = [
        AdaptiveSpec(POOL, name, budgets=(2, 8), guard=None, seed=4)
        .generate(model, prompt(), max_new_tokens=30, temperature=1.2)
        .sequences
        for name in (strategy, "fixed:ar")
    ]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("strategy", ["hedge", "ucb"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_sampling_draft_model_among_lookups(strategy: str, temperature: float, model: Any) -> None:
    draft = DraftModel(FAMILIES["llama"]("eager"), max_depth=3)
    spec = AdaptiveSpec([draft, "suffix"], strategy, budgets=(2, 4), guard=None)
    result = spec.generate(model, prompt(), max_new_tokens=40, temperature=temperature, eos_token_id=VOCAB + 9)
    assert result.stats.set_aside == {}
    assert result.stats.new_tokens == 40
    if temperature == 0.0:
        assert torch.equal(result.sequences, reference(model, prompt(), max_new_tokens=40, eos_token_id=None))


def test_the_same_seed_and_times_give_the_same_arms(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10**9))
    monkeypatch.setattr("adaptspec.session.perf_counter", lambda: next(ticks) * 1e-3)

    def arms() -> list[str]:
        spec = AdaptiveSpec(POOL, "exp3", budgets=(2, 8), seed=1)
        return [record.arm for record in spec.generate(model, prompt(), max_new_tokens=40).trace]

    assert arms() == arms()


def test_a_policy_object_is_a_strategy(model: Any) -> None:
    spec = AdaptiveSpec(["suffix"], make_policy("ucb", n_arms=3), budgets=(2, 8))
    result = spec.generate(model, prompt(), max_new_tokens=20)
    assert torch.equal(result.sequences, reference(model, prompt(), max_new_tokens=20))
    with pytest.raises(ValueError, match="must have 2 arms, got 3"):
        AdaptiveSpec(["suffix"], make_policy("ucb", n_arms=3), budgets=(8,))


def test_bad_strategies_are_named() -> None:
    with pytest.raises(ValueError, match="unknown strategy 'hedgee'; did you mean 'hedge'"):
        AdaptiveSpec(["suffix"], "hedgee")
    with pytest.raises(ValueError, match=r"guard must be in \(0, 1\) or None, got 1.5"):
        AdaptiveSpec(["suffix"], guard=1.5)
    with pytest.raises(ValueError, match="unknown objective 'speed'"):
        AdaptiveSpec(["suffix"], objective="speed")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="plays budgets that are numbers, got suffix@auto"):
        AdaptiveSpec(["suffix@auto"], "hedge")
