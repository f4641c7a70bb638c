"""The bounded memory of past outputs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptspec.drafters.past_outputs import PastOutputs
from adaptspec.drafters.suffix_automaton import ROOT_STATE, SuffixAutomaton
from tests.drafters.driving import examples

outputs = st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=25)


@examples
@given(outputs, st.integers(0, 40))
def test_the_newest_whole_outputs_are_kept_within_bounds(added: list[list[int]], max_tokens: int) -> None:
    past = PastOutputs(max_tokens=max_tokens)
    known: list[list[int]] = []
    for output in added:
        past.add(output)
        if output and max_tokens:
            known.append(output[-max_tokens:])
        kept = past.outputs()
        assert kept == known[len(known) - len(kept) :]
        assert len(past) == sum(map(len, kept)) <= max_tokens
        if output and max_tokens:
            assert kept, "the newest output is always kept"
        if 0 < len(kept) < len(known):
            room = max_tokens - len(past)
            assert room <= max_tokens / 2 + 12, "more was dropped than had to be"


@examples
@given(outputs, st.integers(1, 40))
def test_counts_are_those_of_the_kept_outputs_alone(added: list[list[int]], max_tokens: int) -> None:
    past = PastOutputs(max_tokens=max_tokens, count_length=4)
    for output in added:
        past.add(output)
    kept = past.outputs()
    for output in added:
        for start in range(len(output)):
            for end in range(start + 1, min(len(output), start + 4) + 1):
                substring = output[start:end]
                size = len(substring)
                times = sum(text[i : i + size] == substring for text in kept for i in range(len(text) - size + 1))
                state, matched = past.automaton.follow(ROOT_STATE, 0, substring)
                assert (past.automaton.count[state] if matched == size else 0) == times


@examples
@given(outputs, outputs, st.integers(1, 40))
def test_what_is_restored_forgets_at_the_same_time(
    before: list[list[int]], after: list[list[int]], max_tokens: int
) -> None:
    past = PastOutputs(max_tokens=max_tokens, count_length=4)
    for output in before:
        past.add(output)
    restored = PastOutputs(max_tokens=max_tokens, count_length=4)
    restored.add([1, 1, 1])
    restored.restore(past.outputs(), shared=past.shared)
    for output in [[], *after]:
        past.add(output)
        restored.add(output)
        assert restored.outputs() == past.outputs() and restored.shared == past.shared
        assert arrays(restored.automaton) == arrays(past.automaton)


def arrays(automaton: SuffixAutomaton) -> list[object]:
    return [
        automaton.text,
        automaton.length,
        automaton.link,
        automaton.first_end,
        automaton.count,
        [list(automaton.transitions(state)) for state in range(automaton.states)],
    ]


def test_half_of_the_memory_is_left_after_the_take_over() -> None:
    past = PastOutputs(max_tokens=100)
    for i in range(10):
        past.add([i] * 10)
    assert len(past) == 100 and past.shared == 5
    past.add([10] * 10)
    assert past.outputs() == [[i] * 10 for i in (5, 6, 7, 8, 9, 10)]


def test_clear_forgets_both_automata() -> None:
    past = PastOutputs(max_tokens=10)
    for _ in range(3):
        past.add([1, 2, 3])
    past.clear()
    assert len(past) == past.shared == 0 and past.outputs() == []
    past.add([4] * 6)
    past.add([5] * 6)
    assert past.outputs() == [[5] * 6]


@pytest.mark.parametrize(
    ("outputs", "shared", "message"),
    [
        ([[1] * 11], 0, "must be at most 10 tokens, got 11"),
        ([[1], []], 0, "must not be empty"),
        ([[1], [2]], 3, r"shared of the state must be in \[0, 2\], got 3"),
    ],
)
def test_restore_checks_and_keeps_what_it_had(outputs: list[list[int]], shared: int, message: str) -> None:
    past = PastOutputs(max_tokens=10)
    past.add([7, 8])
    with pytest.raises(ValueError, match=message):
        past.restore(outputs, shared=shared)
    assert past.outputs() == [[7, 8]]
