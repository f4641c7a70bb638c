from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptspec.trees import trie_from_counts
from tests.trees.tree_strategies import check_scores_fall, property_test, token_paths

CONTINUATIONS = [[4, 5, 6], [4, 5, 7], [4, 8], [9, 1], [9, 1], [], [2]]


def test_by_hand() -> None:
    tree = trie_from_counts(CONTINUATIONS, budget=5)
    assert token_paths(tree) == [(4,), (9,), (4, 5), (9, 1), (2,)]
    assert tree.parents.tolist() == [-1, -1, 0, 1, -1]
    assert np.exp(tree.scores) == pytest.approx([3 / 6, 2 / 6, 2 / 6, 2 / 6, 1 / 6])
    assert tree.evidence["count"].tolist() == [3, 2, 2, 2, 1]
    assert tree.evidence["parent_count"].tolist() == [6, 6, 3, 2, 6]


def test_arrays_end_at_the_first_negative_entry() -> None:
    table = np.array([[4, 5, 6], [4, 5, 7], [4, 8, -1], [9, 1, -1], [9, 1, -1], [-1, 4, 4], [2, -1, 3]], dtype=np.int32)
    for budget in range(12):
        from_array = trie_from_counts(table, budget=budget)
        from_lists = trie_from_counts(CONTINUATIONS, budget=budget)
        assert from_array.token_ids.tolist() == from_lists.token_ids.tolist()
        assert from_array.parents.tolist() == from_lists.parents.tolist()
        assert from_array.token_ids.dtype == np.int64


def test_first_seen_wins_ties_and_shallow_goes_before_deep() -> None:
    assert token_paths(trie_from_counts([[7, 1], [3, 2]], budget=3)) == [(7,), (3,), (7, 1)]
    assert token_paths(trie_from_counts([[3, 2], [7, 1]], budget=3)) == [(3,), (7,), (3, 2)]


def test_weights_and_depth() -> None:
    tree = trie_from_counts([[1, 2], [3, 4], [3, 5]], budget=3, weights=[5.0, 1.0, 2.0])
    assert token_paths(tree) == [(1,), (1, 2), (3,)]
    assert tree.evidence["count"].tolist() == [5.0, 5.0, 3.0]
    assert np.exp(tree.scores) == pytest.approx([5 / 8, 5 / 8, 3 / 8])
    assert token_paths(trie_from_counts([[1, 2], [3, 4]], budget=9, max_depth=1)) == [(1,), (3,)]
    assert trie_from_counts([[1], [], [1]], budget=9, weights=[0.5, 9.0, 0.5]).scores.tolist() == [0.0]


def test_a_child_never_outweighs_its_parent_by_rounding() -> None:
    weights = np.random.default_rng(0).uniform(0.1, 0.9, size=400)
    table = np.random.default_rng(1).integers(0, 2, size=(400, 8))
    tree = trie_from_counts(table, budget=200, weights=weights)
    tree.validate(vocab_size=2, budget=200)
    check_scores_fall(tree)


def test_nothing_retrieved() -> None:
    for nothing in (
        [],
        [[], []],
        np.zeros((0, 4), dtype=np.int64),
        np.full((3, 2), -1),
        np.zeros((3, 0), dtype=np.int64),
    ):
        assert len(trie_from_counts(nothing, budget=4)) == 0
    assert len(trie_from_counts([[1]], budget=0)) == 0
    assert len(trie_from_counts([[1]], budget=4, max_depth=0)) == 0


@property_test
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=25),
    st.integers(0, 40),
    st.integers(0, 6),
    st.booleans(),
)
def test_agrees_with_counting_prefixes(rows: list[list[int]], budget: int, max_depth: int, weighted: bool) -> None:
    weights = [1.0 + (i % 3) for i in range(len(rows))] if weighted else None
    tree = trie_from_counts(rows, budget=budget, max_depth=max_depth, weights=weights)
    tree.validate(vocab_size=4, budget=budget)
    check_scores_fall(tree)
    counts: Counter[tuple[int, ...]] = Counter()
    first_seen: dict[tuple[int, ...], int] = {}
    total = 0.0
    for index, row in enumerate(rows):
        weight = weights[index] if weights else 1.0
        total += weight if row else 0.0
        for depth in range(1, min(len(row), max_depth) + 1):
            counts[tuple(row[:depth])] += weight
            first_seen.setdefault(tuple(row[:depth]), index)
    expected = sorted(counts, key=lambda path: (-counts[path], len(path), first_seen[path]))[:budget]
    assert token_paths(tree) == expected
    if expected:
        counts[()] = total
        assert tree.evidence["count"].tolist() == [counts[path] for path in expected]
        assert tree.evidence["parent_count"].tolist() == [counts[path[:-1]] for path in expected]
    assert tree.scores == pytest.approx([np.log(counts[path] / total) for path in expected])


def test_ids_beyond_sixteen_bits_survive() -> None:
    tree = trie_from_counts(np.array([[70_000, 2**31 - 1], [70_000 - 2**16, 1]]), budget=4)
    assert token_paths(tree) == [(70_000,), (4_464,), (70_000, 2**31 - 1), (4_464, 1)]
    # Two prefixes whose next tokens differ only in high bits stay apart.
    tree = trie_from_counts(np.array([[5, 0x20003], [6, 0x10003]]), budget=4)
    assert token_paths(tree) == [(5,), (6,), (5, 0x20003), (6, 0x10003)]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="budget must be >= 0, got -1"):
        trie_from_counts([[1]], budget=-1)
    with pytest.raises(ValueError, match=r"got uint16 of shape \[1, 2\]"):
        trie_from_counts(np.zeros((1, 2), dtype=np.uint16), budget=2)
    with pytest.raises(ValueError, match="weights must be 2 positive numbers"):
        trie_from_counts([[1], [2]], budget=2, weights=[1.0, 0.0])
    with pytest.raises(ValueError, match="weights must be 2 positive numbers"):
        trie_from_counts([[1], [2]], budget=2, weights=[1.0])
