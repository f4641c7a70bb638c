"""Exponential weights with full information: every observed arm teaches, played or not.

Arms that were not observed are asleep: they keep their standing against the mixture (`sampling.mixture_gain`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from adaptspec.bandits.base import Feedback, PolicyDecision
from adaptspec.bandits.checks import check_between, check_count
from adaptspec.bandits.registry import register_policy
from adaptspec.bandits.sampling import SamplingPolicy, filled_gains, mixture_gain
from adaptspec.bandits.state import read_array, read_float


@register_policy("hedge")
class Hedge(SamplingPolicy):
    """Hedge (Freund and Schapire 1997): p_i proportional to exp(eta G_i), G_i the sum of arm i's gains.

    Anytime rate eta_t = sqrt(8 ln N / t) (Cesa-Bianchi and Lugosi 2006, Theorem 2.3): regret at most
    2 sqrt(T ln N / 2) + sqrt(ln N / 8). With a known horizon eta = sqrt(8 ln N / T): at most sqrt(T ln N / 2).

    Args:
        horizon: rounds T, for the fixed rate.
        learning_rate: eta, overrides.
    """

    full_information = True
    additive = ("gains",)

    def __init__(
        self, n_arms: int, seed: int = 0, *, horizon: int | None = None, learning_rate: float | None = None
    ) -> None:
        super().__init__(n_arms, seed)
        if horizon is not None and learning_rate is not None:
            raise ValueError("give horizon or learning_rate, not both")
        self._scale = 8.0 * math.log(self.n_arms)
        self._rate: float | None = None
        if learning_rate is not None:
            self._rate = check_between("learning_rate", learning_rate, low=0.0, high=1e6)
        elif horizon is not None:
            self._rate = math.sqrt(self._scale / check_count("horizon", horizon, minimum=1))
        self.options["learning_rate"] = self._rate
        self._gains = np.zeros(self.n_arms)

    def _fill_weights(self) -> None:
        rate = self._rate
        if rate is None:
            rate = math.sqrt(self._scale / (self.rounds + 1.0))
        self._fill_exponential(self._gains, rate)

    def _learn(self, decision: PolicyDecision, feedback: Feedback) -> None:
        if feedback.complete:
            self._gains += feedback.gains
        else:
            mixture = mixture_gain(decision, feedback)
            if mixture is None:
                return
            self._gains += filled_gains(feedback, mixture)
        self.rounds += 1.0

    def _state(self) -> dict[str, Any]:
        return {"gains": self._gains.tolist()}

    def _load(self, learned: Mapping[str, Any]) -> None:
        self._gains = read_array(learned, "gains", (self.n_arms,))


@register_policy("adahedge")
class AdaHedge(SamplingPolicy):
    """AdaHedge (de Rooij, van Erven, Grunwald and Koolen 2014, Figure 1): Hedge whose rate follows the data.

    eta_t = ln N / Delta, Delta the sum of mixability gaps delta_t = m_t - h_t >= 0 with h_t = p . g the expected gain
    and m_t = ln(p . exp(eta g)) / eta the mix gain. While Delta is 0, eta is infinite: follow the leaders. Fast on easy
    data, regret O(sqrt(T ln N)) on any. Late feedback is judged with the p and eta of its own decision (ours).
    """

    full_information = True

    def __init__(self, n_arms: int, seed: int = 0) -> None:
        super().__init__(n_arms, seed)
        self._gains = np.zeros(self.n_arms)
        self._gap = 0.0

    @property
    def learning_rate(self) -> float:
        """eta of the next decision; infinite while no mixability gap was seen."""
        return math.log(self.n_arms) / self._gap if self._gap > 0.0 else math.inf

    def _fill_weights(self) -> float | None:
        rate = self.learning_rate
        if rate == math.inf:
            np.equal(self._gains, self._gains.max(), out=self._weights)
            return None
        self._fill_exponential(self._gains, rate)
        return rate

    def _learn(self, decision: PolicyDecision, feedback: Feedback) -> None:
        mixture = mixture_gain(decision, feedback)
        if mixture is None:
            return
        gains = filled_gains(feedback, mixture)
        self._gap += max(0.0, mix_gain(decision.probabilities, gains, rate=decision.memo) - mixture)
        self._gains += gains
        self.rounds += 1.0

    def _state(self) -> dict[str, Any]:
        return {"gains": self._gains.tolist(), "gap": self._gap}

    def _load(self, learned: Mapping[str, Any]) -> None:
        gains = read_array(learned, "gains", (self.n_arms,))
        self._gap = read_float(learned, "gap", minimum=0.0)
        self._gains = gains


def mix_gain(probabilities: np.ndarray, gains: np.ndarray, *, rate: float | None) -> float:
    """ln(p . exp(rate * gains)) / rate; its limit, the best gain with p > 0, for rate None."""
    best = float(gains[probabilities > 0.0].max())
    if rate is None or rate == 0.0:
        return best
    # The arm of the best gain has p > 0, so the sum stays positive however large the rate.
    return best + math.log(float(probabilities.dot(np.exp(np.minimum(rate * (gains - best), 0.0))))) / rate


@register_policy("fixed-share")
class FixedShare(SamplingPolicy):
    """Fixed-Share (Herbster and Warmuth 1998): Hedge that tracks a changing best arm.

    w_i <- w_i exp(eta g_i), normalised, then w_i <- (1 - alpha) w_i + alpha / N. Against the best sequence with S
    switches the regret is at most ((S + 1) ln N + (T - 1) H(S / (T - 1))) / eta + eta T / 8, H the binary entropy
    (Cesa-Bianchi and Lugosi 2006, Corollary 5.1).

    Args:
        horizon, switches: T and S, which give alpha = S / (T - 1) and the eta that minimises the bound.
        learning_rate: eta, overrides.
        share: alpha, overrides.
    """

    full_information = True

    def __init__(
        self,
        n_arms: int,
        seed: int = 0,
        *,
        horizon: int = 10_000,
        switches: int = 20,
        learning_rate: float | None = None,
        share: float | None = None,
    ) -> None:
        super().__init__(n_arms, seed)
        horizon = check_count("horizon", horizon, minimum=2)
        switches = check_count("switches", switches, minimum=0)
        rounds = horizon - 1
        if share is None:
            share = min(switches / rounds, 1.0)
        self._share = check_between("share", share, low=0.0, high=1.0, open_low=False)
        if learning_rate is None:
            entropy = sum(-x * math.log(x) for x in (self._share, 1.0 - self._share) if x > 0.0)
            spread = (switches + 1) * math.log(self.n_arms) + rounds * entropy
            learning_rate = math.sqrt(8.0 * spread / horizon) if self.n_arms > 1 else 1.0
        self._rate = check_between("learning_rate", learning_rate, low=0.0, high=1e6)
        self.options |= {"learning_rate": self._rate, "share": self._share}
        self._shares = np.full(self.n_arms, 1.0 / self.n_arms)

    def _fill_weights(self) -> None:
        self._weights[:] = self._shares

    def _learn(self, decision: PolicyDecision, feedback: Feedback) -> None:
        mixture = 0.0 if feedback.complete else mixture_gain(decision, feedback)
        if mixture is None:
            return
        gains = filled_gains(feedback, mixture)
        self._fill_exponential(gains, self._rate)
        shares = self._shares
        shares *= self._weights
        total = float(shares.sum())
        # With no sharing an arm's weight may have reached 0 and be the only one that gained; start over then.
        shares[:] = shares * ((1.0 - self._share) / total) if total > 0.0 else (1.0 - self._share) / self.n_arms
        shares += self._share / self.n_arms
        self.rounds += 1.0

    def _state(self) -> dict[str, Any]:
        return {"shares": self._shares.tolist()}

    def _load(self, learned: Mapping[str, Any]) -> None:
        self._shares = read_array(learned, "shares", (self.n_arms,), minimum=0.0, maximum=1.0)
