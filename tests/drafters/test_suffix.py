"""SuffixDecoding against a reference that scans the texts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptspec.drafters import make_drafter
from adaptspec.drafters.suffix import SuffixDrafter
from adaptspec.drafters.suffix_automaton import SuffixAutomaton
from adaptspec.drafters.suffix_tree import LARGEST_FAN_OUT, Match, grow
from tests.drafters.driving import Vocabulary, ask, begin, commit, examples, paths, request

texts = st.integers(1, 3).flatmap(lambda size: st.lists(st.integers(0, size - 1), min_size=1, max_size=24))


@dataclass
class Reference:
    """The drafts of SuffixDecoding by scanning, as the docstrings of the drafter describe them."""

    max_depth: int
    factor: float
    offset: int
    min_probability: float
    tree: bool

    def ends(self, sequences: list[list[int]], suffix: list[int]) -> list[tuple[int, int]]:
        size = len(suffix)
        return [
            (i, start + size)
            for i, text in enumerate(sequences)
            for start in range(len(text) - size + 1)
            if text[start : start + size] == suffix
        ]

    def draft(self, text: list[int], past: list[list[int]], budget: int) -> dict[tuple[int, ...], float]:
        best: dict[tuple[int, ...], float] = {}
        for sequences, own in (([text], True), (past, False)):
            tried, known = 0, None
            for size in range(min(self.max_depth, len(text)), 0, -1):
                suffix = text[len(text) - size :]
                ends = self.ends(sequences, suffix)
                if ends == known:
                    continue  # a shorter suffix of the same occurrences tells nothing new
                known = ends
                depth = min(self.max_depth, int(self.factor * size + self.offset))
                if depth < 1 or (best and sum(best.values()) >= min(depth, budget)):
                    break
                if len(ends) <= own or len(ends) < 2 * tried:
                    continue
                tried = len(ends)
                paths = self.grow(sequences, suffix, own, budget, depth)
                if not best or sum(paths.values()) > sum(best.values()):
                    best = paths
        return best

    def grow(
        self, sequences: list[list[int]], suffix: list[int], own: bool, budget: int, depth: int
    ) -> dict[tuple[int, ...], float]:
        chosen: dict[tuple[int, ...], float] = {}
        waiting: list[tuple[float, int, tuple[int, ...], float]] = []
        order = 0

        def children(path: tuple[int, ...], estimate: float, ratio: float) -> None:
            nonlocal order
            ends = self.ends(sequences, suffix + list(path))
            followers: dict[int, int] = {}
            for i, end in ends:
                if end < len(sequences[i]):
                    followers[sequences[i][end]] = followers.get(sequences[i][end], 0) + 1
            # An ended past output counts as one more successor, an end of the own text as an occurrence only.
            distinct = len(followers) + (not own) * len({i for i, end in ends if end == len(sequences[i])})
            mass = len(ends) + distinct / (len(suffix) + len(path)) - (own and not path)
            kept = []
            for token, times in followers.items():
                order += 1
                if ratio * times / len(ends) >= self.min_probability:
                    kept.append((-estimate * times / mass, order, (*path, token), ratio * times / len(ends)))
            waiting.extend(kept if self.tree else sorted(kept)[:1])

        children((), 1.0, 1.0)
        while waiting and len(chosen) < budget:
            waiting.sort()
            negated, _, path, ratio = waiting.pop(0)
            chosen[path] = -negated
            if len(path) < depth:
                children(path, -negated, ratio)
        return chosen


@examples
@given(
    texts,
    st.lists(texts, max_size=3),
    st.sampled_from([1, 3, 8, 64]),
    st.builds(
        Reference,
        max_depth=st.sampled_from([2, 5, 64]),
        factor=st.sampled_from([1.0, 2.0]),
        offset=st.sampled_from([-1, 0, 1]),
        min_probability=st.sampled_from([0.0, 0.1, 0.4]),
        tree=st.booleans(),
    ),
)
def test_drafts_are_those_of_a_scan(text: list[int], past: list[list[int]], budget: int, reference: Reference) -> None:
    drafter = SuffixDrafter(
        max_depth=reference.max_depth,
        factor=reference.factor,
        offset=reference.offset,
        min_probability=reference.min_probability,
        tree=reference.tree,
    )
    for output in past:
        request(drafter, output, prompt=0)
    begin(drafter, text[:3])
    for end in range(min(3, len(text)), len(text) + 1):
        tree = ask(drafter, text[:end], budget)
        expected = reference.draft(text[:end], past, budget)
        assert list(paths(tree)) == list(expected)
        assert tree.scores == pytest.approx([min(0.0, math.log(p)) for p in expected.values()], abs=1e-12)
        if end < len(text):
            commit(drafter, [text[end]])


def test_a_worked_example() -> None:
    # "1 2" was followed by 3 twice and by 4 once, and ends the text.
    text = [1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2]
    drafter = SuffixDrafter(max_past_tokens=0)
    begin(drafter, text)
    tree = ask(drafter, text)
    # Match of 2 tokens, so 2 deep; 3 continuations, 2 distinct; the ratios of the paths are 2/4, 2/4, 1/4, 1/4.
    assert {path: math.exp(score) for path, score in paths(tree).items()} == pytest.approx(
        {(3,): 2 / 4, (3, 1): 2 / 4 * 2 / (2 + 1 / 3), (4,): 1 / 4, (4, 1): 1 / 4 * 1 / (1 + 1 / 3)}
    )
    assert {name: column.tolist() for name, column in tree.evidence.items()} == {
        "match_length": [2.0, 2.0, 2.0, 2.0],
        "count": [2.0, 2.0, 1.0, 1.0],
        "parent_count": [4.0, 2.0, 4.0, 1.0],
        "rank": [0.0, 0.0, 1.0, 0.0],
    }


def test_past_outputs_serve_later_requests_and_prompts_do_not() -> None:
    drafter = SuffixDrafter()
    request(drafter, [1, 2, 3, 4, 5, 6, 7, 8], prompt=4)
    begin(drafter, [9, 5, 6])
    assert ask(drafter, [9, 5, 6]).token_ids.tolist() == [7, 8]
    drafter.finish()
    begin(drafter, [9, 1, 2])
    assert len(ask(drafter, [9, 1, 2])) == 0


def test_the_candidate_with_the_higher_expected_length_wins() -> None:
    drafter = SuffixDrafter()
    request(drafter, [1, 2, 3, 4, 50, 51, 52, 53], prompt=0)
    own = [2, 3, 60, 61, 9, 1, 2, 3]  # matches 2 tokens here, 3 in the past output
    begin(drafter, own)
    assert ask(drafter, own).token_ids.tolist() == [4, 50, 51]
    own = [*range(2, 4), 60, 61, 62, 9, 2, 3]  # the same 2 tokens in both: the own text goes first
    begin(drafter, own)
    assert ask(drafter, own).token_ids.tolist() == [60, 61]


@pytest.mark.parametrize(
    ("factor", "offset", "depth"), [(1.0, 0, 3), (2.0, 0, 6), (0.5, 0, 1), (1.0, 4, 7), (0.0, 2, 2)]
)
def test_longer_matches_draft_deeper(factor: float, offset: float, depth: int) -> None:
    text = [*range(3), *range(100, 120), *range(3)]
    drafter = SuffixDrafter(factor=factor, offset=offset)
    begin(drafter, text)
    assert ask(drafter, text).token_ids.tolist() == list(range(100, 100 + depth))


def test_a_long_repetition_drafts_to_the_full_depth() -> None:
    text = [5, 6, 7] * 100
    drafter = SuffixDrafter()
    begin(drafter, text)
    tree = ask(drafter, text)
    assert tree.token_ids.tolist() == ([5, 6, 7] * 22)[:64]
    assert (tree.evidence["match_length"] == 64).all()


def test_a_suffix_with_very_many_successors_is_passed_over() -> None:
    automaton = SuffixAutomaton(count_length=4)
    tokens = [token for i in range(LARGEST_FAN_OUT + 1) for token in (0, i + 1)]
    automaton.extend([*tokens[:-2], 0])
    options: dict[str, Any] = {"budget": 4, "max_depth": 1, "min_probability": 0.0, "greedy": False}
    state = automaton.step(0, 0)
    assert len(grow(Match(automaton, state, 1, 1), **options).token_ids) == 4
    automaton.extend([*tokens[-1:], 0])
    state = automaton.step(0, 0)
    assert grow(Match(automaton, state, 1, 1), **options).token_ids == []


def test_max_depth_of_the_context_is_kept() -> None:
    drafter = SuffixDrafter()
    begin(drafter, [1] * 50)
    assert len(ask(drafter, [1] * 50, 64, max_depth=7)) == 7


def test_states_must_fit_the_options() -> None:
    state = SuffixDrafter(max_depth=8).state_dict()
    with pytest.raises(ValueError, match="max_depth of the state must be 64 as in this drafter, got 8"):
        SuffixDrafter().load_state_dict(state)
    drafter = SuffixDrafter()
    drafter.bind(Vocabulary(10))
    request(drafter, [1, 2, 3])
    other = SuffixDrafter()
    other.bind(Vocabulary(11))
    with pytest.raises(ValueError, match="vocab_size of the state must be 11, got 10"):
        other.load_state_dict(drafter.state_dict())
    damaged = {**drafter.state_dict(), "outputs": [[3, 10]]}
    with pytest.raises(ValueError, match=r"outputs\[0\] of the state must be in \[0, 10\), got 10"):
        drafter.load_state_dict(damaged)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_depth": 0}, "max_depth must be in"),
        ({"factor": -1}, "factor must be a number in"),
        ({"factor": float("nan")}, "factor must be a number in"),
        ({"factor": float("inf")}, "factor must be finite"),
        ({"offset": 65}, "offset must be a number in"),
        ({"min_probability": 1.5}, "min_probability must be a number in"),
        ({"tree": None}, "tree must be True or False"),
        ({"max_past_tokens": 1.5}, "max_past_tokens must be a whole number"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_drafter("suffix", **options)


def test_the_text_is_released() -> None:
    drafter = SuffixDrafter()
    request(drafter, [1, 2, 3])
    assert drafter._own is None
    drafter.reset()
    assert len(drafter._past) == 0
