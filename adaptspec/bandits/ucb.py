"""Upper confidence bounds: play the arm whose mean gain could still be the largest. Bandit feedback.

All bonuses are multiplied by the width of `gain_range`. A bonus that ignores the range of the gains is the classic
mistake here: against gains in the hundreds it vanishes and the policy is greedy after one pull of every arm.
"""

from __future__ import annotations

import math

import numpy as np

from adaptspec.bandits.checks import check_between, check_gain_range
from adaptspec.bandits.means import MeanPolicy
from adaptspec.bandits.registry import register_policy


def log_at_least_zero(value: float) -> float:
    """ln(value), 0 below 1: no bonus before there is anything to compare."""
    return math.log(value) if value > 1.0 else 0.0


class UpperConfidencePolicy(MeanPolicy):
    """What the bounds below share.

    Args:
        gain_range: where this problem's gains really lie within [0, 1]; gains beyond are clipped to it, so one outlier
            cannot move a mean by more than the range.
    """

    def __init__(self, n_arms: int, seed: int = 0, *, gain_range: tuple[float, float] = (0.0, 1.0)) -> None:
        super().__init__(n_arms, seed)
        self._low, self._high = check_gain_range(gain_range)
        self._width = self._high - self._low
        self.options["gain_range"] = [self._low, self._high]

    def _add(self, index: int, gain: float) -> None:
        super()._add(index, min(max(gain, self._low), self._high))


@register_policy("ucb")
class UCB1(UpperConfidencePolicy):
    """UCB1 (Auer, Cesa-Bianchi and Fischer 2002, Figure 1): mean_i + width * sqrt(2 ln t / n_i).

    t is the number of plays observed, n_i those of arm i. The range and late feedback are ours.
    """

    def __init__(self, n_arms: int, seed: int = 0, *, gain_range: tuple[float, float] = (0.0, 1.0)) -> None:
        super().__init__(n_arms, seed, gain_range=gain_range)
        self._inverse_roots = np.ones(self.n_arms)

    def _refresh(self, index: int) -> None:
        self._inverse_roots[index] = 1.0 / math.sqrt(self._counts.item(index))

    def scores(self) -> np.ndarray:
        scores = self._scratch
        np.multiply(self._inverse_roots, self._width * math.sqrt(2.0 * log_at_least_zero(self.rounds)), out=scores)
        return np.add(scores, self._means, out=scores)


@register_policy("ucb-tuned")
class UCBTuned(UpperConfidencePolicy):
    """UCB1-Tuned (Auer, Cesa-Bianchi and Fischer 2002, section 4).

    mean_i + width * sqrt((ln t / n_i) * min(1/4, V_i)) with V_i = variance_i / width^2 + sqrt(2 ln t / n_i).
    """

    additive = ("counts", "sums", "squares")
    stored = additive

    def __init__(self, n_arms: int, seed: int = 0, *, gain_range: tuple[float, float] = (0.0, 1.0)) -> None:
        super().__init__(n_arms, seed, gain_range=gain_range)
        self._squares = np.zeros(self.n_arms)
        self._variances = np.zeros(self.n_arms)

    def _add(self, index: int, gain: float) -> None:
        gain = min(max(gain, self._low), self._high)
        self._squares[index] += gain * gain
        super()._add(index, gain)

    def _refresh(self, index: int) -> None:
        mean = self._means.item(index)
        variance = self._squares.item(index) / self._counts.item(index) - mean * mean
        self._variances[index] = max(variance, 0.0) / self._width**2

    def scores(self) -> np.ndarray:
        log_over_count = log_at_least_zero(self.rounds) / self._counts
        bound = np.sqrt(2.0 * log_over_count, out=self._scratch)
        bound += self._variances
        np.minimum(bound, 0.25, out=bound)
        bound *= log_over_count
        np.sqrt(bound, out=bound)
        bound *= self._width
        return np.add(bound, self._means, out=bound)


@register_policy("kl-ucb")
class KLUCB(UpperConfidencePolicy):
    """KL-UCB (Garivier and Cappe 2011, Algorithm 1): the largest q with n_i * kl(mean_i, q) <= ln t + c ln ln t.

    kl is the divergence of Bernoulli laws; means are first scaled from `gain_range` to [0, 1]. The paper uses c = 0 in
    practice. Never wider than UCB1, much narrower for means near the ends of the range.
    """

    def __init__(
        self, n_arms: int, seed: int = 0, *, c: float = 0.0, gain_range: tuple[float, float] = (0.0, 1.0)
    ) -> None:
        super().__init__(n_arms, seed, gain_range=gain_range)
        self._c = check_between("c", c, low=0.0, high=100.0, open_low=False)
        self.options["c"] = self._c

    def scores(self) -> np.ndarray:
        log_t = log_at_least_zero(self.rounds)
        level = log_t + self._c * log_at_least_zero(log_t)
        bounds = kl_upper_bound((self._means - self._low) / self._width, level / self._counts)
        bounds *= self._width
        bounds += self._low
        return bounds


def kl_upper_bound(means: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """The largest q in [mean, 1] with kl(mean, q) <= level, elementwise, to 1e-9.

    Newton's method on a convex increasing function, from the right of its root: two bounds give the start, Pinsker's
    (kl >= 2 (q - mean)^2) and kl >= -entropy(mean) - (1 - mean) log(1 - q). From there it only descends.
    """
    p = np.minimum(np.maximum(means, 1e-12), 1.0 - 1e-12)
    miss = 1.0 - p
    constant = p * np.log(p) + miss * np.log(miss) - levels
    lowest = p + 1e-15
    q = np.minimum(p + np.sqrt(0.5 * levels), 1.0 - np.exp(constant / miss))
    for _ in range(50):
        np.maximum(q, lowest, out=q)
        np.minimum(q, 1.0 - 1e-15, out=q)
        rest = 1.0 - q
        step = constant - p * np.log(q) - miss * np.log(rest)
        step *= q
        step *= rest
        step /= q - p
        q -= step
        if step.item(step.argmax()) < 1e-7:  # the error after this step is of the order of its square
            break
    return np.minimum(np.maximum(q, p), 1.0)


@register_policy("ucbspec")
class UCBSpec(UpperConfidencePolicy):
    """UCBSpec (Hou et al. 2025, BanditSpec, arXiv 2505.15141): every arm once, then the largest

    mean_i + (width / 2) * sqrt(((1 + n) / n^2) * (1 + 2 ln(K t^2 sqrt(1 + n) / delta))), n = n_i.

    The paper's rewards are accepted lengths with range L; here gains with range `width`. t is the current round.
    """

    def __init__(
        self, n_arms: int, seed: int = 0, *, delta: float = 0.05, gain_range: tuple[float, float] = (0.0, 1.0)
    ) -> None:
        super().__init__(n_arms, seed, gain_range=gain_range)
        self._delta = check_between("delta", delta, low=0.0, high=1.0)
        self.options["delta"] = self._delta
        self._factors = np.ones(self.n_arms)
        self._logs = np.zeros(self.n_arms)

    def _refresh(self, index: int) -> None:
        count = self._counts.item(index)
        self._factors[index] = (1.0 + count) / (count * count)
        self._logs[index] = math.log1p(count)  # 2 ln sqrt(1 + n)

    def scores(self) -> np.ndarray:
        constant = 1.0 + 2.0 * math.log(self.n_arms * (self.rounds + 1.0) ** 2 / self._delta)
        scores = np.add(self._logs, constant, out=self._scratch)
        scores *= self._factors
        np.sqrt(scores, out=scores)
        scores *= 0.5 * self._width
        return np.add(scores, self._means, out=scores)
