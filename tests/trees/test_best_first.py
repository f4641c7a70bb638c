from __future__ import annotations

import importlib
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptspec.trees import (
    best_first,
    budget_order,
    cost_aware,
    expected_length,
    paying_budget,
    top_candidates,
    transitions,
    truncate,
)
from adaptspec.types import DraftTree
from tests.trees.tree_strategies import check_scores_fall, closed_sets, deterministic_trees, property_test, token_paths


def random_log_probs(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Normalised along the last axis, with repeated values so that ties happen."""
    weights = rng.choice([1.0, 2.0, 4.0, 8.0], size=shape)
    return np.log(weights / weights.sum(axis=-1, keepdims=True))


# Factorised marginals ------------------------------------------------------------------------------------------------


def test_by_hand() -> None:
    # Position 1: token 7 with 0.6, token 3 with 0.4; position 2: token 5 with 0.9, token 8 with 0.1.
    tree = best_first(np.log([[0.6, 0.4], [0.9, 0.1]]), np.array([[7, 3], [5, 8]]), budget=5)
    assert token_paths(tree) == [(7,), (7, 5), (3,), (3, 5), (7, 8)]
    assert tree.parents.tolist() == [-1, 0, -1, 2, 0]
    assert np.exp(tree.scores) == pytest.approx([0.6, 0.54, 0.4, 0.36, 0.06])
    assert tree.evidence["rank"].tolist() == [0, 0, 1, 0, 1]
    assert np.exp(tree.evidence["log_prob"]) == pytest.approx([0.6, 0.9, 0.4, 0.9, 0.1])


def test_whole_rows_are_sorted_first() -> None:
    tree = best_first(np.log([[0.1, 0.2, 0.7], [0.3, 0.6, 0.1]]), budget=4)
    assert token_paths(tree) == [(2,), (2, 1), (2, 0), (1,)]
    assert len(best_first(np.log([[0.1, 0.2, 0.7]]), budget=8)) == 3  # more budget than nodes


def test_top_candidates() -> None:
    ids, values = top_candidates(np.log([[0.1, 0.2, 0.7], [0.3, 0.6, 0.1]]), 2)
    assert ids.tolist() == [[2, 1], [1, 0]]
    assert np.exp(values) == pytest.approx(np.array([[0.7, 0.2], [0.6, 0.3]]))
    assert top_candidates(np.zeros((2, 3)), 2)[0].tolist() == [[0, 1], [0, 1]]
    assert top_candidates(np.zeros((2, 3)), 9)[0].shape == (2, 3)
    assert top_candidates(np.zeros((2, 3)), 0)[0].shape == (2, 0)


def test_limits_and_impossible_tokens() -> None:
    table = np.log([[0.6, 0.4], [0.9, 0.1]])
    ids = np.array([[7, 3], [5, 8]])
    assert len(best_first(table, ids, budget=0)) == 0
    assert len(best_first(table, ids, budget=9, max_depth=0)) == 0
    assert token_paths(best_first(table, ids, budget=9, max_depth=1)) == [(7,), (3,)]
    assert len(best_first(np.zeros((0, 2)), np.zeros((0, 2), dtype=np.int64), budget=3)) == 0
    assert len(best_first(np.zeros((2, 0)), np.zeros((2, 0), dtype=np.int64), budget=3)) == 0
    with np.errstate(divide="ignore"):
        one_hot = np.log([[1.0, 0.0], [1.0, 0.0]])
    assert token_paths(best_first(one_hot, ids, budget=9)) == [(7,), (7, 5)]
    assert len(best_first(np.full((1, 2), -np.inf), np.array([[1, 2]]), budget=3)) == 0


def brute_force_length(path_probability: dict[tuple[int, ...], float], budget: int) -> float:
    candidates = {path for path, probability in path_probability.items() if probability > 0}
    size = min(budget, len(candidates))
    return 1.0 + max(sum(path_probability[path] for path in chosen) for chosen in closed_sets(candidates, size))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("depth", "width"), [(1, 3), (2, 2), (3, 2), (2, 3)])
def test_no_tree_is_better_under_factorised_marginals(depth: int, width: int, seed: int) -> None:
    log_probs = random_log_probs(np.random.default_rng(seed), depth, width)
    probability = {
        path: float(np.exp(sum(log_probs[i, token] for i, token in enumerate(path))))
        for length in range(1, depth + 1)
        for path in product(range(width), repeat=length)
    }
    for budget in range(6):
        tree = best_first(log_probs, budget=budget)
        assert expected_length(tree) == pytest.approx(brute_force_length(probability, budget), abs=1e-12)
        assert np.exp(tree.scores) == pytest.approx([probability[path] for path in token_paths(tree)])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("depth", "width"), [(2, 2), (3, 2), (2, 3)])
def test_no_tree_is_better_under_transitions(depth: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    first = random_log_probs(rng, width)
    steps = random_log_probs(rng, depth - 1, width, width)
    ids = np.array([rng.permutation(10)[:width] for _ in range(depth)])

    def log_probability(candidates: tuple[int, ...]) -> float:
        pairs = zip(candidates, candidates[1:], strict=False)
        return float(first[candidates[0]] + sum(steps[d, i, j] for d, (i, j) in enumerate(pairs)))

    probability = {
        tuple(int(ids[d, i]) for d, i in enumerate(candidates)): float(np.exp(log_probability(candidates)))
        for length in range(1, depth + 1)
        for candidates in product(range(width), repeat=length)
    }
    for budget in range(6):
        tree = transitions(ids, first, steps, budget=budget)
        tree.validate(vocab_size=10, budget=budget)
        assert expected_length(tree) == pytest.approx(brute_force_length(probability, budget), abs=1e-12)
        assert np.exp(tree.scores) == pytest.approx([probability[path] for path in token_paths(tree)])


@property_test
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 9), st.integers(0, 30))
def test_promises_hold(seed: int, depth: int, width: int, budget: int) -> None:
    log_probs = random_log_probs(np.random.default_rng(seed), depth, width)
    tree = best_first(log_probs, budget=budget)
    tree.validate(vocab_size=width, budget=budget)
    check_scores_fall(tree)
    assert (np.diff(tree.scores) <= 0).all()
    for smaller in range(budget):
        part = best_first(log_probs, budget=smaller)
        assert part.token_ids.tolist() == tree.token_ids[:smaller].tolist()
        assert part.parents.tolist() == tree.parents[:smaller].tolist()


def test_forgetting_the_sibling_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The brute-force comparison can fail: a heap that never offers the next sibling is not optimal."""
    module = importlib.import_module("adaptspec.trees._frontier")
    monkeypatch.setattr(module, "heapreplace", lambda heap, item: module.heappop(heap))
    log_probs = np.log([[0.6, 0.4], [0.5, 0.5]])
    assert expected_length(best_first(log_probs, budget=2)) < 1 + 0.6 + 0.4 - 1e-9


@pytest.mark.parametrize(
    ("log_probs", "ids", "message"),
    [
        ([[-0.1, -2.0]], [[1, 2, 3]], "token_ids must have the shape of log_probs"),
        ([[-2.0, -0.1]], [[1, 2]], "must fall along each row"),
        ([[0.5, -0.1]], [[1, 2]], "log-probabilities"),
        ([[np.nan, -0.1]], [[1, 2]], "log-probabilities"),
        ([[np.nan, -0.1]], None, "NaN in row 0"),
        ([-0.1, -0.2], None, r"log_probs must have shape \[D, V\]"),
    ],
)
def test_bad_candidates_are_refused(log_probs: list, ids: list | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        best_first(np.array(log_probs), None if ids is None else np.array(ids), budget=4)


def test_transition_limits_and_refusals() -> None:
    ids = np.array([[4, 5], [6, 7], [8, 9]])
    first = np.log([0.25, 0.75])
    steps = np.log(np.array([[[0.9, 0.1], [0.2, 0.8]], [[0.5, 0.5], [0.3, 0.7]]]))
    tree = transitions(ids, first, steps, budget=4)
    assert token_paths(tree) == [(5,), (5, 7), (5, 7, 9), (4,)]
    assert tree.evidence["rank"].tolist() == [0, 0, 0, 1]
    assert np.exp(tree.scores) == pytest.approx([0.75, 0.6, 0.42, 0.25])
    assert token_paths(transitions(ids, first, steps, budget=9, max_depth=1)) == [(5,), (4,)]
    assert len(transitions(ids, first, steps, budget=9, max_depth=0)) == 0
    assert len(transitions(ids, first, steps, budget=99)) == 2 + 4 + 8
    assert token_paths(transitions(ids[:1], first, steps[:0], budget=9)) == [(5,), (4,)]
    with pytest.raises(ValueError, match=r"first_log_probs must have shape \[2\]"):
        transitions(ids, first[:1], steps, budget=4)
    with pytest.raises(ValueError, match=r"log_probs must have shape \[2, 2, 2\]"):
        transitions(ids, first, steps[:1], budget=4)
    with pytest.raises(ValueError, match="must be log-probabilities"):
        transitions(ids, first, -steps, budget=4)


# Sized by cost -------------------------------------------------------------------------------------------------------


def test_cost_aware_by_hand() -> None:
    # Path probabilities 0.5, 0.25, 0.125; tokens 1, 1.5, 1.75, 1.875.
    log_probs = np.log(np.full((3, 1), 0.5))
    ids = np.array([[1], [2], [3]])

    def nodes(seconds: list[float], **options: object) -> int:
        return len(cost_aware(log_probs, ids, budget=3, verify_seconds=seconds, **options))

    assert nodes([1.0, 1.0, 1.0, 1.0]) == 3
    assert nodes([1.0, 1.4, 1.6, 1.8]) == 2  # rates 1, 1.071, 1.094, 1.042
    assert nodes([1.0, 2.0, 2.0, 2.0]) == 0
    assert nodes([1.0, 2.0, 2.0, 2.0], draft_seconds=1.0) == 3  # rates 0.5, 0.5, 0.583, 0.625: nothing falls
    assert nodes([1.0, 1.6, 1.6, 1.6]) == 0  # blind behind the step ...
    assert nodes([1.0, 1.6, 1.6, 1.6], search="global") == 3  # ... where 1.875 / 1.6 is the best
    with_callable = cost_aware(log_probs, ids, budget=3, verify_seconds=lambda n: 1.0 + 0.18 * n)
    assert len(with_callable) == len(cost_aware(log_probs, ids, budget=3, verify_seconds=[1.0, 1.18, 1.36, 1.54])) == 2


@property_test
@given(st.integers(0, 2**32 - 1), st.integers(0, 12))
def test_cost_aware_stops_where_the_rate_first_falls(seed: int, budget: int) -> None:
    rng = np.random.default_rng(seed)
    log_probs = random_log_probs(rng, 4, 3)
    seconds = 1.0 + rng.uniform(0.0, 0.4, size=budget + 1).cumsum()
    whole = best_first(log_probs, budget=budget)
    rate = np.concatenate(([1.0], 1.0 + np.exp(whole.scores).cumsum())) / (seconds[: len(whole) + 1] + 0.5)
    stop = next((n for n in range(len(whole)) if rate[n + 1] < rate[n]), len(whole))
    tree = cost_aware(log_probs, budget=budget, verify_seconds=seconds, draft_seconds=0.5)
    assert len(tree) == stop
    assert token_paths(tree) == token_paths(whole)[:stop]
    best = cost_aware(log_probs, budget=budget, verify_seconds=seconds, draft_seconds=0.5, search="global")
    assert rate[len(best)] == pytest.approx(rate.max())


@property_test
@given(deterministic_trees(), st.integers(0, 2**32 - 1))
def test_paying_budget_is_the_best_of_all_sizes(tree: DraftTree, seed: int) -> None:
    seconds = 1.0 + np.random.default_rng(seed).uniform(0.0, 0.5, size=len(tree) + 1).cumsum()
    tokens = [expected_length(truncate(tree, n)) for n in range(len(tree) + 1)]
    chosen = paying_budget(tree, seconds, draft_seconds=0.25)
    rates = tokens / (seconds + 0.25)
    assert rates[chosen] == pytest.approx(rates.max())
    surplus = tokens - 1.5 * (seconds + 0.25)
    chosen = paying_budget(tree, seconds, draft_seconds=0.25, tokens_per_second=1.5)
    assert surplus[chosen] == pytest.approx(surplus.max())
    first = paying_budget(tree, seconds, draft_seconds=0.25, search="first-fall")
    assert all(rates[n + 1] >= rates[n] - 1e-12 for n in range(first))
    assert first == len(tree) or rates[first + 1] < rates[first] + 1e-12
    assert len(budget_order(tree)) == len(tree)


def test_cost_refusals() -> None:
    table = np.log([[0.5, 0.5]])
    with pytest.raises(ValueError, match="verify_seconds must have at least 5 entries, got 2"):
        cost_aware(table, budget=4, verify_seconds=[1.0, 2.0])
    with pytest.raises(ValueError, match="verify_seconds must be positive"):
        cost_aware(table, budget=1, verify_seconds=[0.0, 2.0])
    with pytest.raises(ValueError, match="draft_seconds must be >= 0, got -1"):
        cost_aware(table, budget=1, verify_seconds=[1.0, 2.0], draft_seconds=-1.0)
    with pytest.raises(ValueError, match="search must be one of first-fall, global, got 'best'"):
        cost_aware(table, budget=1, verify_seconds=[1.0, 2.0], search="best")
    sampled = DraftTree(np.array([1]), np.array([-1]), np.array([-1.0]), "iid", np.full((1, 2), 0.5), np.array([0, -1]))
    with pytest.raises(ValueError, match="cannot size by score a tree with iid siblings"):
        paying_budget(sampled, [1.0, 1.0])
