"""How far proposals would have been accepted: nested budgets, text that comes in pieces, text that ends too soon."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
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
