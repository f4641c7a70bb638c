"""Upper confidence bounds for gains that change over time: forget by a window or by discounting. Bandit feedback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from adaptspec.bandits.checks import check_between, check_count
from adaptspec.bandits.registry import register_policy
from adaptspec.bandits.state import read_array, read_indices
from adaptspec.bandits.ucb import UpperConfidencePolicy, log_at_least_zero


@register_policy("sw-ucb")
class SlidingWindowUCB(UpperConfidencePolicy):
    """SW-UCB (Garivier and Moulines 2011, section 3.2): UCB on the latest `window` plays, for changing gains.

    mean_i + width * sqrt(xi ln min(t, window) / n_i), both over the window. An arm that fell out of it is played again.
    """

    additive = ()

    def __init__(
        self,
        n_arms: int,
        seed: int = 0,
        *,
        window: int = 1000,
        xi: float = 0.6,
        gain_range: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        super().__init__(n_arms, seed, gain_range=gain_range)
        self._window = check_count("window", window, minimum=1)
        self._xi = check_between("xi", xi, low=0.0, high=100.0)
        self.options |= {"window": self._window, "xi": self._xi}
        self._ring_arms = np.zeros(self._window, dtype=np.int64)
        self._ring_gains = np.zeros(self._window)
        self._held = 0
        self._oldest = 0

    def _add(self, index: int, gain: float) -> None:
        gain = min(max(gain, self._low), self._high)
        if self._held == self._window:
            slot = self._oldest
            self._oldest = (slot + 1) % self._window
            self._remove(self._ring_arms.item(slot), self._ring_gains.item(slot))
        else:
            slot = self._held
            self._held += 1
        self._ring_arms[slot] = index
        self._ring_gains[slot] = gain
        super()._add(index, gain)

    def _remove(self, index: int, gain: float) -> None:
        count = self._counts.item(index) - 1.0
        total = max(self._sums.item(index) - gain, 0.0) if count else 0.0
        self._counts[index], self._sums[index] = count, total
        if count:
            self._means[index] = total / count
        else:
            self._untried += 1

    def scores(self) -> np.ndarray:
        scores = np.divide(self._xi * log_at_least_zero(self._held), self._counts, out=self._scratch)
        np.sqrt(scores, out=scores)
        scores *= self._width
        return np.add(scores, self._means, out=scores)

    def _state(self) -> dict[str, Any]:
        order = (np.arange(self._held) + self._oldest) % self._window
        return super()._state() | {
            "recent_arms": self._ring_arms[order].tolist(),
            "recent_gains": self._ring_gains[order].tolist(),
        }

    def _load(self, learned: Mapping[str, Any]) -> None:
        arms = read_indices(learned, "recent_arms", length=self._window, maximum=self.n_arms - 1)
        gains = read_array(learned, "recent_gains", (len(arms),), minimum=self._low, maximum=self._high)
        super()._load(learned)
        self._held, self._oldest = len(arms), 0
        self._ring_arms[: len(arms)] = arms
        self._ring_gains[: len(arms)] = gains


@register_policy("d-ucb")
class DiscountedUCB(UpperConfidencePolicy):
    """D-UCB (Garivier and Moulines 2011, section 3.1): every play fades all earlier ones by `discount`.

    mean_i + 2 width * sqrt(xi ln n / n_i), where n_i is the discounted number of plays of arm i and n their sum.
    """

    additive = ()

    def __init__(
        self,
        n_arms: int,
        seed: int = 0,
        *,
        discount: float = 0.999,
        xi: float = 0.6,
        gain_range: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        super().__init__(n_arms, seed, gain_range=gain_range)
        # At 1/2 and below the total never passes 2 plays, ln n stays small, and unplayed arms are never revisited.
        self._discount = check_between("discount", discount, low=0.5, high=1.0)
        self._xi = check_between("xi", xi, low=0.0, high=100.0)
        self.options |= {"discount": self._discount, "xi": self._xi}

    def _add(self, index: int, gain: float) -> None:
        self._counts *= self._discount
        self._sums *= self._discount
        super()._add(index, gain)

    def scores(self) -> np.ndarray:
        scores = np.divide(self._xi * log_at_least_zero(float(self._counts.sum())), self._counts, out=self._scratch)
        np.sqrt(scores, out=scores)
        scores *= 2.0 * self._width
        scores += self._sums / self._counts
        return scores
