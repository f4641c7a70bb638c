from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptspec.trees import merge, truncate
from adaptspec.types import DraftTree
from tests.trees.tree_strategies import (
    VOCAB,
    check_scores_fall,
    deterministic_trees,
    path_scores_by_path,
    property_test,
    token_paths,
)


def test_by_hand() -> None:
    suffix = DraftTree(
        np.array([3, 4]), np.array([-1, 0]), np.log([0.5, 0.25]), evidence={"count": np.array([8.0, 4.0])}
    )
    head = DraftTree(
        np.array([9, 3, 4, 5]),
        np.array([-1, -1, 1, 1]),
        np.log([0.2, 0.75, 0.125, 0.5]),
        evidence={"rank": np.array([1.0, 0.0, 1.0, 0.0])},
    )
    tree, origins = merge([suffix, DraftTree.empty(), head], names=["suffix", "none", "head"])
    assert tree.token_ids.tolist() == [3, 4, 9, 5]
    assert tree.parents.tolist() == [-1, 0, -1, 0]
    assert np.exp(tree.scores) == pytest.approx([0.75, 0.25, 0.2, 0.5])
    assert origins.tolist() == [[0, 1, -1, -1], [-1, -1, -1, -1], [1, 2, 0, 3]]
    assert tree.evidence.keys() == {"suffix/count", "head/rank"}
    np.testing.assert_equal(tree.evidence["suffix/count"], [8.0, 4.0, np.nan, np.nan])
    np.testing.assert_equal(tree.evidence["head/rank"], [0.0, 1.0, 1.0, 0.0])

    independent, _ = merge([suffix, DraftTree.empty(), head], combine="noisy-or")
    assert np.exp(independent.scores) == pytest.approx([1 - 0.5 * 0.25, 1 - 0.75 * 0.875, 0.2, 0.5])


def test_nothing_to_merge() -> None:
    tree, origins = merge([])
    assert len(tree) == 0
    assert origins.shape == (0, 0)
    tree, origins = merge([DraftTree.empty(), DraftTree.empty()])
    assert len(tree) == 0
    assert origins.shape == (2, 0)


def test_certain_and_impossible_nodes_under_noisy_or() -> None:
    left = DraftTree.chain([1, 2], [0.0, -np.inf])
    tree, _ = merge([left, DraftTree.chain([1, 2], [-1.0, -np.inf])], combine="noisy-or")
    assert tree.scores.tolist() == [0.0, -np.inf]


@pytest.mark.parametrize("combine", ["max", "noisy-or"])
@property_test
@given(trees=st.lists(deterministic_trees(), max_size=4))
def test_contains_each_input_exactly_and_nothing_else(combine: str, trees: list[DraftTree]) -> None:
    tree, origins = merge(trees, combine=combine)
    tree.validate(vocab_size=VOCAB)
    check_scores_fall(tree)
    assert origins.shape == (len(trees), len(tree))
    paths = token_paths(tree)
    assert len(set(paths)) == len(paths)
    assert set(paths) == {path for each in trees for path in token_paths(each)}
    for index, each in enumerate(trees):
        own = origins[index]
        there = np.flatnonzero(own >= 0)
        assert sorted(own[there].tolist()) == list(range(len(each)))
        each_paths = token_paths(each)
        assert [paths[row] for row in there] == [each_paths[row] for row in own[there]]
        column = tree.evidence[f"{index}/row"]
        assert column[there].tolist() == own[there].tolist()
        assert np.isnan(np.delete(column, there)).all()
    if combine == "max":
        all_scores = [path_scores_by_path(each) for each in trees]
        assert tree.scores.tolist() == [max(s[path] for s in all_scores if path in s) for path in paths]


@property_test
@given(deterministic_trees(), deterministic_trees())
def test_merging_a_tree_with_its_own_part_changes_nothing(tree: DraftTree, other: DraftTree) -> None:
    part = truncate(tree, len(tree) // 2)
    merged, _ = merge([tree, part, tree])
    assert merged.token_ids.tolist() == tree.token_ids.tolist()
    assert merged.parents.tolist() == tree.parents.tolist()
    assert merged.scores.tolist() == tree.scores.tolist()
    one_way, _ = merge([tree, other])
    other_way, _ = merge([other, tree])
    assert path_scores_by_path(one_way) == path_scores_by_path(other_way)


def test_refusals() -> None:
    sampled = DraftTree(np.array([1]), np.array([-1]), np.array([-1.0]), "iid", np.full((1, 2), 0.5), np.array([0, -1]))
    with pytest.raises(ValueError, match="cannot merge a tree with iid siblings"):
        merge([DraftTree.empty(), sampled])
    with pytest.raises(ValueError, match="combine must be one of max, noisy-or, got 'mean'"):
        merge([], combine="mean")
    with pytest.raises(ValueError, match="names must be 2 different names"):
        merge([DraftTree.empty(), DraftTree.empty()], names=["a", "a"])
