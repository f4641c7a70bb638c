"""SAM-decoding against scanning the texts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptspec.drafters import make_drafter
from adaptspec.drafters.sam import SamDrafter
from tests.drafters.driving import Vocabulary, ask, begin, commit, examples, request

texts = st.integers(1, 3).flatmap(lambda size: st.lists(st.integers(0, size - 1), min_size=1, max_size=30))


def longest_match(text: list[int], sequences: list[list[int]], *, own: bool) -> tuple[int, list[int]]:
    """Length of the longest suffix of `text` that occurs (before its end), and what follows its first occurrence."""
    for size in range(len(text) - own, 0, -1):
        suffix = text[len(text) - size :]
        for sequence in sequences:
            for start in range(len(sequence) - size + 1 - own):
                if sequence[start : start + size] == suffix:
                    return size, sequence[start + size :]
    return 0, []


def expected_draft(
    text: list[int], past: list[list[int]], given: list[int], *, min_match: int, limit: int
) -> tuple[int, list[int]]:
    length, following = longest_match(text, [text], own=True)
    periodic = True
    for sequences in (past, [given]):
        other, behind = longest_match(text, sequences, own=False)
        if other > length:
            length, following, periodic = other, behind, False
    if length < min_match:
        return length, []
    if periodic:
        following = (following * limit)[:limit]
    return length, following[:limit]


@examples
@given(texts, st.lists(texts, max_size=3), st.one_of(st.just([]), texts), st.integers(1, 4), st.integers(1, 5))
def test_drafts_are_those_of_a_scan(
    text: list[int], past: list[list[int]], given_text: list[int], min_match: int, chunk: int
) -> None:
    drafter = SamDrafter(min_match=min_match, max_copy=9, text=given_text)
    for output in past:
        request(drafter, output, prompt=0)
    known = text[:chunk]
    begin(drafter, known)
    while True:
        for budget, limit in ((64, 9), (4, 4)):
            tree = ask(drafter, known, budget)
            length, draft = expected_draft(known, past, given_text, min_match=min_match, limit=limit)
            assert tree.token_ids.tolist() == draft
            assert (tree.evidence["match_length"] == length).all() if draft else not tree.evidence
        if len(known) == len(text):
            break
        new = text[len(known) : len(known) + chunk]
        commit(drafter, new)
        known += new


def test_it_declines_below_the_shortest_match() -> None:
    drafter = SamDrafter()
    text = [1, 2, 3, 4, 5, 6, 9, 2, 3, 4, 5]
    begin(drafter, text)
    assert len(ask(drafter, text)) == 0
    commit(drafter, [6])
    assert ask(drafter, [*text, 6], 4).token_ids.tolist() == [9, 2, 3, 4]


def test_at_most_forty_tokens_are_copied() -> None:
    drafter = SamDrafter()
    begin(drafter, [7] * 20)
    tree = ask(drafter, [7] * 20)
    assert tree.token_ids.tolist() == [7] * 40
    assert tree.scores[[0, 39]] == pytest.approx([math.log(18.5 / 19.5), math.log(18.5 / 58.5)])


def test_a_given_text_is_searched_and_survives_reset() -> None:
    drafter = SamDrafter(text=np.arange(100, 130))
    begin(drafter, [1, *range(105, 110)])
    assert ask(drafter, [1, *range(105, 110)], 3).token_ids.tolist() == [110, 111, 112]
    drafter.reset()
    begin(drafter, [1, *range(120, 126)])
    assert ask(drafter, [1, *range(120, 126)]).token_ids.tolist() == [126, 127, 128, 129]
    with pytest.raises(ValueError, match=r"text must be token ids in \[0, 129\), got 129"):
        drafter.bind(Vocabulary(129))


def test_past_outputs_are_remembered_unless_told_otherwise() -> None:
    for remember in (True, False):
        drafter = SamDrafter(remember=remember)
        request(drafter, list(range(20)), prompt=4)
        prompt = [50, *range(4, 10)]
        begin(drafter, prompt)
        assert ask(drafter, prompt, 3).token_ids.tolist() == ([10, 11, 12] if remember else [])
        drafter.finish()
        prompt = [50, *range(1, 4)]
        drafter.min_match = 1
        begin(drafter, prompt)
        assert len(ask(drafter, prompt)) == 0, "prompts are not remembered"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_match": 0}, "min_match must be >= 1"),
        ({"max_copy": 0}, "max_copy must be >= 1"),
        ({"remember": "yes"}, "remember must be True or False"),
        ({"max_past_tokens": -1}, "max_past_tokens must be >= 0"),
        ({"text": [[1, 2]]}, "text must be one-dimensional integers"),
        ({"text": [0.5]}, "text must be one-dimensional integers"),
        ({"text": [1, -2]}, r"text must be in \[0, 2147483647\), got -2"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_drafter("sam", **options)


def test_states_of_another_size_are_refused() -> None:
    state = SamDrafter(remember=False).state_dict()
    with pytest.raises(ValueError, match="max_past_tokens of the state must be 100000"):
        SamDrafter().load_state_dict(state)


def test_the_text_is_released() -> None:
    drafter = SamDrafter()
    request(drafter, [1, 2, 3])
    assert drafter._own is None
