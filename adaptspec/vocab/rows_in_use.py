"""A bounded set of rows from which the one goes out that was not used for longest."""

from __future__ import annotations

import numpy as np

from adaptspec.kernels.dense_rows import DenseRows

_PINNED = np.iinfo(np.int64).max


class RowsInUse:
    """Least-recently-used eviction over the slots of a `DenseRows`.

    Args:
        dense: holds the pinned rows, and no others yet; they are never given up.
    """

    def __init__(self, dense: DenseRows) -> None:
        self.dense = dense
        self._pinned = len(dense)
        self._last_use = np.zeros(dense.capacity, dtype=np.int64)
        self._last_use[: self._pinned] = _PINNED
        self._clock = 0

    def clear(self) -> None:
        """Keep the pinned rows only."""
        self.dense.truncate(self._pinned)
        self._clock = 0

    def use(self, rows: np.ndarray) -> None:
        """Rows in the order in which they were used, the latest last. What is kept is what were kept had they come one
        by one: the rows whose last use is the latest."""
        different, first = np.unique(rows[::-1], return_index=True)
        times = self._clock + len(rows) - 1 - first  # of the last use of each
        self._clock += len(rows)
        slots = self.dense.slots_of(different)
        known = slots >= self._pinned
        self._last_use[slots[known]] = times[known]
        new = slots < 0
        entering, entered = different[new], times[new]
        if not len(entering):
            return
        used, capacity = len(self.dense), self.dense.capacity
        places = np.arange(used, min(used + len(entering), capacity))
        if (surplus := used + len(entering) - capacity) > 0:
            lasts = np.concatenate([self._last_use[:used], entered])
            out = np.argpartition(lasts, surplus - 1)[:surplus]  # no two are equal but pinned ones, which never go
            stays = np.ones(len(entering), dtype=bool)
            stays[out[out >= used] - used] = False
            entering, entered = entering[stays], entered[stays]
            places = np.concatenate([np.sort(out[out < used]), places])
        self.dense.replace(places, entering)
        self._last_use[places] = entered
