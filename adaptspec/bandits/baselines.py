"""The hand-written rules that people use today: what every learner has to beat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from adaptspec.bandits.base import Choice, Feedback, Policy, PolicyContext, PolicyDecision
from adaptspec.bandits.checks import check_arm, check_between, check_count
from adaptspec.bandits.means import MeanPolicy
from adaptspec.bandits.registry import register_policy
from adaptspec.bandits.state import read_float, read_int


@register_policy("fixed")
class Fixed(Policy):
    """Always the arm `index`; by name `fixed:INDEX`."""

    def __init__(self, n_arms: int, seed: int = 0, *, index: int = 0) -> None:
        super().__init__(n_arms, seed)
        self._index = check_arm("index", index, n_arms=self.n_arms)
        self.options["index"] = self._index

    def _choose(self, context: Any) -> Choice:
        return self._index, 1.0, None, None

    def _learn(self, decision: PolicyDecision, feedback: Feedback) -> None:
        self.rounds += 1.0

    def _state(self) -> dict[str, Any]:
        return {}

    def _load(self, learned: Mapping[str, Any]) -> None:
        pass


@register_policy("follow-the-leader")
class FollowTheLeader(MeanPolicy):
    """The arm of the largest mean gain over the rounds it was observed. Full information, no exploration."""

    full_information = True

    def scores(self) -> np.ndarray:
        return self._means

    def _learn(self, decision: PolicyDecision, feedback: Feedback) -> None:
        observed = feedback.observed
        if not observed[observed.argmax()]:
            return
        self._counts += observed
        self._sums += feedback.gains
        np.divide(self._sums, self._counts, out=self._means, where=self._counts > 0.0)
        if self._untried:
            self._untried = int((self._counts == 0.0).sum())
        self.rounds += 1.0


@register_policy("ema")
class MovingAverage(FollowTheLeader):
    """Exponential moving average of every observed arm's gain, with hysteresis. Full information where it is given.

    m_i <- m_i + rate (g_i - m_i), the first observation as it is; leaves the current arm only for one whose average is
    larger by more than `margin`. The rule of hand-tuned servers; never revisits an arm that nobody observes.
    """

    additive = ()
    stored = ("counts", "sums", "averages")

    def __init__(self, n_arms: int, seed: int = 0, *, rate: float = 0.1, margin: float = 0.02) -> None:
        super().__init__(n_arms, seed)
        self._rate = check_between("rate", rate, low=0.0, high=1.0)
        self._margin = check_between("margin", margin, low=0.0, high=1.0, open_low=False)
        self.options |= {"rate": self._rate, "margin": self._margin}
        self._averages = np.zeros(self.n_arms)
        self._current = -1

    def scores(self) -> np.ndarray:
        return self._averages

    def _choose(self, context: Any) -> Choice:
        index, propensity, probabilities, memo = super()._choose(context)
        if not self._untried:
            current = self._current
            if current < 0 or self._averages[index] > self._averages[current] + self._margin:
                self._current = index
            index = self._current
        return index, propensity, probabilities, memo

    def _learn(self, decision: PolicyDecision, feedback: Feedback) -> None:
        rates = np.where(self._counts == 0.0, 1.0, self._rate) * feedback.observed
        self._averages += rates * (feedback.gains - self._averages)
        super()._learn(decision, feedback)

    def _state(self) -> dict[str, Any]:
        return super()._state() | {"current": self._current}

    def _load(self, learned: Mapping[str, Any]) -> None:
        current = read_int(learned, "current", minimum=-1, maximum=self.n_arms - 1)
        super()._load(learned)
        self._current = current


@register_policy("heuristic")
class LengthHeuristic(Policy):
    """The +2 / -1 rule of assisted generation: two tokens longer after a full accept, one shorter otherwise.

    Works on a wished length; plays the longest arm that does not exceed it. A full accept is `accepted == drafted`
    where the feedback has counts, else a played gain of at least `full_gain`. An arm of length 0 always counts as one:
    nothing was rejected, and drafting is tried again.

    Args:
        lengths: draft length of every arm, increasing; default the arm's index.
        start: first wished length; default the middle arm's.
        full_gain: gain that counts as a full accept when counts are missing.
    """

    off_policy = False

    def __init__(
        self,
        n_arms: int,
        seed: int = 0,
        *,
        lengths: tuple[int, ...] | None = None,
        start: int | None = None,
        full_gain: float = 1.0,
    ) -> None:
        super().__init__(n_arms, seed)
        values = list(range(self.n_arms)) if lengths is None else [int(length) for length in lengths]
        if len(values) != self.n_arms or values[0] < 0 or any(a >= b for a, b in zip(values, values[1:], strict=False)):
            raise ValueError(f"lengths must be {self.n_arms} increasing whole numbers >= 0, got {lengths!r}")
        self._lengths = np.array(values)
        self._shortest, self._longest = min(max(values[0], 1), values[-1]), values[-1]
        wish = values[len(values) // 2] if start is None else check_count("start", start, minimum=0)
        self._wish = min(max(wish, self._shortest), self._longest)
        self._full_gain = check_between("full_gain", full_gain, low=0.0, high=1.0)
        self.options |= {"lengths": values, "start": self._wish, "full_gain": self._full_gain}

    def _choose(self, context: Any) -> Choice:
        index = int(self._lengths.searchsorted(self._wish, side="right")) - 1
        return max(index, 0), 1.0, None, None

    def _learn(self, decision: PolicyDecision, feedback: Feedback) -> None:
        if self._lengths[decision.index] == 0:
            full = True
        elif feedback.drafted is not None and feedback.accepted is not None:
            full = feedback.accepted >= feedback.drafted
        elif feedback.observed[decision.index]:
            full = feedback.gains.item(decision.index) >= self._full_gain
        else:
            return
        self._wish = min(max(self._wish + (2 if full else -1), self._shortest), self._longest)
        self.rounds += 1.0

    def _state(self) -> dict[str, Any]:
        return {"wish": self._wish}

    def _load(self, learned: Mapping[str, Any]) -> None:
        self._wish = read_int(learned, "wish", minimum=self._shortest, maximum=self._longest)


@register_policy("lookup-else")
class LookupElse(Policy):
    """Prefer one arm (a lookup drafter) while it does well, else a fallback (a trained drafter).

    With `PolicyContext(evidence=...)`, or the bare number, it does well when the evidence, such as the length of the
    match, reaches `min_evidence`. Without evidence: while the moving average of its gain is at least `min_gain`; below
    that it is tried once in `retry_every` steps.
    """

    def __init__(
        self,
        n_arms: int,
        seed: int = 0,
        *,
        preferred: int = 0,
        fallback: int | None = None,
        min_evidence: float = 2.0,
        min_gain: float = 0.3,
        rate: float = 0.1,
        retry_every: int = 20,
    ) -> None:
        super().__init__(n_arms, seed)
        self._preferred = check_arm("preferred", preferred, n_arms=self.n_arms)
        last = self.n_arms - 1
        self._fallback = last if fallback is None else check_arm("fallback", fallback, n_arms=self.n_arms)
        self._min_evidence = check_between("min_evidence", min_evidence, low=-1e18, high=1e18)
        self._min_gain = check_between("min_gain", min_gain, low=0.0, high=1.0, open_low=False)
        self._rate = check_between("rate", rate, low=0.0, high=1.0)
        self._retry_every = check_count("retry_every", retry_every, minimum=1)
        self.options |= {
            "preferred": self._preferred,
            "fallback": self._fallback,
            "min_evidence": self._min_evidence,
            "min_gain": self._min_gain,
            "rate": self._rate,
            "retry_every": self._retry_every,
        }
        self._average = 1.0
        self._since_preferred = 0

    def _choose(self, context: Any) -> Choice:
        evidence = context.evidence if isinstance(context, PolicyContext) else context
        if evidence is not None:
            good = float(evidence) >= self._min_evidence
        else:
            good = self._average >= self._min_gain or self._since_preferred + 1 >= self._retry_every
        self._since_preferred = 0 if good else self._since_preferred + 1
        return (self._preferred if good else self._fallback), 1.0, None, None

    def _learn(self, decision: PolicyDecision, feedback: Feedback) -> None:
        if feedback.observed[self._preferred]:
            self._average += self._rate * (feedback.gains.item(self._preferred) - self._average)
            self.rounds += 1.0

    def _state(self) -> dict[str, Any]:
        return {"average": self._average, "since_preferred": self._since_preferred}

    def _load(self, learned: Mapping[str, Any]) -> None:
        average = read_float(learned, "average", minimum=0.0, maximum=1.0)
        self._since_preferred = read_int(learned, "since_preferred")
        self._average = average
