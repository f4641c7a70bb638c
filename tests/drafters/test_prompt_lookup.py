"""Prompt lookup against scanning the text."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptspec.drafters import make_drafter
from adaptspec.drafters.prompt_lookup import PromptLookupDrafter, Tie
from tests.drafters.driving import ask, begin, commit, examples

streams = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), min_size=1, max_size=40))


def scan(text: list[int], *, min_ngram: int, max_ngram: int, tie: Tie) -> int | None:
    """Where the copy starts: behind the longest n-gram equal to the last tokens that something follows."""
    for size in range(max_ngram, min_ngram - 1, -1):
        starts = [
            start
            for start in range(len(text) - size)  # the n-gram at len(text) - size is the suffix itself
            if text[start : start + size] == text[len(text) - size :]
        ]
        if starts:
            return (max if tie == "latest" else min)(starts) + size
    return None


def copied(text: list[int], start: int, limit: int) -> list[int]:
    extended = list(text)
    for i in range(limit):
        extended.append(extended[start + i])
    return extended[len(text) :]


@examples
@given(streams, st.integers(1, 3), st.integers(0, 3), st.sampled_from(["latest", "earliest"]), st.integers(1, 5))
def test_the_draft_is_the_one_a_scan_finds(text: list[int], low: int, more: int, tie: Tie, chunk: int) -> None:
    drafter = PromptLookupDrafter(min_ngram=low, max_ngram=low + more, tie=tie)
    known = text[:chunk]
    begin(drafter, known)
    while True:
        tree = ask(drafter, known, 12)
        start = scan(known, min_ngram=low, max_ngram=low + more, tie=tie)
        assert tree.token_ids.tolist() == ([] if start is None else copied(known, start, 12))
        if len(known) == len(text):
            break
        new = text[len(known) : len(known) + chunk]
        commit(drafter, new)
        known += new


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_ngram": 2, "max_tokens": 10, "tie": "earliest", "periodic": False}, [3, 1, 2, 4, 1, 2]),  # transformers
        ({"max_ngram": 2, "tie": "latest"}, [4, 1, 2, 4, 1, 2, 4, 1]),
        ({"max_ngram": 2, "tie": "latest", "max_tokens": 2}, [4, 1]),
        ({"max_ngram": 3, "tie": "earliest"}, [3, 1, 2, 4, 1, 2, 3, 1]),
        ({"min_ngram": 3, "max_ngram": 3}, []),
    ],
)
def test_a_worked_example(options: dict[str, Any], expected: list[int]) -> None:
    text = [1, 2, 3, 1, 2, 4, 1, 2]
    drafter = make_drafter("prompt-lookup", **options)
    begin(drafter, text)
    assert ask(drafter, text, 8).token_ids.tolist() == expected


def test_the_longest_ngram_goes_before_a_later_shorter_one() -> None:
    text = [1, 2, 3, 7, 9, 3, 8, 1, 2, 3]
    drafter = PromptLookupDrafter(max_ngram=3)
    begin(drafter, text)
    assert ask(drafter, text, 1).token_ids.tolist() == [7]


def test_a_period_goes_on_beyond_the_end() -> None:
    text = [4, 5, 6] * 3
    drafter = PromptLookupDrafter()
    begin(drafter, text)
    assert ask(drafter, text, 64).token_ids.tolist() == ([4, 5, 6] * 22)[:64]


def test_the_suffix_is_no_match_of_itself() -> None:
    drafter = PromptLookupDrafter()
    begin(drafter, [1, 2, 3, 4])
    assert len(ask(drafter, [1, 2, 3, 4])) == 0


def test_zero_padding_is_no_token() -> None:
    drafter = PromptLookupDrafter(min_ngram=2, max_ngram=2)
    for text in ([5, 9, 0, 5], [0, 5], [5, 0], [0]):  # (0, 5) must not be found where the text begins with 5
        begin(drafter, text)
        assert len(ask(drafter, text)) == 0
    begin(drafter, [0, 0, 0])
    assert ask(drafter, [0, 0, 0], 2).token_ids.tolist() == [0, 0]


def test_scores_say_how_long_the_match_is() -> None:
    text = [*range(10, 20), 1, *range(10, 20)]
    drafter = PromptLookupDrafter(max_ngram=2)
    begin(drafter, text)
    tree = ask(drafter, text, 3)
    assert tree.evidence["match_length"].tolist() == [10.0] * 3
    assert tree.scores == pytest.approx([math.log(9.5 / 10.5), math.log(9.5 / 11.5), math.log(9.5 / 12.5)])


def test_depth_limits_the_draft() -> None:
    drafter = PromptLookupDrafter()
    begin(drafter, [1, 1, 1])
    assert len(ask(drafter, [1, 1, 1], 64, max_depth=5)) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_ngram": 0}, "max_ngram must be in"),
        ({"max_ngram": 2, "min_ngram": 3}, "min_ngram must be in"),
        ({"max_ngram": 2.0}, "max_ngram must be a whole number"),
        ({"max_tokens": 0}, "max_tokens must be >= 1"),
        ({"tie": "first"}, "tie must be one of latest, earliest, got 'first'"),
        ({"periodic": 1}, "periodic must be True or False"),
        ({"max_gram": 2}, "did you mean 'max_ngram'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_drafter("prompt-lookup", **options)


def test_one_entry_per_ngram_and_nothing_after_the_request() -> None:
    drafter = PromptLookupDrafter(max_ngram=3)
    text = np.random.default_rng(0).integers(0, 50, 2000).tolist()
    begin(drafter, text)
    assert drafter._index is not None
    assert sum(map(len, drafter._index._positions)) <= 3 * len(text)
    drafter.finish()
    assert drafter._index is None
