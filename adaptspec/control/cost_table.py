"""Curves of cost by size, one per batch and context bucket, with what is known lending itself to what is not."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from statistics import median
from typing import Any

import numpy as np

from adaptspec.bandits.state import read_int
from adaptspec.control.cost_cell import (
    CHANGE,
    CLIP,
    RECENT,
    CostCell,
    check_fields,
    merge_cells,
    persistent,
    read_times,
)
from adaptspec.control.cost_curve import MAX_NODES, CostPrior, fit_curve, scaled

MAX_POINTS = 64
"""Measured sizes kept per curve; the one measured longest ago makes room."""
MAX_CURVES = 64
"""Curves kept per table; the one measured longest ago makes room."""
STALE = 50
"""A cell that was not measured during so many measurements of the table is doubted when it is measured again."""
SMALLEST_CONTEXT = 9
"""Contexts of up to 2 ** 9 = 512 tokens share a bucket."""

Key = tuple[str, int, int]
"""Vocabulary, batch bucket and context bucket; buckets as exponents of two, rounded up."""

_FIELDS = ("clock", "steady", "curves", "window", "basis")


class CostTable:
    """Costs of one kind of work on one machine.

    A change of speed (throttling, a neighbour on the same device) hits every size, but only the sizes in play are
    measured. When the latest `RECENT` measurements, of whatever sizes, are all off on one side, the cells among them
    restart from what was measured and all that were not measured since are scaled by the median ratio. New sizes count
    against the curve between older ones, but do not suffice alone: their first use may be slow. A cell whose own
    measurements change while others stay is followed alone.

    Args:
        prior: used where nothing was measured, and for the shape between batch sizes.
    """

    def __init__(self, prior: CostPrior) -> None:
        self.prior = prior
        self.curves: dict[Key, dict[int, CostCell]] = {}
        self.basis: CostTable | None = None
        self.clock = 0
        self._steady = 0  # the clock when a measurement was last as expected
        self._window: deque[tuple[Key, int, float, float, bool]] = deque(maxlen=RECENT)
        self._ratios: deque[float] = deque(maxlen=RECENT)
        self._cache: dict[Key, np.ndarray] = {}
        self._alone: dict[Key, np.ndarray] = {}
        self._nearest: dict[Key, Key | None] = {}
        self._prior_curves: dict[int, np.ndarray] = {}

    def observe(self, key: Key, size: int, seconds: float) -> None:
        """Learn one measurement."""
        self.clock += 1
        points = self.curves.get(key)
        cell = None if points is None else points.get(size)
        if cell is None:
            self._add(key, size, seconds)
            return
        if cell.count >= 2:
            self._compare(key, size, seconds, expected=cell.value, settled=True)
        if self.clock - cell.updated > STALE:
            cell.doubt()
        cell.add(seconds)
        cell.updated = self.clock
        if persistent(self._ratios):
            self._follow()
        if cell.moved():
            cell.show()
            self._forget(key)

    def _add(self, key: Key, size: int, seconds: float) -> None:
        points = self.curves.setdefault(key, {})
        ceiling = inf
        if len(points) >= 2:
            expected = self.curve(key).item(size)
            # A slow first use of a large size would look like its cost for good, for then nobody would use it again.
            ceiling = CLIP * expected
            if min(points) < size < max(points):
                self._compare(key, size, seconds, expected=expected, settled=False)
        points[size] = CostCell(seconds, ceiling=ceiling, updated=self.clock)
        if len(points) == 1 or len(points) > MAX_POINTS:
            self._shrink()
        self._forget(key)
        if persistent(self._ratios):
            self._follow()

    def _compare(self, key: Key, size: int, seconds: float, *, expected: float, settled: bool) -> None:
        if expected > 0.0:
            ratio = seconds / expected
            self._window.append((key, size, seconds, expected, settled))
            self._ratios.append(ratio)
            if 1.0 / CHANGE <= ratio <= CHANGE:
                self._steady = self.clock

    def _forget(self, key: Key | None = None) -> None:
        """Drop what was computed from this curve, or (None) from any; curves that lean on it are among `_cache`."""
        self._cache.clear()
        if key is None:
            self._alone.clear()
        else:
            self._alone.pop(key, None)

    def _shrink(self) -> None:
        self._nearest.clear()
        while len(self.curves) > MAX_CURVES:
            ages = {key: max(cell.updated for cell in points.values()) for key, points in self.curves.items()}
            oldest = min(ages, key=ages.__getitem__)
            del self.curves[oldest]
            self._alone.pop(oldest, None)
        for points in self.curves.values():
            while len(points) > MAX_POINTS:
                del points[min(points, key=lambda size: points[size].updated)]

    def _follow(self) -> None:
        """Adopt a change of speed that the whole window bears witness to."""
        if not any(settled for *_, settled in self._window):
            return
        before: dict[tuple[Key, int], float] = {}
        measured: dict[tuple[Key, int], list[float]] = {}
        ratios = []
        for key, size, seconds, expected, _ in self._window:
            measured.setdefault((key, size), []).append(seconds)
            # Against the value before the change: the running value is on its way since.
            ratios.append(seconds / before.setdefault((key, size), expected))
        factor = median(ratios)
        for key, size, cell in self.cells():
            if (key, size) in measured:
                cell.restart(measured[key, size])
                cell.show()
            elif cell.updated <= self._steady:
                cell.scale(factor)
        self._window.clear()
        self._ratios.clear()
        self._forget()

    def curve(self, key: Key) -> np.ndarray:
        """float64 [MAX_NODES + 1], seconds by size; read-only, computed anew only after a cell moved materially."""
        curve = self._cache.get(key)
        if curve is None:
            if len(self._cache) >= MAX_CURVES:
                self._cache.clear()
            curve = self._cache[key] = self._build(key)
            curve.flags.writeable = False
        return curve

    def _build(self, key: Key) -> np.ndarray:
        reference, reach = self._assumed(key), -1
        neighbour = self._neighbour(key)
        if neighbour is not None:
            curve, assumed = self._fit_alone(neighbour), self._assumed(neighbour)
            reference = curve if assumed is reference else scaled(curve, reference, assumed)
            reach = max(self.curves[neighbour])
        own = self.curves.get(key)
        return fit_curve(own, reference=reference, reach=reach) if own else reference.copy()

    def _fit_alone(self, key: Key) -> np.ndarray:
        """What a measured curve looks like without its neighbours."""
        curve = self._alone.get(key)
        if curve is None:
            curve = self._alone[key] = fit_curve(self.curves[key], reference=self._assumed(key))
        return curve

    def _assumed(self, key: Key) -> np.ndarray:
        if self.basis is not None:
            return self.basis.curve(key)
        curve = self._prior_curves.get(key[1])
        if curve is None:
            curve = self._prior_curves[key[1]] = self.prior.curve(1 << key[1])
        return curve

    def _neighbour(self, key: Key) -> Key | None:
        """The nearest other curve: same vocabulary first, then batch before context (it changes the cost more)."""
        if key not in self._nearest:
            vocab, batch, context = key

            def distance(other: Key) -> tuple[bool, int, Key]:
                return other[0] != vocab, 2 * abs(other[1] - batch) + abs(other[2] - context), other

            if len(self._nearest) > 2 * MAX_CURVES:
                self._nearest.clear()
            self._nearest[key] = min((other for other in self.curves if other != key), key=distance, default=None)
        return self._nearest[key]

    def cells(self) -> Iterator[tuple[Key, int, CostCell]]:
        """Every cell with where it is."""
        for key, points in self.curves.items():
            for size, cell in points.items():
                yield key, size, cell

    def state_dict(self) -> dict[str, Any]:
        return {
            "clock": self.clock,
            "steady": self._steady,
            "curves": [
                [*key, [[size, cell.state_dict()] for size, cell in points.items()]]
                for key, points in self.curves.items()
            ],
            "window": [[*key, *entry] for key, *entry in self._window],
            "basis": None if self.basis is None else self.basis.state_dict(),
        }

    @classmethod
    def from_state(cls, state: Any, *, prior: CostPrior) -> CostTable:
        """Raises ValueError on anything but a `state_dict()`."""
        check_fields(state, _FIELDS, what="a cost table")
        table = cls(prior)
        table.clock, table._steady = read_int(state, "clock"), read_int(state, "steady")
        for vocab, batch, context, points in _rows(state, "curves", length=4, maximum=MAX_CURVES):
            key = _read_key(vocab, batch, context)
            cells: dict[int, CostCell] = {}
            for size, cell in _rows({"points": points}, "points", length=2, maximum=MAX_POINTS):
                cells[read_int({"size": size}, "size", maximum=MAX_NODES)] = CostCell.from_state(cell)
            if not cells or len(cells) != len(points) or key in table.curves:
                raise ValueError(f"state: curves must be different and hold different sizes, got {key!r}")
            table.curves[key] = cells
        for vocab, batch, context, size, seconds, expected, settled in _rows(state, "window", length=7, maximum=RECENT):
            seconds, expected = read_times({"window": [seconds, expected]}, "window")
            if expected == 0.0 or not isinstance(settled, bool):
                raise ValueError(f"state: window must hold expected > 0 and a flag, got {expected!r}, {settled!r}")
            size = read_int({"size": size}, "size", maximum=MAX_NODES)
            table._window.append((_read_key(vocab, batch, context), size, seconds, expected, settled))
            table._ratios.append(seconds / expected)
        if state["basis"] is not None:
            table.basis = cls.from_state(state["basis"], prior=prior)
            if table.basis.basis is not None:
                raise ValueError("state: basis of a basis must be None")
        return table

    def lean_on(self, foreign: CostTable) -> None:
        """Take the shapes of another machine's table where nothing was measured here."""
        foreign.basis = None
        self.basis = foreign
        self._forget()

    def merge(self, tables: Sequence[CostTable], *, base: CostTable | None) -> None:
        """Take in what the replicas `tables` measured since `base`."""
        together: dict[Key, dict[int, list[CostCell]]] = {}
        for table in (self, *tables):
            for key, size, cell in table.cells():
                together.setdefault(key, {}).setdefault(size, []).append(cell)
        start = {} if base is None else {(key, size): cell for key, size, cell in base.cells()}
        self.curves = {
            key: {size: merge_cells(cells, base=start.get((key, size))) for size, cells in points.items()}
            for key, points in together.items()
        }
        self.clock = max(table.clock for table in (self, *tables))
        self._shrink()
        self._forget()


def _read_key(vocab: Any, batch: Any, context: Any) -> Key:
    if not isinstance(vocab, str) or not vocab:
        raise ValueError(f"state: vocab must be a name, got {vocab!r}")
    exponent = read_int({"batch": batch}, "batch", maximum=62)
    return vocab, exponent, read_int({"context": context}, "context", minimum=SMALLEST_CONTEXT, maximum=62)


def _rows(state: Mapping[str, Any], key: str, *, length: int, maximum: int) -> list[list[Any]]:
    rows = state[key]
    if not isinstance(rows, list) or len(rows) > maximum:
        raise ValueError(f"state: {key} must be a list of at most {maximum} rows, got {rows!r:.80}")
    for row in rows:
        if not isinstance(row, list) or len(row) != length:
            raise ValueError(f"state: {key} must hold rows of {length} values, got {row!r:.80}")
    return rows
