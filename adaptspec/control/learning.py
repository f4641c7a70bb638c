"""A bandit or expert policy over drafters and budgets, judged by tokens per second."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from adaptspec.bandits import Feedback, Policy
from adaptspec.bandits.base import PolicyDecision
from adaptspec.control.controller import Assembly, Controller, StepContext, StepOutcome
from adaptspec.control.cost import CostModel
from adaptspec.control.counterfactual import Follower, Reach
from adaptspec.control.rate import RunningRate
from adaptspec.control.step_costs import is_cheap, observe_step
from adaptspec.trees import truncate
from adaptspec.types import Arm, Decision, DraftTree

Objective = Literal["throughput", "accepted_length"]
OBJECTIVES: tuple[Objective, ...] = ("throughput", "accepted_length")

GAIN_TOKENS = 4.0
"""A step worth so many tokens more than the running average has gain 1, so many less gain 0."""


@dataclass(slots=True)
class _Judged:
    """One decision that waits until every proposal made with it is judged."""

    policy_decision: PolicyDecision
    start: int
    followers: dict[str, Follower]
    nodes: dict[str, int]
    tokens: float
    seconds: float
    reaches: dict[str, Reach] = field(default_factory=dict)


class PolicyController(Controller):
    """Lets a policy choose among arms.

    Gain of arm i at a step (Dinkelbach, POLICY objective of a ratio): L_i - rho tau_i tokens, L_i the tokens it gains,
    tau_i its seconds, rho the running rate; rescaled to [0, 1] around the average step. Averaging these is maximising
    the sum of tokens over the sum of seconds, which averaging tokens per second of single steps is not.

    A full-information policy is told of every drafter that is cheap enough to be asked at every step, at every budget
    (the trees are nested), with the seconds that the cost model expects. Other policies are told of the played arm with
    its measured seconds. An arm is judged only at positions that it would have stopped at itself: a long match is
    counted once, and not again at every position inside it (ours; a virtual pointer per arm).

    Prefill, and proposals that are only made to learn from, are not charged to an arm; they are charged to the run.

    Args:
        arms: no speculation first.
        policy: over `len(arms)` arms.
        cost: learns seconds.
        objective: "throughput", or "accepted_length", which ignores seconds.
    """

    def __init__(
        self, arms: Sequence[Arm], policy: Policy, *, cost: CostModel, objective: Objective = "throughput"
    ) -> None:
        if not arms or arms[0] != Arm.autoregressive():
            raise ValueError("arms must start with the arm 'ar'")
        if policy.n_arms != len(arms):
            raise ValueError(f"the policy must have {len(arms)} arms, got {policy.n_arms}")
        if objective not in OBJECTIVES:
            raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, got {objective!r}")
        self.arms = tuple(arms)
        self.policy = policy
        self.cost = cost
        self.objective = objective
        self._budgets = np.array([0 if arm.budget == "auto" else arm.budget for arm in arms], dtype=np.int64)
        self._members: dict[str, list[int]] = {}
        for index, arm in enumerate(arms[1:], start=1):
            self._members.setdefault(arm.drafter, []).append(index)
        self._widest = {name: int(self._budgets[members].max()) for name, members in self._members.items()}
        self.rate = RunningRate()
        self._pointers = np.zeros(len(arms), dtype=np.int64)
        self._waiting: deque[_Judged] = deque()
        self._chosen: PolicyDecision | None = None
        self._steps = 0

    def drafters_in_play(self, names: Collection[str]) -> list[str]:
        return [name for name in self._members if name in names]

    def select(self, context: StepContext) -> Decision:
        chosen = self.policy.select()
        self._chosen = chosen
        self._steps += 1
        arm = self.arms[chosen.index]
        if arm.drafter in context.unavailable:
            arm = Arm.autoregressive()
        asked = [arm] if arm.drafter != "ar" else []
        if self.policy.full_information:
            asked = [
                Arm(drafter, budget)
                for drafter, budget in self._widest.items()
                if drafter not in context.unavailable
                and (drafter == arm.drafter or is_cheap(self.cost, drafter, budget))
            ]
        return Decision(self._steps, arm, chosen.propensity, asked=tuple(asked))

    def assemble(self, decision: Decision, trees: Mapping[str, DraftTree]) -> Assembly:
        whole = super().assemble(decision, trees)
        assert isinstance(decision.arm.budget, int)
        if whole.tree.siblings != "deterministic":
            return whole
        return replace(whole, tree=truncate(whole.tree, decision.arm.budget))

    def update(self, decision: Decision, outcome: StepOutcome) -> None:
        chosen, self._chosen = self._chosen, None
        assert chosen is not None, "update follows select"
        record = outcome.record
        observe_step(self.cost, outcome, budgets=self._widest)
        tokens, seconds = float(record.emitted), record.seconds
        self.rate.add(tokens, seconds)
        realised = outcome.tokens.tolist()
        if self.policy.full_information:
            self._judge_waiting(realised)
            judged = _Judged(
                chosen,
                record.position,
                {name: Follower(tree) for name, tree in outcome.trees.items() if tree.siblings == "deterministic"},
                {name: len(tree) for name, tree in outcome.trees.items()},
                tokens,
                seconds,
            )
            self._waiting.append(judged)
            self._judge(judged, realised)
            self._settle(everything=outcome.finished)
            if outcome.finished:
                self._pointers[:] = 0
        elif not outcome.finished and decision.arm == self.arms[chosen.index]:
            played = seconds - record.evaluate_seconds
            gain = self._gain(tokens, played)
            self.policy.update(
                chosen, Feedback.of_arm(len(self.arms), chosen.index, gain=gain, tokens=tokens, seconds=played)
            )

    def _judge_waiting(self, realised: list[int]) -> None:
        for judged in self._waiting:
            self._judge(judged, realised)

    def _judge(self, judged: _Judged, realised: list[int]) -> None:
        for name, follower in judged.followers.items():
            if name not in judged.reaches and follower.extend(realised):
                judged.reaches[name] = follower.close()

    def _settle(self, *, everything: bool) -> None:
        """Teach the policy what is fully known, oldest first; what the end of the text leaves open is not taught."""
        while self._waiting and (everything or len(self._waiting[0].reaches) == len(self._waiting[0].followers)):
            judged = self._waiting.popleft()
            gains, observed = self._gains_of(judged)
            self.policy.update(
                judged.policy_decision,
                Feedback.from_gains(gains, observed, tokens=judged.tokens, seconds=judged.seconds),
            )

    def _gains_of(self, judged: _Judged) -> tuple[np.ndarray, np.ndarray]:
        """Gains and mask [n_arms] of one decision; moves the arms' virtual pointers on."""
        gains = np.zeros(len(self.arms))
        observed = np.zeros(len(self.arms), dtype=np.bool_)
        verify = self.cost.verify_curve(int(self._budgets.max()), context=judged.start)
        overhead = self.cost.overhead_seconds()
        gains[0], observed[0] = self._gain(1.0, float(verify[0]) + overhead), True
        for name, reach in judged.reaches.items():
            if not reach.complete:
                continue
            draft = self.cost.draft_seconds(name, self._widest[name]) + overhead
            for index in self._members[name]:
                if judged.start < self._pointers[index]:
                    continue
                budget = int(self._budgets[index])
                length = reach.length(budget)
                gains[index] = self._gain(length, draft + float(verify[min(budget, judged.nodes[name])]))
                observed[index] = True
                self._pointers[index] = judged.start + length
        return gains, observed

    def _gain(self, tokens: float, seconds: float) -> float:
        value = tokens - 1.0 if self.objective == "accepted_length" else tokens - self.rate.value * seconds
        if self.objective == "accepted_length":
            return min(1.0, value / (2.0 * GAIN_TOKENS))
        return min(1.0, max(0.0, 0.5 + value / (2.0 * GAIN_TOKENS)))

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, between requests."""
        return {
            "arms": [str(arm) for arm in self.arms],
            "policy": self.policy.state_dict(),
            "cost": self.cost.state_dict(),
            "rate": self.rate.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`. Raises ValueError on a state of other arms or another policy."""
        names = [str(arm) for arm in self.arms]
        if state.get("arms") != names:
            raise ValueError(f"state holds the arms {state.get('arms')}, this controller has {names}")
        self.policy.load_state_dict(state["policy"])
        self.cost.load_state_dict(state["cost"])
        self.rate = RunningRate(*(float(value) for value in state["rate"]))
