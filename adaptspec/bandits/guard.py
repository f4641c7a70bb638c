"""A floor under the loss: speculation may never have cost more than a share `alpha` against not speculating."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from adaptspec.bandits.base import Choice, Feedback, Policy, PolicyContext, PolicyDecision
from adaptspec.bandits.checks import check_between, check_count
from adaptspec.bandits.state import read_array, read_float, read_int
from adaptspec.bandits.wrapper import Wrapper, as_played

_BASELINE_FADE = 1.0 - 1.0 / 64.0
_CHANGED_BY = math.log(1.2)
_CONFIRMATIONS = 3
_SPREAD_RATE = 1.0 / 16.0
_RESERVE_FADE = 0.99
_PEAK_FADE = 0.98
_MEAN_RATE = 0.2


class Guard(Wrapper):
    """Lets the inner policy play arm i only while even its worst step leaves tokens / seconds >= (1 - alpha) r.

    r is the rate of arm 0, no speculation, measured from its own steps (or `PolicyContext.baseline_seconds`, tokens per
    second being its inverse). This is the budget of conservative bandits (Wu, Shariff, Lattimore and Szepesvari 2016)
    for a ratio. The balance is kept in tokens: a step without speculation earns alpha * tokens, any other
    tokens - (1 - alpha) r seconds. Arm i may be played while balance >= (1 - alpha) r upper_i - 1: it emits at least
    one token and takes at most upper_i seconds, the fading peak of its own steps, or before its first step
    `assumed_slowdown` steps without speculation. If upper_i holds, the balance never falls below 0, which is the
    promise; a step that takes longer can break it once, and the next ones are held back until it is made good.

    What is refused is played as arm 0, which earns: every arm is affordable again after finitely many steps, so a
    refusal is never for good. After `probe_every` steps of arm 0 in a row another arm is tried, if one is affordable:
    in turn the one of the best rate so far and the one played longest ago. While speculating, every
    `baseline_every`-th step measures arm 0 again; a rate that is off by more than a fifth and by more than four times
    its usual deviation is measured again at once, and three such in a row replace what was known. The balance is
    capped, so a long good past does not pay for a long bad future.

    Feedback must carry `tokens` and `seconds`. Policies that divide by propensities learn only from steps that were
    played as they chose; `Policy.off_policy`.

    Args:
        alpha: share that may be lost.
        initial_credit: tokens that may be lost on top, once, to learn sooner; 0 starts with arm 0 until it has earned
            the first trial (about 40 steps with the other defaults; see `calibrate`).
        credit_limit: cap of the balance in tokens; raised where an arm needs more to be tried at all.
        warmup: steps without speculation before anything else, to measure r.
        baseline_every: 0 measures only when arm 0 is played anyway.
        probe_every: 0 for no probes.
        assumed_slowdown: how much longer an arm that was never played may take than a step without speculation.
    """

    kind = "guard"

    def __init__(
        self,
        policy: Policy,
        *,
        alpha: float = 0.05,
        initial_credit: float = 0.0,
        credit_limit: float = 20.0,
        warmup: int = 3,
        baseline_every: int = 256,
        probe_every: int = 100,
        assumed_slowdown: float = 3.0,
    ) -> None:
        super().__init__(policy)
        self._alpha = check_between("alpha", alpha, low=0.0, high=1.0)
        self._balance = check_between("initial_credit", initial_credit, low=0.0, high=1e9, open_low=False)
        self._credit_limit = check_between("credit_limit", credit_limit, low=0.0, high=1e9, open_low=False)
        self._warmup = check_count("warmup", warmup, minimum=1)
        self._baseline_every = check_count("baseline_every", baseline_every, minimum=0)
        self._probe_every = check_count("probe_every", probe_every, minimum=0)
        self._assumed_slowdown = check_between("assumed_slowdown", assumed_slowdown, low=1.0, high=1e6, open_low=False)
        self.options |= {
            "alpha": self._alpha,
            "initial_credit": self._balance,
            "credit_limit": self._credit_limit,
            "warmup": self._warmup,
            "baseline_every": self._baseline_every,
            "probe_every": self._probe_every,
            "assumed_slowdown": self._assumed_slowdown,
        }
        self._reserved = 0.0
        self._baseline = np.zeros(3)  # fading sums over arm 0's steps: steps, tokens, seconds
        self._deviants = np.zeros(4)  # the same over its latest steps in a row whose rate was off, and the side
        self._spread = 0.1  # usual deviation of arm 0's rate, as a logarithm
        self._measured = 0
        self._since_baseline = 0
        self._off_streak = 0
        self._probes = 0
        self._mean_tokens = np.zeros(self.n_arms)
        self._mean_seconds = np.zeros(self.n_arms)
        self._peak_seconds = np.zeros(self.n_arms)  # 0: never played
        self._last_played = np.full(self.n_arms, -1.0)

    @property
    def balance(self) -> float:
        """Tokens that speculation is ahead of (1 - alpha) times no speculation, capped."""
        return self._balance

    @property
    def baseline_rate(self) -> float | None:
        """Measured tokens per second without speculation; None before the first measurement."""
        return float(self._baseline[1] / self._baseline[2]) if self._baseline[2] > 0.0 else None

    @property
    def never_played(self) -> np.ndarray:
        """bool [n_arms], the arms whose own steps are not known yet."""
        return self._last_played < 0.0

    @staticmethod
    def overruled(decision: PolicyDecision) -> bool:
        """Whether a decision of a guard is not what the inner policy chose."""
        inner, _, _ = decision.memo
        return decision.index != inner.index

    def calibrate(self, index: int, *, seconds: float, tokens: float = 1.0) -> None:
        """Say what a step of arm `index` takes (a calibration run, a cost table), instead of `assumed_slowdown`."""
        if not 0 <= index < self.n_arms:
            raise ValueError(f"index must be in [0, {self.n_arms}), got {index}")
        if not (0.0 < seconds < np.inf and 0.0 < tokens < np.inf):
            raise ValueError(f"seconds and tokens must be positive and finite, got {seconds} and {tokens}")
        self._mean_seconds[index] = self._peak_seconds[index] = seconds
        self._mean_tokens[index] = tokens

    def _choose(self, context: Any) -> Choice:
        inner = self.policy.select(context)
        known = context.baseline_seconds if isinstance(context, PolicyContext) else None
        if known is not None and not 0.0 < known < np.inf:
            raise ValueError(f"baseline_seconds must be positive and finite, got {known}")
        self._reserved *= _RESERVE_FADE
        if known is None and self._must_measure():
            return self._forced(inner, index=0, needs=None, rate=0.0)
        rate = 1.0 / known if known is not None else self.baseline_rate
        needs = self._needs(rate, known)
        # An arm that cannot lose is allowed whatever the balance.
        affordable = needs <= max(self._balance - self._reserved, 0.0)
        affordable[0] = True
        if self._probe_every and self._off_streak >= self._probe_every and affordable[1:].any():
            return self._forced(inner, index=self._probe(affordable), needs=needs, rate=1.0 / known if known else 0.0)
        index, propensity, probabilities = inner.index, inner.propensity, inner.probabilities
        if not affordable[index]:
            self._peak_seconds[index] = self._faded_peak(index)
            index = 0
        if probabilities is not None and not affordable.all():
            probabilities = np.where(affordable, probabilities, 0.0)
            probabilities[0] = max(0.0, 1.0 - float(probabilities[1:].sum()))
            probabilities.flags.writeable = False
            propensity = probabilities.item(index)
        return self._play(inner, index, propensity, probabilities, needs, 1.0 / known if known else 0.0)

    def _must_measure(self) -> bool:
        if self._measured < self._warmup or self._deviants[0] > 0.0:
            return True
        return bool(self._baseline_every) and self._since_baseline >= self._baseline_every

    def _needs(self, rate: float, known: float | None) -> np.ndarray:
        """[n_arms], the most that each arm's next step may cost, in tokens."""
        step_seconds = known if known is not None else float(self._baseline[2] / self._baseline[0])
        upper = np.where(self._peak_seconds > 0.0, self._peak_seconds, self._assumed_slowdown * step_seconds)
        upper *= (1.0 - self._alpha) * rate
        upper -= 1.0
        return upper

    def _probe(self, affordable: np.ndarray) -> int:
        self._probes += 1
        allowed = affordable.copy()
        allowed[0] = False
        if self._probes % 2:
            # Arms never played come before the best known rate.
            rates = np.full(self.n_arms, np.inf)
            np.divide(self._mean_tokens, self._mean_seconds, out=rates, where=self._mean_seconds > 0.0)
            return int(np.where(allowed, rates, -1.0).argmax())
        return int(np.where(allowed, self._last_played, np.inf).argmin())

    def _forced(self, inner: PolicyDecision, *, index: int, needs: np.ndarray | None, rate: float) -> Choice:
        probabilities = None
        if inner.probabilities is not None:
            probabilities = np.zeros(self.n_arms)
            probabilities[index] = 1.0
            probabilities.flags.writeable = False
        return self._play(inner, index, 1.0, probabilities, needs, rate)

    def _play(
        self,
        inner: PolicyDecision,
        index: int,
        propensity: float,
        probabilities: np.ndarray | None,
        needs: np.ndarray | None,
        rate: float,
    ) -> Choice:
        # Held back until the feedback comes, so that many open decisions cannot spend the balance together; fading, so
        # that decisions without feedback do not hold it for good.
        reserve = 0.0 if index == 0 else max(0.0, needs.item(index))
        self._reserved += reserve
        self._since_baseline = 0 if index == 0 else self._since_baseline + 1
        self._off_streak = self._off_streak + 1 if index == 0 else 0
        self._last_played[index] = self._next_step
        return index, propensity, probabilities, (inner, reserve, rate)

    def _learn(self, decision: PolicyDecision, feedback: Feedback) -> None:
        if feedback.tokens is None or not feedback.seconds:
            raise ValueError(f"guard needs tokens and seconds > 0, got {feedback.tokens} and {feedback.seconds}")
        inner, reserve, rate = decision.memo
        index, tokens, seconds = decision.index, float(feedback.tokens), float(feedback.seconds)
        if self.policy.off_policy:
            self.policy.update(as_played(inner, decision), feedback)
        elif index == inner.index:
            self.policy.update(inner, feedback)
        age = self._next_step - decision.step_id
        self._reserved = max(0.0, self._reserved - reserve * _RESERVE_FADE ** (age - 1))
        self._observe_arm(index, tokens, seconds)
        if index == 0:
            self._observe_baseline(tokens, seconds)
            earned = self._alpha * tokens
        else:
            earned = tokens - (1.0 - self._alpha) * (rate or self.baseline_rate or tokens / seconds) * seconds
        self._balance = min(self._balance + earned, self._cap(rate))
        self.rounds += 1.0

    def _observe_baseline(self, tokens: float, seconds: float) -> None:
        known = self.baseline_rate
        off = math.log(tokens / seconds / known) if known and tokens else 0.0
        limit = max(_CHANGED_BY, 4.0 * self._spread)
        side = math.copysign(1.0, off) if abs(off) > limit and self._measured >= self._warmup else 0.0
        # Clipped, so that a change of the rate does not pass for noise.
        self._spread += _SPREAD_RATE * (min(abs(off), 3.0 * max(self._spread, 0.05)) - self._spread)
        self._baseline *= _BASELINE_FADE
        self._baseline += (1.0, tokens, seconds)
        self._measured += 1
        if side != self._deviants[3]:
            self._deviants[:] = 0.0
        if side:
            self._deviants[:3] += (1.0, tokens, seconds)
            self._deviants[3] = side
        if self._deviants[0] >= _CONFIRMATIONS:
            self._baseline[:] = self._deviants[:3]
            self._deviants[:] = 0.0

    def _observe_arm(self, index: int, tokens: float, seconds: float) -> None:
        mean = self._mean_seconds.item(index)
        if mean == 0.0:
            self._mean_seconds[index], self._mean_tokens[index] = seconds, tokens
        else:
            # One stall may double the running value, not more.
            self._mean_seconds[index] = mean + _MEAN_RATE * (min(seconds, 2.0 * mean) - mean)
            self._mean_tokens[index] += _MEAN_RATE * (tokens - self._mean_tokens.item(index))
        self._peak_seconds[index] = max(seconds, self._faded_peak(index))

    def _faded_peak(self, index: int) -> float:
        mean, peak = self._mean_seconds.item(index), self._peak_seconds.item(index)
        return max(mean + _PEAK_FADE * (peak - mean), 0.0) if peak > 0.0 else 0.0

    def _cap(self, rate: float) -> float:
        """The credit limit, or what the dearest arm needs if that is more: else it could never be tried again."""
        steps, _, seconds = self._baseline.tolist()
        if not steps:
            return self._credit_limit
        dearest = max(self._peak_seconds.item(self._peak_seconds.argmax()), self._assumed_slowdown * seconds / steps)
        return max(self._credit_limit, (1.0 - self._alpha) * (rate or self.baseline_rate) * dearest - 1.0)

    def _state(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, f"_{name}") for name in ("balance", "reserved", "spread", *_COUNTERS)},
            **{name: getattr(self, f"_{name}").tolist() for name in ("baseline", "deviants", *_PER_ARM)},
            "policy": self.policy.state_dict(),
        }

    def _load(self, learned: Mapping[str, Any]) -> None:
        values: dict[str, Any] = {"balance": read_float(learned, "balance")}
        values["reserved"] = read_float(learned, "reserved", minimum=0.0)
        values["spread"] = read_float(learned, "spread", minimum=0.0)
        values["baseline"] = read_array(learned, "baseline", (3,), minimum=0.0)
        values["deviants"] = read_array(learned, "deviants", (4,), minimum=-1.0)
        values |= {name: read_int(learned, name) for name in _COUNTERS}
        values |= {name: read_array(learned, name, (self.n_arms,), minimum=-1.0) for name in _PER_ARM}
        self.policy.load_state_dict(learned.get("policy"))
        for name, value in values.items():
            setattr(self, f"_{name}", value)


_COUNTERS = ("measured", "since_baseline", "off_streak", "probes")
_PER_ARM = ("mean_tokens", "mean_seconds", "peak_seconds", "last_played")
