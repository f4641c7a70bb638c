from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptspec.trees import (
    budget_order,
    depths,
    expected_length,
    keep_first,
    limit_depth,
    nested_lengths,
    path_to,
    prune,
    sort_parents_first,
    subtree,
    truncate,
)
from adaptspec.types import DraftTree
from tests.trees.tree_strategies import VOCAB, deterministic_trees, path_scores_by_path, property_test, token_paths


def hand_tree() -> DraftTree:
    """root -> 7 (-0.1) -> 8 (-0.3) -> 9 (-2.0); 7 -> 5 (-1.5); root -> 6 (-1.0)."""
    return DraftTree(
        np.array([7, 6, 8, 5, 9]),
        np.array([-1, -1, 0, 0, 2]),
        np.array([-0.1, -1.0, -0.3, -1.5, -2.0]),
        evidence={"count": np.array([50.0, 40.0, 30.0, 20.0, 10.0])},
    )


def sampled_tree_by_hand() -> DraftTree:
    """Two draws at the root, one below each."""
    return DraftTree(
        np.array([0, 1, 2, 0]),
        np.array([-1, -1, 0, 1]),
        np.array([-0.5, -1.0, -0.6, -1.2]),
        "without-replacement",
        np.full((3, 3), 1 / 3),
        np.array([0, 1, 2, -1, -1]),
    )


def same(left: DraftTree, right: DraftTree) -> bool:
    arrays = ("token_ids", "parents", "scores")
    return (
        all(np.array_equal(getattr(left, name), getattr(right, name)) for name in arrays)
        and left.evidence.keys() == right.evidence.keys()
        and all(np.array_equal(left.evidence[name], right.evidence[name]) for name in left.evidence)
    )


def test_truncate_by_hand() -> None:
    tree = hand_tree()
    assert budget_order(tree).tolist() == [0, 2, 1, 3, 4]
    kept = truncate(tree, 3)
    assert kept.token_ids.tolist() == [7, 6, 8]
    assert kept.parents.tolist() == [-1, -1, 0]
    assert kept.evidence["count"].tolist() == [50.0, 40.0, 30.0]
    assert truncate(tree, 5) is tree
    assert len(truncate(tree, 0)) == 0


def test_prune_by_hand() -> None:
    kept = prune(hand_tree(), np.array([True, True, False, True, True]))  # 9 falls with its parent 8
    assert kept.token_ids.tolist() == [7, 6, 5]
    assert kept.parents.tolist() == [-1, -1, 0]
    assert kept.scores.tolist() == [-0.1, -1.0, -1.5]
    assert kept.evidence["count"].tolist() == [50.0, 40.0, 20.0]


def test_limit_depth_and_keep_first_by_hand() -> None:
    assert limit_depth(hand_tree(), 2).token_ids.tolist() == [7, 6, 8, 5]
    assert limit_depth(hand_tree(), 1).token_ids.tolist() == [7, 6]
    assert len(limit_depth(hand_tree(), 0)) == 0
    assert keep_first(hand_tree(), 2).token_ids.tolist() == [7, 6]
    tree = hand_tree()
    assert limit_depth(tree, 3) is tree
    assert keep_first(tree, 5) is tree


def test_subtree_by_hand() -> None:
    below = subtree(hand_tree(), 0)
    assert below.token_ids.tolist() == [8, 5, 9]
    assert below.parents.tolist() == [-1, -1, 0]
    assert below.scores == pytest.approx([-0.2, -1.4, -1.9])
    assert below.evidence["count"].tolist() == [30.0, 20.0, 10.0]
    assert len(subtree(hand_tree(), 4)) == 0
    tree = hand_tree()
    assert subtree(tree, -1) is tree
    with pytest.raises(ValueError, match="node must be in"):
        subtree(tree, 5)


def test_nested_lengths_by_hand() -> None:
    # Budget order is 7, 8, 6, 5, 9: the path 7-8-9 has one node at budget 1, two from 2 on, three at 5.
    assert nested_lengths(hand_tree(), [0, 2, 4]).tolist() == [1, 2, 3, 3, 3, 4]
    assert nested_lengths(hand_tree(), [1]).tolist() == [1, 1, 1, 2, 2, 2]
    assert nested_lengths(hand_tree(), []).tolist() == [1, 1, 1, 1, 1, 1]
    assert nested_lengths(DraftTree.empty(), []).tolist() == [1]


@pytest.mark.parametrize("path", [[2], [0, 1], [0, 4], [0, 2, 9], [-1]])
def test_nested_lengths_refuses_what_is_no_path(path: list[int]) -> None:
    with pytest.raises(ValueError, match="path must"):
        nested_lengths(hand_tree(), path)


def test_sort_parents_first_by_hand() -> None:
    tree = hand_tree()
    assert sort_parents_first(tree) is tree
    mixed = DraftTree(
        np.array([9, 7, 8]),
        np.array([2, -1, 1]),
        np.array([-3.0, -1.0, -2.0]),
        evidence={"n": np.array([3.0, 1.0, 2.0])},
    )
    ordered = sort_parents_first(mixed)
    assert ordered.token_ids.tolist() == [7, 8, 9]
    assert ordered.parents.tolist() == [-1, 0, 1]
    assert ordered.scores.tolist() == [-1.0, -2.0, -3.0]
    assert ordered.evidence["n"].tolist() == [1.0, 2.0, 3.0]


def test_a_child_above_its_parent_never_goes_first() -> None:
    tree = DraftTree(np.array([1, 2, 3]), np.array([-1, 0, -1]), np.array([-2.0, -0.5, -1.0]))
    assert budget_order(tree).tolist() == [2, 0, 1]
    assert truncate(tree, 1).token_ids.tolist() == [3]
    assert truncate(tree, 2).parents.tolist() == [-1, -1]


def test_expected_length() -> None:
    assert expected_length(DraftTree.empty()) == 1.0
    assert expected_length(DraftTree.chain([1, 2], np.log([0.5, 0.25]))) == pytest.approx(1.75)


def test_sampled_trees_are_cut_by_shape_only() -> None:
    tree = sampled_tree_by_hand()
    for cut in (lambda: truncate(tree, 3), lambda: prune(tree, np.array([True, True, False, True]))):
        with pytest.raises(ValueError, match="no longer be lossless"):
            cut()
    assert truncate(tree, 4) is tree
    assert prune(tree, np.ones(4, dtype=bool)) is tree
    flat = limit_depth(tree, 1)
    assert flat.draft_rows.tolist() == [0, -1, -1]
    assert flat.draft_probs is tree.draft_probs
    first = keep_first(tree, 3)
    assert first.draft_rows.tolist() == [0, 1, -1, -1]
    below = subtree(tree, 1)
    assert below.token_ids.tolist() == [0]
    assert below.draft_rows.tolist() == [2, -1]
    for cut_tree in (flat, first, below):
        cut_tree.validate(vocab_size=3)
        assert cut_tree.siblings == "without-replacement"
    assert nested_lengths(tree, [1, 3]).tolist() == [1, 1, 2, 2, 3]  # order of drawing, not of scores


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda tree: truncate(tree, -1), "budget must be >= 0, got -1"),
        (lambda tree: truncate(tree, 1.5), "budget must be a whole number >= 0, got 1.5"),
        (lambda tree: truncate(tree, True), "budget must be a whole number"),
        (lambda tree: limit_depth(tree, -3), "max_depth must be >= 0, got -3"),
        (lambda tree: keep_first(tree, -2), "count must be >= 0, got -2"),
        (lambda tree: prune(tree, [True]), r"keep must be bool of shape \[5\]"),
        (lambda tree: prune(tree, [1, 0, 1, 0, 1]), "keep must be bool"),
    ],
)
def test_bad_arguments_are_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(hand_tree())


@property_test
@given(deterministic_trees(), st.integers(0, 14))
def test_truncate_keeps_the_best_and_stays_a_tree(tree: DraftTree, budget: int) -> None:
    kept = truncate(tree, budget)
    kept.validate(vocab_size=VOCAB, budget=budget)
    assert len(kept) == min(budget, len(tree))
    scores = path_scores_by_path(tree)
    assert path_scores_by_path(kept).items() <= scores.items()
    dropped = scores.keys() - set(token_paths(kept))
    if dropped and len(kept):
        assert max(scores[path] for path in dropped) <= kept.scores.min()
    assert kept.evidence["score"].tolist() == kept.scores.tolist()
    assert (np.diff(kept.evidence["row"]) > 0).all()  # old row order


@property_test
@given(deterministic_trees())
def test_budgets_are_nested(tree: DraftTree) -> None:
    for budget in range(len(tree)):
        smaller, larger = truncate(tree, budget), truncate(tree, budget + 1)
        assert set(token_paths(smaller)) < set(token_paths(larger))
        assert same(truncate(larger, budget), smaller)


@property_test
@given(deterministic_trees(), st.data())
def test_nested_lengths_are_what_truncated_trees_would_accept(tree: DraftTree, data: st.DataObject) -> None:
    node = data.draw(st.integers(-1, len(tree) - 1))
    path = path_to(tree.parents, node)
    walked = token_paths(tree)[node] if node >= 0 else ()
    lengths = nested_lengths(tree, path)
    for budget in range(len(tree) + 1):
        kept = set(token_paths(truncate(tree, budget)))
        assert lengths[budget] == 1 + sum(walked[: i + 1] in kept for i in range(len(walked)))


@property_test
@given(deterministic_trees(), st.data())
def test_prune_is_the_closed_part_of_what_is_kept(tree: DraftTree, data: st.DataObject) -> None:
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=len(tree), max_size=len(tree))), dtype=bool)
    kept = prune(tree, keep)
    kept.validate(vocab_size=VOCAB)
    wanted = {path for path, stays in zip(token_paths(tree), keep, strict=True) if stays}
    closed = {path for path in wanted if all(path[: i + 1] in wanted for i in range(len(path)))}
    assert set(token_paths(kept)) == closed
    assert path_scores_by_path(kept).items() <= path_scores_by_path(tree).items()


@property_test
@given(deterministic_trees(), st.integers(0, 12))
def test_limit_depth_keeps_exactly_the_shallow_nodes(tree: DraftTree, max_depth: int) -> None:
    kept = limit_depth(tree, max_depth)
    kept.validate(vocab_size=VOCAB)
    assert token_paths(kept) == [path for path in token_paths(tree) if len(path) <= max_depth]


@property_test
@given(deterministic_trees(), st.data())
def test_subtree_has_exactly_what_lies_below(tree: DraftTree, data: st.DataObject) -> None:
    if not len(tree):
        return
    node = data.draw(st.integers(0, len(tree) - 1))
    start = token_paths(tree)[node]
    below = subtree(tree, node)
    below.validate(vocab_size=VOCAB)
    assert [start + path for path in token_paths(below)] == [
        path for path in token_paths(tree) if path[: len(start)] == start and path != start
    ]
    assert below.scores == pytest.approx(below.evidence["score"] - tree.scores[node])


@property_test
@given(deterministic_trees(), st.randoms(use_true_random=False))
def test_sorting_undoes_a_shuffle(tree: DraftTree, random: object) -> None:
    rows = list(range(len(tree)))
    random.shuffle(rows)
    position = np.full(len(tree) + 1, -1)
    position[rows] = np.arange(len(tree))
    mixed = replace(
        tree,
        token_ids=tree.token_ids[rows],
        parents=position[tree.parents[rows]],
        scores=tree.scores[rows],
        evidence={name: column[rows] for name, column in tree.evidence.items()},
    )
    ordered = sort_parents_first(mixed)
    ordered.validate(vocab_size=VOCAB)
    assert path_scores_by_path(ordered) == path_scores_by_path(tree)
    assert ordered.evidence["score"].tolist() == ordered.scores.tolist()
    assert (depths(ordered.parents) == ordered.depths()).all()
