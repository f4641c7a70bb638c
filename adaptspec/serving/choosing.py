"""Which plan is played: strategy, hysteresis, guard, probes, and the way back from off."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from adaptspec.bandits import Feedback, PolicyContext
from adaptspec.bandits.base import PolicyDecision
from adaptspec.bandits.state import read_array, read_int
from adaptspec.control.rate import RunningRate
from adaptspec.serving.floor import Floor
from adaptspec.serving.planning import Plan
from adaptspec.serving.strategies import ALONE, FREE, OFF, make_chooser

REASONS: Mapping[str, str] = {
    "nothing to do": "no row may draft: all are in their prompts, at their limit, or asked for no speculation",
    "fixed": "the strategy plays one arm always",
    "worth most": "it is expected to give the most tokens per second of the whole step",
    "nothing pays": "no draft is expected to be worth its seconds",
    "kept": "another plan is expected to be better, but not by so much that switching would pay",
    "strategy": "the strategy chose it among the experts",
    "baseline": "no speculation is measured at this load, for the guard",
    "guard": "the guard refused what was chosen: speculation has used up what it may lose",
    "off": "nothing was worth its seconds at the latest look, and the next look is not due",
    "probe": "to see whether a drafter that was not played for long has become better",
    "reused": "thinking anew would take too large a share of the step's time",
}
"""Why steps are decided as they are: the keys stand in decisions and records."""

MARGIN = 0.03
"""A plan must be better by this share to take another's place."""

DWELL, DWELL_MARGIN = 8, 0.15
"""For so many steps after a switch it must be better by this share."""

LOOK_EVERY = 16
"""While speculation is off it is looked at anew after so many steps at the latest."""

PROBE_EVERY, LONGEST_WAIT = 64, 1024
"""Steps off after which a drafter is tried again; doubled with every try that ends in off."""

TRY_FIRST, TRY_EVERY = 32, 512
"""While speculating, steps after which the drafter played longest ago is tried, at first and in the long run."""

PROBE_TRIALS = 8
"""Rows times steps of a probe."""

GAIN_TOKENS = 2.0
"""A step worth so many tokens per row more than the running rate has gain 1, so many less gain 0."""

MAX_LOADS = 64


@dataclass(frozen=True, slots=True)
class Choice:
    """What is played.

    Attributes:
        plan, reason, propensity: as in a decision.
        expert, asked: the expert that is played and the strategy's own decision, if there is one.
        estimates: float64 [experts, 2], expected tokens and seconds; None if nothing was estimated.
        same: bool [experts], whose plan is the played one.
    """

    plan: Plan
    reason: str
    propensity: float = 1.0
    expert: int = -1
    asked: PolicyDecision | None = None
    estimates: np.ndarray | None = None
    same: np.ndarray | None = None


@dataclass(slots=True)
class _Progress:
    """What decides which step comes next."""

    step: int = 0
    off_streak: int = 0
    since_look: int = LOOK_EVERY
    since_switch: int = DWELL
    probe_wait: int = PROBE_EVERY
    next_probe: int = PROBE_EVERY
    probe_left: int = 0
    probe_drafter: int = -1
    probes: int = 0
    try_wait: int = TRY_FIRST
    next_try: int = TRY_FIRST
    quiet: int = 0  # 1 if nothing paid at the latest look
    plan: list[int] = field(default_factory=list)
    played: list[int] = field(default_factory=list)  # per drafter, the step in which it was last in play


class PlanChooser:
    """See the module.

    Args:
        drafters: their number, D.
        strategy: a name of `strategies.strategy_names()`.
        guard: share that may be lost, None for no guard.
        uniform: plans are told apart by their arm, and not only by their drafters.
    """

    def __init__(self, drafters: int, *, strategy: str, guard: float | None, seed: int, uniform: bool) -> None:
        self.floor = Floor(guard)
        self._experts = ALONE + drafters
        self._policy = make_chooser(strategy, experts=self._experts, seed=seed)
        self._uniform = uniform
        self.probabilities: np.ndarray | None = None  # float64 [experts], of the latest choice of the strategy
        self._latest: Plan | None = None
        self._rates: dict[int, RunningRate] = {}
        self._now = _Progress(played=[0] * drafters)

    @property
    def off_streak(self) -> int:
        """Latest steps in a row without speculation."""
        return self._now.off_streak

    @property
    def under_way(self) -> tuple[int, ...]:
        """Drafters of the latest plan that drafts."""
        return () if self._latest is None else self._latest.drafters

    def last_played(self, drafter: int) -> int:
        """How many steps ago a drafter was in play."""
        return self._now.step - self._now.played[drafter]

    def begin(self) -> None:
        """A step begins, whatever will be decided in it."""
        self._now.step += 1

    def shortcut(self, load: int) -> str | None:
        """The reason to be off in this step without looking, None if there is none."""
        now = self._now
        if self.floor.must_measure(load, step=now.step):
            return "baseline"
        if not now.quiet or not now.off_streak or now.probe_left or now.off_streak >= now.next_probe:
            return None
        if now.since_look < min(now.off_streak // 2, LOOK_EVERY):
            now.since_look += 1
            now.off_streak += 1
            return "off"
        return None

    def choose(
        self,
        off: Plan,
        alone: Sequence[Plan | None],
        others: Sequence[Plan],
        shortest: Callable[[], Sequence[Plan | None]],
        *,
        load: int,
        rows: int,
    ) -> Choice:
        """Pick a plan.

        Args:
            off: no speculation.
            alone: the best plan of every drafter alone, None where it cannot be played.
            others: further plans, such as mixtures.
            shortest: gives every drafter at its shortest length on all rows, for probes; None where it is unavailable.
            rows: that may draft.
        """
        now = self._now
        now.since_switch += 1
        now.since_look = 0
        probe = self._probe(alone, shortest, rows=rows)
        if probe is not None:
            return self._guarded(Choice(probe, "probe"), off)
        free, reason = self._free(off, [plan for plan in (*alone, *others) if plan is not None])
        plans = [free, off, *(off if plan is None else plan for plan in alone)]
        expert, propensity, asked = FREE, 1.0, None
        if self._policy is not None:
            asked = self._policy.select(PolicyContext(bucket=load))
            expert, propensity, self.probabilities = asked.index, asked.propensity, asked.probabilities
        plan = plans[expert]
        estimates = np.array([(p.tokens, p.seconds) for p in plans])
        same = np.array([_same(p, plan) for p in plans])
        if expert != FREE and not same[FREE]:
            reason = "strategy"
        return self._guarded(Choice(plan, reason, propensity, expert, asked, estimates, same), off)

    def reuse(self) -> Choice:
        """The latest plan that drafts, once more without looking."""
        assert self._latest is not None
        for drafter in self._latest.drafters:
            self._now.played[drafter] = self._now.step
        return Choice(self._latest, "reused")

    def _free(self, off: Plan, plans: Sequence[Plan]) -> tuple[Plan, str]:
        """The best plan, or the one under way unless that is worse by the margin."""
        now = self._now
        best = max((off, *plans), key=lambda plan: plan.rate)
        now.quiet = int(not _drafts(best))
        before = next((plan for plan in (off, *plans) if self._key(plan) == now.plan), None)
        if before is not None and self._key(best) != now.plan:
            margin = DWELL_MARGIN if now.since_switch < DWELL else MARGIN
            if best.rate < before.rate * (1.0 + margin):
                return before, "kept"
        if self._key(best) != now.plan:
            now.plan = self._key(best)
            now.since_switch = 0
        return best, "worth most" if _drafts(best) else "nothing pays"

    def _key(self, plan: Plan) -> list[int]:
        if not _drafts(plan):
            return []
        return [*plan.drafters, int(plan.arms.max())] if self._uniform else list(plan.drafters)

    def _probe(
        self, alone: Sequence[Plan | None], lazily: Callable[[], Sequence[Plan | None]], *, rows: int
    ) -> Plan | None:
        """What to try again in this step, if a try is due."""
        now = self._now
        again = not now.off_streak and now.step >= now.next_try
        if not (now.probe_left or again or now.off_streak >= now.next_probe):
            return None
        shortest = lazily()
        usable = [drafter for drafter, plan in enumerate(shortest) if plan is not None]
        if not usable:
            now.probe_left = 0
            return None
        if now.probe_left and now.probe_drafter in usable:
            now.probe_left -= 1
        elif now.off_streak >= now.next_probe:
            # The most promising and the one not seen for longest take turns.
            promising = max(usable, key=lambda drafter: (_rate(alone[drafter], shortest[drafter]), -drafter))
            oldest = min(usable, key=lambda drafter: (now.played[drafter], drafter))
            self._begin_probe(oldest if now.probes % 2 else promising, rows=rows)
            now.next_probe = now.off_streak + now.probe_wait
            now.probe_wait = min(2 * now.probe_wait, LONGEST_WAIT)
        elif again:
            oldest = min(usable, key=lambda drafter: (now.played[drafter], drafter))
            idle = now.step - now.played[oldest]
            wait, now.try_wait = now.try_wait, min(2 * now.try_wait, TRY_EVERY)
            now.next_try = now.step + now.try_wait
            if idle < wait:
                return None
            self._begin_probe(oldest, rows=rows)
        else:
            now.probe_left = 0
            return None
        best = alone[now.probe_drafter]
        return best if best is not None and _drafts(best) else shortest[now.probe_drafter]

    def _begin_probe(self, drafter: int, *, rows: int) -> None:
        self._now.probe_drafter = drafter
        self._now.probe_left = -(-PROBE_TRIALS // max(rows, 1)) - 1
        self._now.probes += 1

    def _guarded(self, choice: Choice, off: Plan) -> Choice:
        now = self._now
        drafts = _drafts(choice.plan)
        if drafts and not self.floor.allows(choice.plan.seconds / off.seconds):
            choice = self._refused(choice, off)
            now.probe_left, drafts = 0, False
        if drafts:
            self._latest = choice.plan
            for drafter in choice.plan.drafters:
                now.played[drafter] = now.step
        if choice.reason == "probe":
            now.since_look = LOOK_EVERY
        elif drafts:
            now.off_streak, now.probe_wait, now.next_probe = 0, PROBE_EVERY, PROBE_EVERY
        else:
            now.off_streak += 1
        return choice

    def _refused(self, choice: Choice, off: Plan) -> Choice:
        """No speculation instead. A strategy that divides by probabilities is not taught of a step that was not its."""
        if choice.asked is None or self._policy is None or not self._policy.off_policy or choice.estimates is None:
            return Choice(off, "guard")
        same = (choice.estimates == choice.estimates[OFF]).all(axis=1)
        return Choice(off, "guard", 1.0, OFF, replace(choice.asked, index=OFF, propensity=1.0), choice.estimates, same)

    def learn(
        self, choice: Choice, *, load: int, rows: int, off: bool, tokens: float, seconds: float, off_seconds: float
    ) -> None:
        """What came of a step.

        Args:
            rows: decoding rows.
            off: nothing was drafted.
            tokens: emitted by all rows.
            off_seconds: what the step would have taken without drafts.
        """
        self.floor.account(
            load,
            step=self._now.step,
            off=off,
            tokens=tokens / rows,
            slowdown=seconds / off_seconds,
            expected=choice.plan.seconds / off_seconds,
        )
        if load not in self._rates and len(self._rates) >= MAX_LOADS:
            return
        rate = self._rates.setdefault(load, RunningRate())
        rate.add(tokens, seconds)
        if self._policy is None or choice.asked is None or choice.estimates is None or choice.same is None:
            return
        estimates = choice.estimates.copy()
        estimates[choice.same] = tokens, min(seconds, 2.0 * choice.plan.seconds)
        gains = (estimates[:, 0] - rate.value * estimates[:, 1]) / (2.0 * GAIN_TOKENS * rows) + 0.5
        observed = np.ones(len(gains), dtype=np.bool_) if self._policy.full_information else choice.same
        feedback = Feedback.from_gains(gains.clip(0.0, 1.0), observed, tokens=tokens, seconds=seconds)
        self._policy.update(choice.asked, feedback)

    def state_dict(self) -> dict[str, Any]:
        latest = self._latest
        return {
            "progress": asdict(self._now),
            "floor": self.floor.state_dict(),
            "policy": None if self._policy is None else self._policy.state_dict(),
            "rates": [[load, *rate.state()] for load, rate in self._rates.items()],
            "latest": None
            if latest is None
            else [list(latest.drafters), latest.tokens, latest.verified, latest.seconds],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError on anything but a `state_dict()` with these settings."""
        if not isinstance(state, Mapping) or state.keys() != {"progress", "floor", "policy", "rates", "latest"}:
            raise ValueError("state: chooser must be a mapping of progress, floor, policy, rates and latest")
        if (state["policy"] is None) != (self._policy is None):
            there = "not be there" if self._policy is None else "be there"
            raise ValueError(f"state: policy must {there}, got {state['policy']!r:.80}")
        now = _read_progress(state["progress"], drafters=self._experts - ALONE)
        rates: dict[int, RunningRate] = {}
        for row in state["rates"]:
            load, tokens, seconds = read_array({"rates": row}, "rates", (3,), minimum=0.0).tolist()
            rates[int(load)] = RunningRate(tokens, seconds)
        latest = None
        if state["latest"] is not None:
            drafters, *numbers = state["latest"]
            values = read_array({"latest": numbers}, "latest", (3,), minimum=0.0).tolist()
            known = tuple(read_int({"latest": drafter}, "latest") for drafter in drafters)
            latest = Plan(known, np.zeros(0, np.int64), *values)
        self.floor.load_state_dict(state["floor"])
        if self._policy is not None:
            self._policy.load_state_dict(state["policy"])
        self._now, self._rates, self._latest = now, rates, latest


def _read_progress(state: Any, *, drafters: int) -> _Progress:
    names = [entry.name for entry in fields(_Progress)]
    if not isinstance(state, Mapping) or state.keys() != set(names):
        raise ValueError(f"state: progress must be a mapping of {', '.join(names)}")
    lists = {}
    for name, length in (("plan", None), ("played", drafters)):
        value = state[name]
        if not isinstance(value, list) or (length is not None and len(value) != length):
            raise ValueError(f"state: {name} must be a list of {'some' if length is None else length} whole numbers")
        lists[name] = [read_int({name: item}, name) for item in value]
    numbers = {name: read_int(state, name, minimum=-1) for name in names if name not in lists}
    return _Progress(**numbers, **lists)


def _drafts(plan: Plan) -> bool:
    return bool(plan.drafters) and bool((plan.arms >= 0).any())


def _same(plan: Plan, other: Plan) -> bool:
    return plan is other or (plan.drafters == other.drafters and bool((plan.arms == other.arms).all()))


def _rate(*plans: Plan | None) -> float:
    return max(plan.rate for plan in plans if plan is not None and _drafts(plan))
