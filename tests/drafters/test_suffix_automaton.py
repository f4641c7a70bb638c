"""The suffix automaton against scanning the text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptspec.drafters.suffix_automaton import ROOT_STATE, SuffixAutomaton
from tests.drafters.driving import examples

Text = list[int]

texts = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=30))
several = st.lists(texts, min_size=1, max_size=4)


def occurrences(sequences: list[Text], substring: Text) -> list[tuple[int, int]]:
    """(sequence, end) of every occurrence."""
    size = len(substring)
    return [
        (i, start + size)
        for i, sequence in enumerate(sequences)
        for start in range(len(sequence) - size + 1)
        if sequence[start : start + size] == substring
    ]


def substrings(sequences: list[Text], longest: int) -> list[Text]:
    return [
        sequence[start:end]
        for sequence in sequences
        for start in range(len(sequence))
        for end in range(start + 1, min(len(sequence), start + longest) + 1)
    ]


def read(automaton: SuffixAutomaton, text: Text) -> int:
    state = ROOT_STATE
    for token in text:
        state = automaton.step(state, token)
        if state < 0:
            return state
    return state


def build(sequences: list[Text], *, count_length: int, chunk: int = 1000) -> SuffixAutomaton:
    """All sequences but the last are ended."""
    automaton = SuffixAutomaton(count_length=count_length)
    for i, sequence in enumerate(sequences):
        if i:
            automaton.end_sequence()
        for start in range(0, len(sequence), chunk):
            automaton.extend(sequence[start : start + chunk])
    return automaton


@examples
@given(several, st.integers(1, 8), st.integers(1, 5))
def test_counts_are_those_of_a_scan(sequences: list[Text], count_length: int, chunk: int) -> None:
    automaton = build(sequences, count_length=count_length, chunk=chunk)
    for substring in substrings(sequences, count_length):
        assert automaton.count[read(automaton, substring)] == len(occurrences(sequences, substring))


@examples
@given(texts, st.integers(1, 6))
def test_counting_at_once_equals_counting_token_by_token(text: Text, count_length: int) -> None:
    at_once = build([text], count_length=count_length)
    one_by_one = build([text], count_length=count_length, chunk=1)
    for substring in substrings([text], count_length):
        assert at_once.count[read(at_once, substring)] == one_by_one.count[read(one_by_one, substring)]
    at_once.extend(text)
    one_by_one.extend(text)
    for substring in substrings([text + text], count_length):
        assert at_once.count[read(at_once, substring)] == one_by_one.count[read(one_by_one, substring)]


@examples
@given(several, texts)
def test_it_knows_exactly_the_substrings(sequences: list[Text], other: Text) -> None:
    automaton = build(sequences, count_length=0)
    for substring in substrings([other], 6):
        assert (read(automaton, substring) >= 0) == bool(occurrences(sequences, substring))


@examples
@given(texts)
def test_first_ends_are_those_of_a_scan(text: Text) -> None:
    automaton = build([text], count_length=0)
    for substring in substrings([text], len(text)):
        assert automaton.first_end[read(automaton, substring)] == occurrences([text], substring)[0][1]


@examples
@given(texts)
def test_longest_repeat_is_that_of_a_scan(text: Text) -> None:
    automaton = SuffixAutomaton()
    for end, token in enumerate(text, start=1):
        automaton.extend([token])
        expected = (0, 0)
        for size in range(1, end):
            ends = [e for _, e in occurrences([text[:end]], text[end - size : end])]
            if len(ends) > 1:
                expected = (size, ends[0])
        assert automaton.longest_repeat() == expected


@examples
@given(several, texts, st.integers(1, 4))
def test_follow_finds_the_longest_known_suffix(sequences: list[Text], other: Text, chunk: int) -> None:
    automaton = build(sequences, count_length=0)
    state, matched = ROOT_STATE, 0
    for start in range(0, len(other), chunk):
        state, matched = automaton.follow(state, matched, other[start : start + chunk])
        end = min(start + chunk, len(other))
        known = [size for size in range(1, end + 1) if occurrences(sequences, other[end - size : end])]
        assert matched == max(known, default=0)
        assert state == read(automaton, other[end - matched : end])


@examples
@given(several, st.integers(1, 6), st.integers(1, 6))
def test_suffix_states_are_all_suffixes_grouped_by_their_ends(
    sequences: list[Text], max_length: int, further: int
) -> None:
    automaton = build(sequences, count_length=max_length + further, chunk=1)
    text = sequences[-1]
    expected: dict[tuple[tuple[int, int], ...], int] = {}
    for size in range(1, min(len(text), max_length) + 1):
        expected[tuple(occurrences(sequences, text[len(text) - size :]))] = size
    found = list(automaton.suffix_states(max_length=max_length))
    assert [length for _, length in found] == sorted(expected.values(), reverse=True)
    for state, length in found:
        assert state == read(automaton, text[len(text) - length :])


@examples
@given(several)
def test_transitions_are_successors_in_the_order_of_appearance(sequences: list[Text]) -> None:
    automaton = build(sequences, count_length=0)
    for substring in [[], *substrings(sequences, 4)]:
        seen: dict[int, None] = {}
        for i, end in occurrences(sequences, substring):
            if end < len(sequences[i]):
                seen[sequences[i][end]] = None
        state = read(automaton, substring)
        assert [token for token, _ in automaton.transitions(state)] == list(seen)
        assert all(target == read(automaton, [*substring, token]) for token, target in automaton.transitions(state))
        ended = any(end == len(sequences[i]) for i, end in occurrences(sequences[:-1], substring))
        assert automaton.branching(state) >= len(seen) + ended


def test_no_match_spans_two_sequences() -> None:
    automaton = build([[1, 2, 3], [4, 5], [1, 2]], count_length=8)
    assert read(automaton, [3, 4]) == -1 and read(automaton, [1, 2, 3]) > 0
    assert automaton.longest_repeat() == (2, 2)
    assert [length for _, length in automaton.suffix_states(max_length=8)] == [2]


@pytest.mark.parametrize("alphabet", [1, 2, 1000])
def test_states_are_linear_in_tokens(alphabet: int) -> None:
    tokens = np.random.default_rng(3).integers(0, alphabet, 4000).tolist()
    automaton = build([tokens], count_length=128)
    assert len(automaton) == 4000 and automaton.states <= 8000


def test_counting_a_constant_text_is_bounded_by_the_count_length() -> None:
    automaton = build([[7] * 500], count_length=10, chunk=1)
    states = [read(automaton, [7] * size) for size in range(1, 11)]
    assert [automaton.count[state] for state in states] == list(range(500, 490, -1))
    assert automaton.count[read(automaton, [7] * 12)] < 489, "counted further than asked"


def test_large_token_ids_are_kept() -> None:
    largest = 2**31 - 2
    automaton = build([[largest, 70_000, largest]], count_length=4)
    assert dict(automaton.transitions(read(automaton, [largest]))) == {70_000: read(automaton, [largest, 70_000])}
