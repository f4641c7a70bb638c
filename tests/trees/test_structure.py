from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptspec.trees import (
    ancestor_mask,
    children_lists,
    depths,
    leaf_paths,
    parents_first_order,
    path_scores,
    path_to,
)
from tests.trees.tree_strategies import property_test

#        root
#       /    \
#      0      1
#     / \      \
#    2   4      3
#    |
#    5
PARENTS = [-1, -1, 0, 1, 0, 2]

parent_arrays = st.integers(0, 70).flatmap(
    lambda n: st.tuples(*(st.integers(-1, i - 1) for i in range(n))).map(lambda p: np.array(p, dtype=np.int64))
)


def test_hand_written_tree() -> None:
    assert ancestor_mask(PARENTS).astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [0, 1, 0, 1, 0, 0],
        [1, 0, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 1],
    ]
    assert depths(PARENTS).tolist() == [1, 1, 2, 2, 2, 3]
    assert children_lists(PARENTS) == [[0, 1], [2, 4], [3], [5], [], [], []]
    assert path_to(PARENTS, 5) == [0, 2, 5]
    assert path_to(PARENTS, -1) == []
    assert leaf_paths(PARENTS).tolist() == [[1, 3, -1], [0, 4, -1], [0, 2, 5]]
    assert path_scores(PARENTS, [-1.0, -2.0, -0.5, 0.0, -3.0, -0.25]).tolist() == [-1.0, -2.0, -1.5, -2.0, -4.0, -1.75]


def test_empty_tree() -> None:
    assert ancestor_mask([]).shape == (0, 0)
    assert depths([]).shape == (0,)
    assert children_lists([]) == [[]]
    assert leaf_paths([]).shape == (0, 0)
    assert parents_first_order([]).shape == (0,)


@property_test
@given(parent_arrays)
def test_ancestor_mask_is_the_set_of_ancestors(parents: np.ndarray) -> None:
    mask = ancestor_mask(parents)
    assert mask.dtype == np.bool_
    assert mask.shape == (len(parents), len(parents))
    for node in range(len(parents)):
        assert np.flatnonzero(mask[node]).tolist() == path_to(parents, node)
    assert (mask.sum(axis=1) == depths(parents)).all()


@pytest.mark.parametrize("count", [63, 64, 65, 128, 129])
def test_ancestor_mask_of_a_chain_over_the_word_size(count: int) -> None:
    assert (ancestor_mask(np.arange(-1, count - 1)) == np.tri(count, dtype=bool)).all()


@property_test
@given(parent_arrays)
def test_rows_that_are_parents_first_stay(parents: np.ndarray) -> None:
    assert (parents_first_order(parents) == np.arange(len(parents))).all()


@property_test
@given(parent_arrays, st.randoms(use_true_random=False))
def test_shuffled_rows_are_put_parents_first(parents: np.ndarray, random: object) -> None:
    shuffled = list(range(len(parents)))
    random.shuffle(shuffled)
    position = np.full(len(parents) + 1, -1)
    position[shuffled] = np.arange(len(parents))
    mixed = position[parents[shuffled]]
    order = parents_first_order(mixed)
    assert sorted(order.tolist()) == list(range(len(parents)))
    place = np.argsort(order)
    assert all(place[parent] < place[node] for node, parent in enumerate(mixed.tolist()) if parent >= 0)
    for siblings in children_lists(mixed):
        assert (np.diff(place[siblings]) > 0).all()


def test_stable_order_by_hand() -> None:
    # Node 0 hangs below node 3; the others are placed as early as their parents allow, lowest row first.
    assert parents_first_order([3, -1, 1, -1]).tolist() == [1, 2, 3, 0]


@pytest.mark.parametrize(
    ("parents", "message"),
    [([1, 0], "circle through node 0"), ([-1, 1], "circle through node 1"), ([-1, 2], "got 2 at node 1"), ([-2], "-2")],
)
def test_impossible_parents_are_refused(parents: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parents_first_order(parents)


@pytest.mark.parametrize("node", [-2, 6])
def test_path_to_a_missing_node_is_refused(node: int) -> None:
    with pytest.raises(ValueError, match=r"node must be in \[-1, 6\)"):
        path_to(PARENTS, node)
