"""Strategies that decide on the evidence of the step, in the world of `test_learning`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from adaptspec.control.controller import StepContext
from adaptspec.control.cost import CostModel
from adaptspec.control.mixture import EvidenceController, Mode
from adaptspec.control.step_costs import cheap_together
from adaptspec.types import Arm, DraftTree
from tests.control.test_learning import World, drawn


def controller_for(names: Sequence[str], mode: Mode = "mixture", *, max_nodes: int = 8) -> EvidenceController:
    return EvidenceController(names, cost=CostModel(), mode=mode, max_nodes=max_nodes)


def run(world: World, controller: EvidenceController, steps: int) -> float:
    """Tokens per second of the last half."""
    for _ in range(steps // 2):
        world.step(controller)
    tokens, seconds = world.tokens, world.seconds
    for _ in range(steps // 2):
        world.step(controller)
    return (world.tokens - tokens) / (world.seconds - seconds)


def best_rate(world: World, sizes: Sequence[int] = (1, 2, 4, 8)) -> float:
    arms = [Arm.autoregressive(), *(Arm(name, size) for name in world.reach for size in sizes)]
    return max(world.rate(arm) for arm in arms)


def test_automatic_size_reaches_the_best_fixed_size() -> None:
    for mean, per_node in ((0.5, 0.01), (3.0, 0.001), (3.0, 0.02)):
        world = World(
            {"only": drawn(mean, 1)}, {"only": 0.0}, verify_seconds=lambda nodes, slope=per_node: 0.04 + slope * nodes
        )
        assert run(world, controller_for(["only"]), 1200) > 0.95 * best_rate(world)


def test_automatic_size_reckons_with_rows_that_are_added_anyway() -> None:
    """Beyond the rows that the drafter adds nodes are dear: they are few, whatever they cost in a pass without them."""
    world = World(
        {"only": drawn(3.0, 1)},
        {"only": 0.0},
        verify_seconds=lambda rows: 0.04 + 0.0001 * rows + 0.1 * max(0, rows - 22),
        added={"only": 20},
    )
    controller = EvidenceController(["only"], cost=CostModel(), max_nodes=8, label=Arm("only", "auto"))
    assert run(world, controller, 1200) > 0.9 * best_rate(world)
    assert controller._added_rows.count("only", 3) == 20


@pytest.mark.parametrize("mode", ["mixture", "draft-then-choose"])
def test_the_better_drafter_is_found(mode: Mode) -> None:
    world = World({"bad": drawn(0.1, 2), "good": drawn(3.0, 1)}, {"bad": 0.0002, "good": 0.0002})
    assert run(world, controller_for(["bad", "good"], mode), 1200) > 0.95 * best_rate(world)


@pytest.mark.parametrize("mode", ["mixture", "draft-then-choose"])
def test_nothing_is_verified_where_it_does_not_pay(mode: Mode) -> None:
    world = World({"weak": drawn(0.1, 1)}, {"weak": 0.0}, verify_seconds=lambda nodes: 0.01 + 0.02 * nodes)
    controller = controller_for(["weak"], mode)
    run(world, controller, 400)
    sizes = []
    for _ in range(100):
        before = world.seconds
        world.step(controller)
        sizes.append(round((world.seconds - before - 0.01) / 0.02))
    assert np.mean(np.array(sizes) == 0) > 0.9


def test_a_change_of_cost_is_followed_within_50_steps() -> None:
    """Reports of throttled machines: verification gets dear, trees shrink; it gets cheap again, trees grow."""
    world = World({"only": drawn(2.0, 1)}, {"only": 0.0}, verify_seconds=lambda nodes: 0.04 + 0.0005 * nodes)
    controller = controller_for(["only"])
    run(world, controller, 400)

    def size() -> float:
        sizes = []
        for _ in range(30):
            before = world.seconds
            world.step(controller)
            sizes.append(world.seconds - before)
        return float(np.median(sizes))

    wide = size()
    assert wide > 0.0435  # 7 nodes or 8
    world.verify_seconds = lambda nodes: 0.04 + 0.03 * nodes
    for _ in range(50):
        world.step(controller)
    assert size() <= 0.101  # 2 nodes or fewer
    world.verify_seconds = lambda nodes: 0.04 + 0.0005 * nodes
    for _ in range(50):
        world.step(controller)
    assert size() > 0.0415  # 4 nodes or more at once
    run(world, controller, 600)
    assert size() > 0.0425  # and all that pay in the long run


def test_a_drafter_that_costs_more_than_it_adds_is_asked_only_to_probe() -> None:
    world = World({"cheap": drawn(2.0, 1), "dear": drawn(2.0, 2)}, {"cheap": 0.0001, "dear": 0.2})
    controller = controller_for(["cheap", "dear"])
    decisions = [world.step(controller) for _ in range(600)]
    asked = [any(arm.drafter == "dear" for arm in decision.asked) for decision in decisions[100:]]
    assert 0.0 < np.mean(asked) < 0.06
    world.draft_seconds["dear"] = 0.0001
    decisions = [world.step(controller) for _ in range(1500)]
    asked = [any(arm.drafter == "dear" for arm in decision.asked) for decision in decisions[-100:]]
    assert np.mean(asked) > 0.9  # and it comes back when that changes


def test_sampled_drafts_are_left_out() -> None:
    controller = controller_for(["a"])
    decision = controller.select(StepContext(5, 10))
    sampled = DraftTree.chain([1], siblings="iid", draft_probs=np.array([[0.5, 0.5]]), draft_rows=np.array([0, -1]))
    assembly = controller.assemble(decision, {"a": sampled})
    assert len(assembly.tree) == 0


def test_restored_state_decides_alike() -> None:
    def fresh() -> tuple[World, EvidenceController]:
        world = World({"a": drawn(3.0, 1), "b": drawn(0.5, 2)}, {"a": 0.0005, "b": 0.0005})
        return world, controller_for(["a", "b"])

    world, controller = fresh()
    for _ in range(100):
        world.step(controller)
    other_world, other = fresh()
    other.load_state_dict(controller.state_dict())
    other_world.position = world.position
    for each in (controller, other):
        each.begin()  # the state is that between requests
    for _ in range(50):
        world.step(controller)
        other_world.step(other)
        assert world.position == other_world.position
    with pytest.raises(ValueError, match="names must be"):
        controller_for(["a"]).load_state_dict(controller.state_dict())
    with pytest.raises(ValueError, match="names must not be empty"):
        controller_for([])


def test_drafters_are_cheap_together_or_not_at_all() -> None:
    cost = CostModel()
    for _ in range(3):
        cost.observe_verify(0, 0.100)
        for name, seconds in (("a", 0.0005), ("b", 0.0010), ("c", 0.0010), ("d", 0.0300)):
            cost.observe_draft(name, 8, seconds)
    assert cheap_together(cost, [Arm(name, 8) for name in "dcba"]) == {"a", "b"}  # 2 % of 100 ms
    assert cheap_together(cost, [Arm("d", 8), Arm("new", 8)]) == {"new"}
