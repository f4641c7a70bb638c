"""The order of calls and the checks that all lookup drafters share."""

from __future__ import annotations

import math

import numpy as np
import pytest

from adaptspec.drafters.lookup import pack_state, survival_scores, unpack_state
from adaptspec.drafters.prompt_lookup import PromptLookupDrafter
from adaptspec.drafters.suffix import SuffixDrafter
from adaptspec.types import DraftContext, Sampling
from tests.drafters.driving import Vocabulary, ask, begin, commit, request


def test_calls_need_an_open_request() -> None:
    drafter = PromptLookupDrafter()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="propose needs an open request: call prefill first"):
            ask(drafter, [1, 2])
        with pytest.raises(RuntimeError, match="observe needs an open request"):
            commit(drafter, [1])
        drafter.finish()  # nothing to finish
        begin(drafter, [1, 2, 1])
        assert len(ask(drafter, [1, 2, 1], 3)) == 3
        drafter.finish()


def test_a_context_of_another_length_is_refused() -> None:
    drafter = PromptLookupDrafter()
    begin(drafter, [1, 2, 1])
    commit(drafter, [2, 1])
    context = DraftContext(1, 4, 8, Sampling(), np.random.default_rng(0))
    with pytest.raises(ValueError, match="context.length must be 5, .* got 4"):
        drafter.propose(context, 4)


def test_budgets_are_checked() -> None:
    drafter = PromptLookupDrafter()
    begin(drafter, [1, 1])
    assert len(ask(drafter, [1, 1], 0)) == 0
    with pytest.raises(ValueError, match="budget must be >= 0, got -1"):
        ask(drafter, [1, 1], -1)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "token_ids must hold at least the root"),
        ([[1, 2]], "token_ids must be one-dimensional integers"),
        ([0.5], "token_ids must be one-dimensional integers"),
        ([3, 10], r"token_ids must be in \[0, 10\), got 10"),
        ([3, -1], r"token_ids must be in \[0, 10\), got -1"),
    ],
)
def test_prompts_are_checked(tokens: list[object], message: str) -> None:
    drafter = PromptLookupDrafter()
    drafter.bind(Vocabulary(10))
    with pytest.raises(ValueError, match=message):
        drafter.prefill(np.asarray(tokens))


@pytest.mark.parametrize("size", [0, 2**31, True, 10.5])
def test_vocabularies_must_fit_32_bits(size: int) -> None:
    with pytest.raises(ValueError, match="vocab_size of the target must be"):
        PromptLookupDrafter().bind(Vocabulary(size))


def test_another_vocabulary_needs_a_reset_once_something_is_learnt() -> None:
    drafter = SuffixDrafter()
    drafter.bind(Vocabulary(10))
    drafter.bind(Vocabulary(20))  # nothing learnt yet
    request(drafter, [1, 2, 3])
    drafter.bind(Vocabulary(20))
    with pytest.raises(ValueError, match="vocabulary of 20; call reset"):
        drafter.bind(Vocabulary(10))
    drafter.reset()
    drafter.bind(Vocabulary(10))


def test_an_abandoned_request_is_not_remembered() -> None:
    drafter = SuffixDrafter()
    begin(drafter, [1, 2, 3])
    commit(drafter, [4, 5])
    begin(drafter, [6])
    drafter.finish()
    assert drafter._past.outputs() == [[6]]


def test_survival_is_scale_free() -> None:
    assert survival_scores(4, 3) == pytest.approx([math.log(3.5 / 4.5), math.log(3.5 / 5.5), math.log(3.5 / 6.5)])
    assert len(survival_scores(1, 0)) == 0


def test_states_come_back_as_they_were() -> None:
    state = pack_state("x", 70_001, {"size": 3}, [[1, 70_000], [5]])
    assert [output.dtype for output in state["outputs"]] == [np.int32, np.int32]
    read = unpack_state(state, name="x", vocab_size=None, settings={"size": None})
    assert read == (70_001, {"size": 3}, [[1, 70_000], [5]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drafter": "y"}, "state must be of drafter 'x', got one of 'y'"),
        ({"version": 2}, "version of the state must be 1, got 2"),
        ({"vocab_size": 7}, "vocab_size of the state must be 8, got 7"),
        ({"vocab_size": "8"}, "vocab_size of the state must be a whole number"),
        ({"settings": {}}, "settings of the state must be size"),
        ({"settings": {"size": -1}}, "size of the state must be >= 0, got -1"),
        ({"settings": {"size": 4}}, "size of the state must be 3 as in this drafter, got 4"),
        ({"outputs": "12"}, "outputs of the state must be a list, got str"),
        ({"outputs": [[1.5]]}, r"outputs\[0\] of the state must be one-dimensional integers"),
        ({"outputs": [[1], [8]]}, r"outputs\[1\] of the state must be in \[0, 8\), got 8"),
        ({"further": 1}, "must have the keys drafter, outputs, settings, version, vocab_size, got .*further"),
    ],
)
def test_foreign_states_are_refused(change: dict[str, object], message: str) -> None:
    state = {**pack_state("x", 8, {"size": 3}, [[1, 2]]), **change}
    with pytest.raises(ValueError, match=message):
        unpack_state(state, name="x", vocab_size=8, settings={"size": 3})


def test_a_state_must_be_a_mapping() -> None:
    with pytest.raises(ValueError, match="must be a mapping, got list"):
        unpack_state([], name="x", vocab_size=8, settings={})  # type: ignore[arg-type]
