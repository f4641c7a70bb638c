"""Thompson sampling with exact propensities. Bandit feedback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from adaptspec.bandits.base import Feedback, PolicyDecision
from adaptspec.bandits.checks import check_count, check_gain_range
from adaptspec.bandits.registry import register_policy
from adaptspec.bandits.sampling import SamplingPolicy
from adaptspec.bandits.state import read_array

_TINY = 1e-300


@register_policy("thompson")
class Thompson(SamplingPolicy):
    """Thompson sampling (Thompson 1933; Agrawal and Goyal 2012) with a Beta(1, 1) prior per arm.

    A gain g in [0, 1] counts as g successes and 1 - g failures (Agrawal and Goyal toss a coin instead; this needs no
    random number in `update`). Ours: each posterior lives on `resolution` equal cells, which gives the probability
    p_i = sum_x posterior_i(x) prod_{j != i} CDF_j(x) that arm i is the best, and the arm is drawn from p. So
    propensities are known, not estimated, and one uniform number is used per step.

    Args:
        resolution: cells G; gains closer than 1 / G are not told apart once both are known well.
        gain_range: where gains lie in [0, 1]; gains beyond are clipped to it.
    """

    additive = ("successes", "failures")

    def __init__(
        self, n_arms: int, seed: int = 0, *, resolution: int = 512, gain_range: tuple[float, float] = (0.0, 1.0)
    ) -> None:
        super().__init__(n_arms, seed)
        cells = check_count("resolution", resolution, minimum=2)
        self._low, high = check_gain_range(gain_range)
        self._width = high - self._low
        self.options |= {"resolution": cells, "gain_range": [self._low, high]}
        middles = (np.arange(cells) + 0.5) / cells
        self._log_middle = np.log(middles)
        self._log_rest = np.log1p(-middles)
        self._successes = np.zeros(self.n_arms)
        self._failures = np.zeros(self.n_arms)
        self._ratios = np.empty((self.n_arms, cells))
        self._log_cdfs = np.empty((self.n_arms, cells))
        for index in range(self.n_arms):
            self._refresh(index)

    def _refresh(self, index: int) -> None:
        mass = self._successes.item(index) * self._log_middle
        mass += self._failures.item(index) * self._log_rest
        mass -= mass.item(mass.argmax())
        np.exp(mass, out=mass)
        # CDF at the middle of each cell: two arms in the same cell beat each other half of the time.
        cdf = np.add.accumulate(mass)
        total = cdf.item(-1)
        cdf -= 0.5 * mass
        cdf /= total
        mass /= total
        np.maximum(cdf, _TINY, out=cdf)
        np.divide(mass, cdf, out=self._ratios[index])
        np.log(cdf, out=self._log_cdfs[index])

    def _fill_weights(self) -> None:
        all_below = np.exp(np.add.reduce(self._log_cdfs, axis=0))
        np.dot(self._ratios, all_below, out=self._weights)

    def _learn(self, decision: PolicyDecision, feedback: Feedback) -> None:
        index = decision.index
        if not feedback.observed[index]:
            return
        gain = min(max((feedback.gains.item(index) - self._low) / self._width, 0.0), 1.0)
        self._successes[index] += gain
        self._failures[index] += 1.0 - gain
        self._refresh(index)
        self.rounds += 1.0

    def _state(self) -> dict[str, Any]:
        return {"successes": self._successes.tolist(), "failures": self._failures.tolist()}

    def _load(self, learned: Mapping[str, Any]) -> None:
        successes = read_array(learned, "successes", (self.n_arms,), minimum=0.0)
        failures = read_array(learned, "failures", (self.n_arms,), minimum=0.0)
        self._successes, self._failures = successes, failures
        for index in range(self.n_arms):
            self._refresh(index)
