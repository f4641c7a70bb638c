"""Replicas that learn apart and are merged know what one learner would know."""

from __future__ import annotations

import json

import numpy as np
import pytest

from adaptspec.bandits import Guard, make_policy
from adaptspec.control.calibration import Calibrator
from adaptspec.control.cost import CostModel
from adaptspec.control.learning import PolicyController
from adaptspec.control.merging import merge_controllers
from adaptspec.control.mixture import EvidenceController
from adaptspec.control.strategies import make_controller
from adaptspec.types import DraftTree
from tests.control.test_learning import World, controller_for, drawn

CHAIN = DraftTree.chain([1, 2, 3], np.log([0.5, 0.25, 0.125]))
TEXTS = [[1, 2, 3, 4], [1, 9], [9], [1, 2, 9], [1, 2, 3, 9]] * 6


def taught(texts: list[list[int]], state: dict | None = None) -> Calibrator:
    calibrator = Calibrator(memory=1e9)
    if state is not None:
        calibrator.load_state_dict(state)
    for text in texts:
        calibrator.update(CHAIN, text)
    return calibrator


def test_calibration_counts_add_up() -> None:
    base = taught(TEXTS[:6]).state_dict()
    replicas = [taught(part, base).state_dict() for part in (TEXTS[6:14], TEXTS[14:])]
    merged = Calibrator(memory=1e9)
    merged.load_state_dict(Calibrator.merge(replicas, base=base))
    np.testing.assert_allclose(merged.conditional(CHAIN), taught(TEXTS).conditional(CHAIN), rtol=1e-6)
    doubled = Calibrator.merge(replicas)  # without the base, what both began with counts twice
    assert sum(doubled["tables"]["score"]["trials"]) > sum(merged.state_dict()["tables"]["score"]["trials"]) + 5


def test_merged_counts_respect_the_memory() -> None:
    calibrators = [Calibrator(memory=20.0) for _ in range(3)]
    for calibrator in calibrators:
        for text in TEXTS:
            calibrator.update(CHAIN, text)
    merged = Calibrator(memory=20.0)
    merged.load_state_dict(Calibrator.merge([c.state_dict() for c in calibrators]))
    np.testing.assert_allclose(merged.conditional(CHAIN), calibrators[0].conditional(CHAIN), atol=0.05)
    with pytest.raises(ValueError, match="states must agree on memory, got 20.0 and 1000.0"):
        Calibrator.merge([calibrators[0].state_dict(), Calibrator().state_dict()])


def play(controller: PolicyController | EvidenceController, *, seed: int, steps: int) -> World:
    world = World({"good": drawn(3.0, seed), "bad": drawn(0.2, seed + 1)}, {"good": 0.0005, "bad": 0.0005})
    controller.begin()
    for _ in range(steps):
        world.step(controller)
    world.step(controller, finished=True)
    return world


@pytest.mark.parametrize("strategy", ["hedge", "ucb", "mixture", "draft-then-choose"])
def test_a_fresh_replica_plays_well_with_what_others_learnt(strategy: str) -> None:
    def fresh() -> PolicyController | EvidenceController:
        arms = controller_for(World({"good": drawn(1.0, 1), "bad": drawn(1.0, 1)}, {}), "hedge").arms
        made = make_controller(strategy, arms=arms, drafters=["good", "bad"], guard=0.05, seed=3)
        assert isinstance(made, (PolicyController, EvidenceController))
        return made

    states = []
    for replica in range(3):
        controller = fresh()
        play(controller, seed=10 * replica, steps=400)
        states.append(json.loads(json.dumps(controller.state_dict())))
    merged = fresh()
    merged.load_state_dict(merge_controllers(states))
    taught_world, naive_world = play(merged, seed=80, steps=60), play(fresh(), seed=80, steps=60)
    # A policy has to find its arm; strategies on evidence know within a few steps anyway.
    least = 1.05 if isinstance(merged, PolicyController) else 0.98
    assert taught_world.tokens / taught_world.seconds > least * naive_world.tokens / naive_world.seconds
    again = fresh()
    again.load_state_dict(merge_controllers(states, base=states[0]))


def test_a_guards_account_stays_its_own() -> None:
    policies = [Guard(make_policy("hedge", n_arms=5, seed=seed), alpha=0.05) for seed in (1, 2)]
    states = []
    for seed, policy in enumerate(policies):
        arms = controller_for(World({"good": drawn(1.0, 1), "bad": drawn(1.0, 1)}, {}), "hedge").arms
        controller = PolicyController(arms, policy, cost=CostModel())
        play(controller, seed=seed, steps=100)
        states.append(controller.state_dict())
    merged = merge_controllers(states)
    assert merged["policy"]["learned"]["balance"] == states[0]["policy"]["learned"]["balance"]
    inner = [state["policy"]["learned"]["policy"]["rounds"] for state in (*states, merged)]
    assert inner[2] == pytest.approx(inner[0] + inner[1])


def test_states_that_do_not_belong_together_are_refused() -> None:
    world = World({"good": drawn(1.0, 1), "bad": drawn(1.0, 1)}, {})
    hedge, ucb = (controller_for(world, name).state_dict() for name in ("hedge", "ucb"))
    mixture = EvidenceController(["good"], cost=CostModel()).state_dict()
    with pytest.raises(ValueError, match="at least one state"):
        merge_controllers([])
    with pytest.raises(ValueError, match="policy"):
        merge_controllers([hedge, ucb])
    with pytest.raises(ValueError, match="arms"):
        merge_controllers([hedge, mixture])
    with pytest.raises(ValueError, match="learns nothing"):
        merge_controllers([{}, {}])
    other = EvidenceController(["good", "bad"], cost=CostModel()).state_dict()
    with pytest.raises(ValueError, match="names"):
        merge_controllers([mixture, other])
