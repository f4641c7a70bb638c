"""What the parts of a serving step take, learnt from what they took.

    seconds(step) = verify(tokens in the pass, mean context) + sum of draft_d(rows, length) over the drafters on
                    + catching up + everything else

What drafting takes is learnt in `draft_seconds`. A verification is a curve over the tokens of the pass (rows, drafts
and prompt tokens alike), non-decreasing, at sizes two to an octave. A change of speed that seven measurements in a row
agree on moves the whole curve.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping
from math import ceil
from statistics import median
from typing import Any

import numpy as np

from adaptspec.bandits.state import read_array, read_int
from adaptspec.control.cost_cell import CLIP, RECENT, CostCell, persistent, read_times
from adaptspec.control.cost_curve import CostPrior, isotonic
from adaptspec.serving.acceptance import CONTEXTS
from adaptspec.serving.draft_seconds import DraftSeconds

_SIZES = np.unique(np.array([size for e in range(17) for size in (2**e, 2**e + 2 ** max(e - 1, 0))], dtype=np.float64))
_SIZE_LIST: list[float] = _SIZES.tolist()
_EDGES: list[float] = np.sqrt(_SIZES[1:] * _SIZES[:-1]).tolist()

_AROUND = np.array([[[1.1], [0.9]], [[4.0], [0.0]]])
"""Sizes between which the price of a token is taken: a tenth more and 4, and a tenth less."""

DEFAULT_PRIOR = CostPrior(0.02, 0.0001)
"""A pass on no machine in particular; only its shape counts once anything was measured."""


class StepSeconds:
    """See the module.

    Args:
        drafters: their number, D.
        prior: of a pass, by its tokens: `seconds_at_1 + seconds_per_node * (tokens - 1)`.
    """

    def __init__(self, drafters: int, *, prior: CostPrior = DEFAULT_PRIOR) -> None:
        self.prior = prior
        self._prior_curve = prior.seconds_at_1 + prior.seconds_per_node * (_SIZES - 1.0)
        self._cells: dict[int, CostCell] = {}
        self._scales: dict[int, CostCell] = {}  # by context bucket, relative to the one seen first
        self._ratios: deque[float] = deque(maxlen=RECENT)
        self._curve: tuple[np.ndarray, list[float]] | None = None
        self.changes = 0  # how often the machine became faster or slower
        self._overhead: CostCell | None = None
        self._refresh: dict[int, CostCell] = {}  # seconds per call
        self.drafting = DraftSeconds(drafters)
        self._drafters = drafters

    @property
    def measured(self) -> bool:
        """Whether a pass was ever measured."""
        return bool(self._cells)

    def verify(self, tokens: float, *, context: float = 0.0) -> float:
        """Expected seconds of a pass of so many tokens."""
        return _interpolate(tokens, self._shape()[1]) * self._scale(context)

    def verify_each(self, tokens: np.ndarray, *, context: float = 0.0) -> np.ndarray:
        """Expected seconds of passes of so many tokens."""
        seconds = np.interp(tokens, _SIZES, self._shape()[0])
        seconds *= self._scale(context)
        return seconds

    def price_each(self, tokens: np.ndarray, *, context: float = 0.0) -> np.ndarray:
        """Expected seconds of one more token in passes of so many: a secant, since real curves have steps."""
        around = np.maximum(tokens * _AROUND[0].astype(tokens.dtype) + _AROUND[1].astype(tokens.dtype), 1.0)
        dear, cheap = self.verify_each(around, context=context)
        return (dear - cheap) / (around[0] - around[1])

    def refresh(self, drafter: int) -> float:
        """Expected seconds of bringing a drafter's state up; what one token of draft takes where that was never
        measured."""
        cell = self._refresh.get(drafter)
        return self.drafting.expected(drafter, rows=1, length=1) if cell is None else cell.value

    @property
    def overhead(self) -> float:
        """Expected seconds of a step that belong to no part."""
        return 0.0 if self._overhead is None else self._overhead.value

    def observe_verify(self, tokens: int, seconds: float, *, context: float = 0.0) -> None:
        """A pass of so many tokens took `seconds`; 0 is what a coarse clock says, and tells nothing."""
        if seconds <= 0.0:
            return
        place = bisect_left(_EDGES, tokens)
        bucket = _bucket(context)
        if not self._scales:
            self._scales[bucket] = CostCell(1.0)
        reference = next(iter(self._scales))
        shape = self._shape()[1]
        known = _interpolate(tokens, shape)
        if self._cells:
            self._ratios.append(seconds / max(known * self._scale(context), 1e-12))
            if bucket != reference:
                ratio = seconds / max(known, 1e-12)
                if bucket in self._scales:
                    self._scales[bucket].add(ratio)
                else:
                    self._scales[bucket] = CostCell(ratio, ceiling=CLIP * self._scale(context))
        # What it would have taken at the size that the cell stands for, and at the context of reference.
        value = seconds / self._scale(context) * (shape[place] / known)
        cell = self._cells.get(place)
        if cell is None:
            self._cells[place] = CostCell(value, ceiling=CLIP * shape[place] if len(self._cells) > 1 else np.inf)
            self._curve = None
        else:
            cell.add(value)
            if cell.moved():
                cell.show()
                self._curve = None
        if persistent(self._ratios):
            self._follow(place)

    def _follow(self, place: int) -> None:
        """The machine has become faster or slower: all sizes move, the one just measured has moved itself."""
        factor = median(self._ratios)
        for other, cell in self._cells.items():
            if other != place:
                cell.scale(factor)
        self._ratios.clear()
        self._curve = None
        self.changes += 1

    def observe_refresh(self, drafter: int, seconds: float) -> None:
        """Bringing a drafter's state up took `seconds`."""
        cell = self._refresh.get(drafter)
        if cell is None:
            self._refresh[drafter] = CostCell(seconds)
        else:
            cell.add(seconds)

    def observe_overhead(self, seconds: float) -> None:
        """What a step took beyond its parts."""
        if self._overhead is None:
            self._overhead = CostCell(seconds)
        else:
            self._overhead.add(seconds)

    def table(self) -> list[tuple[int, float, int]]:
        """Measured sizes of a pass in tokens, their seconds, and how often they were measured."""
        return [(int(_SIZES[place]), cell.value, cell.count) for place, cell in sorted(self._cells.items())]

    def _scale(self, context: float) -> float:
        if not self._scales:
            return 1.0
        bucket = _bucket(context)
        cell = self._scales.get(bucket)
        if cell is None:
            cell = self._scales[min(self._scales, key=lambda other: (abs(other - bucket), other))]
        return cell.value

    def _shape(self) -> tuple[np.ndarray, list[float]]:
        """float64 [sizes], seconds at the context of reference, as an array and as plain numbers."""
        if self._curve is None:
            curve = self._fit()
            self._curve = curve, curve.tolist()
        return self._curve

    def _fit(self) -> np.ndarray:
        prior = self._prior_curve
        if not self._cells:
            return prior
        places = sorted(self._cells)
        cells = [self._cells[place] for place in places]
        values = isotonic([cell.shown for cell in cells], [cell.shown_weight for cell in cells])
        sizes = _SIZES[places]
        curve = np.interp(_SIZES, sizes, values)
        first, last = places[0], places[-1]
        curve[:first] = prior[:first] * (values[0] / prior[first])
        # Beyond what was measured a pass is taken to become dearer at least as the prior does.
        slope = self.prior.seconds_per_node * values[-1] / prior[last]
        half = int(np.searchsorted(sizes, 0.5 * sizes[-1], side="right")) - 1
        if len(places) > 1:
            anchor = max(half, 0)
            slope = max(slope, (values[-1] - values[anchor]) / (sizes[-1] - sizes[anchor]))
        curve[last + 1 :] = values[-1] + slope * (_SIZES[last + 1 :] - _SIZES[last])
        return np.maximum.accumulate(curve)

    def state_dict(self) -> dict[str, Any]:
        return {
            "prior": [self.prior.seconds_at_1, self.prior.seconds_per_node],
            "ratios": list(self._ratios),
            "overhead": None if self._overhead is None else self._overhead.state_dict(),
            **{
                name: [[key, cell.state_dict()] for key, cell in cells.items()]
                for name, cells in self._tables().items()
            },
            **self.drafting.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError on anything but a `state_dict()` with as many drafters; nothing changes then."""
        tables = self._tables()
        expected = {"prior", "ratios", "overhead", *tables, "moments", "measured"}
        if not isinstance(state, Mapping) or state.keys() != expected:
            raise ValueError(f"state: costs must be a mapping of {', '.join(sorted(expected))}")
        prior = CostPrior(*read_array(state, "prior", (2,), minimum=0.0).tolist())
        read = {name: _read_cells(state, name, maximum=limit) for name, limit in self._limits().items()}
        overhead = None if state["overhead"] is None else CostCell.from_state(state["overhead"])
        ratios = read_times(state, "ratios")
        self.drafting.load_state_dict(state)
        self.prior = prior
        self._prior_curve = prior.seconds_at_1 + prior.seconds_per_node * (_SIZES - 1.0)
        self._cells, self._scales, self._refresh = read["cells"], read["scales"], read["refresh"]
        self._overhead = overhead
        self._ratios = deque(ratios, maxlen=RECENT)
        self._curve = None

    def _tables(self) -> dict[str, dict[int, CostCell]]:
        return {"cells": self._cells, "scales": self._scales, "refresh": self._refresh}

    def _limits(self) -> dict[str, int]:
        return {"cells": len(_SIZES) - 1, "scales": CONTEXTS - 1, "refresh": max(self._drafters - 1, 0)}


def _read_cells(state: Mapping[str, Any], name: str, *, maximum: int) -> dict[int, CostCell]:
    rows = state[name]
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == 2 for row in rows):
        raise ValueError(f"state: {name} must be a list of pairs, got {rows!r:.80}")
    cells = {read_int({name: key}, name, maximum=maximum): CostCell.from_state(cell) for key, cell in rows}
    if len(cells) != len(rows):
        raise ValueError(f"state: {name} must be different places, got one twice")
    return cells


def _interpolate(tokens: float, curve: list[float]) -> float:
    """`np.interp` of one number, which takes a tenth of the time."""
    place = bisect_right(_SIZE_LIST, tokens) - 1
    if place < 0:
        return curve[0]
    if place + 1 >= len(curve):
        return curve[-1]
    size, value = _SIZE_LIST[place], curve[place]
    return (curve[place + 1] - value) / (_SIZE_LIST[place + 1] - size) * (tokens - size) + value


def _bucket(context: float) -> int:
    """As `acceptance.context_buckets`, of one."""
    return min(max((ceil(context) - 1).bit_length() - 9, 0), CONTEXTS - 1)
