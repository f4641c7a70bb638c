"""The reach of all traced trees at once is that of walking every one of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from adaptspec.control.counterfactual import Follower
from adaptspec.control.trace import Proposals, TracedRequest
from adaptspec.control.trace_reach import Reaches, reaches, stops
from adaptspec.types import DraftTree
from tests.control.trace_cases import requests

NODES = {"a": 8}


@settings(derandomize=True, deadline=None, max_examples=150)
@given(requests(nodes=NODES) | requests(nodes=NODES, ordered=False))
def test_equal_to_following_each_tree(request: TracedRequest) -> None:
    found = reaches(request, "a")
    assert len(found.complete) == request.positions
    for position in range(request.positions):
        follower = Follower(request.proposals["a"].tree(position))
        follower.extend(request.tokens[position + 1 :].tolist())
        assert found.at(position) == follower.close()
    for budget in range(9):
        expected = [found.at(position).length(budget) for position in range(request.positions)]
        assert found.lengths(budget).tolist() == expected


def traced(tokens: list[int], trees: list[DraftTree]) -> Reaches:
    return reaches(TracedRequest("1", "any", 3, np.array(tokens), {"a": Proposals.of(trees)}), "a")


def test_a_known_case() -> None:
    """Ranks 0, 2, 1, 3; then nothing; then a tree that the end of the text cuts off; then one that ends with it."""
    tree = DraftTree(np.array([5, 6, 7, 8]), np.array([-1, -1, 0, 2]), np.array([-0.1, -2.0, -0.3, -3.0]))
    found = traced([4, 5, 7, 9, 3], [tree, DraftTree.empty(), DraftTree.chain([9, 3, 1]), DraftTree.chain([3])])
    assert [found.at(position).ranks for position in range(4)] == [(0, 1), (), (0, 1), (0,)]
    assert found.complete.tolist() == [True, True, False, True]
    assert found.lengths(1).tolist() == [2, 1, 2, 2]
    assert found.lengths(64).tolist() == [3, 1, 3, 2]


def test_an_output_of_one_token_has_no_positions() -> None:
    found = traced([4], [])
    assert found.offsets.tolist() == [0] and len(found.complete) == 0 and len(found.lengths(8)) == 0
    assert len(stops(found.lengths(8))) == 0


@pytest.mark.parametrize(
    ("lengths", "expected"), [([3, 9, 9, 1, 2], [0, 3, 4]), ([1, 1, 1], [0, 1, 2]), ([5, 1], [0]), ([], [])]
)
def test_an_arm_stops_where_its_own_steps_end(lengths: list[int], expected: list[int]) -> None:
    assert stops(np.array(lengths, np.int64)).tolist() == expected
