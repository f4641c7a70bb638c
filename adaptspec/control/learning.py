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
from adaptspec.bandits.state import read_array, read_float, read_rng
from adaptspec.control.added_rows import AddedRows
from adaptspec.control.assembly import Candidates, fit_to_cost, learn, value_candidates
from adaptspec.control.calibration import Calibrator
from adaptspec.control.catching_up import CATCH_UP_STEPS, CatchUpAllowance
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
    """Where the proposals of an arm come from: arms of one source differ in budget only. `str()` is `Arm.source`."""

    drafter: str
    vocab: str

    def __str__(self) -> str:
        return Arm(self.drafter, "auto", self.vocab).source


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
    to the run. An arm whose drafter is cold is played only if catching up is worth it (`control.catching_up`); else the
    arm of the step before is played again.

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
        self._added_rows = AddedRows()
        self._budgets = [MAX_NODES if arm.budget == "auto" else arm.budget for arm in arms]
        members: dict[tuple[Source, bool], list[int]] = {}
        self._widest: dict[Source, int] = {}
        for index, arm in enumerate(self.arms[1:], start=1):
            source = _source(arm)
            members.setdefault((source, arm.budget == "auto"), []).append(index)
            nodes = AUTO_NODES if arm.budget == "auto" else arm.budget
            self._widest[source] = max(self._widest.get(source, 0), nodes)
        self._widest_arms = {source: Arm(source.drafter, nodes, source.vocab) for source, nodes in self._widest.items()}
        self._members = members
        only_automatic = all(automatic for _, automatic in members)  # no arm has a size to keep
        self._sizes = objective == "throughput" and only_automatic
        self._most_nodes = max(self._widest.values(), default=0)
        self._drafters = list(dict.fromkeys(source.drafter for source in self._widest))
        self.calibrators = {str(source): Calibrator() for source, automatic in self._members if automatic}
        self._rng = np.random.default_rng(seed)
        self._digest = Digest()
        self._steps = 0
        self._requests = 0
        self._latest_length = 1.0
        self._pointers = [0] * len(arms)
        self._waiting: deque[_Judged] = deque()
        self._chosen: PolicyDecision | None = None
        self._played = 0  # the arm of the latest step
        self._instead = ""  # why it is not the one that the policy chose
        self._allowance = CatchUpAllowance()
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
        self._pointers = [0] * len(self.arms)
        self._latest_length = 1.0
        self._chosen = None
        self._played = 0

    def select(self, context: StepContext) -> Decision:
        chosen = self.policy.select(self._policy_context(context))
        self._chosen = chosen
        self._position = context.length
        self._steps += 1
        index, self._instead = chosen.index, ""
        if self.arms[index].drafter in context.unavailable:
            index, self._instead = 0, "set aside"
        elif cold := context.cold_tokens.get(self.arms[index].drafter, 0):
            warm = 0 if self.arms[self._played].drafter in context.unavailable else self._played
            if not self._pays_to_warm(index, warm, cold):
                index, self._instead = warm, "cold"
        self._played = index
        arm = self.arms[index]
        asked = self._asked(arm, context)
        return Decision(self._steps, arm, chosen.propensity, asked=asked, rate=self.rate.value if self._sizes else 0.0)

    def _pays_to_warm(self, index: int, warm: int, cold: int) -> bool:
        """Whether to switch from one arm to another whose drafter is `cold` tokens behind."""
        catch_up = self.cost.catch_up_seconds(self.arms[index].drafter, cold)
        rate = self.rate.value
        if self.objective == "accepted_length" or catch_up == 0.0 or rate == 0.0:
            return True
        gain = CATCH_UP_STEPS * (self._value(index) - self._value(warm))
        return gain > rate * catch_up or self._allowance.take(catch_up)

    def _value(self, index: int) -> float:
        """Tokens that a step with an arm is known to gain over what its seconds are worth."""
        arm = self.arms[index]
        nodes = self._most_nodes if arm.budget == "auto" else arm.budget
        seconds = self._step_seconds(arm, nodes, context=self._position)
        return float(self.expected_lengths[index]) - self.rate.value * seconds

    def _step_seconds(self, arm: Arm, nodes: int, *, context: int = 0) -> float:
        """Of a step with an arm, the rows that its drafter adds to the pass included."""
        added = self._added_rows.count(arm.source, nodes)
        return self.cost.step_seconds(arm, nodes, context=context, extra_rows=added)

    def _asked(self, played: Arm, context: StepContext) -> tuple[Arm, ...]:
        """The played drafter, and others if the policy learns from all, other vocabularies of the played one among
        them; then for all nodes that arms could use."""
        widen = self.policy.full_information or played.budget == "auto"
        asked: dict[Source, Arm] = {}
        if played.drafter != "ar":
            asked[_source(played)] = self._widest_arms[_source(played)] if widen else played
        if self.policy.full_information:
            chances = self._rng.random(len(self._widest)).tolist()  # drawn always: the stream must not depend on times
            allowed = EVALUATION_SHARE / len(self._widest) * self.cost.verify_seconds(0, context=context.length)
            for chance, (source, nodes) in zip(chances, self._widest.items(), strict=True):
                if source in asked or source.drafter in context.unavailable:
                    continue
                seconds = self.cost.draft_seconds(source.drafter, nodes, vocab=source.vocab)
                if cold := context.cold_tokens.get(source.drafter, 0):
                    seconds += self.cost.catch_up_seconds(source.drafter, cold)
                if chance * seconds <= allowed:
                    asked[source] = self._widest_arms[source]
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
            name, tree = arm.source, trees.get(arm.source)
            if tree is None or tree.siblings != "deterministic" or (_source(arm), True) not in self._members:
                continue
            candidates = self._candidates[name] = value_candidates([tree], [name], calibrators=self.calibrators)
            curve = self._added_rows.verify_curve(self.cost, name, self._most_nodes, context=self._position)
            rate = self.rate.value
            self._kept[name], _ = fit_to_cost(candidates.tree, verify_curve=curve, rate=rate if rate > 0.0 else None)
        whole = super().assemble(decision, trees)
        budget = decision.arm.budget
        if budget == "auto":
            return replace(whole, tree=self._kept.get(decision.arm.source, DraftTree.empty()))
        if whole.tree.siblings != "deterministic":
            return whole
        return Assembly(truncate(whole.tree, budget), whole.arm, whole.used)

    def trust_costs(self) -> None:
        if isinstance(self.policy, Guard):
            for index in np.flatnonzero(self.policy.never_played).tolist():
                arm = self.arms[index]
                nodes = self._most_nodes if arm.budget == "auto" else arm.budget
                self.policy.calibrate(index, seconds=self._step_seconds(arm, nodes))

    def update(self, decision: Decision, outcome: StepOutcome) -> StepNotes:
        chosen, self._chosen = self._chosen, None
        assert chosen is not None, "update follows select"
        record = outcome.record
        notes = self._notes(decision, outcome, chosen)
        observe_step(self.cost, outcome, asked=decision.asked)
        self._added_rows.learn(outcome.offered_rows)
        tokens, seconds = float(record.emitted), record.seconds
        self.rate.add(tokens, seconds)
        self._latest_length = tokens
        for candidates in self._candidates.values():
            learn(candidates, outcome.tokens, calibrators=self.calibrators)
        self._allowance.earn(seconds)
        if self._instead:
            chosen = replace(chosen, index=self._played, propensity=1.0)
            if not (self.policy.off_policy or isinstance(self.policy, Guard)):
                return notes
        judged = _Judged(chosen, record.position, {}, {}, tokens, seconds, record.verified, record.accepted)
        if self.policy.full_information:
            self._follow(judged, decision, outcome)
            self._settle(everything=outcome.finished)
            if outcome.finished:
                self._pointers = [0] * len(self.arms)
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
        if self._instead:
            reason, index = self._instead, self._played
        elif isinstance(self.policy, Guard) and self.policy.overruled(chosen):
            reason = "guard"
        gain = record.emitted - self.rate.value * record.seconds
        rows = record.verified + outcome.extra_rows
        expected = self.cost.overhead_seconds() + self.cost.verify_seconds(rows, context=record.position)
        expected += sum(self.cost.draft_seconds(arm.drafter, arm.budget, vocab=arm.vocab) for arm in decision.asked)
        digest = self._digest.add(outcome.tokens, index, gain)
        return StepNotes(reason, float(self.expected_lengths[index]), expected, gain, digest)

    def _follow(self, judged: _Judged, decision: Decision, outcome: StepOutcome) -> None:
        """Put a decision's proposals in the queue, and take in the text that the step revealed."""
        realised = outcome.tokens.tolist()
        for arm in decision.asked:
            tree, source = outcome.trees.get(arm.source), _source(arm)
            if tree is None or tree.siblings != "deterministic":
                continue
            for automatic, part in ((False, tree), (True, self._kept.get(arm.source))):
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
        count, start, pointers = len(self.arms), judged.start, self._pointers
        lengths, seconds, seen = [0.0] * count, [0.0] * count, [False] * count  # few of each kind: faster than arrays
        overhead, plain = self.cost.overhead_seconds(), self.cost.verify_curve(self._most_nodes, context=start)
        for key, reach in judged.reaches.items():
            if not reach.complete:
                continue
            source, nodes = key[0], judged.nodes[key]
            draft = self.cost.draft_seconds(source.drafter, self._widest[source], vocab=source.vocab) + overhead
            verify, name = plain, self._widest_arms[source].source
            if name in self._added_rows:
                verify = self._added_rows.verify_curve(self.cost, name, self._most_nodes, context=start)
            for index in self._members[key]:
                if start < pointers[index]:
                    continue
                verified = min(self._budgets[index], nodes)
                reached = reach.length(verified)
                lengths[index] = reached if reach.masses is None else reach.expected_length(verified)
                seconds[index] = draft + verify.item(verified)
                seen[index] = True
                pointers[index] = start + reached
        observed, gained = np.array(seen), np.array(lengths, dtype=np.float64)
        self._expect(observed, gained[observed])
        gained[0], seconds[0], observed[0] = 1.0, plain.item(0) + overhead, True
        gains = self._gain(gained, np.array(seconds))
        gains[~observed] = 0.0
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
            "allowance": self._allowance.seconds,
            "added_rows": self._added_rows.state(),
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
        allowance = CatchUpAllowance(read_float(state, "allowance"))
        added_rows = AddedRows.from_state(state.get("added_rows", {}))
        self.policy.load_state_dict(state["policy"])
        self.cost.load_state_dict(state["cost"])
        for name, calibrator in self.calibrators.items():
            calibrator.load_state_dict(state["calibrators"][name])
        self.rate = RunningRate(*(float(value) for value in state["rate"]))
        self.expected_lengths, self._rng, self._allowance = expected, rng, allowance
        self._added_rows = added_rows
        self._steps, self._requests, self._digest.value = steps, requests, digest
