"""The stack-neutral policy: `decide` before a step, `observe` after it, for the whole batch at once."""

from __future__ import annotations

import os
import threading
import zlib
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from struct import pack
from typing import Any, Literal

import numpy as np

from adaptspec.bandits.checks import check_between, check_count
from adaptspec.bandits.state import check_equal, read_array
from adaptspec.control.cost_curve import CostPrior
from adaptspec.names import unknown_name
from adaptspec.serving.accounting import learn_seconds
from adaptspec.serving.arms import ArmTable, check_drafters, fixed_arm, read_arms
from adaptspec.serving.batches import Batch, BatchReader
from adaptspec.serving.choosing import Choice
from adaptspec.serving.deciding import Decider, KeepWarm
from adaptspec.serving.knowledge import Knowledge
from adaptspec.serving.outcomes import count_outcome, learn_outcome
from adaptspec.serving.records import Attribute, step_attributes
from adaptspec.serving.seconds import DEFAULT_PRIOR
from adaptspec.serving.status import PolicyStatus
from adaptspec.serving.summary import RequestSummary
from adaptspec.serving.types import OFF, Decision, StepContext, StepOutcome
from adaptspec.state_file import load_state, save_state
from adaptspec.types import Arm

Objective = Literal["throughput", "accepted_length"]

CATCH_UP_STEPS = 16
"""Steps over which the price of catching up is spread when plans are compared."""

OPEN_STEPS = 256
"""How many of the latest decisions may still get an outcome."""

KEPT_RECORDS = 64
STATE_KEY = "serving"
"""Where the policy stands in a state file."""
STATE_VERSION = 1


@dataclass(frozen=True, slots=True, eq=False)
class _Memo:
    """What `observe` wants back from `decide`.

    Attributes:
        batch, choice, thought: what was decided about and how.
        owners: int64 [R], index of the row's drafter, -1 for none.
        played: drafters in play, each with its rows and the longest draft that it is asked for.
    """

    batch: Batch
    choice: Choice | None
    thought: bool
    owners: np.ndarray
    played: list[tuple[int, int, int]]


class ServingPolicy:
    """Chooses drafters and draft lengths for all requests of a serving step together.

    What drafts are accepted is learnt apart from what steps cost (`acceptance`, `seconds`), and the plan with the most
    expected tokens per second of the whole step is sought (`planning`, `choosing`). All calls may come from any thread.
    Decisions depend on nothing but the seed, the contexts and the outcomes: ranks that are told the same decide alike.

    Args:
        arms: like "eagle3@4" or `Arm`; the number is the draft length K. "ar", no speculation, is always an arm.
        strategy: a name of `adaptspec.serving.strategies.strategy_names()`, or "fixed:<arm>".
        objective: "throughput", or "accepted_length", which ignores seconds.
        guard: share of the speed without speculation that may be lost at most; None for no guard. Not for "fixed:".
        seed: of all chances.
        uniform: one drafter and one length for the whole batch, for stacks that allow no more.
        stateful: drafters with a state of their own (a KV cache) that goes stale while they are off.
        keep_warm: whether `Decision.refresh` names stateful drafters that are off: "auto", for a few steps after they
            were in play, so that off costs nothing in the long run; "always"; "never".
        policy_share: share of a step's time that deciding may take, by `StepOutcome.policy_seconds`; beyond it
            decisions are reused for some steps.
        prior: of a pass by its tokens, until passes were measured.
        max_requests: requests remembered at once; the one seen longest ago makes room.

    Raises:
        ValueError: unknown strategy, arms without a number, a value out of range.

    >>> policy = ServingPolicy(["eagle3@2", "eagle3@4"], guard=None)
    >>> decision = policy.decide(StepContext(["a", "b"], [100, 200]))
    >>> proposed = decision.lengths
    >>> policy.observe(decision, StepOutcome(proposed, proposed, proposed, seconds=0.02))
    """

    def __init__(
        self,
        arms: Sequence[str | Arm],
        strategy: str = "hedge",
        *,
        objective: Objective = "throughput",
        guard: float | None = 0.05,
        seed: int = 0,
        uniform: bool = False,
        stateful: Collection[str] = (),
        keep_warm: KeepWarm = "auto",
        policy_share: float = 0.02,
        prior: CostPrior = DEFAULT_PRIOR,
        max_requests: int = 4096,
    ) -> None:
        if objective not in ("throughput", "accepted_length"):
            raise unknown_name("objective", objective, ("throughput", "accepted_length"))
        if keep_warm not in ("auto", "always", "never"):
            raise unknown_name("keep_warm", keep_warm, ("auto", "always", "never"))
        if not isinstance(uniform, bool):
            raise ValueError(f"uniform must be True or False, got {uniform!r}")
        if not isinstance(prior, CostPrior) or prior.seconds_at_1 <= 0.0:
            raise ValueError(f"prior must be a CostPrior of more than 0 seconds, got {prior!r}")
        self._arms = ArmTable(read_arms(arms))
        self.arms, self.names, self.drafters = self._arms.arms, self._arms.names, self._arms.drafters
        self.strategy, self.objective, self.guard = strategy, objective, guard
        self.seed = check_count("seed", seed, minimum=0)
        self.uniform, self.keep_warm = uniform, keep_warm
        self.policy_share = check_between("policy_share", policy_share, low=0.0, high=1.0)
        self.max_requests = check_count("max_requests", max_requests, minimum=1)
        self.stateful = check_drafters("stateful", stateful, self.drafters)
        self._prior = prior
        self._fixed = fixed_arm(strategy, self.names)
        self._stateful = np.array([self.drafters.index(name) for name in self.stateful], dtype=np.int64)
        self._reader = BatchReader(
            self.drafters, stateful=self._stateful, longest=self._arms.longest, catch_up_steps=CATCH_UP_STEPS
        )
        self._learn_from(self._empty())
        self._steps = 0
        self._digest = 0
        self._open: dict[int, str] = {}  # digests of decisions without an outcome, by their step
        self._records: deque[dict[str, Attribute]] = deque(maxlen=KEPT_RECORDS)
        self._lock = threading.RLock()

    def _empty(self) -> Knowledge:
        return Knowledge(
            self._arms,
            strategy=self.strategy if self._fixed is None else None,
            timed=self.objective == "throughput",
            guard=self.guard,
            seed=self.seed,
            uniform=self.uniform,
            policy_share=self.policy_share,
            prior=self._prior,
            max_requests=self.max_requests,
        )

    def _learn_from(self, knowledge: Knowledge) -> None:
        """Go on from what is known there."""
        self._known = knowledge
        self._decider = Decider(
            self._arms,
            knowledge,
            fixed=self._fixed,
            uniform=self.uniform,
            stateful=self._stateful,
            keep_warm=self.keep_warm,
        )

    def decide(self, context: StepContext) -> Decision:
        """What to do in the next step.

        Raises:
            TypeError: not a `StepContext`.
            ValueError: drafters that no arm has, more requests than `max_requests`.
        """
        if not isinstance(context, StepContext):
            raise TypeError(f"context must be a StepContext, got {type(context).__name__}")
        for name in ("available", "evidence", "unavailable"):
            if given := getattr(context, name):
                check_drafters(name, given, self.drafters)
        with self._lock:
            return self._decide(context)

    def _decide(self, context: StepContext) -> Decision:
        known = self._known
        slots = known.table.rows(context.request_ids, step=self._steps + 1)
        self._steps += 1
        if known.chooser is not None:
            known.chooser.begin()
        batch = self._reader.read(context, slots, known.table, known.seconds)
        answer = self._decider.decide(batch)
        if answer.arms is None:
            playing, lengths, owners = np.zeros((3, len(context)), dtype=np.int64)
            owners -= 1
            played: list[tuple[int, int, int]] = []
        else:
            playing = np.zeros(len(context), dtype=np.int64)
            playing[batch.may] = answer.arms + 1
            lengths, owners = self._arms.length_of.take(playing), self._arms.owner_of.take(playing)
            if batch.caps is not None:
                lengths = np.minimum(lengths, batch.caps.clip(min=0))
            played = self._arms.played(owners, lengths)
        in_play = [drafter for drafter, _, _ in played]
        refresh = self._decider.refresh(batch, in_play)
        cold = np.zeros(len(context), dtype=np.int64)
        if batch.cold is not None:
            if in_play:
                cold = np.where(owners >= 0, batch.cold[np.arange(len(cold)), owners], 0)
            for drafter in {*in_play, *refresh}.intersection(self._stateful.tolist()):
                # A drafter that runs at all runs over the whole batch, which brings the state of every row up.
                known.table.seen_length[slots, drafter] = context.context_lengths
        if answer.thought or answer.reason == "reused":
            known.table.arms[slots] = playing
        self._digest = zlib.crc32(playing.tobytes() + lengths.tobytes(), self._digest)
        digest = f"{self._digest:08x}"
        self._open[self._steps] = digest
        if len(self._open) > OPEN_STEPS:
            del self._open[next(iter(self._open))]
        plan = None if answer.choice is None else answer.choice.plan
        return Decision(
            self._steps,
            context.request_ids,
            self.names,
            playing,
            lengths,
            plan="+".join(self.drafters[drafter] for drafter in in_play) or "off",
            propensity=1.0 if answer.choice is None else answer.choice.propensity,
            reason=answer.reason,
            refresh=tuple(self.drafters[drafter] for drafter in refresh),
            cold_tokens=cold,
            expected_tokens=None if plan is None else plan.tokens,
            expected_seconds=None if plan is None or self.objective != "throughput" else plan.seconds,
            digest=digest,
            memo=_Memo(batch, answer.choice, answer.thought, owners, played),
        )

    def observe(self, decision: Decision, outcome: StepOutcome) -> None:
        """What came of a step. Outcomes may come late, in any order, or never.

        Raises:
            TypeError: not a `Decision` of a policy, not a `StepOutcome`.
            ValueError: not one of the latest decisions of this policy, or told twice; another number of rows; more
                proposed than was asked for; an unknown drafter. Nothing is learnt then, and the step may be told anew.
        """
        if not isinstance(decision, Decision) or not isinstance(decision.memo, _Memo):
            raise TypeError(f"decision must be a Decision of decide(), got {type(decision).__name__}")
        if not isinstance(outcome, StepOutcome):
            raise TypeError(f"outcome must be a StepOutcome, got {type(outcome).__name__}")
        if len(outcome) != len(decision):
            raise ValueError(
                f"proposed must have one entry per row of the decision: {len(decision)}, got {len(outcome)}"
            )
        if np.count_nonzero(over := outcome.proposed > decision.lengths):
            row = int(over.argmax())
            asked, proposed = decision.lengths[row], outcome.proposed[row]
            raise ValueError(f"proposed must be at most what was asked, {asked}, got {proposed} in row {row}")
        for name in ("draft_seconds", "refresh_seconds"):
            if given := getattr(outcome, name):
                check_drafters(name, given, self.drafters)
        with self._lock:
            if self._open.get(decision.step_id) != decision.digest:
                raise ValueError(
                    f"step_id {decision.step_id} is not one of the latest {OPEN_STEPS} decisions without an outcome"
                )
            del self._open[decision.step_id]
            self._observe(decision, outcome, decision.memo)

    def _observe(self, decision: Decision, outcome: StepOutcome, memo: _Memo) -> None:
        known, batch = self._known, memo.batch
        emitted = outcome.accepted + 1 if outcome.emitted is None else outcome.emitted
        drafting = decision.arms > 0
        if outcome.observed is not None:
            emitted = np.where(outcome.observed, emitted, 0)
            drafting &= outcome.observed
        if batch.context.decoding is not None:
            emitted = np.where(batch.context.decoding, emitted, 0)
        slots = known.table.known(decision.request_ids)
        count_outcome(known.table, slots, outcome, emitted=emitted, drafting=drafting)
        learn_outcome(
            known.acceptance,
            known.table,
            slots,
            decision,
            outcome,
            batch,
            drafters=self.drafters,
            owners=memo.owners,
            judged=drafting,
        )
        tokens = batch.load.tokens + int(outcome.verified.sum()) + outcome.padding
        total = int(emitted.sum())
        wall = self._learn_times(outcome, memo, tokens=tokens, emitted=total) if tokens else None
        known.acceptance.fade(known.table, step=self._steps)
        told = outcome.verified.tobytes() + outcome.accepted.tobytes() + pack("d", wall or 0.0)
        self._digest = zlib.crc32(told, self._digest)
        self._records.append(step_attributes(decision, outcome, tokens=total))

    def _learn_times(self, outcome: StepOutcome, memo: _Memo, *, tokens: int, emitted: int) -> float | None:
        """What a pass of so many tokens took, and what came of the plan; returns the wall time if it is known."""
        known, load = self._known, memo.batch.load
        changes = known.seconds.changes
        wall = learn_seconds(
            known.seconds, outcome, names=self.drafters, played=memo.played, tokens=tokens, context=load.context
        )
        chooser = known.chooser
        if chooser is not None and known.seconds.changes != changes:
            chooser.floor.forget()
        if wall is None or wall <= 0.0:
            return wall
        known.reuse.took(wall, policy=outcome.policy_seconds if memo.thought else None)
        if chooser is not None and memo.choice is not None and emitted:
            chooser.learn(
                memo.choice,
                load=memo.batch.bucket,
                rows=load.rows,
                off=not memo.played,
                tokens=float(emitted),
                seconds=wall,
                off_seconds=load.off_seconds,
            )
        return wall

    def finish(self, request_ids: Iterable[Hashable]) -> dict[Hashable, RequestSummary]:
        """These requests ended: forget them. Unknown ones are ignored.

        Returns:
            A summary of each that was known.
        """
        if isinstance(request_ids, str):
            raise ValueError(f"request_ids must be a list of requests, got the string {request_ids!r}")
        with self._lock:
            table = self._known.table
            ids = [request for request in request_ids if request in table]
            slots = table.known(ids)
            summaries = {
                request: RequestSummary.of(table.totals[slot], table.histogram[slot])
                for request, slot in zip(ids, slots.tolist(), strict=True)
            }
            table.finish(ids)
            return summaries

    def calibrate(self, seconds: Mapping[int, float], *, context: float = 0.0) -> None:
        """Say what passes of so many tokens take, measured beforehand.

        Args:
            seconds: by tokens of the pass.
            context: mean committed tokens at which it was measured.

        Raises:
            ValueError: no mapping, less than one token, a time that is not above 0, a negative context.
        """
        if not isinstance(seconds, Mapping):
            raise ValueError(f"seconds must be a mapping from tokens of a pass, got {seconds!r:.80}")
        checked = {
            check_count("tokens", tokens, minimum=1): check_between("seconds", value, low=0.0, high=1e6)
            for tokens, value in seconds.items()
        }
        context = check_between("context", context, low=0.0, high=1e12, open_low=False)
        with self._lock:
            for tokens, value in sorted(checked.items()):
                for _ in range(3):  # the first measurement of a size is taken to be slow
                    self._known.seconds.observe_verify(tokens, value, context=context)

    @property
    def records(self) -> list[dict[str, Attribute]]:
        """The latest steps with an outcome, oldest first: see `adaptspec.serving.records`."""
        with self._lock:
            return list(self._records)

    def status(self) -> PolicyStatus:
        """What the policy is up to."""
        with self._lock:
            known = self._known
            chooser = known.chooser
            weights = None if chooser is None else chooser.probabilities
            experts = ("free", OFF, *self.drafters)
            return PolicyStatus(
                steps=self._steps,
                off_streak=0 if chooser is None else chooser.off_streak,
                requests=len(known.table),
                probabilities={} if weights is None else dict(zip(experts, weights.tolist(), strict=True)),
                guard_balance=None if chooser is None or chooser.floor.share is None else chooser.floor.balance,
                acceptance={
                    name: tuple(known.acceptance.curve(place).tolist()) for place, name in enumerate(self.drafters)
                },
                pass_seconds={size: value for size, value, _ in known.seconds.table()},
            )

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides the future, as plain Python values that survive JSON exactly; and the latest records.

        Requests whose id is neither text nor a whole number are left out. Decisions that are open stay open.
        """
        with self._lock:
            return {
                "version": STATE_VERSION,
                "arms": list(self.names),
                "settings": self._settings(),
                "progress": [
                    *(self._steps, self._digest, self._known.reuse.left, self._known.reuse.common_arm),
                    *(self._known.reuse.policy_seconds, self._known.reuse.step_seconds),
                ],
                **self._known.state_dict(),
                "records": list(self._records),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`: future decisions are then identical.

        Raises:
            ValueError: another version, other arms or settings, or a damaged state; nothing is changed then.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"state must be a mapping from state_dict(), got {type(state).__name__}")
        check_equal(state, "version", STATE_VERSION)
        check_equal(state, "arms", list(self.names))
        settings = self._settings()
        found = state.get("settings")
        if not isinstance(found, Mapping) or found.keys() != settings.keys():
            raise ValueError(f"state: settings must be a mapping of {', '.join(settings)}")
        for key in settings.keys() - {"prior"}:
            check_equal(found, key, settings[key])
        numbers = read_array(state, "progress", (6,), minimum=0.0).tolist()
        records = state.get("records")
        if not isinstance(records, list) or len(records) > KEPT_RECORDS:
            raise ValueError(f"state: records must be a list of at most {KEPT_RECORDS}, got {records!r:.80}")
        fresh = self._empty()  # so that a damaged state changes nothing
        fresh.load_state_dict(state)
        steps, digest, fresh.reuse.left, fresh.reuse.common_arm = map(int, numbers[:4])
        fresh.reuse.policy_seconds, fresh.reuse.step_seconds = numbers[4:]
        with self._lock:
            self._learn_from(fresh)
            self._steps, self._digest = steps, digest
            self._records = deque(records, maxlen=KEPT_RECORDS)
            self._open.clear()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `state_dict()` to a file, whole or not at all. Raises OSError where that cannot be done."""
        save_state(path, {STATE_KEY: self.state_dict()})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ServingPolicy:
        """The policy that `save` wrote.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not such a file, or a damaged one.
        """
        state = load_state(path).get(STATE_KEY)
        if not isinstance(state, Mapping) or not isinstance(state.get("settings"), Mapping):
            raise ValueError(f"{path} holds no serving policy")
        settings = dict(state["settings"])
        settings["prior"] = CostPrior(*read_array(settings, "prior", (2,), minimum=0.0).tolist())
        try:
            policy = cls(state.get("arms", ()), **settings)
        except TypeError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        policy.load_state_dict(state)
        return policy

    def _settings(self) -> dict[str, Any]:
        """Keyword arguments of this policy, as plain values."""
        return {
            "strategy": self.strategy,
            "objective": self.objective,
            "guard": self.guard,
            "seed": self.seed,
            "uniform": self.uniform,
            "stateful": list(self.stateful),
            "keep_warm": self.keep_warm,
            "policy_share": self.policy_share,
            "prior": [self._prior.seconds_at_1, self._prior.seconds_per_node],
            "max_requests": self.max_requests,
        }

    def _fresh(self) -> ServingPolicy:
        return type(self)(self.arms, **{**self._settings(), "prior": self._prior})

    def __deepcopy__(self, memo: dict[int, Any]) -> ServingPolicy:
        """A policy of its own with the same knowledge; decisions that are open stay with the original."""
        copy = self._fresh()
        copy.load_state_dict(self.state_dict())
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.arms, {**self._settings(), "prior": self._prior}, self.state_dict())


def _restore(arms: Sequence[Arm], settings: dict[str, Any], state: dict[str, Any]) -> ServingPolicy:
    policy = ServingPolicy(arms, **settings)
    policy.load_state_dict(state)
    return policy
