from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptspec.trees import (
    Template,
    fill_by_rank,
    fill_by_successor,
    greedy_template,
    medusa_template,
    token_recycling_template,
)
from adaptspec.trees.template_shapes import MEDUSA_ACCEPTANCE, RECYCLING_ACCEPTANCE
from tests.trees.tree_strategies import check_scores_fall, closed_sets, property_test, token_paths

PATHS = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
ACCEPTANCE = np.array([0.5, 0.25])


def test_from_paths_by_hand() -> None:
    shape = Template.from_paths(reversed(PATHS), ACCEPTANCE)
    assert shape.paths() == [(1,), (0,), (1, 0), (0, 1), (0, 0), (0, 0, 0)]
    assert shape.parents.tolist() == [-1, -1, 0, 1, 1, 4]
    assert np.exp(shape.scores) == pytest.approx([0.25, 0.5, 0.125, 0.125, 0.25, 0.125])
    assert len(shape) == 6
    assert shape.max_depth == 3
    assert shape.truncate(3).paths() == [(1,), (0,), (1, 0)]
    by_depth = Template.from_paths([(0,), (0, 0)], np.array([[0.5], [0.25]]))
    assert np.exp(by_depth.scores) == pytest.approx([0.5, 0.125])
    assert len(Template.from_paths([], ACCEPTANCE)) == 0


def test_from_branching() -> None:
    shape = Template.from_branching([2, 3])
    assert shape.parents.tolist() == [-1, -1, 0, 0, 0, 1, 1, 1]
    assert shape.ranks.tolist() == [0, 1, 0, 1, 2, 0, 1, 2]
    assert np.exp(shape.scores) == pytest.approx([1 / 2] * 2 + [1 / 6] * 6)
    assert len(Template.from_branching([])) == 0


def test_fill_by_rank_by_hand() -> None:
    shape = Template.from_paths(PATHS, ACCEPTANCE)
    ids = np.array([[10, 11], [20, 21], [30, 31]])
    tree = fill_by_rank(shape, ids, np.log([[0.8, 0.1], [0.5, 0.25], [1.0, 0.5]]))
    assert token_paths(tree) == [(10,), (11,), (10, 20), (10, 21), (11, 20), (10, 20, 30)]
    assert np.exp(tree.scores) == pytest.approx([0.8, 0.1, 0.4, 0.2, 0.05, 0.4])
    assert tree.evidence["rank"].tolist() == [0, 1, 0, 1, 0, 0]
    assert np.exp(tree.evidence["log_prob"]) == pytest.approx([0.8, 0.1, 0.5, 0.25, 0.5, 1.0])
    plain = fill_by_rank(shape, ids)
    assert plain.scores.tolist() == shape.scores.tolist()
    assert plain.evidence.keys() == {"rank"}


def test_missing_tokens_take_their_subtree_along() -> None:
    shape = Template.from_paths(PATHS, ACCEPTANCE)
    assert token_paths(fill_by_rank(shape, np.array([[-1, 11], [20, 21], [30, 31]]))) == [(11,), (11, 20)]
    assert token_paths(fill_by_rank(shape, np.array([[10, 11], [20, -1]]))) == [(10,), (11,), (10, 20), (11, 20)]
    assert token_paths(fill_by_rank(shape, np.array([[10], [20], [30]]))) == [(10,), (10, 20), (10, 20, 30)]
    assert len(fill_by_rank(shape, np.zeros((0, 2), dtype=np.int64))) == 0
    # A sibling that already has the token keeps it.
    assert token_paths(fill_by_rank(shape, np.array([[10, 10], [20, 21]]))) == [(10,), (10, 20), (10, 21)]


def test_fill_by_successor_by_hand() -> None:
    successors = np.full((6, 2), -1)
    successors[0] = [1, 2]
    successors[1] = [3, 0]
    successors[3] = [4, 5]
    shape = Template.from_paths(PATHS, ACCEPTANCE)
    tree = fill_by_successor(shape, 0, successors)
    # Token 2 has no successors, so (1, 0) is left out.
    assert token_paths(tree) == [(1,), (2,), (1, 3), (1, 0), (1, 3, 4)]
    assert np.exp(tree.scores) == pytest.approx([0.5, 0.25, 0.25, 0.125, 0.125])
    assert tree.evidence["rank"].tolist() == [0, 1, 0, 1, 0]
    scored = fill_by_successor(shape, 0, successors, np.log([0.9, 0.1]))
    assert np.exp(scored.scores) == pytest.approx([0.9, 0.1, 0.81, 0.09, 0.729])
    assert len(fill_by_successor(shape, 5, successors)) == 0
    assert token_paths(fill_by_successor(shape, 0, successors, budget=2)) == [(1,), (2,)]
    assert token_paths(fill_by_successor(shape, 0, successors, max_depth=1)) == [(1,), (2,)]
    assert len(fill_by_successor(shape, 0, successors, max_depth=0)) == 0


@property_test
@given(st.integers(0, 2**32 - 1), st.integers(0, 80), st.integers(0, 8))
def test_filled_trees_keep_their_promises(seed: int, budget: int, max_depth: int) -> None:
    rng = np.random.default_rng(seed)
    successors = rng.integers(-3, 12, size=(12, 8))  # holes and repeats
    tree = fill_by_successor(token_recycling_template(), 3, successors, budget=budget, max_depth=max_depth)
    tree.validate(vocab_size=12, budget=budget)
    check_scores_fall(tree)
    assert tree.depths().max(initial=0) <= max_depth
    whole = fill_by_successor(token_recycling_template(), 3, successors, max_depth=max_depth)
    assert token_paths(tree) == token_paths(whole)[:budget]
    for path, rank in zip(token_paths(tree), tree.evidence["rank"].astype(int), strict=True):
        assert successors[path[-2] if len(path) > 1 else 3, rank] == path[-1]


@property_test
@given(st.integers(0, 2**32 - 1), st.integers(0, 63))
def test_medusa_fill_keeps_its_promises(seed: int, budget: int) -> None:
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, 30, size=(5, 10))
    log_probs = np.sort(rng.uniform(-5, 0, size=(5, 10)))[:, ::-1]
    tree = fill_by_rank(medusa_template(), ids, log_probs, budget=budget)
    tree.validate(vocab_size=30, budget=budget)
    check_scores_fall(tree)
    for path, rank, step in zip(
        token_paths(tree), tree.evidence["rank"].astype(int), tree.evidence["log_prob"], strict=True
    ):
        assert ids[len(path) - 1, rank] == path[-1]
        assert log_probs[len(path) - 1, rank] == step


@pytest.mark.parametrize("budget", range(1, 7))
@pytest.mark.parametrize("acceptance", [[[0.5, 0.3], [0.4, 0.1], [0.9, 0.05]], [[0.9, 0.05], [0.9, 0.9], [0.1, 0.1]]])
def test_no_shape_is_better_than_the_greedy_one(acceptance: list[list[float]], budget: int) -> None:
    table = np.array(acceptance)
    candidates = set(Template.from_branching([2, 2, 2]).paths())
    value = {path: float(np.prod([table[d, r] for d, r in enumerate(path)])) for path in candidates}
    best = max(sum(value[path] for path in chosen) for chosen in closed_sets(candidates, budget))
    shape = greedy_template(table, budget=budget)
    assert np.exp(shape.scores).sum() == pytest.approx(best)
    assert np.exp(shape.scores) == pytest.approx([value[path] for path in shape.paths()])


def test_greedy_template_by_hand_and_limits() -> None:
    by_depth = np.array([[0.5, 0.3], [0.4, 0.2]])
    assert greedy_template(by_depth, budget=5).paths() == [(0,), (1,), (0, 0), (1, 0), (0, 1)]
    assert greedy_template(np.array([0.5, 0.3]), budget=3).paths() == [(0,), (1,), (0, 0)]
    assert greedy_template(np.array([0.5, 0.3]), budget=3, max_depth=1).paths() == [(0,), (1,)]
    assert len(greedy_template(np.array([0.5, 0.3]), budget=0)) == 0
    assert len(greedy_template(np.array([0.5, 0.3]), budget=3, max_depth=0)) == 0
    assert greedy_template(np.array([0.5, 0.0]), budget=3).paths() == [(0,), (0, 0), (0, 0, 0)]


@pytest.mark.parametrize(
    ("shape", "acceptance", "nodes", "ranks", "depth"),
    [
        (token_recycling_template(), RECYCLING_ACCEPTANCE, 80, 8, 8),
        (medusa_template(), MEDUSA_ACCEPTANCE, 63, 10, 5),
    ],
)
def test_default_shapes(shape: Template, acceptance: tuple, nodes: int, ranks: int, depth: int) -> None:
    assert len(shape) == nodes
    assert shape.ranks.max() == ranks - 1
    assert shape.max_depth == depth
    assert (np.diff(shape.scores) <= 0).all()
    rebuilt = Template.from_paths(shape.paths(), np.array(acceptance))
    assert sorted(rebuilt.paths()) == sorted(shape.paths())
    # Every prefix and every lower-ranked sibling is in the shape, and no node left out is better than one kept.
    paths = set(shape.paths())
    assert all(len(path) == 1 or path[:-1] in paths for path in paths)
    assert all(path[-1] == 0 or (*path[:-1], path[-1] - 1) in paths for path in paths)
    table = np.broadcast_to(np.array(acceptance), (depth + 1, ranks)) if np.ndim(acceptance) == 1 else acceptance
    outside = [
        np.prod([table[d][r] for d, r in enumerate((*path, rank))])
        for path in [(), *paths]
        for rank in range(ranks)
        if (*path, rank) not in paths and len(path) < len(table)
    ]
    assert max(outside) <= np.exp(shape.scores.min()) + 1e-15


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Template.from_paths([(0, 0)], ACCEPTANCE), r"\(0, 0\) needs \(0,\)"),
        (lambda: Template.from_paths([(0,), (0,)], ACCEPTANCE), "twice"),
        (lambda: Template.from_paths([()], ACCEPTANCE), "must not be empty"),
        (lambda: Template.from_paths([(2,)], ACCEPTANCE), "no entry for the path"),
        (lambda: Template.from_paths([(0,)], np.array([1.5])), "must be probabilities"),
        (lambda: Template.from_branching([2, 0]), "branching must be >= 1, got 0"),
        (lambda: Template(np.array([0]), np.array([0]), np.zeros(1)), "parents must satisfy"),
        (lambda: Template(np.array([-1]), np.array([-1]), np.zeros(1)), "ranks must be >= 0"),
        (lambda: Template(np.array([-1, -1]), np.array([0, 0]), np.zeros(2)), "repeated"),
        (lambda: Template(np.array([-1]), np.array([0, 1]), np.zeros(1)), r"ranks must have shape \[1\]"),
        (lambda: greedy_template(np.array([0.1, 0.3]), budget=3), "must fall with the rank"),
        (lambda: fill_by_rank(medusa_template(), np.array([1, 2])), r"one shape \[D, K\]"),
        (lambda: fill_by_rank(medusa_template(), np.array([[1, 2]]), np.array([[-1.0]])), r"one shape \[D, K\]"),
        (lambda: fill_by_rank(medusa_template(), np.array([[1]]), np.array([[0.7]])), "log-probabilities"),
        (lambda: fill_by_successor(medusa_template(), 4, np.zeros((4, 2), int)), "root must be a row"),
        (lambda: fill_by_successor(medusa_template(), 0, np.zeros((4, 2), int), np.zeros(3)), r"shape \[2\]"),
    ],
)
def test_refusals(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
