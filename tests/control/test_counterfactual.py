"""How far proposals would have been accepted: nested budgets, text that comes in pieces, text that ends too soon."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from adaptspec.control.counterfactual import Follower
from adaptspec.trees import truncate
from adaptspec.types import DraftTree
from adaptspec.verify import verify_greedy


def tree(tokens: list[int], parents: list[int], scores: list[float]) -> DraftTree:
    return DraftTree(np.array(tokens), np.array(parents), np.array(scores))


EXAMPLE = tree([5, 6, 7, 8], [-1, -1, 0, 2], [-0.1, -2.0, -0.3, -3.0])  # ranks 0, 2, 1, 3


def test_lengths_by_budget() -> None:
    follower = Follower(EXAMPLE)
    assert follower.extend([5, 7, 9])
    reach = follower.close()
    assert reach.complete
    assert [reach.length(budget) for budget in range(5)] == [1, 2, 3, 3, 3]


def test_the_first_token_decides_a_miss_and_a_leaf() -> None:
    miss, leaf = Follower(EXAMPLE), Follower(EXAMPLE)
    assert miss.extend([4])
    assert miss.close().length(4) == 1
    assert leaf.extend([6])
    assert [leaf.close().length(budget) for budget in (2, 3)] == [1, 2]


def test_text_in_pieces_equals_text_at_once() -> None:
    follower = Follower(EXAMPLE)
    assert not follower.extend([5])
    assert not follower.extend([7])
    assert follower.extend([8, 1, 2])
    assert follower.close().ranks == (0, 1, 3)


def test_an_end_in_the_middle_is_a_lower_bound() -> None:
    follower = Follower(EXAMPLE)
    assert not follower.extend([5])
    reach = follower.close()
    assert not reach.complete
    assert reach.length(4) == 2


def test_an_empty_tree_gains_the_bonus_only() -> None:
    follower = Follower(DraftTree.empty())
    assert follower.extend([3])
    assert follower.close().length(64) == 1


@st.composite
def trees_and_texts(draw: st.DrawFn) -> tuple[DraftTree, list[int]]:
    count = draw(st.integers(1, 12))
    parents, tokens, scores = [], [], []
    taken: set[tuple[int, int]] = set()
    for node in range(count):
        parent = draw(st.integers(-1, node - 1))
        token = draw(st.integers(0, 3))
        if (parent, token) in taken or parent >= len(tokens):
            continue
        taken.add((parent, token))
        parents.append(parent)
        tokens.append(token)
        scores.append((scores[parent] if parent >= 0 else 0.0) - draw(st.floats(0.0, 2.0)))
    return tree(tokens, parents, scores), draw(st.lists(st.integers(0, 3), min_size=14, max_size=14))


@settings(derandomize=True, deadline=None)
@given(trees_and_texts())
def test_every_budget_equals_verifying_the_smaller_tree(case: tuple[DraftTree, list[int]]) -> None:
    """The identity that makes one proposal tell about all budgets."""
    drafted, text = case
    follower = Follower(drafted)
    follower.extend(text)
    reach = follower.close()
    for budget in range(len(drafted) + 1):
        cut = truncate(drafted, budget)
        depths = np.concatenate([[0], cut.depths()])
        verdict = verify_greedy(cut, np.array(text)[depths])
        assert reach.length(budget) == verdict.accepted_length


VOCABULARY = 3


def chances(prefix: tuple[int, ...]) -> np.ndarray:
    """The target's next-token distribution after a prefix."""
    weights = np.random.default_rng([7, *prefix]).random(VOCABULARY) + 0.05
    return weights / weights.sum()


def texts(depth: int) -> Iterator[tuple[tuple[int, ...], float, np.ndarray]]:
    """Every text of a length, its probability, and the distributions [depth, V] along it."""
    for text in itertools.product(range(VOCABULARY), repeat=depth):
        rows = np.stack([chances(text[:k]) for k in range(depth)])
        yield text, float(np.prod(rows[np.arange(depth), text])), rows


@settings(derandomize=True, deadline=None, max_examples=30)
@given(trees_and_texts())
def test_the_estimate_under_sampling_is_unbiased(case: tuple[DraftTree, list[int]]) -> None:
    """By enumeration of all texts, for every budget: the mean of the estimates is the mean accepted length, and they
    scatter less."""
    drafted = case[0]
    drafted = DraftTree(np.minimum(drafted.token_ids, VOCABULARY - 1), drafted.parents, drafted.scores)
    keys = set(zip(drafted.parents.tolist(), drafted.token_ids.tolist(), strict=True))
    assume(len(drafted) and len(keys) == len(drafted) and int(drafted.depths().max()) <= 4)
    depth = int(drafted.depths().max()) + 1
    budgets = range(len(drafted) + 1)
    moments = np.zeros((4, len(drafted) + 1))
    for text, probability, rows in texts(depth):
        follower = Follower(drafted)
        assert follower.extend(text, rows)
        reach = follower.close()
        estimates = np.array([reach.expected_length(budget) for budget in budgets])
        lengths = np.array([reach.length(budget) for budget in budgets], dtype=np.float64)
        moments += probability * np.stack([estimates, lengths, estimates**2, lengths**2])
    np.testing.assert_allclose(moments[0], moments[1], rtol=1e-12)
    assert (moments[2] <= moments[3] + 1e-12).all()
    assert moments[2, -1] < moments[3, -1] - 1e-6


def test_a_plain_product_of_masses_would_be_biased() -> None:
    """Acceptance depends on the token: what comes after a rejected token must not count."""
    drafted = tree([0, 1], [-1, 0], [-0.1, -0.2])
    right = product = 0.0
    for text, probability, rows in texts(3):
        follower = Follower(drafted)
        follower.extend(text, rows)
        right += probability * follower.close().expected_length(2)
        product += probability * (1.0 + rows[0, 0] + rows[0, 0] * rows[1, 1])
    first = chances(())[0]
    assert right == pytest.approx(1.0 + first + first * chances((0,))[1])
    assert abs(product - right) > 0.01


def test_estimates_take_in_what_later_steps_reveal() -> None:
    drafted = tree([0, 1, 2], [-1, 0, 1], [-0.1, -0.2, -0.3])
    text, _, rows = next(case for case in texts(4) if case[0] == (0, 1, 2, 0))
    at_once, in_parts = Follower(drafted), Follower(drafted)
    assert at_once.extend(text, rows)
    assert not in_parts.extend(text[:2], rows[:2])
    assert in_parts.extend(text[2:], rows[2:])
    for budget in range(4):
        assert at_once.close().expected_length(budget) == in_parts.close().expected_length(budget)
