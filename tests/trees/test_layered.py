"""Builders that ask a model level by level: beam + rerank (EAGLE-2) and OPT-Tree; and the plain chain."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptspec.trees import beam_rerank, chain, expected_length, opt_tree
from adaptspec.types import DraftTree
from tests.trees.tree_strategies import check_scores_fall, closed_sets, property_test, token_paths

ROOT_TOKEN = 99


class TableModel:
    """A drafter for tests: the distribution after a path is drawn from a generator seeded by the path.

    Follows the calling convention by rebuilding every path from the rows it was ever passed.
    """

    def __init__(self, seed: int, vocab: int, width: int) -> None:
        self.seed, self.vocab, self.width = seed, vocab, width
        self.paths: list[tuple[int, ...]] = []
        self.calls: list[list[tuple[int, ...]]] = []

    def log_probs(self, path: tuple[int, ...]) -> np.ndarray:
        weights = np.random.default_rng([self.seed, len(path), *path]).choice([1.0, 2.0, 4.0, 16.0], size=self.vocab)
        return np.log(weights / weights.sum())

    def __call__(self, token_ids: np.ndarray, parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        called: list[tuple[int, ...]] = []
        for token, parent in zip(token_ids.tolist(), parents.tolist(), strict=True):
            if parent < 0:
                assert not self.paths and token == ROOT_TOKEN
                called.append(())
            else:
                called.append((*self.paths[parent], token))
        self.paths += called
        self.calls.append(called)
        rows = np.array([self.log_probs(path) for path in called])
        ids = np.argsort(-rows, axis=1, kind="stable")[:, : self.width]
        return ids, np.take_along_axis(rows, ids, axis=1)

    def path_probability(self, path: tuple[int, ...]) -> float:
        return float(np.exp(sum(self.log_probs(path[:i])[token] for i, token in enumerate(path))))


def fixed(table: dict[tuple[int, ...], dict[int, float]]) -> TableModel:
    """A model with a hand-written table of probabilities per path."""

    class Fixed(TableModel):
        def log_probs(self, path: tuple[int, ...]) -> np.ndarray:
            with np.errstate(divide="ignore"):
                return np.log([table.get(path, {}).get(token, 0.0) for token in range(self.vocab)])

    return Fixed(0, 6, 2)


HAND = {
    (): {1: 0.6, 2: 0.4},
    (1,): {3: 0.5, 4: 0.25},
    (2,): {3: 0.9, 5: 0.1},
    (2, 3): {1: 1.0},
    (1, 3): {2: 0.5, 0: 0.5},
}


def test_beam_rerank_by_hand() -> None:
    model = fixed(HAND)
    tree = beam_rerank(model, root=ROOT_TOKEN, budget=5, width=2, max_depth=3)
    # Paths: 1 0.6, 2 0.4, 2-3 0.36, 2-3-1 0.36, 1-3 0.3, then 1-4 and below 0.15.
    assert token_paths(tree) == [(1,), (2,), (2, 3), (2, 3, 1), (1, 3)]
    assert np.exp(tree.scores) == pytest.approx([0.6, 0.4, 0.36, 0.36, 0.3])
    assert tree.evidence["rank"].tolist() == [0, 1, 0, 0, 0]
    assert np.exp(tree.evidence["log_prob"]) == pytest.approx([0.6, 0.4, 0.9, 1.0, 0.5])
    assert model.calls == [[()], [(1,), (2,)], [(2, 3), (1, 3)]]


def test_a_narrow_beam_misses_what_a_wide_one_finds() -> None:
    narrow = beam_rerank(fixed(HAND), root=ROOT_TOKEN, budget=4, width=1, max_depth=3)
    assert token_paths(narrow) == [(1,), (2,), (1, 3), (1, 4)]


def test_depths_that_cannot_matter_are_not_drafted() -> None:
    model = fixed(HAND)
    tree = beam_rerank(model, root=ROOT_TOKEN, budget=2, width=2, max_depth=3)
    assert token_paths(tree) == [(1,), (2,)]
    assert len(model.calls) == 2  # after depth 2 (best 0.36) nothing can displace 0.6 and 0.4


def test_opt_tree_stops_when_a_depth_adds_too_little() -> None:
    # Sums of the best 4: depth 1: 1.0; depth 2: 0.6 + 0.4 + 0.36 + 0.3 = 1.66; depth 3: 0.6 + 0.4 + 0.36 + 0.36.
    for threshold, calls in [(0.7, 2), (0.5, 3), (0.05, 3)]:
        model = fixed(HAND)
        tree = opt_tree(model, root=ROOT_TOKEN, budget=4, max_depth=9, threshold=threshold)
        assert len(model.calls) == calls, threshold
        assert expected_length(tree) == pytest.approx(2.66 if calls == 2 else 2.72)
    assert len(opt_tree(fixed(HAND), root=ROOT_TOKEN, budget=4, max_depth=9, threshold=1.1)) == 2


@pytest.mark.parametrize("seed", range(5))
def test_a_full_beam_is_optimal(seed: int) -> None:
    """With a beam as wide as the level the result is the best tree of the drafter's own distribution."""
    model = TableModel(seed, 2, 2)
    candidates = {p for p in _all_paths(2, 3)}
    for budget in range(1, 6):
        tree = beam_rerank(TableModel(seed, 2, 2), root=ROOT_TOKEN, budget=budget, width=8, max_depth=3)
        best = max(sum(model.path_probability(p) for p in chosen) for chosen in closed_sets(candidates, budget))
        assert expected_length(tree) == pytest.approx(1 + best)
        same = opt_tree(TableModel(seed, 2, 2), root=ROOT_TOKEN, budget=budget, max_depth=3, threshold=0.0)
        assert expected_length(same) == pytest.approx(1 + best)


def _all_paths(vocab: int, depth: int) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        level = [(*path, token) for path in level for token in range(vocab)]
        paths += level
    return paths


@property_test
@given(st.integers(0, 1000), st.integers(0, 14), st.integers(1, 5), st.integers(0, 5), st.integers(1, 5))
def test_promises_hold(seed: int, budget: int, width: int, max_depth: int, fan_out: int) -> None:
    def build(nodes: int) -> tuple[DraftTree, TableModel]:
        model = TableModel(seed, 5, fan_out)
        return beam_rerank(model, root=ROOT_TOKEN, budget=nodes, width=width, max_depth=max_depth), model

    tree, model = build(budget)
    tree.validate(vocab_size=5, budget=budget)
    check_scores_fall(tree)
    assert (np.diff(tree.scores) <= 0).all()
    assert tree.depths().max(initial=0) <= max_depth
    assert all(len(called) <= width for called in model.calls)
    assert np.exp(tree.scores) == pytest.approx([model.path_probability(path) for path in token_paths(tree)])
    for smaller in range(budget):
        assert token_paths(build(smaller)[0]) == token_paths(tree)[:smaller]


def test_a_model_with_nothing_to_say() -> None:
    model = fixed({})
    assert len(beam_rerank(model, root=ROOT_TOKEN, budget=4, width=2, max_depth=3)) == 0
    assert len(beam_rerank(model, root=ROOT_TOKEN, budget=0)) == 0
    assert len(opt_tree(model, root=ROOT_TOKEN, budget=0, max_depth=3)) == 0
    assert len(beam_rerank(model, root=ROOT_TOKEN, budget=4, max_depth=0)) == 0
    assert len(model.calls) == 1


def test_refusals() -> None:
    with pytest.raises(ValueError, match="width must be >= 1, got 0"):
        beam_rerank(fixed(HAND), root=ROOT_TOKEN, budget=4, width=0)
    with pytest.raises(ValueError, match="budget must be >= 0, got -1"):
        beam_rerank(fixed(HAND), root=ROOT_TOKEN, budget=-1)
    with pytest.raises(ValueError, match="threshold must be >= 0, got -0.5"):
        opt_tree(fixed(HAND), root=ROOT_TOKEN, budget=4, max_depth=3, threshold=-0.5)
    with pytest.raises(ValueError, match=r"one shape \[1, K\], got \[2, 2\] and \[2, 2\]"):
        beam_rerank(lambda ids, parents: (np.zeros((2, 2), int), np.zeros((2, 2))), root=1, budget=4)
    with pytest.raises(ValueError, match="log_probs of expand must be log-probabilities"):
        beam_rerank(lambda ids, parents: (np.array([[1, 2]]), np.array([[0.5, 0.5]])), root=1, budget=4)


def test_chain() -> None:
    tree = chain([4, 5, 6], np.log([0.5, 0.5, 0.25]), evidence={"match_length": np.full(3, 7.0)})
    tree.validate(vocab_size=7, budget=3)
    assert tree.parents.tolist() == [-1, 0, 1]
    assert np.exp(tree.scores) == pytest.approx([0.5, 0.25, 0.0625])
    assert tree.evidence["match_length"].tolist() == [7.0, 7.0, 7.0]
    assert chain([4, 5]).scores.tolist() == [0.0, 0.0]
    assert len(chain([])) == 0
    with pytest.raises(ValueError, match=r"log_probs must have shape \[2\]"):
        chain([1, 2], [-1.0])
    with pytest.raises(ValueError, match="must be log-probabilities"):
        chain([1, 2], [0.5, 0.5])
