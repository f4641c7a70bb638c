"""Parameter-free expert learning: weights from the regret to each arm, with no learning rate. Full information.

Arms that were not observed are asleep: their regret stays as it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from adaptspec.bandits.base import Feedback, PolicyDecision
from adaptspec.bandits.registry import register_policy
from adaptspec.bandits.sampling import SamplingPolicy, mixture_gain
from adaptspec.bandits.state import read_array


class RegretPolicy(SamplingPolicy):
    """Keeps per arm the regret R_i: what it gained beyond the mixture, summed over the rounds it was observed."""

    full_information = True
    additive = ("regrets",)

    def __init__(self, n_arms: int, seed: int = 0) -> None:
        super().__init__(n_arms, seed)
        self._regrets = np.zeros(self.n_arms)

    def _learn(self, decision: PolicyDecision, feedback: Feedback) -> None:
        mixture = mixture_gain(decision, feedback)
        if mixture is None:
            return
        regrets = np.subtract(feedback.gains, mixture, out=self._scratch)
        if not feedback.complete:
            regrets *= feedback.observed
        self._accumulate(regrets)
        self.rounds += 1.0

    def _accumulate(self, regrets: np.ndarray) -> None:
        self._regrets += regrets

    def _state(self) -> dict[str, Any]:
        return {"regrets": self._regrets.tolist()}

    def _load(self, learned: Mapping[str, Any]) -> None:
        self._regrets = read_array(learned, "regrets", (self.n_arms,))


@register_policy("normal-hedge")
class NormalHedge(RegretPolicy):
    """NormalHedge (Chaudhuri, Freund and Hsu 2009, Figure 1).

    p_i proportional to ([R_i]+ / c) exp([R_i]+^2 / (2 c)), c > 0 such that the mean of exp([R_i]+^2 / (2 c)) is e;
    uniform while no regret is positive. Regret to the best epsilon-share of arms O(sqrt(T ln(1 / epsilon))).
    """

    def __init__(self, n_arms: int, seed: int = 0) -> None:
        super().__init__(n_arms, seed)
        self._ones = np.ones(self.n_arms)
        self._log_n = math.log(self.n_arms)

    def _fill_weights(self) -> None:
        weights = self._weights
        if not self._scaled_squares(self._scratch):
            weights[:] = 1.0
            return
        self._potential(self._scratch, weights)
        weights *= np.sqrt(self._scratch, out=self._scratch)

    def scale(self) -> float:
        """c, which solves mean exp([R]+^2 / (2 c)) = e; 0 while no regret is positive."""
        squares, exponentials = np.empty(self.n_arms), np.empty(self.n_arms)
        largest = self._scaled_squares(squares)
        return 0.5 * largest**2 / self._potential(squares, exponentials) if largest else 0.0

    def _scaled_squares(self, out: np.ndarray) -> float:
        """Write ([R_i]+ / R_max)^2 to `out` and return R_max, or 0 if no regret is positive."""
        largest = self._regrets.item(self._regrets.argmax())
        if largest <= 0.0:
            return 0.0
        np.divide(self._regrets, largest, out=out)
        np.maximum(out, 0.0, out=out)
        np.multiply(out, out, out=out)
        return largest

    def _potential(self, squares: np.ndarray, out: np.ndarray) -> float:
        """Write exp(s (squares - 1)) to `out` for the s = R_max^2 / (2 c) that makes the mean of exp(s squares) e.

        f(s) = ln mean exp(s squares) - 1 is convex and increasing, and f >= 0 at s = 1 + ln N since the largest square
        is 1. Newton from there only descends, and f is nearly linear: a handful of steps.
        """
        s = 1.0 + self._log_n
        for _ in range(50):
            np.multiply(squares, s, out=out)
            out -= s
            np.exp(out, out=out)
            total = out.dot(self._ones)
            value = s + math.log(total) - self._log_n - 1.0
            if value < 1e-12:
                break
            s -= value / (out.dot(squares) / total)
        return s


@register_policy("ada-normal-hedge")
class AdaNormalHedge(RegretPolicy):
    """AdaNormalHedge (Luo and Schapire 2015, Algorithm 1): no root finding, bounds that adapt to each arm's own losses.

    p_i proportional to w(R_i, C_i), w(R, C) = (Phi(R + 1, C + 1) - Phi(R - 1, C + 1)) / 2, Phi(R, C) =
    exp([R]+^2 / (3 C)), C_i the sum of |r_i| over the rounds the arm was awake; uniform if all are 0.
    """

    additive = ("regrets", "magnitudes")

    def __init__(self, n_arms: int, seed: int = 0) -> None:
        super().__init__(n_arms, seed)
        self._magnitudes = np.zeros(self.n_arms)

    def _accumulate(self, regrets: np.ndarray) -> None:
        self._regrets += regrets
        self._magnitudes += np.abs(regrets, out=regrets)

    def _fill_weights(self) -> None:
        divisor = 3.0 * (self._magnitudes + 1.0)
        above = np.maximum(self._regrets + 1.0, 0.0)
        above *= above
        above /= divisor
        below = np.maximum(self._regrets - 1.0, 0.0)
        below *= below
        below /= divisor
        # Exponents can be large when feedback is late; only ratios of weights matter.
        shift = above.item(above.argmax())
        np.exp(above - shift, out=self._weights)
        self._weights -= np.exp(below - shift)
        if self._weights.item(self._weights.argmax()) <= 0.0:
            self._weights[:] = 1.0

    def _state(self) -> dict[str, Any]:
        return super()._state() | {"magnitudes": self._magnitudes.tolist()}

    def _load(self, learned: Mapping[str, Any]) -> None:
        magnitudes = read_array(learned, "magnitudes", (self.n_arms,), minimum=0.0)
        super()._load(learned)
        self._magnitudes = magnitudes
