"""Which plan is played: strategy, hysteresis, guard, and tries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from adaptspec.bandits import Feedback, PolicyContext
from adaptspec.bandits.base import PolicyDecision
from adaptspec.bandits.state import read_array, read_int
from adaptspec.control.rate import RunningRate
from adaptspec.serving.floor import Floor
from adaptspec.serving.pacing import Pace
from adaptspec.serving.plans import Plan
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

GAIN_TOKENS = 2.0
"""A step worth so many tokens per row more than the running rate has gain 1, so many less gain 0."""

MAX_LOADS = 64


@dataclass(frozen=True, slots=True, eq=False)
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
        self._pace = Pace(played=[0] * drafters)

    @property
    def off_streak(self) -> int:
        """Latest steps in a row without speculation."""
        return self._pace.off_streak

    @property
    def under_way(self) -> tuple[int, ...]:
        """Drafters of the latest plan that drafts."""
        return () if self._latest is None else self._latest.drafters

    def last_played(self, drafter: int) -> int:
        """How many steps ago a drafter was in play."""
        return self._pace.step - self._pace.played[drafter]

    def begin(self) -> None:
        """A step begins, whatever will be decided in it."""
        self._pace.step += 1

    def shortcut(self, load: int) -> str | None:
        """The reason to be off in this step without looking, None if there is none."""
        if self.floor.must_measure(load, step=self._pace.step):
            return "baseline"
        return "off" if self._pace.rests() else None

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
        self._pace.looks()
        probe = self._pace.probe(alone, shortest, rows=rows)
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
        same = np.array([p.same(plan) for p in plans])
        if expert != FREE and not same[FREE]:
            reason = "strategy"
        return self._guarded(Choice(plan, reason, propensity, expert, asked, estimates, same), off)

    def reuse(self) -> Choice:
        """The latest plan that drafts, once more without looking."""
        assert self._latest is not None
        self._pace.play(self._latest.drafters)
        return Choice(self._latest, "reused")

    def _free(self, off: Plan, plans: Sequence[Plan]) -> tuple[Plan, str]:
        """The best plan, or the one under way unless that is worse by the margin."""
        pace = self._pace
        best = max((off, *plans), key=lambda plan: plan.rate)
        pace.quiet = int(not best.drafts)
        key = self._key(best)
        if key != pace.plan:
            before = next((plan for plan in (off, *plans) if self._key(plan) == pace.plan), None)
            if before is not None and best.rate < before.rate * (1.0 + pace.margin):
                return before, "kept"
            pace.switch(key)
        return best, "worth most" if best.drafts else "nothing pays"

    def _key(self, plan: Plan) -> list[int]:
        if not plan.drafts:
            return []
        return [*plan.drafters, int(plan.arms.max())] if self._uniform else list(plan.drafters)

    def _guarded(self, choice: Choice, off: Plan) -> Choice:
        drafts = choice.plan.drafts
        if drafts and not self.floor.allows(choice.plan.seconds / off.seconds):
            choice = self._refused(choice, off)
            self._pace.probe_left, drafts = 0, False
        if drafts:
            self._latest = choice.plan
            self._pace.play(choice.plan.drafters)
        self._pace.count(drafts=drafts, probe=choice.reason == "probe")
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
            step=self._pace.step,
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
        gains = np.minimum(np.maximum(gains, 0.0), 1.0)
        observed = choice.same
        if self._policy.full_information:
            observed = np.ones_like(choice.same)
        else:
            gains[~observed] = 0.0
        self._policy.update(choice.asked, Feedback(gains, observed, tokens, seconds))

    def state_dict(self) -> dict[str, Any]:
        latest = self._latest
        return {
            "progress": self._pace.state_dict(),
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
        pace = Pace.from_state(state["progress"], drafters=self._experts - ALONE)
        rates: dict[int, RunningRate] = {}
        for row in state["rates"]:
            load, tokens, seconds = read_array({"rates": row}, "rates", (3,), minimum=0.0).tolist()
            rates[int(load)] = RunningRate(tokens, seconds)
        latest = None
        if state["latest"] is not None:
            drafters, *numbers = state["latest"]
            values = read_array({"latest": numbers}, "latest", (3,), minimum=0.0).tolist()
            known = tuple(read_int({"latest": drafter}, "latest") for drafter in drafters)
            latest = Plan(known, None, True, *values)
        self.floor.load_state_dict(state["floor"])
        if self._policy is not None:
            self._policy.load_state_dict(state["policy"])
        self._pace, self._rates, self._latest = pace, rates, latest
