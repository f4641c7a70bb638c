"""Trees of fixed shape that are filled by a model."""

from __future__ import annotations

import numpy as np
import pytest

from adaptspec.drafters.static_tree import limit_depth, rank_template, static_tree
from adaptspec.trees import Template


class Model:
    """A token's children are 10 t + 1, 10 t + 2, ... of falling probability; notes what it is asked."""

    def __init__(self, children: int) -> None:
        self.children = children
        self.asked: list[tuple[list[int], list[int]]] = []

    def __call__(self, token_ids: np.ndarray, parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.asked.append((token_ids.tolist(), parents.tolist()))
        ids = 10 * token_ids[:, None] + np.arange(1, self.children + 1)
        log_probs = np.broadcast_to(-np.arange(1.0, self.children + 1), ids.shape).copy()
        log_probs[ids % 100 == 22] = -np.inf  # no second child of a second child
        return np.where(log_probs > -np.inf, ids, -1), log_probs


SHAPE = Template.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (1, 1, 0), (0, 1, 0)], np.full(3, 0.3))


def test_the_shape_is_filled_level_by_level() -> None:
    model = Model(2)
    tree = static_tree(model, SHAPE, root=7, max_depth=5)
    # Rank 2 finds no token, and neither does the second child of 72; what lies below is left out.
    assert tree.token_ids.tolist() == [71, 72, 711, 712, 721, 7121]
    assert tree.parents.tolist() == [-1, -1, 0, 0, 1, 3]
    assert tree.scores.tolist() == [-1, -2, -2, -3, -3, -4]
    assert tree.evidence["rank"].tolist() == [0, 1, 0, 1, 0, 0]
    assert tree.evidence["log_prob"].tolist() == [-1, -2, -1, -2, -1, -1]
    # Nodes without children are not run; parents are numbers of expanded rows, the root's being 0.
    assert model.asked == [([7], [-1]), ([71, 72], [0, 0]), ([712], [1])]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_depth_is_limited(depth: int) -> None:
    tree = static_tree(Model(3), SHAPE, root=7, max_depth=depth)
    assert tree.depths().max(initial=0) == depth
    shallow = limit_depth(SHAPE, depth)
    assert len(shallow) == [0, 3, 7][depth] and shallow.max_depth == depth
    again = static_tree(Model(3), shallow, root=7, max_depth=9)
    assert again.state_bytes() == tree.state_bytes()


def test_templates_of_smaller_budgets_come_first() -> None:
    large = rank_template(14, 64, 5)
    assert len(large) == 64 and large.max_depth <= 5 and large.ranks.max() <= 13
    small = rank_template(14, 20, 5)
    assert small.paths() == large.paths()[:20]
    assert rank_template(1, 9, 3).paths() == [(0,), (0, 0), (0, 0, 0)]
