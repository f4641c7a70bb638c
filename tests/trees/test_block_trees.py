"""Builders of block-parallel drafters: trees over transition tables, and prefixes chosen out of a lattice's trie."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from adaptspec.trees import best_first, expected_length, lattice_trie, select_prefixes, transition_tables, transitions
from adaptspec.types import DraftTree
from tests.trees.test_best_first import brute_force_length, random_log_probs
from tests.trees.tree_strategies import check_scores_fall, token_paths


def tables(rng: np.random.Generator, depth: int, width: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Successors out of eight tokens, most of which are no candidates."""
    token_ids = np.array([[rng.permutation(8)[:count] for _ in range(width)] for _ in range(depth)])
    steps = -np.sort(-random_log_probs(rng, depth, width, count))
    candidates = np.array([rng.permutation(8)[:width] for _ in range(depth - 1)]).reshape(depth - 1, width)
    return token_ids, steps, candidates


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("depth", "width", "count"), [(1, 2, 3), (2, 3, 2), (3, 3, 2), (2, 2, 4)])
def test_no_tree_is_better_under_transition_tables(depth: int, width: int, count: int, seed: int) -> None:
    token_ids, steps, candidates = tables(np.random.default_rng(seed), depth, width, count)
    probability: dict[tuple[int, ...], float] = {}

    def walk(path: tuple[int, ...], log_probability: float, row: int) -> None:
        place = len(path)
        for token, step in zip(token_ids[place, row].tolist(), steps[place, row].tolist(), strict=True):
            probability[*path, token] = float(np.exp(log_probability + step))
            if place + 1 < depth and token in candidates[place]:
                walk((*path, token), log_probability + step, candidates[place].tolist().index(token))

    walk((), 0.0, 0)
    for budget in range(6):
        tree = transition_tables(token_ids, steps, candidates, budget=budget)
        tree.validate(vocab_size=8, budget=budget)
        assert expected_length(tree) == pytest.approx(brute_force_length(probability, budget), abs=1e-12)
        assert np.exp(tree.scores) == pytest.approx([probability[path] for path in token_paths(tree)])
    whole = transition_tables(token_ids, steps, candidates, budget=200)
    assert set(token_paths(whole)) == set(probability)
    first = transition_tables(token_ids, steps, candidates, budget=200, max_depth=1)
    assert set(token_paths(first)) == {path for path in probability if len(path) == 1}


def test_tables_whose_successors_are_candidates_are_transitions() -> None:
    rng = np.random.default_rng(3)
    depth, width = 4, 5
    log_probs = rng.normal(size=(depth, width, width))
    log_probs -= np.logaddexp.reduce(log_probs, axis=-1, keepdims=True)
    ids = np.array([rng.permutation(20)[:width] for _ in range(depth)])
    order = np.argsort(-log_probs, axis=-1)
    successors = np.take_along_axis(np.broadcast_to(ids[:, None], log_probs.shape), order, axis=-1)
    ours = transition_tables(successors, np.take_along_axis(log_probs, order, -1), ids[:-1], budget=25)
    theirs = transitions(ids, log_probs[0, 0], log_probs[1:], budget=25)
    assert token_paths(ours) == token_paths(theirs) and np.allclose(ours.scores, theirs.scores)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": np.zeros((2, 3), int)}, r"token_ids must have shape \[D, M, K\]"),
        ({"log_probs": np.zeros((2, 3, 1))}, "log_probs must have the shape of token_ids"),
        ({"candidates": np.zeros((2, 3), int)}, r"candidates must have shape \[1, 3\]"),
        ({"log_probs": -np.ones((2, 3, 2)) * np.array([2.0, 1.0])}, "log_probs must fall"),
        ({"log_probs": np.ones((2, 3, 2))}, "log_probs must be log-probabilities"),
        ({"budget": -1}, "budget must be >= 0, got -1"),
    ],
)
def test_bad_tables(change: dict[str, object], message: str) -> None:
    token_ids, steps, candidates = tables(np.random.default_rng(0), 2, 3, 2)
    values = {"token_ids": token_ids, "log_probs": steps, "candidates": candidates, "budget": 4, **change}
    with pytest.raises(ValueError, match=message):
        transition_tables(**values)


# Lattice and prefixes ------------------------------------------------------------------------------------------------


def lattice(seed: int, depth: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    values = -np.sort(-random_log_probs(rng, depth, width))
    return values, np.array([rng.permutation(30)[:width] for _ in range(depth)])


@pytest.mark.parametrize("seed", range(4))
def test_a_trie_holds_what_the_beam_meets(seed: int) -> None:
    log_probs, ids = lattice(seed, 3, 4)
    trie = lattice_trie(log_probs, ids, beam=5)
    trie.validate(vocab_size=30)
    check_scores_fall(trie)
    by_depth = [np.sort(trie.scores[trie.depths() == d + 1])[::-1] for d in range(3)]
    assert [len(level) for level in by_depth] == [4, 5, 5]
    # Under factorised marginals the best prefixes of a depth extend the best ones of the depth before.
    for d in range(3):
        every = sorted(sum(log_probs[i, r] for i, r in enumerate(path)) for path in product(range(4), repeat=d + 1))
        assert by_depth[d] == pytest.approx(every[::-1][: len(by_depth[d])])
    above = np.concatenate([[0.0], trie.scores])[trie.parents + 1]
    assert trie.scores == pytest.approx(above + trie.evidence["log_prob"])
    small = lattice_trie(log_probs, ids, beam=5, most_nodes=7)
    assert len(small) == 7 and small.token_ids.tolist() == trie.token_ids[:7].tolist()
    assert len(lattice_trie(np.full((2, 2), -np.inf), ids[:2, :2])) == 0


@pytest.mark.parametrize("seed", range(4))
def test_chosen_prefixes_have_the_largest_utility(seed: int) -> None:
    rng = np.random.default_rng(seed)
    trie = lattice_trie(*lattice(seed, 4, 6), beam=8)
    log_q = np.log(rng.uniform(0.01, 1.0, len(trie)))
    reach = np.zeros(len(trie))
    for node, parent in enumerate(trie.parents.tolist()):
        reach[node] = log_q[node] + (reach[parent] if parent >= 0 else 0.0)
    utility = np.exp(reach) / (1.0 + 0.3 * trie.depths())
    known = dict(zip(token_paths(trie), reach.tolist(), strict=True))
    whole = select_prefixes(trie, log_q, budget=len(trie), depth_penalty=0.3)
    for budget in (0, 1, 5, 12):
        tree = select_prefixes(trie, log_q, budget=budget, depth_penalty=0.3)
        tree.validate(vocab_size=30, budget=budget)  # parents are there, and first
        check_scores_fall(tree)
        assert tree.scores == pytest.approx([known[path] for path in token_paths(tree)])
        got = np.exp(tree.scores) / (1.0 + 0.3 * tree.depths())
        assert got == pytest.approx(np.sort(utility)[::-1][:budget])
        assert tree.token_ids.tolist() == whole.token_ids[:budget].tolist()
    log_q[0] = -np.inf
    barred = select_prefixes(trie, log_q, budget=len(trie))
    assert 0 < len(barred) < len(trie) and np.isfinite(barred.scores).all()


def test_marginals_and_no_penalty_are_best_first() -> None:
    log_probs, ids = lattice(9, 4, 8)
    log_probs = log_probs - 1e-3 * np.arange(8) - 0.01 * np.arange(4)[:, None]  # no ties
    trie = lattice_trie(log_probs, ids)
    tree = select_prefixes(trie, trie.evidence["log_prob"], budget=20, depth_penalty=0.0)
    expected = best_first(log_probs, ids, budget=20)
    assert sorted(token_paths(tree)) == sorted(token_paths(expected))
    deep = select_prefixes(trie, trie.evidence["log_prob"], budget=20, depth_penalty=5.0)
    assert deep.depths().sum() < tree.depths().sum()


def test_bad_lattices_and_prefixes() -> None:
    log_probs, ids = lattice(0, 2, 3)
    for arguments, message in (
        ({"beam": 0}, "beam must be >= 1"),
        ({"most_nodes": 0}, "most_nodes must be >= 1"),
        ({"token_ids": ids[:1]}, "must have one shape"),
        ({"log_probs": log_probs[:, ::-1] - np.arange(3)[::-1]}, "log_probs must fall"),
    ):
        with pytest.raises(ValueError, match=message):
            lattice_trie(**{"log_probs": log_probs, "token_ids": ids, **arguments})
    trie = lattice_trie(log_probs, ids)
    for arguments, message in (
        ({"log_probs": np.zeros(2)}, "log_probs must have shape"),
        ({"depth_penalty": -1.0}, "depth_penalty must be >= 0"),
        ({"budget": 1.5}, "budget must be a whole number"),
        ({"log_probs": np.ones(len(trie))}, "must be log-probabilities"),
    ):
        with pytest.raises(ValueError, match=message):
            select_prefixes(**{"trie": trie, "log_probs": np.zeros(len(trie)), "budget": 3, **arguments})
    drawn = DraftTree.chain([1], siblings="iid", draft_probs=np.eye(2), draft_rows=np.array([0, -1]))
    with pytest.raises(ValueError, match="cannot select from a tree with iid siblings"):
        select_prefixes(drawn, np.zeros(1), budget=1)
