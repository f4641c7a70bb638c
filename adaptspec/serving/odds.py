"""Factors of the odds: how much better than expected something fares, for many cells at once.

A factor for h hits in n trials of which e were expected is

    (h + s/2) / (e + s/2) * (n - e + s/2) / (n - h + s/2),

s trials of doubt. Memory fades with every trial beyond a limit, and a little with every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Memory:
    """How a factor learns.

    Attributes:
        doubt: trials that "as expected" is worth.
        horizon: trials that are remembered.
        fade: what is left of the counts after a step.
    """

    doubt: float
    horizon: float
    fade: float


def odds_factor(hits: Any, trials: Any, expected: Any, *, half: Any) -> Any:
    """How much better than expected, as a factor of the odds; 1 without trials. `half` is half the doubt."""
    return (hits + half) / (expected + half) * (trials - expected + half) / (trials - hits + half)


def cap(counts: np.ndarray, trials: np.ndarray, horizon: Any) -> None:
    """Scale all counts down where there are more trials than the horizon."""
    if np.count_nonzero(trials > horizon):
        counts *= np.minimum(1.0, horizon / np.maximum(trials, 1.0))


class Factors:
    """The factors of several groups of cells, side by side in one array.

    Args:
        groups: cells and memory of each.

    Attributes:
        counts: float64 [3, all cells], hits, trials and expected hits. Say `changed()` after writing to it.
        parts: where the cells of each group are.
    """

    def __init__(self, groups: Sequence[tuple[int, Memory]]) -> None:
        sizes = [cells for cells, _ in groups]
        ends = np.cumsum(sizes).tolist()
        self.parts = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        self.counts = np.zeros((3, ends[-1]))
        self._half, self._horizon, self._fade = (
            np.repeat([getattr(memory, name) for _, memory in groups], sizes) for name in ("doubt", "horizon", "fade")
        )
        self._half *= 0.5
        self._values: np.ndarray | None = None

    def values(self) -> list[np.ndarray]:
        """The factors of each group. Do not change them."""
        if self._values is None:
            self._values = odds_factor(*self.counts, half=self._half)
        return [self._values[part] for part in self.parts]

    def add(self, more: np.ndarray) -> None:
        """Hits, trials and expected hits [3, all cells]."""
        self.counts += more
        cap(self.counts, self.counts[1], self._horizon)
        self._values = None

    def fade(self) -> None:
        """A step passed."""
        self.counts *= self._fade
        self._values = None

    def changed(self) -> None:
        """The counts were written from outside."""
        self._values = None
