from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from adaptspec.trees import greedy_template, sequoia_dp

Shape = tuple["Shape", ...]
"""A subtree as the tuple of its children's subtrees, in rank order."""


@cache
def shapes(nodes: int, depth: int, width: int) -> tuple[Shape, ...]:
    """Every shape with exactly `nodes` nodes below its root, at most `depth` levels and `width` children per node."""
    return tuple(_forests(nodes, depth, width, width))


def _forests(nodes: int, depth: int, width: int, slots: int) -> Iterator[Shape]:
    if nodes == 0:
        yield ()
    elif depth > 0 and slots > 0:
        for below_first in range(nodes):
            for first in shapes(below_first, depth - 1, width):
                for rest in _forests(nodes - 1 - below_first, depth, width, slots - 1):
                    yield (first, *rest)


def length(shape: Shape, acceptance: list[float]) -> float:
    return 1.0 + sum(acceptance[rank] * length(child, acceptance) for rank, child in enumerate(shape))


ACCEPTANCES = [[0.5, 0.3, 0.1], [0.2, 0.5, 0.25], [0.0, 0.6, 0.3], [1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]]


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
def test_no_shape_of_any_size_and_depth_is_better(acceptance: list[float]) -> None:
    plan = sequoia_dp(acceptance, budget=6, max_depth=4)
    for nodes in range(7):
        for depth in range(5):
            every = shapes(nodes, depth, 3)
            best = max((length(shape, acceptance) for shape in every), default=-np.inf)
            assert plan.lengths[nodes, depth] == pytest.approx(best, abs=1e-12), (nodes, depth)
    assert plan.expected_length == pytest.approx(plan.lengths.max())


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
@pytest.mark.parametrize(("budget", "max_depth"), [(0, 3), (1, 1), (3, 2), (6, 2), (9, 5), (5, 0)])
def test_the_template_is_what_the_table_promises(acceptance: list[float], budget: int, max_depth: int) -> None:
    plan = sequoia_dp(acceptance, budget=budget, max_depth=max_depth)
    template = plan.template
    assert len(template) <= budget
    assert template.max_depth <= max_depth
    products = [float(np.prod([acceptance[rank] for rank in path])) for path in template.paths()]
    assert np.exp(template.scores) == pytest.approx(products, abs=1e-12)
    assert 1.0 + sum(products) == pytest.approx(plan.expected_length)
    paths = set(template.paths())
    assert all(path[-1] == 0 or (*path[:-1], path[-1] - 1) in paths for path in paths)
    assert (template.scores[:-1] >= template.scores[1:]).all()
    assert np.isnan(plan.seconds)


def test_by_hand() -> None:
    # Rank 0 accepts 0.5, rank 1 accepts 0.3. Three nodes, two levels: 0, 1 and 0-0: 1 + 0.5 + 0.3 + 0.25.
    plan = sequoia_dp([0.5, 0.3], budget=3, max_depth=2)
    assert plan.template.paths() == [(0,), (1,), (0, 0)]
    assert plan.expected_length == pytest.approx(2.05)
    chain_only = sequoia_dp([0.5], budget=3, max_depth=9)
    assert chain_only.template.paths() == [(0,), (0, 0), (0, 0, 0)]
    assert chain_only.expected_length == pytest.approx(1.875)


def test_falling_acceptance_gives_the_greedy_shape() -> None:
    acceptance = np.array([0.47, 0.11, 0.05, 0.03])
    for budget, depth in [(5, 3), (20, 4), (40, 8)]:
        greedy = greedy_template(acceptance, budget=budget, max_depth=depth)
        plan = sequoia_dp(acceptance, budget=budget, max_depth=depth)
        assert plan.expected_length == pytest.approx(1.0 + np.exp(greedy.scores).sum())


def test_cost_decides_size_and_depth() -> None:
    acceptance = [0.6, 0.2]

    def verify(nodes: int) -> float:
        return 1.0 + 0.02 * nodes

    plan = sequoia_dp(acceptance, budget=12, max_depth=6, verify_seconds=verify, draft_seconds=0.1)
    best = min(
        (verify(nodes) + 0.1 * depth) / length(shape, acceptance)
        for nodes in range(7)
        for depth in range(5)
        for shape in shapes(nodes, depth, 2)
    )
    assert plan.seconds / plan.expected_length <= best + 1e-12
    assert plan.seconds == pytest.approx(verify(len(plan.template)) + 0.1 * plan.template.max_depth)
    per_token = [
        (verify(nodes) + 0.1 * depth) / plan.lengths[nodes, depth]
        for nodes in range(13)
        for depth in range(7)
        if plan.lengths[nodes, depth] > 0
    ]
    assert plan.seconds / plan.expected_length == pytest.approx(min(per_token))
    # Dear drafting makes it flat, dear verification switches it off.
    flat = sequoia_dp(acceptance, budget=12, max_depth=6, verify_seconds=verify, draft_seconds=0.45)
    assert flat.template.max_depth == 1
    off = sequoia_dp(acceptance, budget=12, max_depth=6, verify_seconds=1.0 + np.arange(13.0))
    assert len(off.template) == 0
    assert off.expected_length == 1.0
    assert off.seconds == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank_acceptance": [0.8, 0.4]}, "sum to at most 1"),
        ({"rank_acceptance": [-0.1]}, "must be"),
        ({"rank_acceptance": [[0.5]]}, "must be"),
        ({"budget": -1}, "budget must be >= 0, got -1"),
        ({"max_depth": -1}, "max_depth must be >= 0, got -1"),
        ({"verify_seconds": [1.0]}, "verify_seconds must be budget"),
        ({"verify_seconds": [1.0, 0.0, 1.0]}, "positive"),
        ({"verify_seconds": [1.0, 1.0, 1.0], "draft_seconds": -1.0}, "draft_seconds >= 0"),
    ],
)
def test_refusals(options: dict, message: str) -> None:
    arguments = {"rank_acceptance": [0.5, 0.3], "budget": 2, "max_depth": 2} | options
    with pytest.raises(ValueError, match=message):
        sequoia_dp(arguments.pop("rank_acceptance"), **arguments)
