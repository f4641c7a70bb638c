"""Costs change (throttling, a neighbour, another batch): what is verified follows, both ways, within 50 steps."""

from __future__ import annotations

import numpy as np
import pytest

from tests.control.world import Drafter, Step, World, constantly, nodes, rate

BUDGETS = (1, 2, 4, 8)
SETTLED = 50
"""Steps after a change that are not looked at."""


def flat(nodes: int) -> float:
    return 0.030 + 0.0015 * nodes


def steep(nodes: int) -> float:
    return 0.030 + 0.0075 * nodes


def one_drafter(seed: int = 0) -> World:
    return World({"good": Drafter(constantly(0.8))}, verify=flat, seed=seed)


def after_a_change(world: World, controller: object, verify: object) -> list[Step]:
    world.verify = verify  # type: ignore[assignment]
    return world.run(controller, steps=SETTLED + 150)[SETTLED:]  # type: ignore[arg-type]


def best_of_now(world: World) -> tuple[str, float]:
    return world.best_fixed(BUDGETS, tokens=2000)


@pytest.mark.parametrize(
    ("strategy", "seed"), [("mixture", 0), ("mixture", 1), ("draft-then-choose", 0), ("fixed:good@auto", 1)]
)
def test_a_slope_five_times_as_steep_and_back_is_followed_within_50_steps(strategy: str, seed: int) -> None:
    """Reports 8: control by acceptance alone fails when costs change. Here nothing but the cost changes."""
    world = one_drafter(seed)
    controller = world.controller(strategy, budgets=BUDGETS)
    before = world.run(controller, steps=300)[-100:]
    assert nodes(before) > 6.0
    dear = after_a_change(world, controller, steep)
    assert best_of_now(world)[0] in ("good@2", "good@4")
    assert nodes(dear) < 5.0
    assert rate(dear) > 0.85 * best_of_now(world)[1]
    cheap = after_a_change(world, controller, flat)
    assert best_of_now(world)[0] == "good@8"
    assert nodes(cheap) > 4.0
    assert rate(cheap) > 0.85 * best_of_now(world)[1]


@pytest.mark.parametrize("strategy", ["mixture", "fixed:good@auto"])
def test_everything_three_times_as_slow_costs_nothing_on_top(strategy: str) -> None:
    """Throttling slows every size alike: the best size stays the same, and so does the share of it that is reached."""
    world = one_drafter()
    controller = world.controller(strategy, budgets=BUDGETS)
    world.run(controller, steps=300)
    slow = after_a_change(world, controller, lambda n: 3.0 * flat(n))
    assert nodes(slow) > 2.5
    assert rate(slow) > 0.85 * best_of_now(world)[1]


def test_a_step_in_the_cost_is_found_and_not_crossed() -> None:
    """Kernels come in tile sizes: the fifth node costs as much as twenty would."""
    world = World({"good": Drafter(constantly(0.85))}, verify=lambda n: 0.030 + 0.0005 * n + (0.040 if n > 4 else 0.0))
    steps = world.run(world.controller("mixture", budgets=BUDGETS), steps=500)[200:]
    sizes = [step.verified for step in steps]
    assert np.mean(np.array(sizes) <= 4) > 0.9
    assert rate(steps) > 0.9 * best_of_now(world)[1]


@pytest.mark.parametrize("strategy", ["hedge", "fixed-share", "ucb", "thompson"])
def test_policies_come_back_to_large_budgets_when_they_get_cheap(strategy: str) -> None:
    world = one_drafter()
    controller = world.controller(strategy, budgets=BUDGETS)
    world.run(controller, steps=300)
    after_a_change(world, controller, steep)
    after_a_change(world, controller, flat)
    again = world.run(controller, steps=200)
    assert rate(again) > 0.75 * best_of_now(world)[1]
