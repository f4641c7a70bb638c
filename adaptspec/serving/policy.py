"""The stack-neutral policy: `decide` before a step, `observe` after it, for the whole batch at once."""

from __future__ import annotations

import os
import threading
import zlib
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

import numpy as np

from adaptspec.bandits.checks import check_between, check_count
from adaptspec.bandits.state import check_equal, read_array
from adaptspec.control.cost_curve import CostPrior
from adaptspec.names import unknown_name
from adaptspec.serving.acceptance import AcceptanceModel, Prospects
from adaptspec.serving.accounting import learn_seconds
from adaptspec.serving.arms import check_drafters, fixed_arm, read_arms
from adaptspec.serving.batches import Batch, read_batch
from adaptspec.serving.choosing import Choice, PlanChooser
from adaptspec.serving.fitting import fit_budget
from adaptspec.serving.outcomes import count_outcome, learn_outcome
from adaptspec.serving.planning import Load, Plan, Planner
from adaptspec.serving.records import Attribute, step_attributes
from adaptspec.serving.requests import RequestTable
from adaptspec.serving.seconds import DEFAULT_PRIOR, StepSeconds
from adaptspec.serving.status import PolicyStatus
from adaptspec.serving.summary import RequestSummary
from adaptspec.serving.types import OFF, Decision, StepContext, StepOutcome, drafter_of
from adaptspec.state_file import load_state, save_state
from adaptspec.types import Arm

Objective = Literal["throughput", "accepted_length"]
KeepWarm = Literal["auto", "always", "never"]

WARM_STEPS = 8
"""Steps for which a drafter's state is kept up to date after it was last in play."""

CATCH_UP_STEPS = 16
"""Steps over which the price of catching up is spread when plans are compared."""

OPEN_STEPS = 256
"""How many of the latest decisions may still get an outcome."""

KEPT_RECORDS = 64
STATE_KEY = "serving"
"""Where the policy stands in a state file."""
STATE_VERSION = 1
_POLICY_FADE = 0.9


@dataclass(frozen=True, slots=True)
class _Memo:
    """What `observe` wants back from `decide`."""

    batch: Batch
    choice: Choice | None
    off_seconds: float
    thought: bool


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
        self.arms = read_arms(arms)
        self.names = (OFF, *map(str, self.arms))
        labels = [drafter_of(name) or "" for name in self.names[1:]]
        self.drafters = tuple(dict.fromkeys(labels))
        self.strategy, self.objective, self.guard = strategy, objective, guard
        self.seed = check_count("seed", seed, minimum=0)
        self.uniform, self.keep_warm = uniform, keep_warm
        self.policy_share = check_between("policy_share", policy_share, low=0.0, high=1.0)
        self.max_requests = check_count("max_requests", max_requests, minimum=1)
        self.stateful = check_drafters("stateful", stateful, self.drafters)
        self._stateful = np.array([self.drafters.index(name) for name in self.stateful], dtype=np.int64)
        self._whose = np.array([self.drafters.index(label) for label in labels], dtype=np.int64)
        self._lengths = np.array([arm.budget for arm in self.arms], dtype=np.int64)
        self._longest = int(self._lengths.max(initial=1))
        self._fixed = fixed_arm(strategy, self.names)
        self._chooser: PlanChooser | None = None
        if self._fixed is None:
            self._chooser = PlanChooser(
                len(self.drafters), strategy=strategy, guard=guard, seed=self.seed, uniform=uniform
            )
        self._table = RequestTable(len(self.drafters), longest=self._longest, max_requests=self.max_requests)
        self._acceptance = AcceptanceModel(len(self.drafters), self._longest)
        self._prior = prior
        self._seconds = StepSeconds(len(self.drafters), prior=prior)
        self._planner = Planner(self._whose, self._lengths, timed=objective == "throughput")
        self._steps = 0
        self._digest = 0
        self._reuse_left = 0
        self._common_arm = 0
        self._policy_seconds = self._step_seconds = 0.0
        self._open: dict[int, None] = {}
        self._records: deque[dict[str, Attribute]] = deque(maxlen=KEPT_RECORDS)
        self._lock = threading.RLock()

    def decide(self, context: StepContext) -> Decision:
        """What to do in the next step.

        Raises:
            TypeError: not a `StepContext`.
            ValueError: drafters that no arm has, more requests than `max_requests`.
        """
        if not isinstance(context, StepContext):
            raise TypeError(f"context must be a StepContext, got {type(context).__name__}")
        for name in ("available", "evidence"):
            check_drafters(name, getattr(context, name), self.drafters)
        with self._lock:
            return self._decide(context)

    def _decide(self, context: StepContext) -> Decision:
        self._steps += 1
        if self._chooser is not None:
            self._chooser.begin()
        slots = self._table.rows(context.request_ids, step=self._steps)
        batch = read_batch(
            context,
            slots,
            self._table,
            self._seconds,
            drafters=self.drafters,
            stateful=self._stateful,
            longest=self._longest,
            catch_up_steps=CATCH_UP_STEPS,
        )
        choice, arms, reason, thought = self._choose(batch)
        lengths = np.zeros(len(context), dtype=np.int64)
        playing = np.zeros(len(context), dtype=np.int64)
        if arms is not None and len(self._lengths):
            rows = np.flatnonzero(batch.may)
            drafting = arms >= 0
            playing[rows] = np.where(drafting, arms + 1, 0)
            lengths[rows] = np.where(drafting, np.minimum(self._lengths[arms], batch.caps[rows]), 0)
        owners = np.where(playing > 0, self._whose[playing - 1], -1)
        in_play = np.flatnonzero(np.bincount(owners + 1, minlength=1)[1:]).tolist()
        refresh = self._refresh(batch, in_play)
        table, slots = self._table, batch.slots
        cold = np.zeros(len(context), dtype=np.int64)
        if len(self._stateful) and in_play:
            cold = np.where(owners >= 0, batch.cold[np.arange(len(cold)), owners], 0)
        for drafter in {*in_play, *refresh}.intersection(self._stateful.tolist()):
            # A drafter that runs at all runs over the whole batch, which brings the state of every row up.
            table.seen_length[slots, drafter] = context.context_lengths
        if thought or reason == "reused":
            table.arms[slots] = playing
        plan = None if choice is None else choice.plan
        off_seconds = self._off_seconds(batch.load)
        self._digest = zlib.crc32(playing.tobytes() + lengths.tobytes(), self._digest)
        self._open[self._steps] = None
        if len(self._open) > OPEN_STEPS:
            del self._open[next(iter(self._open))]
        return Decision(
            self._steps,
            context.request_ids,
            self.names,
            playing,
            lengths,
            plan="+".join(self.drafters[drafter] for drafter in in_play) or "off",
            propensity=1.0 if choice is None else choice.propensity,
            reason=reason,
            refresh=tuple(self.drafters[drafter] for drafter in refresh),
            cold_tokens=cold,
            expected_tokens=None if plan is None else plan.tokens,
            expected_seconds=None if plan is None or self.objective != "throughput" else plan.seconds,
            digest=f"{self._digest:08x}",
            memo=_Memo(batch, choice, off_seconds, thought),
        )

    def _choose(self, batch: Batch) -> tuple[Choice | None, np.ndarray | None, str, bool]:
        """The choice, the arms of the rows that may draft (None: none), the reason, and whether it took thinking."""
        context, load = batch.context, batch.load
        rows = int(np.count_nonzero(batch.may))
        if not rows or not load.usable.any() or context.draft_budget == 0:
            return None, None, "nothing to do", False
        if self._fixed is not None:
            arm = self._fixed
            if arm < 0 or not load.usable[self._whose[arm]]:
                return None, None, "fixed", False
            return None, self._fit(batch, np.full(rows, arm), None), "fixed", False
        assert self._chooser is not None
        reason = self._chooser.shortcut(batch.bucket)
        if reason is not None:
            plan = self._planner.off(load, self._seconds, rows=rows)
            return Choice(plan, reason), None, reason, False
        if self._reuse_left and self._common_arm and load.usable.all():
            self._reuse_left -= 1
            choice = self._chooser.reuse()
            return choice, self._fit(batch, self._reused(batch), None), choice.reason, False
        prospects = self._prospects(batch)
        off = self._planner.off(load, self._seconds, rows=rows)
        if self.uniform:
            every = self._planner.uniform(prospects, load, self._seconds)
            every = [plan for plan in every if load.usable[plan.drafters[0]]]
            alone = [_best(every, drafter) for drafter in range(len(self.drafters))]
            mixed = every
        else:
            alone, mixed = self._planner.plans(prospects, load, self._seconds, keep=self._chooser.under_way)
            alone = [plan if load.usable[drafter] else None for drafter, plan in enumerate(alone)]

        def shortest() -> list[Plan | None]:
            plans = self._planner.uniform(prospects, load, self._seconds, arms=self._planner.starts)
            return [plan if load.usable[drafter] else None for drafter, plan in enumerate(plans)]

        choice = self._chooser.choose(off, alone, mixed, shortest, load=batch.bucket, rows=rows)
        arms = self._fit(batch, choice.plan.arms, prospects)
        drafting = arms[arms >= 0]
        self._common_arm = int(np.bincount(drafting).argmax()) + 1 if len(drafting) else 0
        share = self.policy_share * self._step_seconds
        if self._policy_seconds > share > 0.0:
            self._reuse_left = ceil(self._policy_seconds / share) - 1
        return choice, arms, choice.reason, True

    def _prospects(self, batch: Batch) -> Prospects:
        may, context = batch.may, batch.context
        return self._acceptance.prospects(
            self._table,
            batch.slots[may],
            buckets=batch.contexts[may],
            evidence=None if batch.evidence is None else batch.evidence[:, may],
            available={self.drafters.index(name): known[may] for name, known in context.available.items()},
            caps=batch.caps[may],
        )

    def _reused(self, batch: Batch) -> np.ndarray:
        """What the rows had before; new ones get what most have."""
        before = self._table.arms[batch.slots[batch.may]]
        new = self._table.totals[batch.slots[batch.may], 0] == 0
        if self.uniform:
            new[:] = True
        return np.where(new, self._common_arm, before) - 1

    def _fit(self, batch: Batch, arms: np.ndarray, prospects: Prospects | None) -> np.ndarray:
        """Arms that fit the step's draft budget."""
        worth = None if prospects is None else prospects.accepted
        return fit_budget(
            arms,
            self._whose,
            self._lengths,
            caps=batch.caps[batch.may],
            budget=batch.context.draft_budget,
            uniform=self.uniform,
            worth=worth,
        )

    def _refresh(self, batch: Batch, in_play: Sequence[int]) -> list[int]:
        """Stateful drafters to bring up to date although they draft nothing."""
        if self.keep_warm == "never" or not batch.load.rows:
            return []
        found = []
        for drafter in self._stateful.tolist():
            if drafter in in_play or not batch.load.usable[drafter] or not batch.cold[:, drafter].any():
                continue
            chooser = self._chooser
            recent = chooser is not None and max(chooser.last_played(drafter), chooser.off_streak) <= WARM_STEPS
            if self.keep_warm == "always" or recent:
                found.append(drafter)
        return found

    def _off_seconds(self, load: Load) -> float:
        return float(self._seconds.verify(max(load.tokens, 1), context=load.context)) + self._seconds.overhead

    def observe(self, decision: Decision, outcome: StepOutcome) -> None:
        """What came of a step. Outcomes may come late, in any order, or never.

        Raises:
            TypeError: not a `Decision` of a policy, not a `StepOutcome`.
            ValueError: not one of the latest decisions of this policy, or told twice; another number of rows; more
                proposed than was asked for; an unknown drafter. Nothing is learnt then.
        """
        if not isinstance(decision, Decision) or not isinstance(decision.memo, _Memo):
            raise TypeError(f"decision must be a Decision of decide(), got {type(decision).__name__}")
        if not isinstance(outcome, StepOutcome):
            raise TypeError(f"outcome must be a StepOutcome, got {type(outcome).__name__}")
        if len(outcome) != len(decision):
            raise ValueError(
                f"proposed must have one entry per row of the decision: {len(decision)}, got {len(outcome)}"
            )
        if (over := outcome.proposed > decision.lengths).any():
            row = int(over.argmax())
            asked, proposed = decision.lengths[row], outcome.proposed[row]
            raise ValueError(f"proposed must be at most what was asked, {asked}, got {proposed} in row {row}")
        for field in ("draft_seconds", "refresh_seconds"):
            check_drafters(field, getattr(outcome, field), self.drafters)
        with self._lock:
            if decision.step_id not in self._open:
                raise ValueError(
                    f"step_id {decision.step_id} is not one of the latest {OPEN_STEPS} decisions without an outcome"
                )
            del self._open[decision.step_id]
            self._observe(decision, outcome, decision.memo)

    def _observe(self, decision: Decision, outcome: StepOutcome, memo: _Memo) -> None:
        batch = memo.batch
        observed = np.ones(len(decision), dtype=bool) if outcome.observed is None else outcome.observed
        emitted = outcome.accepted + 1 if outcome.emitted is None else outcome.emitted
        emitted = np.where(observed & batch.decoding, emitted, 0)
        playing = decision.arms > 0
        owners = np.where(playing, self._whose[decision.arms - 1], -1) if len(self._whose) else decision.arms - 1
        slots = self._table.known(decision.request_ids)
        count_outcome(self._table, slots, outcome, emitted=emitted, drafting=playing & observed)
        learn_outcome(
            self._acceptance,
            self._table,
            slots,
            decision,
            outcome,
            batch,
            drafters=self.drafters,
            owners=owners,
            judged=playing & observed,
        )
        tokens = batch.load.tokens + int(outcome.verified.sum()) + outcome.padding
        wall = None
        changes = self._seconds.changes
        if tokens:
            wall = learn_seconds(
                self._seconds,
                outcome,
                names=self.drafters,
                owners=owners,
                lengths=decision.lengths,
                tokens=tokens,
                context=batch.load.context,
            )
        if self._seconds.changes != changes and self._chooser is not None:
            self._chooser.floor.forget()
        total = int(emitted.sum())
        if wall is not None and wall > 0.0:
            if memo.thought:
                self._policy_seconds = _faded(self._policy_seconds, outcome.policy_seconds)
            self._step_seconds = _faded(self._step_seconds, wall)
            if memo.choice is not None and self._chooser is not None and total:
                self._chooser.learn(
                    memo.choice,
                    load=batch.bucket,
                    rows=batch.load.rows,
                    off=decision.off,
                    tokens=float(total),
                    seconds=wall,
                    off_seconds=memo.off_seconds,
                )
        self._acceptance.fade(self._table, step=self._steps)
        for array in (outcome.verified, outcome.accepted):
            self._digest = zlib.crc32(array.tobytes(), self._digest)
        self._digest = zlib.crc32(np.float64(wall or 0.0).tobytes(), self._digest)
        self._records.append(step_attributes(decision, outcome, tokens=total))

    def finish(self, request_ids: Iterable[Hashable]) -> dict[Hashable, RequestSummary]:
        """These requests ended: forget them. Unknown ones are ignored.

        Returns:
            A summary of each that was known.
        """
        if isinstance(request_ids, str):
            raise ValueError(f"request_ids must be a list of requests, got the string {request_ids!r}")
        with self._lock:
            ids = [request for request in request_ids if request in self._table]
            slots = self._table.known(ids)
            summaries = {
                request: RequestSummary.of(self._table.totals[slot], self._table.histogram[slot])
                for request, slot in zip(ids, slots.tolist(), strict=True)
            }
            self._table.finish(ids)
            return summaries

    def calibrate(self, seconds: Mapping[int, float], *, context: float = 0.0) -> None:
        """Say what passes of so many tokens take, measured beforehand.

        Args:
            seconds: by tokens of the pass.
            context: mean committed tokens at which it was measured.
        """
        checked = {
            check_count("tokens", tokens, minimum=1): check_between("seconds", value, low=0.0, high=1e6)
            for tokens, value in seconds.items()
        }
        with self._lock:
            for tokens, value in sorted(checked.items()):
                for _ in range(3):  # the first measurement of a size is taken to be slow
                    self._seconds.observe_verify(tokens, value, context=context)

    @property
    def records(self) -> list[dict[str, Attribute]]:
        """The latest steps with an outcome, oldest first: see `adaptspec.serving.records`."""
        with self._lock:
            return list(self._records)

    def status(self) -> PolicyStatus:
        """What the policy is up to."""
        with self._lock:
            chooser = self._chooser
            weights = None if chooser is None else chooser.probabilities
            experts = ("free", OFF, *self.drafters)
            return PolicyStatus(
                steps=self._steps,
                off_streak=0 if chooser is None else chooser.off_streak,
                requests=len(self._table),
                probabilities={} if weights is None else dict(zip(experts, weights.tolist(), strict=True)),
                guard_balance=None if chooser is None or chooser.floor.share is None else chooser.floor.balance,
                acceptance={
                    name: tuple(self._acceptance.curve(place).tolist()) for place, name in enumerate(self.drafters)
                },
                pass_seconds={size: value for size, value, _ in self._seconds.table()},
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
                    *(self._steps, self._digest, self._reuse_left, self._common_arm),
                    *(self._policy_seconds, self._step_seconds),
                ],
                "acceptance": self._acceptance.state_dict(),
                "seconds": self._seconds.state_dict(),
                "planner": self._planner.state_dict(),
                "chooser": None if self._chooser is None else self._chooser.state_dict(),
                "requests": self._table.state_dict(),
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
        # Read into a fresh policy first, so that a damaged state changes nothing.
        fresh = self._fresh()
        fresh._acceptance.load_state_dict(state.get("acceptance"))
        fresh._seconds.load_state_dict(state.get("seconds"))
        fresh._planner.load_state_dict(state.get("planner"))
        if fresh._chooser is not None:
            fresh._chooser.load_state_dict(state.get("chooser"))
        fresh._table.load_state_dict(state.get("requests"))
        with self._lock:
            for name in ("_acceptance", "_seconds", "_planner", "_chooser", "_table"):
                setattr(self, name, getattr(fresh, name))
            self._steps, self._digest, self._reuse_left, self._common_arm = map(int, numbers[:4])
            self._policy_seconds, self._step_seconds = numbers[4:]
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


def _best(plans: Sequence[Plan], drafter: int) -> Plan | None:
    return max((plan for plan in plans if plan.drafters == (drafter,)), key=lambda plan: plan.rate, default=None)


def _faded(old: float, new: float) -> float:
    return new if old == 0.0 else _POLICY_FADE * old + (1.0 - _POLICY_FADE) * new
