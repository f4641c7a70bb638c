"""Cost as a function of size (nodes or budget) from measurements at a few sizes: monotone, exact where it can be."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from adaptspec.control.cost_cell import CostCell, check_seconds

MAX_NODES = 1024
"""The largest size that a curve covers."""

_NO_TIME = 1e-12
"""Seconds below which a reference has no shape."""

_SIZES = np.arange(MAX_NODES + 1, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class CostPrior:
    """What is assumed before anything is measured: `seconds_at_1 + seconds_per_node * (rows - 1)` for a pass of
    `rows = batch * (nodes + 1)` rows, the root of every request included.

    >>> CostPrior(0.036, 0.0015).curve(1)[[0, 64]].round(3).tolist()
    [0.036, 0.132]
    """

    seconds_at_1: float
    seconds_per_node: float = 0.0

    def __post_init__(self) -> None:
        for name in ("seconds_at_1", "seconds_per_node"):
            check_seconds(name, getattr(self, name))

    def curve(self, batch: int) -> np.ndarray:
        """float64 [MAX_NODES + 1], seconds by nodes."""
        return self.seconds_at_1 + self.seconds_per_node * (batch * (_SIZES + 1.0) - 1.0)


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` in weighted squares (pool adjacent violators)."""
    heights: list[float] = []
    masses: list[float] = []
    widths: list[int] = []
    for value, weight in zip(values, weights, strict=True):
        width = 1
        while heights and heights[-1] > value:
            mass = masses.pop()
            value = (value * weight + heights.pop() * mass) / (weight + mass)
            weight += mass
            width += widths.pop()
        heights.append(value)
        masses.append(weight)
        widths.append(width)
    return [height for height, width in zip(heights, widths, strict=True) for _ in range(width)]


def scaled(curve: np.ndarray, target: np.ndarray, source: np.ndarray) -> np.ndarray:
    """`curve` times target / source, made non-decreasing; unchanged where `source` is zero."""
    ratio = np.divide(target, source, out=np.ones(len(curve)), where=source > _NO_TIME)
    return np.maximum.accumulate(curve * ratio)


def fit_curve(points: Mapping[int, CostCell], *, reference: np.ndarray, reach: int = -1) -> np.ndarray:
    """float64 [MAX_NODES + 1], non-decreasing, from at least one measured size.

    Exact at the measured sizes where they do not contradict each other (larger but cheaper); where they do, they are
    pooled by weight. Linear in between. Below the smallest, `reference` gives the shape. Above the largest: `reference`
    where it is measured further or where there is only one size; else affine through the largest size and the largest
    measured one of at most half of it (the smallest if there is none), so that the noise of two adjacent sizes is not
    stretched over hundreds of nodes.

    Args:
        reference: [MAX_NODES + 1], only its shape matters.
        reach: the largest size up to which the reference is measured.
    """
    sizes = sorted(points)
    cells = [points[size] for size in sizes]
    values = isotonic([cell.shown for cell in cells], [cell.shown_weight for cell in cells])
    first, last = sizes[0], sizes[-1]
    curve = np.interp(_SIZES, sizes, values) if len(sizes) > 1 else np.full(MAX_NODES + 1, values[0])
    if first > 0 and reference[first] > _NO_TIME:
        curve[:first] = reference[:first] * (values[0] / reference[first])
    if last < MAX_NODES:
        if len(sizes) > 1 and reach <= last:
            anchor = max(bisect_right(sizes, last // 2) - 1, 0)
            slope = (values[-1] - values[anchor]) / (last - sizes[anchor])
            curve[last + 1 :] = values[-1] + slope * (_SIZES[last + 1 :] - last)
        elif reference[last] > _NO_TIME:
            curve[last + 1 :] = reference[last + 1 :] * (values[-1] / reference[last])
    return np.maximum.accumulate(curve)
