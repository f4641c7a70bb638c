"""Whatever a policy decides, the output is the target's, and every step says what was decided."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adaptspec import AdaptiveSpec
from adaptspec.bandits import make_policy
from adaptspec.control.controller import REASONS, FixedController, StepContext
from adaptspec.control.learning import PolicyController
from adaptspec.control.strategies import strategy_names
from adaptspec.drafters.draft_model import DraftModel
from adaptspec.types import Arm, Decision, StepRecord
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
    with pytest.raises(ValueError, match="unknown option of strategy 'hedge\\+lazzy': 'lazzy'; did you mean 'lazy'"):
        AdaptiveSpec(["suffix"], "hedge+lazzy")
    with pytest.raises(ValueError, match="names an option twice"):
        AdaptiveSpec(["suffix"], "hedge+lazy+lazy")
    with pytest.raises(ValueError, match="lazy play needs a full-information policy, got 'ucb'"):
        AdaptiveSpec(["suffix"], "ucb+lazy")
    for rule in ("lookup-else", "heuristic"):
        with pytest.raises(ValueError, match=f"strategy '{rule}' needs a drafter with a budget that is a number"):
            AdaptiveSpec(["suffix@auto"], rule)


@pytest.mark.parametrize("strategy", ["hedge+request", "hedge+lazy+context", "exp3+blocks", "ucb+request", "hedge"])
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_options_and_automatic_budgets(strategy: str, temperature: float, model: Any) -> None:
    def sequences(name: str) -> tuple[list[Any], set[str]]:
        spec = AdaptiveSpec(POOL[:3], name, budgets=("auto", 4), guard=None, seed=4)
        results = [spec.generate(model, prompt(20 + k), max_new_tokens=40, temperature=temperature) for k in range(3)]
        assert all(result.stats.set_aside == {} for result in results)
        return [r.sequences for r in results], {record.arm for r in results for record in r.trace}

    adaptive, arms = sequences(strategy)
    plain, _ = sequences("fixed:ar")
    assert all(torch.equal(*pair) for pair in zip(adaptive, plain, strict=True))
    assert any(arm.endswith("@auto") for arm in arms) or "lazy" in strategy


def test_lookup_else_asks_in_the_order_of_the_pool(model: Any) -> None:
    draft = DraftModel(FAMILIES["llama"]("eager"), max_depth=3)
    spec = AdaptiveSpec(["prompt-lookup", draft], "lookup-else", budgets=(4,))
    result = spec.generate(model, prompt(), max_new_tokens=40)
    assert torch.equal(result.sequences, reference(model, prompt(), max_new_tokens=40))
    assert {"prompt-lookup@4", "draft-model@4"} <= set(result.stats.arms)
    assert all(record.drafted == record.verified for record in result.trace), "the second is not asked for nothing"


def test_every_step_says_why(model: Any) -> None:
    for strategy in ("hedge", "exp3", "mixture", "draft-then-choose", "lookup-else", "fixed:suffix@4"):
        spec = AdaptiveSpec(["prompt-lookup", "suffix"], strategy, budgets=(2, 4))
        trace = spec.generate(model, prompt(), max_new_tokens=60).trace
        assert all(record.reason in REASONS for record in trace), strategy
        if strategy in ("hedge", "exp3", "mixture", "draft-then-choose"):
            assert all(record.gain is not None and record.expected_seconds is not None for record in trace)
            assert len({record.digest for record in trace}) == len(trace)


def test_a_request_that_ends_by_an_error_leaves_nothing_behind(model: Any) -> None:
    """Proposals that wait for text of a request which never comes must not be judged by the next request's."""

    class Stop(Exception):
        pass

    def stop(record: StepRecord, tokens: list[int]) -> None:
        if record.position > 40:
            raise Stop

    for strategy in ("hedge", "mixture"):
        spec = AdaptiveSpec(["prompt-lookup", "suffix"], strategy, budgets=(2, 8), guard=None)
        with pytest.raises(Stop):
            spec.generate(model, torch.cat([prompt(), prompt()], dim=1), max_new_tokens=60, on_step=stop)
        controller = spec.engine.controller
        controller.begin()
        if isinstance(controller, PolicyController):
            assert not controller._waiting and not any(controller._pointers)
        result = spec.generate(model, prompt(9), max_new_tokens=40)
        assert torch.equal(result.sequences, reference(model, prompt(9), max_new_tokens=40))


def test_a_cold_draft_model_catches_up_apart_from_drafting(model: Any) -> None:
    """After steps in which it was not asked, a draft model runs what it missed in a pass that is timed by itself."""
    draft = DraftModel(FAMILIES["llama"]("eager"), max_depth=3)

    class EveryFifth(FixedController):
        cold: list[int] = []

        def select(self, context: StepContext) -> Decision:
            decision = super().select(context)
            self.cold.append(context.cold_tokens.get("draft-model", 0))
            return decision if decision.step_id % 5 == 0 else Decision(decision.step_id, Arm.autoregressive())

    spec = AdaptiveSpec([draft], "fixed:draft-model@3")
    controller = spec.engine.controller = EveryFifth(Arm("draft-model", 3))
    result = spec.generate(model, prompt(), max_new_tokens=40)
    assert torch.equal(result.sequences, reference(model, prompt(), max_new_tokens=40))
    caught_up = [record for record in result.trace if record.catch_up_seconds > 0.0]
    asked = [record for record in result.trace if record.drafted]
    assert caught_up == asked and len(asked) >= 2
    assert max(controller.cold) >= 2
    assert sum(record.catch_up_seconds for record in result.trace) == pytest.approx(result.stats.catch_up_seconds)
    # The tokens that it accepts are those of the same model: it has lost nothing.
    assert all(record.accepted == record.verified for record in asked)
