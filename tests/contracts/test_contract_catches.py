"""The contract suite itself: each kind of fault is caught, and a drafter that reads the target passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from adaptspec.drafters import DRAFTERS, Drafter, Needs
from adaptspec.drafters.prompt_lookup import PromptLookupDrafter
from adaptspec.drafters.suffix import SuffixDrafter
from adaptspec.types import DraftContext, DraftTree, Observation, Sampling
from tests.contracts import cases, checks
from tests.contracts.cases import DrafterCase, ModelWorld, ScriptedWorld

TEXT = checks.streams(64)["periodic"]

Check = Callable[[DrafterCase], None]


def validity(case: DrafterCase) -> None:
    checks.check_validity(case, text=TEXT, vocab_size=64, budget=8)


class TooManyNodes(PromptLookupDrafter):
    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        return super().propose(context, budget + 1)


class TooDeep(PromptLookupDrafter):
    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        return super().propose(replace(context, max_depth=64), budget)


class RisingScores(PromptLookupDrafter):
    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        tree = super().propose(context, budget)
        return replace(tree, scores=tree.scores[::-1].copy())


class ShortEvidence(PromptLookupDrafter):
    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        tree = super().propose(context, budget)
        return replace(tree, evidence={name: column[1:] for name, column in tree.evidence.items()})


class EqualSiblings(PromptLookupDrafter):
    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        token = np.full(min(budget, 2), context.root)
        return DraftTree(token, np.full(len(token), -1), np.zeros(len(token)))


class AlwaysDeclines(PromptLookupDrafter):
    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        return DraftTree.empty()


class IndexesItsDrafts(PromptLookupDrafter):
    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        tree = super().propose(context, budget)
        assert self._index is not None
        self._index.extend(tree.token_ids.tolist()[:1])
        return tree


class UnseededChoice(PromptLookupDrafter):
    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        return super().propose(context, int(np.random.default_rng().integers(1, budget + 1)))


class ReadsOneTokenPerStep(PromptLookupDrafter):
    def _extend(self, tokens: list[int]) -> None:
        super()._extend(tokens[:1])


class SixteenBits(PromptLookupDrafter):
    def _begin(self, tokens: list[int]) -> None:
        super()._begin([token % 2**16 for token in tokens])

    def _extend(self, tokens: list[int]) -> None:
        super()._extend([token % 2**16 for token in tokens])


class NeedsThreeTokens(PromptLookupDrafter):
    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        tree = super().propose(context, budget)
        assert context.length >= 3
        return tree


class KeepsTheLastRequest(PromptLookupDrafter):
    def _begin(self, tokens: list[int]) -> None:
        if self._index is None:
            super()._begin(tokens)
        else:
            self._index.extend(tokens)

    def _end(self) -> None:
        pass


class NeverForgets(SuffixDrafter):
    def _forget(self) -> None:
        self._own = None


class SavesHalf(SuffixDrafter):
    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "outputs": state["outputs"][:1]}


class SavesItself(SuffixDrafter):
    def state_dict(self) -> dict[str, Any]:
        return {"past": self._past}


class SharesItsState(SuffixDrafter):
    def __init__(self) -> None:
        super().__init__()
        self.live: dict[str, Any] = super().state_dict()

    def state_dict(self) -> dict[str, Any]:
        self.live.update(super().state_dict())
        return self.live

    def _end(self) -> None:
        super()._end()
        self.state_dict()


class TakesAnything(SuffixDrafter):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "outputs" in state and "of something else" not in state:
            super().load_state_dict(state)


class HalfLoads(SuffixDrafter):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._past.clear()
        super().load_state_dict(state)


FAULTS: list[tuple[type[Drafter], Check]] = [
    (TooManyNodes, validity),
    (TooDeep, validity),
    (RisingScores, validity),
    (ShortEvidence, validity),
    (EqualSiblings, validity),
    (AlwaysDeclines, checks.check_drafts_something),
    (IndexesItsDrafts, checks.check_idempotence),
    (UnseededChoice, partial(checks.check_determinism, sampling=Sampling())),
    (ReadsOneTokenPerStep, checks.check_multi_token_commits),
    (SixteenBits, checks.check_large_ids),
    (NeedsThreeTokens, checks.check_short_contexts),
    (KeepsTheLastRequest, partial(checks.check_state_is_all_that_stays, finished=True)),
    (NeverForgets, checks.check_reset),
    (SavesHalf, partial(checks.check_state_is_all_that_stays, finished=True)),
    (SavesItself, partial(checks.check_state_is_all_that_stays, finished=True)),
    (SharesItsState, partial(checks.check_state_is_all_that_stays, finished=False)),
    (TakesAnything, checks.check_foreign_states),
    (HalfLoads, checks.check_foreign_states),
]


def case_of(cls: type[Drafter]) -> DrafterCase:
    return DrafterCase(build=lambda world: cls(), world=ScriptedWorld, lookup=True)


@pytest.mark.parametrize(("fault", "check"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_faults_are_caught(fault: type[Drafter], check: Check) -> None:
    check(case_of(fault.__mro__[1]))  # the drafter without the fault passes
    with pytest.raises(AssertionError):
        check(case_of(fault))


def test_a_drafter_that_cannot_be_built_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class NeedsWeights(PromptLookupDrafter):
        def __init__(self, *, path: str) -> None:
            super().__init__()

    monkeypatch.setitem(DRAFTERS, "needs-weights", NeedsWeights)
    with pytest.raises(ValueError, match="needs-weights:PATH"):
        checks.new(cases.case_for("needs-weights"))


class TappedDrafter(Drafter):
    """Drafts a token that it reads off the last hidden state, to see what a `ModelWorld` hands over."""

    name = "tapped"
    summary = "reads hidden states"
    needs = Needs(taps=(1, 3), target_top_k=2)

    def prefill(self, token_ids: np.ndarray, features: Mapping[int, Any] | None = None) -> None:
        assert features is not None and {tap: len(rows) for tap, rows in features.items()} == {
            1: len(token_ids) - 1,
            3: len(token_ids) - 1,
        }
        self._hidden = features[3][-1]

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        favourites = self._hidden.topk(min(budget, 4)).indices.numpy()
        return DraftTree(favourites, np.full(len(favourites), -1), np.zeros(len(favourites)))

    def observe(self, observation: Observation) -> None:
        accepted = len(observation.verdict.token_ids)
        assert observation.features[1].shape == observation.features[3].shape == (accepted, 32)
        assert observation.target_top_ids is not None
        assert observation.target_top_ids.shape == (len(observation.tree) + 1, 2)
        rows = np.concatenate([[0], observation.verdict.path + 1])
        assert observation.target_top_ids[rows, 0].tolist() == observation.tokens.tolist()
        self._hidden = observation.features[3][-1]

    def reset(self) -> None:
        self._hidden = None


@pytest.mark.parametrize("vocab_size", [64, 70_000])
def test_a_drafter_that_reads_the_target_passes(vocab_size: int) -> None:
    case = DrafterCase(build=lambda world: TappedDrafter(), world=ModelWorld, lookup=False)
    for text in checks.streams(vocab_size).values():
        checks.check_validity(case, text=text, vocab_size=vocab_size, budget=8)


def test_model_world_checks_state_and_order() -> None:
    case = DrafterCase(build=lambda world: TappedDrafter(), world=ModelWorld, lookup=False)
    checks.check_short_contexts(case)
    checks.check_idempotence(case)
    checks.check_determinism(case, sampling=Sampling(temperature=1.0))
    checks.check_reset(case)
    checks.check_state_is_all_that_stays(case, finished=True)
    checks.check_foreign_states(case)


@pytest.mark.parametrize("make_world", [partial(ModelWorld, 64), partial(ScriptedWorld, 64)])
def test_worlds_commit_what_the_oracle_says(make_world: Callable[[], cases.World]) -> None:
    world = make_world()
    drafter = TappedDrafter() if isinstance(world, ModelWorld) else PromptLookupDrafter()
    world.start(drafter, TEXT, 20)
    truth = world.oracle(12)
    right, wrong = truth[0], next(token for token in range(64) if token not in truth)
    tree = DraftTree(np.array([wrong, right, truth[1], wrong, truth[2]]), np.array([-1, -1, 1, 2, 2]), np.zeros(5))
    assert world.commit(drafter, tree) == truth[:4]
    assert world.commit(drafter, DraftTree.empty()) == truth[4:5]
    assert world.commit(drafter, DraftTree.chain(truth[5:8])) == truth[5:9]
    assert world.committed[-9:] == truth[:9]
