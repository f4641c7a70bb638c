"""Exponential weights with bandit feedback: only the played arm's gain is used, divided by its propensity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from adaptspec.bandits.base import Feedback, PolicyDecision
from adaptspec.bandits.checks import check_between, check_count
from adaptspec.bandits.registry import register_policy
from adaptspec.bandits.sampling import SamplingPolicy
from adaptspec.bandits.state import read_array


class EstimatePolicy(SamplingPolicy):
    """Keeps per arm the sum of the importance-weighted estimates of its gain (or loss)."""

    off_policy = False
    additive = ("estimates",)

    def __init__(self, n_arms: int, seed: int = 0) -> None:
        super().__init__(n_arms, seed)
        self._estimates = np.zeros(self.n_arms)

    def _learn(self, decision: PolicyDecision, feedback: Feedback) -> None:
        index = decision.index
        if feedback.observed[index]:
            self._estimates[index] += self._estimate(decision, feedback.gains.item(index))
            self.rounds += 1.0

    def _estimate(self, decision: PolicyDecision, gain: float) -> float:
        """The played arm's loss, unbiased: (1 - gain) / propensity; every other arm's estimate is 0."""
        return (1.0 - gain) / decision.propensity

    def _state(self) -> dict[str, Any]:
        return {"estimates": self._estimates.tolist()}

    def _load(self, learned: Mapping[str, Any]) -> None:
        self._estimates = read_array(learned, "estimates", (self.n_arms,), minimum=0.0)


@register_policy("exp3")
class EXP3(EstimatePolicy):
    """EXP3 (Auer, Cesa-Bianchi, Freund and Schapire 2002, Figure 1), in gains and with explicit exploration.

    p_i = (1 - gamma) w_i / W + gamma / K with w_i = exp(gamma G_i / K), G_i the sum of gain / p on the played arm.
    Regret at most (e - 1) gamma G_max + K ln K / gamma.

    Args:
        exploration: gamma in (0, 1]. None (ours): gamma_t = min(1, sqrt(K ln K / ((e - 1) t))), the paper's choice with
            the horizon replaced by the current round.
    """

    def __init__(self, n_arms: int, seed: int = 0, *, exploration: float | None = None) -> None:
        super().__init__(n_arms, seed)
        self._exploration = (
            None if exploration is None else check_between("exploration", exploration, low=0.0, high=1.0)
        )
        self.options["exploration"] = self._exploration
        self._squared_start = self.n_arms * math.log(self.n_arms) / (math.e - 1.0)

    def _fill_weights(self) -> None:
        gamma = self._exploration
        if gamma is None:
            gamma = min(1.0, math.sqrt(self._squared_start / (self.rounds + 1.0)))
        self._fill_exponential(self._estimates, gamma / self.n_arms)
        weights = self._weights
        np.add.accumulate(weights, out=self._cumulative)
        weights *= (1.0 - gamma) / self._cumulative.item(-1)
        weights += gamma / self.n_arms

    def _estimate(self, decision: PolicyDecision, gain: float) -> float:
        return gain / decision.propensity


@register_policy("exp3spec")
class EXP3Spec(EstimatePolicy):
    """EXP3Spec (Hou et al. 2025, BanditSpec, arXiv 2505.15141): exponential weights on losses, no extra exploration.

    p_i proportional to exp(-eta_t Lhat_i), eta_t = sqrt(ln K / (t K)). The paper's loss (L + 1 - Y) / L of an accepted
    length Y in [1, L + 1] is 1 - gain here; the played arm's is divided by its propensity.
    """

    def _fill_weights(self) -> None:
        eta = math.sqrt(math.log(self.n_arms) / ((self.rounds + 1.0) * self.n_arms))
        np.negative(self._estimates, out=self._scratch)
        self._fill_exponential(self._scratch, eta)


@register_policy("exp3-ix")
class EXP3IX(EstimatePolicy):
    """EXP3-IX (Neu 2015, Algorithm 1): loss / (p + gamma) explores implicitly and bounds the regret's tail as well.

    eta_t = 2 gamma_t = sqrt(ln K / (K t)), the paper's anytime rate. gamma_t of the decision travels with it.
    """

    def _fill_weights(self) -> float:
        eta = math.sqrt(math.log(self.n_arms) / (self.n_arms * (self.rounds + 1.0)))
        np.negative(self._estimates, out=self._scratch)
        self._fill_exponential(self._scratch, eta)
        return 0.5 * eta

    def _estimate(self, decision: PolicyDecision, gain: float) -> float:
        return (1.0 - gain) / (decision.propensity + decision.memo)


@register_policy("exp3-s")
class EXP3S(SamplingPolicy):
    """EXP3.S (Auer, Cesa-Bianchi, Freund and Schapire 2002, Figure 4): EXP3 that tracks a changing best arm.

    w_i <- w_i exp(gamma x_i / K) + (e alpha / K) W with x_i = gain / p on the played arm, 0 elsewhere.

    Args:
        horizon, switches: rounds T expected and changes S of the best arm among them; they give alpha = 1 / T and
            gamma = min(1, sqrt(K (S ln(K T) + e) / ((e - 1) T))) (Corollary 8.2).
        exploration: gamma, overrides.
        share: alpha, overrides.
    """

    off_policy = False

    def __init__(
        self,
        n_arms: int,
        seed: int = 0,
        *,
        horizon: int = 10_000,
        switches: int = 10,
        exploration: float | None = None,
        share: float | None = None,
    ) -> None:
        super().__init__(n_arms, seed)
        horizon = check_count("horizon", horizon, minimum=1)
        switches = check_count("switches", switches, minimum=0)
        k = self.n_arms
        if exploration is None:
            spread = k * (switches * math.log(k * horizon) + math.e)
            exploration = min(1.0, math.sqrt(spread / ((math.e - 1.0) * horizon)))
        self._gamma = check_between("exploration", exploration, low=0.0, high=1.0)
        self._alpha = check_between("share", 1.0 / horizon if share is None else share, low=0.0, high=1.0)
        self.options |= {"exploration": self._gamma, "share": self._alpha}
        self._shares = np.full(k, 1.0 / k)

    def _fill_weights(self) -> None:
        np.multiply(self._shares, 1.0 - self._gamma, out=self._weights)
        self._weights += self._gamma / self.n_arms

    def _learn(self, decision: PolicyDecision, feedback: Feedback) -> None:
        index = decision.index
        if not feedback.observed[index]:
            return
        estimate = feedback.gains.item(index) / decision.propensity
        # At the policy's own propensities (at least gamma / K) the exponent is at most 1; a caller's may be smaller.
        growth = math.exp(min(self._gamma * estimate / self.n_arms, 300.0))
        shares = self._shares
        shares[index] *= growth
        shares += math.e * self._alpha / self.n_arms  # the shares sum to 1, so W is 1
        shares /= shares.sum()
        self.rounds += 1.0

    def _state(self) -> dict[str, Any]:
        return {"shares": self._shares.tolist()}

    def _load(self, learned: Mapping[str, Any]) -> None:
        self._shares = read_array(learned, "shares", (self.n_arms,), minimum=0.0, maximum=1.0)


@register_policy("tsallis-inf")
class TsallisINF(EstimatePolicy):
    """Tsallis-INF (Zimmert and Seldin 2021, Algorithm 1 and section 5): optimal for stochastic and adversarial gains.

    p_i = 4 (eta_t (Lhat_i - x))^-2 with x such that they sum to 1, eta_t = 2 / sqrt(t), loss / p on the played arm.
    """

    def _fill_weights(self) -> None:
        eta = 2.0 / math.sqrt(self.rounds + 1.0)
        tsallis_weights(self._estimates, eta, out=self._weights)


def tsallis_weights(losses: np.ndarray, eta: float, *, out: np.ndarray) -> None:
    """Write p_i = 4 (eta (losses_i - x))^-2 with sum 1 to `out`.

    With a_i + z = eta (losses_i - x) / 2, a_i >= 0 the scaled excess over the smallest loss, the equation is
    S_2(z) = 1, S_k = sum (a_i + z)^-k. The function S_2^(-1/2) - 1 is increasing, concave (a power mean) and nearly
    linear in z, and at most 0 at z = 1, so Newton from there climbs to the root without overshooting, in a few steps.
    """
    excess = losses - losses.item(losses.argmin())
    excess *= 0.5 * eta
    squares, ones = np.empty(len(out)), np.ones(len(out))
    z = 1.0
    for _ in range(100):
        np.add(excess, z, out=out)
        np.reciprocal(out, out=out)
        np.multiply(out, out, out=squares)
        total = float(squares.dot(ones))
        if total - 1.0 < 1e-12:
            break
        z += (total**1.5 - total) / float(squares.dot(out))
    np.divide(squares, total, out=out)
