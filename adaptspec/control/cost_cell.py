"""One cost that is measured again and again: a decayed mean that outliers cannot move and real changes can."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import inf
from statistics import median
from typing import Any

import numpy as np

from adaptspec.bandits.state import read_float, read_int
from adaptspec.names import unknown_name

CLIP = 2.0
"""A measurement counts at most this many times the running value."""
MEMORY = 32.0
"""Measurements that the decayed mean remembers: an outlier moves it by at most (CLIP - 1) / MEMORY, 3.1 %."""
RECENT = 7
"""So many measurements in a row on one side of the running value are a change, not noise."""
DOUBTED_RECENT = 2
"""The same for a value that was not measured for long."""
CHANGE = 1.25
"""How far off, as a factor, each of them must be."""
FIRST_WEIGHT = 0.1
"""Weight of a cell that was measured once."""
MATERIAL = 0.01
"""What others see of a cell is renewed when its value moved by this fraction (or its weight doubled)."""

_FIELDS = ("value", "weight", "count", "shown", "shown_weight", "updated", "recent", "doubted")


def check_seconds(name: str, value: Any) -> float:
    """`value` if it is a finite time of at least 0, else ValueError."""
    number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not number or not 0.0 <= value < inf:
        raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")
    return float(value)


def check_fields(state: Any, fields: Collection[str], *, what: str) -> None:
    """ValueError unless `state` is a mapping with exactly these fields."""
    if not isinstance(state, Mapping):
        raise ValueError(f"state: {what} must be a mapping, got {state!r:.80}")
    for field in state:
        if field not in fields:
            raise unknown_name(f"field of {what}", field, fields)
    for field in fields:
        if field not in state:
            raise ValueError(f"state: {field} of {what} is missing")


def persistent(ratios: Collection[float], value: float = 1.0) -> bool:
    """Whether `RECENT` measurements all lie off `value` by more than `CHANGE`, on the same side."""
    return len(ratios) == RECENT and _off(ratios, value)


def _off(ratios: Collection[float], value: float) -> bool:
    return min(ratios) > CHANGE * value or max(ratios) * CHANGE < value


class CostCell:
    """Running value of one cost, in seconds.

    The first measurement stands alone until there is a second, which replaces it: the first use of a shape often pays
    for compilation and cold caches. From the second on the value is the mean of the measurements, each clipped at twice
    the value before it, with rate 1 / `MEMORY` once there are that many. When the latest `RECENT` measurements all lie
    off by more than `CHANGE` on one side, their median takes over; of a value that is doubted, because it was not
    measured for long, the latest `DOUBTED_RECENT`.

    Attributes:
        value, weight, count: running value; measurements in it (at most `MEMORY`); measurements ever.
        shown, shown_weight: what curves are made from; follows material moves only, so that curves can be cached.
        updated: the table's clock at the latest measurement.
        recent: the latest measurements, unclipped.
        doubted: see above.
    """

    __slots__ = _FIELDS

    def __init__(self, seconds: float, *, ceiling: float = inf, updated: int = 0) -> None:
        self.value = self.shown = min(seconds, ceiling)
        self.weight = self.shown_weight = FIRST_WEIGHT
        self.count = 1
        self.updated = updated
        self.recent = [seconds]
        self.doubted = False

    def add(self, seconds: float) -> None:
        """Learn one measurement."""
        recent = self.recent
        recent.append(seconds)
        if len(recent) > RECENT:
            del recent[0]
        self.count += 1
        value = self.value
        if self.count <= 2:
            self.value = seconds if self.count == 1 else min(seconds, CLIP * value)
            self.weight = FIRST_WEIGHT if self.count == 1 else 1.0
        else:
            self.weight = weight = min(self.weight + 1.0, MEMORY)
            self.value = value + (min(seconds, CLIP * value) - value) / weight
        if self.doubted and len(recent) == DOUBTED_RECENT:
            self.doubted = False
            if _off(recent, self.value):
                self.restart(recent)
        elif persistent(recent, self.value):
            self.restart(recent)

    def doubt(self) -> None:
        """The value is old: few measurements that agree against it are enough."""
        self.doubted = True
        self.recent.clear()

    def restart(self, measurements: Sequence[float]) -> None:
        """Start again from the median of these."""
        self.value = float(median(measurements))
        self.weight = float(len(measurements))

    def scale(self, factor: float) -> None:
        """Follow a change that was seen elsewhere. Only a guess: if it was the cost per node that changed, sizes do not
        change alike."""
        self.value *= factor
        self.distrust()

    def moved(self) -> bool:
        """Whether the value, or what it is worth, has left what is shown."""
        return abs(self.value - self.shown) > MATERIAL * self.shown or self.weight >= 2.0 * self.shown_weight

    def show(self) -> None:
        self.shown, self.shown_weight = self.value, self.weight

    def distrust(self) -> None:
        """Keep the value only until the first measurement."""
        self.count, self.weight = 0, FIRST_WEIGHT
        self.recent.clear()
        self.show()

    def state_dict(self) -> dict[str, Any]:
        state = {field: getattr(self, field) for field in _FIELDS}
        return state | {"recent": list(self.recent)}

    @classmethod
    def from_state(cls, state: Any) -> CostCell:
        """Raises ValueError on anything but a `state_dict()`."""
        check_fields(state, _FIELDS, what="a cost cell")
        cell = cls.__new__(cls)
        for field in ("value", "shown"):
            setattr(cell, field, read_float(state, field, minimum=0.0))
        for field in ("weight", "shown_weight"):
            setattr(cell, field, read_float(state, field, minimum=FIRST_WEIGHT, maximum=MEMORY))
        cell.count, cell.updated = read_int(state, "count"), read_int(state, "updated")
        cell.recent = read_times(state, "recent")
        if not isinstance(state["doubted"], bool):
            raise ValueError(f"state: doubted must be true or false, got {state['doubted']!r:.80}")
        cell.doubted = state["doubted"]
        return cell


def read_times(state: Mapping[str, Any], key: str) -> list[float]:
    """At most `RECENT` finite numbers >= 0; else ValueError."""
    values = state[key]
    if not isinstance(values, list) or len(values) > RECENT:
        raise ValueError(f"state: {key} must be a list of at most {RECENT} numbers, got {values!r:.80}")
    return [check_seconds(f"state: {key}", value) for value in values]


def merge_cells(cells: Sequence[CostCell], *, base: CostCell | None) -> CostCell:
    """One cell for all replicas' measurements: the mean of the values, weighted by what is in them.

    With a `base` that the replicas began from, a replica weighs as much as it measured since (at most its own weight).
    """
    start = 0 if base is None else base.count
    weights = [cell.weight if base is None else min(cell.weight, max(cell.count - start, 0)) for cell in cells]
    if not any(weights):
        weights = [cell.weight for cell in cells]
    merged = CostCell.from_state(cells[0].state_dict())
    merged.value = sum(weight * cell.value for weight, cell in zip(weights, cells, strict=True)) / sum(weights)
    merged.weight = min(sum(cell.weight for cell in cells), MEMORY)
    merged.count = start + sum(max(cell.count - start, 0) for cell in cells)
    merged.show()
    return merged
