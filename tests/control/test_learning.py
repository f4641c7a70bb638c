"""Policies over drafters and budgets in a world whose text, drafts and times are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from adaptspec.bandits import make_policy
from adaptspec.control.arms import make_arms
from adaptspec.control.controller import Controller, StepContext, StepOutcome
from adaptspec.control.cost import CostModel
from adaptspec.control.learning import EVALUATION_SHARE, PolicyController
from adaptspec.types import Arm, Decision, DraftTree, ExtraRows, StepRecord

BUDGETS = (2, 8)


@dataclass
class World:
    """A target that always says 0. A drafter is right for a number of tokens that it draws anew at every position;
    the rest of its chain is wrong.

    Attributes:
        reach: drafter -> (position -> tokens that it gets right).
        draft_seconds: per drafter.
        verify_seconds: per number of verified nodes and added rows.
        added: rows that a drafter adds to the pass when it is played.
    """

    reach: Mapping[str, Callable[[int], int]]
    draft_seconds: dict[str, float]
    verify_seconds: Callable[[int], float] = lambda nodes: 0.040 + 0.001 * nodes
    added: Mapping[str, int] = field(default_factory=dict)
    position: int = 0
    seconds: float = 0.0
    tokens: int = 0

    def propose(self, arm: Arm) -> DraftTree:
        right = self.reach[arm.drafter](self.position)
        assert isinstance(arm.budget, int)
        return DraftTree.chain([0 if depth < right else 1 for depth in range(arm.budget)])

    def step(self, controller: Controller, *, finished: bool = False) -> Decision:
        decision = controller.select(StepContext(self.position, 1000))
        trees = {arm.drafter: self.propose(arm) for arm in decision.asked}
        tree = controller.assemble(decision, trees).tree
        right = int((np.cumprod(tree.token_ids == 0)).sum()) if len(tree) else 0
        drafts = {name: self.draft_seconds[name] for name in trees}
        played = drafts.get(decision.arm.drafter, 0.0)
        offered = {name: rows_of(self.added[name]) for name in trees if name in self.added}
        added = self.added.get(decision.arm.drafter, 0)
        record = StepRecord(
            step_id=decision.step_id,
            position=self.position,
            arm=str(decision.arm),
            propensity=decision.propensity,
            drafted=len(tree),
            verified=len(tree),
            accepted=right,
            emitted=right + 1,
            draft_seconds=played,
            evaluate_seconds=sum(drafts.values()) - played,
            verify_seconds=self.verify_seconds(len(tree) + added),
            commit_seconds=0.0,
            observe_seconds=0.0,
            controller_seconds=0.0,
            other_seconds=0.0,
        )
        tokens = np.zeros(right + 1, dtype=np.int64)
        outcome = StepOutcome(
            record, tree, trees, tokens, drafts, extra_rows=added, finished=finished, offered_rows=offered
        )
        controller.update(decision, outcome)
        self.position += right + 1
        self.tokens += right + 1
        self.seconds += record.seconds
        return decision

    def rate(self, arm: Arm, *, steps: int = 4000) -> float:
        """Tokens per second of one arm alone."""
        position, seconds = 0, 0.0
        for _ in range(steps):
            right = 0 if arm.drafter == "ar" else min(self.reach[arm.drafter](position), int(arm.budget))
            position += right + 1
            nodes = 0 if arm.drafter == "ar" else int(arm.budget)
            seconds += self.verify_seconds(nodes + self.added.get(arm.drafter, 0)) + (
                self.draft_seconds[arm.drafter] if nodes else 0.0
            )
        return position / seconds


def rows_of(count: int) -> ExtraRows:
    """So many rows that see themselves alone."""
    return ExtraRows(np.zeros(count, np.int64), np.ones(count, np.int64), np.eye(count, dtype=np.bool_))


def controller_for(world: World, name: str, *, objective: str = "throughput", seed: int = 0) -> PolicyController:
    arms = make_arms(list(world.reach), budgets=BUDGETS, vocab=("full",))
    return PolicyController(
        arms,
        make_policy(name, n_arms=len(arms), seed=seed),
        cost=CostModel(),
        objective=objective,  # type: ignore[arg-type]
    )


def drawn(mean: float, seed: int) -> Callable[[int], int]:
    """Right tokens per position, geometric with a mean, the same at every visit."""
    lengths = np.random.default_rng(seed).geometric(1.0 / (1.0 + mean), size=200_003) - 1
    return lambda position: int(lengths[position % 200_003])


def share_of(decisions: list[Decision], arm: str) -> float:
    return sum(str(decision.arm) == arm for decision in decisions) / len(decisions)


LEARNERS = ["hedge", "adahedge", "ada-normal-hedge", "fixed-share", "ucb", "exp3-ix", "tsallis-inf", "thompson"]


@pytest.mark.parametrize("name", LEARNERS)
def test_learners_approach_the_best_arm(name: str) -> None:
    world = World({"good": drawn(3.0, 1), "bad": drawn(0.2, 2)}, {"good": 0.0005, "bad": 0.0005})
    controller = controller_for(world, name)
    for _ in range(1500):
        world.step(controller)
    rates = {str(arm): world.rate(arm) for arm in controller.arms}
    assert max(rates, key=lambda arm: rates[arm]) == "good@8"
    share = (world.tokens / world.seconds) / rates["good@8"]
    assert share > (0.93 if controller.policy.full_information else 0.75), share


@pytest.mark.parametrize("name", ["hedge", "ucb"])
def test_seconds_decide_and_not_accepted_length(name: str) -> None:
    """The drafter that is right more often costs so much that the other is faster; accepted length prefers it."""
    reach = {"slow": drawn(3.0, 1), "quick": drawn(1.5, 2)}
    costs = {"slow": 0.100, "quick": 0.0005}
    for objective, winner in (("throughput", "quick@8"), ("accepted_length", "slow@8")):
        world = World(reach, costs)
        controller = controller_for(world, name, objective=objective)
        decisions = [world.step(controller) for _ in range(3000)]
        assert share_of(decisions[-500:], winner) > 0.6, objective


@pytest.mark.parametrize("name", ["hedge", "fixed-share", "ucb"])
def test_rows_that_a_drafter_adds_to_the_pass_are_charged(name: str) -> None:
    """One is right a little more often; what it adds to the pass takes as long as 40 nodes, also where it is judged."""
    reach = {"adds": drawn(2.5, 1), "plain": drawn(2.0, 2)}
    world = World(reach, {"adds": 0.0005, "plain": 0.0005}, added={"adds": 40})
    controller = controller_for(world, name)
    decisions = [world.step(controller) for _ in range(3000)]
    assert share_of(decisions[-500:], "plain@8") > 0.5
    if controller.policy.full_information:
        assert share_of(decisions[100:], "adds@8") + share_of(decisions[100:], "adds@2") < 0.15


def test_a_step_is_expected_to_take_what_it_takes_with_added_rows() -> None:
    world = World({"adds": drawn(2.5, 1)}, {"adds": 0.0005}, added={"adds": 40})
    controller = controller_for(world, "hedge")
    for _ in range(200):
        world.step(controller)
    for arm in controller.arms[1:]:
        assert controller._step_seconds(arm, int(arm.budget)) == pytest.approx(
            0.0805 + 0.001 * int(arm.budget), rel=0.01
        )
    other = controller_for(world, "hedge")
    other.load_state_dict(controller.state_dict())
    assert other._step_seconds(controller.arms[1], 2) == controller._step_seconds(controller.arms[1], 2)
    with pytest.raises(ValueError, match=r"added_rows of 'adds' must be two whole numbers >= 0, got \[-1, 0\]"):
        other.load_state_dict({**controller.state_dict(), "added_rows": {"adds": [-1, 0]}})


@pytest.mark.parametrize("name", ["hedge", "exp3-ix"])
def test_speculation_that_does_not_pay_is_left(name: str) -> None:
    world = World({"weak": drawn(0.3, 1)}, {"weak": 0.001}, verify_seconds=lambda nodes: 0.01 + 0.01 * nodes)
    controller = controller_for(world, name)
    decisions = [world.step(controller) for _ in range(3000)]
    assert share_of(decisions[-500:], "ar") > 0.7


def test_a_ratio_is_learnt_and_not_a_mean_of_ratios() -> None:
    """One arm has one very fast step in ten, which a mean of tokens per second of single steps overrates."""
    lucky = World(
        {"lucky": lambda position: 8 if position % 10 == 0 else 0, "steady": lambda position: 2},
        {"lucky": 0.0, "steady": 0.0},
        verify_seconds=lambda nodes: 0.04,
    )
    controller = controller_for(lucky, "hedge")
    decisions = [lucky.step(controller) for _ in range(1500)]
    assert share_of(decisions[-300:], "steady@2") + share_of(decisions[-300:], "steady@8") > 0.6


def test_the_virtual_pointer_counts_a_long_match_once() -> None:
    """A drafter that copies 30 tokens right once in a while is no better for being asked at each of them."""

    def burst(position: int) -> int:
        return max(0, 30 - position % 300) if position % 300 < 30 else 0

    world = World({"burst": burst}, {"burst": 0.0}, verify_seconds=lambda nodes: 0.04 + 0.004 * nodes)
    controller = controller_for(world, "hedge")
    taught: list[tuple[np.ndarray, np.ndarray]] = []
    learn = controller.policy.update

    def spy(decision: object, feedback: object) -> None:
        taught.append((feedback.gains.copy(), feedback.observed.copy()))  # type: ignore[attr-defined]
        learn(decision, feedback)  # type: ignore[arg-type]

    controller.policy.update = spy  # type: ignore[method-assign,assignment]
    for _ in range(600):
        world.step(controller)
    index = [str(arm) for arm in controller.arms].index("burst@8")
    seen = sum(observed[index] for _, observed in taught)
    assert seen < len(taught)  # positions inside its own accepted block are skipped
    # 4 judgements of a 30-token burst (8 + 1 tokens each) against 270 elsewhere, whatever arm is played
    good = sum(gains[index] > 0.6 for gains, observed in taught if observed[index])
    assert good / seen < 0.1


def test_a_request_that_ends_leaves_nothing_waiting() -> None:
    world = World({"long": lambda position: 8}, {"long": 0.0})
    controller = controller_for(world, "hedge")
    for step in range(20):
        world.step(controller, finished=step % 5 == 4)
        if step % 5 == 4:
            assert not controller._waiting
    assert len(controller._pointers) == len(controller.arms)
    assert not any(controller._pointers)


def test_learning_from_unplayed_drafters_takes_a_set_share_of_the_time() -> None:
    world = World({"cheap": drawn(1.0, 1), "dear": drawn(1.0, 2)}, {"cheap": 0.0001, "dear": 0.02})
    controller = controller_for(world, "hedge")
    decisions = [world.step(controller) for _ in range(4000)]
    assert all("cheap" in {arm.drafter for arm in decision.asked} for decision in decisions[5:])
    learnt_from = [d for d in decisions if d.arm.drafter != "dear" and "dear" in {arm.drafter for arm in d.asked}]
    share = 0.02 * len(learnt_from) / world.seconds
    assert 0.2 * EVALUATION_SHARE < share < 1.2 * EVALUATION_SHARE


def test_a_drafter_set_aside_is_not_asked() -> None:
    world = World({"a": drawn(2.0, 1), "b": drawn(2.0, 2)}, {"a": 0.0, "b": 0.0})
    for name in ("hedge", "ucb", "exp3"):
        controller = controller_for(world, name)
        for _ in range(50):
            decision = controller.select(StepContext(world.position, 10, unavailable={"a"}))
            assert decision.arm.drafter != "a"
            assert all(arm.drafter != "a" for arm in decision.asked)
            trees = {arm.drafter: world.propose(arm) for arm in decision.asked}
            tree = controller.assemble(decision, trees).tree
            record = replace(
                StepRecord(1, world.position, str(decision.arm), 1.0, 0, 0, 0, 1, *[0.001] * 7), verified=len(tree)
            )
            controller.update(decision, StepOutcome(record, tree, trees, np.array([1])))


def test_restored_state_decides_alike() -> None:
    def fresh() -> tuple[World, PolicyController]:
        world = World({"good": drawn(3.0, 1), "bad": drawn(0.2, 2)}, {"good": 0.0005, "bad": 0.0005})
        return world, controller_for(world, "hedge", seed=3)

    world, controller = fresh()
    for step in range(100):
        world.step(controller, finished=step == 99)
    other_world, other = fresh()
    other.load_state_dict(controller.state_dict())
    other_world.position = world.position
    for _ in range(100):
        assert world.step(controller).arm == other_world.step(other).arm


def test_misuse_is_refused() -> None:
    world = World({"good": drawn(3.0, 1)}, {"good": 0.0})
    arms = make_arms(["good"], budgets=BUDGETS, vocab=("full",))
    with pytest.raises(ValueError, match="must have 3 arms, got 5"):
        PolicyController(arms, make_policy("hedge", n_arms=5), cost=CostModel())
    with pytest.raises(ValueError, match="start with the arm 'ar'"):
        PolicyController(arms[1:], make_policy("hedge", n_arms=2), cost=CostModel())
    with pytest.raises(ValueError, match="objective must be one of"):
        controller_for(world, "hedge", objective="speed")
    controller = controller_for(world, "hedge")
    other = PolicyController(arms[:2], make_policy("hedge", n_arms=2), cost=CostModel())
    with pytest.raises(ValueError, match="state holds the arms"):
        controller.load_state_dict(other.state_dict())
