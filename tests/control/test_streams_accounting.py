"""What is charged to whom, and what is taught when: honest controllers find the best arm, mutants of them do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from adaptspec.bandits import Feedback, PolicyDecision
from adaptspec.bandits.baselines import FollowTheLeader
from adaptspec.bandits.means import MeanPolicy
from adaptspec.bandits.ucb import UCB1
from adaptspec.control.controller import Controller, StepOutcome
from adaptspec.control.counterfactual import Follower, Reach
from adaptspec.control.strategies import make_controller
from adaptspec.types import Arm
from tests.control.world import Drafter, World, constantly, rate, share

BUDGETS = (2, 8)


def controller_with(policy: type[UCB1], world: World) -> Controller:
    return make_controller(policy(len(world.arms(BUDGETS))), arms=world.arms(BUDGETS), drafters=world.drafters)


class TestPrefill:
    """A drafter that gives more tokens but takes its time is worth it only if seconds are thought to be cheap. They
    are, if most of them are prefill."""

    PREFILL = 3.0

    def world(self, *, charged: bool) -> World:
        quick = Drafter(constantly(0.6))
        slow = Drafter(constantly(0.85), seconds=constantly(0.065))
        world = World({"quick": quick, "slow": slow}, request_tokens=32)

        def first_step_of_a_request(outcome: StepOutcome) -> StepOutcome:
            record = outcome.record
            if record.position > world.prompt:
                return outcome
            return replace(outcome, record=replace(record, other_seconds=record.other_seconds + self.PREFILL))

        if charged:
            world.told = first_step_of_a_request
        return world

    @pytest.mark.parametrize("strategy", ["hedge", "ucb"])
    def test_charged_to_the_step_it_makes_a_slow_drafter_look_good(self, strategy: str) -> None:
        slow_shares = []
        for charged in (False, True):
            world = self.world(charged=charged)
            steps = world.run(world.controller(strategy), steps=1200)[-400:]
            slow_shares.append(sum(step.arm.startswith("slow") for step in steps) / len(steps))
        assert slow_shares[0] < 0.3
        assert slow_shares[1] > slow_shares[0] + 0.2


def test_evaluation_charged_to_the_played_arm_drives_the_learner_away_from_the_best() -> None:
    """Eight cheap drafters are asked at every step, seven of them only to learn from."""

    def all_on_the_played(outcome: StepOutcome) -> StepOutcome:
        record, seconds = outcome.record, dict(outcome.draft_seconds)
        drafter = record.arm.partition("@")[0]
        if drafter in seconds:
            seconds[drafter] += record.evaluate_seconds
        record = replace(record, draft_seconds=record.draft_seconds + record.evaluate_seconds, evaluate_seconds=0.0)
        return replace(outcome, record=record, draft_seconds=seconds)

    shares = []
    for told in (lambda outcome: outcome, all_on_the_played):
        near = {f"near{index}": Drafter(constantly(0.72), seconds=constantly(0.00055)) for index in range(7)}
        world = World({"best": Drafter(constantly(0.76), seconds=constantly(0.00055)), **near}, told=told)
        steps = world.run(world.controller("follow-the-leader", budgets=(8,)), steps=600)
        shares.append(share(steps[-300:], "best@8"))
    assert shares[0] > 0.7
    assert shares[1] < 0.3


class MeanOfRatios(UCB1):
    """Mutant: the reward is the tokens per second of the step, averaged over steps."""

    SCALE = 120.0

    def _learn(self, decision: PolicyDecision, feedback: Feedback) -> None:
        assert feedback.tokens is not None and feedback.seconds is not None
        gain = min(1.0, feedback.tokens / feedback.seconds / self.SCALE)
        super()._learn(decision, Feedback.of_arm(self.n_arms, decision.index, gain=gain))


def test_a_mean_of_ratios_overrates_an_arm_that_is_fast_now_and_then() -> None:
    """One arm is quick and right at one position in two, slow and wrong at the other: 50 tokens per second on average
    over steps, 22 over seconds. The other makes 42 always."""

    def lucky_now(position: int) -> bool:
        return position // 20 % 2 == 0

    def world() -> World:
        moody = Drafter(
            lambda position: 0.97 if lucky_now(position) else 0.0,
            seconds=lambda position: 0.001 if lucky_now(position) else 0.200,
        )
        return World({"moody": moody, "steady": Drafter(constantly(0.35))})

    worlds = world(), world()
    honest = worlds[0].run(worlds[0].controller("ucb"), steps=900)[-400:]
    mutant = worlds[1].run(controller_with(MeanOfRatios, worlds[1]), steps=900)[-400:]
    assert rate(honest) > 1.2 * rate(mutant)


class CreditsThePrevious(UCB1):
    """Mutant: what a decision earned is written to the one before it."""

    previous = 0

    def _learn(self, decision: PolicyDecision, feedback: Feedback) -> None:
        gain = feedback.gains.item(decision.index)
        super()._learn(replace(decision, index=self.previous), Feedback.of_arm(self.n_arms, self.previous, gain=gain))
        self.previous = decision.index


def test_feedback_credited_one_decision_too_early_teaches_nothing() -> None:
    def world() -> World:
        return World({"good": Drafter(constantly(0.8)), "bad": Drafter(constantly(0.1))})

    worlds = world(), world()
    honest = worlds[0].run(worlds[0].controller("ucb"), steps=900)
    mutant = worlds[1].run(controller_with(CreditsThePrevious, worlds[1]), steps=900)
    assert rate(honest) > 1.15 * rate(mutant)
    assert share(honest[-300:], "good@8") > share(mutant[-300:], "good@8") + 0.1


class TestCensoring:
    """A long proposal is judged by tokens that later steps reveal. Who judges it by what its own step revealed takes
    it for a short one whenever a shorter one was played."""

    def world(self) -> World:
        return World(
            {"drafter": Drafter(constantly(0.85), seconds=constantly(0.0001))},
            verify=lambda nodes: 0.030 if nodes == 0 else 0.050 + 0.004 * nodes,
            request_tokens=48,
            ends_early=True,
        )

    def share_of_the_long(self) -> float:
        world = self.world()
        return share(world.run(world.controller("hedge"), steps=600)[-200:], "drafter@8")

    def test_waiting_for_the_text_finds_that_long_drafts_pay(self) -> None:
        world = self.world()
        assert world.rate("drafter@8", tokens=2000) > 1.2 * world.rate("drafter@2", tokens=2000)
        assert self.share_of_the_long() > 0.9

    def test_judging_by_one_step_alone_loses_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        extend = Follower.extend

        def at_once(self: Follower, tokens: Sequence[int], probabilities: np.ndarray | None = None) -> bool:
            extend(self, tokens, probabilities)
            self.reach = Reach(self.close().ranks, True)
            return True

        monkeypatch.setattr(Follower, "extend", at_once)
        assert self.share_of_the_long() < 0.3

    def test_the_end_of_the_text_is_not_taken_for_a_rejection(self) -> None:
        """Requests end in the middle of drafts: what is left open is not taught. Mutant: the text seems to go on with a
        token that nobody drafts."""

        def goes_on(outcome: StepOutcome) -> StepOutcome:
            return replace(outcome, tokens=np.append(outcome.tokens, -1)) if outcome.finished else outcome

        taught = []
        for told in (lambda outcome: outcome, goes_on):
            world = self.world()
            world.request_tokens, world.told = 12, told
            policy = Listening(len(world.arms(BUDGETS)), index=world.arms(BUDGETS).index(Arm("drafter", 8)))
            world.run(make_controller(policy, arms=world.arms(BUDGETS), drafters=world.drafters), steps=900)
            taught.append(np.mean(policy.heard))
        assert taught[0] > taught[1] + 0.03


class Listening(FollowTheLeader):
    """Remembers what it was taught about one arm."""

    def __init__(self, n_arms: int, *, index: int) -> None:
        super().__init__(n_arms)
        self.index = index
        self.heard: list[float] = []

    def _learn(self, decision: PolicyDecision, feedback: Feedback) -> None:
        if feedback.observed[self.index]:
            self.heard.append(feedback.gains.item(self.index))
        super()._learn(decision, feedback)


class RawTokensPerSecond(UCB1):
    """Mutant: gains in the hundreds against a bonus made for gains up to 1."""

    scale = 1.0

    def _learn(self, decision: PolicyDecision, feedback: Feedback) -> None:
        assert feedback.tokens is not None and feedback.seconds is not None
        self.rounds += 1.0
        MeanPolicy._add(self, decision.index, self.reward(feedback.tokens, feedback.seconds))

    def reward(self, tokens: float, seconds: float) -> float:
        return tokens / seconds


class MinusSeconds(RawTokensPerSecond):
    """Mutant: gains of some hundredths, minus the seconds per token, against the same bonus."""

    def reward(self, tokens: float, seconds: float) -> float:
        return 1.0 - seconds / tokens


def test_a_bonus_that_does_not_fit_the_scale_is_greedy_or_plays_at_random() -> None:
    """Greedy: in some texts the best arm's first step is unlucky, and it is never tried again."""

    def world(seed: int) -> World:
        return World({"good": Drafter(constantly(0.7)), "poor": Drafter(constantly(0.25))}, seed=seed)

    shares: dict[str, list[float]] = {"honest": [], "greedy": [], "random": []}
    for seed in range(6):
        for name, policy in (("honest", UCB1), ("greedy", RawTokensPerSecond), ("random", MinusSeconds)):
            of_seed = world(seed)
            steps = of_seed.run(controller_with(policy, of_seed), steps=600)
            shares[name].append(share(steps[-200:], "good@8"))
    assert min(shares["honest"]) > 0.3
    assert min(shares["greedy"]) < 0.05
    assert max(shares["random"]) < 0.4
    assert np.mean(shares["random"]) < np.mean(shares["honest"]) - 0.1
