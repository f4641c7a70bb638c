"""A bandit or expert policy over drafters and budgets, judged by tokens per second."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log2
from typing import Any, Literal, NamedTuple

import numpy as np

from adaptspec.bandits import Feedback, Guard, Policy, PolicyContext
from adaptspec.bandits.base import PolicyDecision
from adaptspec.bandits.state import read_array, read_rng
from adaptspec.control.assembly import Candidates, fit_to_cost, learn, value_candidates
from adaptspec.control.calibration import Calibrator
from adaptspec.control.controller import Assembly, Controller, Digest, StepContext, StepNotes, StepOutcome
from adaptspec.control.cost import MAX_NODES, CostModel
from adaptspec.control.counterfactual import Follower, Reach
from adaptspec.control.rate import RunningRate
from adaptspec.control.step_costs import observe_step
from adaptspec.trees import truncate
from adaptspec.types import Arm, Decision, DraftTree

Objective = Literal["throughput", "accepted_length"]
OBJECTIVES: tuple[Objective, ...] = ("throughput", "accepted_length")

GAIN_TOKENS = 4.0
"""A step worth so many tokens more than the running average has gain 1, so many less gain 0."""

LENGTH_RATE = 0.05
"""Weight of the latest judged step in an arm's running accepted length."""

AUTO_NODES = 64
"""What a drafter is asked for when its only arm sizes itself."""

EVALUATION_SHARE = 0.01
"""Share of the run's time that drafters may take which are asked only to learn from, all together."""

FEATURES = 4
"""Length of the vector that contextual policies see: 1, context length, tokens left, latest accepted length."""


class Source(NamedTuple):
    """Where the proposals of an arm come from: arms of one source differ in budget only."""

    drafter: str
    vocab: str


def _source(arm: Arm) -> Source:
    return Source(arm.drafter, arm.vocab)


@dataclass(slots=True)
class _Judged:
    """One decision that waits until every proposal made with it is judged. "auto" arms have followers of their own."""

    policy_decision: PolicyDecision
    start: int
    followers: dict[tuple[Source, bool], Follower]
    nodes: dict[tuple[Source, bool], int]
    tokens: float
    seconds: float
    drafted: int
    accepted: int
    reaches: dict[tuple[Source, bool], Reach] = field(default_factory=dict)


class PolicyController(Controller):
    """Lets a policy choose among arms.

    Gain of arm i at a step (Dinkelbach, POLICY objective of a ratio): L_i - rho tau_i tokens, L_i the tokens it gains,
    tau_i its seconds, rho the running rate; rescaled to [0, 1] around the average step. Averaging these is maximising
    the sum of tokens over the sum of seconds, which averaging tokens per second of single steps is not.

    A full-information policy is told of every drafter that was asked, at every budget (the trees are nested), with the
    seconds that the cost model expects. Drafters that are not played are asked by chance, as often as
    `EVALUATION_SHARE` of the time allows: cheap ones always, dear ones now and then. Other policies are told of the
    played arm with its measured seconds. An arm is judged only at positions that it would have stopped at itself: a
    long match is counted once, and not again at every position inside it (ours; a virtual pointer per arm).

    An arm of budget "auto" verifies the nodes of its drafter's proposal that pay, by calibrated values and the cost
    table.

    Prefill, catching up, and proposals that are only made to learn from, are not charged to an arm; they are charged
    to the run.

    Args:
        arms: no speculation first.
        policy: over `len(arms)` arms.
        cost: learns seconds.
        objective: "throughput", or "accepted_length", which ignores seconds.
        seed: of the chances with which drafters are asked only to learn from.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        policy: Policy,
        *,
        cost: CostModel,
        objective: Objective = "throughput",
        seed: int = 0,
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
        self.wants_probabilities = policy.full_information
        self.rate = RunningRate()
        self.expected_lengths = np.ones(len(arms))
        self._budgets = np.array([MAX_NODES if arm.budget == "auto" else arm.budget for arm in arms], dtype=np.int64)
        members: dict[tuple[Source, bool], list[int]] = {}
        self._widest: dict[Source, int] = {}
        for index, arm in enumerate(self.arms[1:], start=1):
            source = _source(arm)
            members.setdefault((source, arm.budget == "auto"), []).append(index)
            nodes = AUTO_NODES if arm.budget == "auto" else arm.budget
            self._widest[source] = max(self._widest.get(source, 0), nodes)
        self._members = {key: np.array(indices) for key, indices in members.items()}
        self._most_nodes = max(self._widest.values(), default=0)
        self._drafters = list(dict.fromkeys(source.drafter for source in self._widest))
        self.calibrators = {source.drafter: Calibrator() for source, automatic in self._members if automatic}
        self._rng = np.random.default_rng(seed)
        self._digest = Digest()
        self._steps = 0
        self._requests = 0
        self._latest_length = 1.0
        self._pointers = np.zeros(len(arms), dtype=np.int64)
        self._waiting: deque[_Judged] = deque()
        self._chosen: PolicyDecision | None = None
        self._candidates: dict[str, Candidates] = {}
        self._kept: dict[str, DraftTree] = {}
        self._position = 0

    @property
    def valued(self) -> Sequence[Candidates]:
        return tuple(self._candidates.values())

    def drafters_in_play(self, names: Collection[str]) -> list[str]:
        return [name for name in self._drafters if name in names]

    def begin(self) -> None:
        if self._requests:
            self.policy.finish(self._requests)
        self._requests += 1
        self._waiting.clear()
        self._pointers[:] = 0
        self._latest_length = 1.0
        self._chosen = None

    def select(self, context: StepContext) -> Decision:
        chosen = self.policy.select(self._policy_context(context))
        self._chosen = chosen
        self._position = context.length
        self._steps += 1
        arm = self.arms[chosen.index]
        if arm.drafter in context.unavailable:
            arm = Arm.autoregressive()
        return Decision(self._steps, arm, chosen.propensity, asked=self._asked(arm, context))

    def _asked(self, played: Arm, context: StepContext) -> tuple[Arm, ...]:
        """The played drafter, and others if the policy learns from all; then for all nodes that arms could use."""
        widen = self.policy.full_information or played.budget == "auto"
        asked: dict[str, Arm] = {}
        if played.drafter != "ar":
            nodes = self._widest[_source(played)] if widen else played.budget
            asked[played.drafter] = Arm(played.drafter, nodes, played.vocab)
        if self.policy.full_information:
            chances = self._rng.random(len(self._widest)).tolist()  # drawn always: the stream must not depend on times
            allowed = EVALUATION_SHARE / len(self._widest) * self.cost.verify_seconds(0, context=context.length)
            for chance, (source, nodes) in zip(chances, self._widest.items(), strict=True):
                if source.drafter in asked or source.drafter in context.unavailable:
                    continue
                seconds = self.cost.draft_seconds(source.drafter, nodes, vocab=source.vocab)
                if cold := context.cold_tokens.get(source.drafter, 0):
                    seconds += self.cost.catch_up_seconds(source.drafter, cold)
                if chance * seconds <= allowed:
                    asked[source.drafter] = Arm(source.drafter, nodes, source.vocab)
        return tuple(asked.values())

    def _policy_context(self, context: StepContext) -> PolicyContext:
        bucket = max(9, (context.length - 1).bit_length())
        features = np.array(
            [1.0, log2(max(1, context.length)) / 16.0, log2(1 + context.remaining) / 16.0, self._latest_length / 8.0]
        )
        return PolicyContext(bucket=bucket, request=self._requests, features=features)

    def assemble(self, decision: Decision, trees: Mapping[str, DraftTree]) -> Assembly:
        self._candidates, self._kept = {}, {}
        for arm in decision.asked:
            name, tree = arm.drafter, trees.get(arm.drafter)
            if tree is None or tree.siblings != "deterministic" or (_source(arm), True) not in self._members:
                continue
            candidates = self._candidates[name] = value_candidates([tree], [name], calibrators=self.calibrators)
            curve = self.cost.verify_curve(self._most_nodes, context=self._position)
            rate = self.rate.value
            self._kept[name], _ = fit_to_cost(candidates.tree, verify_curve=curve, rate=rate if rate > 0.0 else None)
        whole = super().assemble(decision, trees)
        drafter, budget = decision.arm.drafter, decision.arm.budget
        if budget == "auto":
            return replace(whole, tree=self._kept.get(drafter, DraftTree.empty()))
        if whole.tree.siblings != "deterministic":
            return whole
        return replace(whole, tree=truncate(whole.tree, budget))

    def trust_costs(self) -> None:
        if isinstance(self.policy, Guard):
            for index in np.flatnonzero(self.policy.never_played).tolist():
                arm = self.arms[index]
                nodes = self._most_nodes if arm.budget == "auto" else arm.budget
                self.policy.calibrate(index, seconds=self.cost.step_seconds(arm, nodes))

    def update(self, decision: Decision, outcome: StepOutcome) -> StepNotes:
        chosen, self._chosen = self._chosen, None
        assert chosen is not None, "update follows select"
        record = outcome.record
        notes = self._notes(decision, outcome, chosen)
        observe_step(self.cost, outcome, asked=decision.asked)
        tokens, seconds = float(record.emitted), record.seconds
        self.rate.add(tokens, seconds)
        self._latest_length = tokens
        for candidates in self._candidates.values():
            learn(candidates, outcome.tokens, calibrators=self.calibrators)
        if decision.arm != self.arms[chosen.index]:  # no speculation, because the drafter is set aside
            chosen = replace(chosen, index=0, propensity=1.0)
            if not (self.policy.off_policy or isinstance(self.policy, Guard)):
                return notes
        judged = _Judged(chosen, record.position, {}, {}, tokens, seconds, record.verified, record.accepted)
        if self.policy.full_information:
            self._follow(judged, decision, outcome)
            self._settle(everything=outcome.finished)
            if outcome.finished:
                self._pointers[:] = 0
        elif not outcome.finished:
            played = seconds - record.evaluate_seconds - record.catch_up_seconds
            gains, observed = np.zeros(len(self.arms)), np.zeros(len(self.arms), dtype=np.bool_)
            gains[chosen.index], observed[chosen.index] = self._gain(tokens, played), True
            self._expect(chosen.index, tokens)
            self._teach(judged, gains, observed)
        return notes

    def _notes(self, decision: Decision, outcome: StepOutcome, chosen: PolicyDecision) -> StepNotes:
        record, index = outcome.record, chosen.index
        reason = "policy"
        if decision.arm != self.arms[index]:
            reason, index = "set aside", 0
        elif isinstance(self.policy, Guard) and self.policy.overruled(chosen):
            reason = "guard"
        gain = record.emitted - self.rate.value * record.seconds
        expected = self.cost.overhead_seconds() + self.cost.verify_seconds(record.verified, context=record.position)
        expected += sum(self.cost.draft_seconds(arm.drafter, arm.budget, vocab=arm.vocab) for arm in decision.asked)
        digest = self._digest.add(outcome.tokens, index, gain)
        return StepNotes(reason, float(self.expected_lengths[index]), expected, gain, digest)

    def _follow(self, judged: _Judged, decision: Decision, outcome: StepOutcome) -> None:
        """Put a decision's proposals in the queue, and take in the text that the step revealed."""
        realised = outcome.tokens.tolist()
        for arm in decision.asked:
            tree, source = outcome.trees.get(arm.drafter), _source(arm)
            if tree is None or tree.siblings != "deterministic":
                continue
            for automatic, part in ((False, tree), (True, self._kept.get(arm.drafter))):
                if part is not None and (source, automatic) in self._members:
                    judged.followers[source, automatic] = Follower(part)
                    judged.nodes[source, automatic] = len(part)
        self._waiting.append(judged)
        for waiting in self._waiting:
            for key, follower in waiting.followers.items():
                if key not in waiting.reaches and follower.extend(realised, outcome.target_probs):
                    waiting.reaches[key] = follower.close()

    def _settle(self, *, everything: bool) -> None:
        """Teach the policy what is fully known, oldest first; what the end of the text leaves open is not taught."""
        while self._waiting and (everything or len(self._waiting[0].reaches) == len(self._waiting[0].followers)):
            judged = self._waiting.popleft()
            self._teach(judged, *self._gains_of(judged))

    def _teach(self, judged: _Judged, gains: np.ndarray, observed: np.ndarray) -> None:
        feedback = Feedback(gains, observed, judged.tokens, judged.seconds, judged.drafted, judged.accepted)
        self.policy.update(judged.policy_decision, feedback)

    def _gains_of(self, judged: _Judged) -> tuple[np.ndarray, np.ndarray]:
        """Gains and mask [n_arms] of one decision; moves the arms' virtual pointers on."""
        gains = np.zeros(len(self.arms))
        observed = np.zeros(len(self.arms), dtype=np.bool_)
        verify = self.cost.verify_curve(self._most_nodes, context=judged.start)
        overhead = self.cost.overhead_seconds()
        gains[0], observed[0] = self._gain(1.0, float(verify[0]) + overhead), True
        for key, reach in judged.reaches.items():
            if not reach.complete:
                continue
            source, members = key[0], self._members[key]
            members = members[judged.start >= self._pointers[members]]
            verified = np.minimum(self._budgets[members], judged.nodes[key])
            lengths = reach.expected_lengths(verified)
            draft = self.cost.draft_seconds(source.drafter, self._widest[source], vocab=source.vocab) + overhead
            gains[members] = self._gain(lengths, draft + verify[verified])
            observed[members] = True
            self._expect(members, lengths)
            self._pointers[members] = judged.start + reach.lengths(verified)
        return gains, observed

    def _expect(self, index: int | np.ndarray, length: float | np.ndarray) -> None:
        self.expected_lengths[index] += LENGTH_RATE * (length - self.expected_lengths[index])

    def _gain(self, tokens: Any, seconds: Any) -> Any:
        """In [0, 1], for numbers or arrays."""
        if self.objective == "accepted_length":
            return np.minimum(1.0, (tokens - 1.0) / (2.0 * GAIN_TOKENS))
        value = tokens - self.rate.value * seconds
        return np.minimum(1.0, np.maximum(0.0, 0.5 + value / (2.0 * GAIN_TOKENS)))

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, between requests."""
        return {
            "arms": [str(arm) for arm in self.arms],
            "policy": self.policy.state_dict(),
            "cost": self.cost.state_dict(),
            "rate": self.rate.state(),
            "expected_lengths": self.expected_lengths.tolist(),
            "calibrators": {name: calibrator.state_dict() for name, calibrator in self.calibrators.items()},
            "rng": self._rng.bit_generator.state,
            "counts": [self._steps, self._requests, self._digest.value],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`. Raises ValueError on a state of other arms or another policy."""
        names = [str(arm) for arm in self.arms]
        if state.get("arms") != names:
            raise ValueError(f"state holds the arms {state.get('arms')}, this controller has {names}")
        expected = read_array(state, "expected_lengths", (len(names),), minimum=0.0)
        steps, requests, digest = (int(count) for count in state["counts"])
        rng = read_rng(state, "rng")
        self.policy.load_state_dict(state["policy"])
        self.cost.load_state_dict(state["cost"])
        for name, calibrator in self.calibrators.items():
            calibrator.load_state_dict(state["calibrators"][name])
        self.rate = RunningRate(*(float(value) for value in state["rate"]))
        self.expected_lengths, self._rng = expected, rng
        self._steps, self._requests, self._digest.value = steps, requests, digest
