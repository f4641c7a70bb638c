"""Notices that a drafter is no longer as right as it was, before long counts would show it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from adaptspec.bandits.state import read_array

FACTORS = (0.125, 8.0)
"""By how much the odds of acceptance are assumed to have changed: a drafter that broke, and one that recovered."""

_COLUMN = np.array(FACTORS)[:, None]

THRESHOLD = 10.0
"""An alarm is raised when the change explains the latest trials exp(10) times better than what was learnt does."""

KEPT = 64
"""At most so many updates since a change may have begun are kept."""


class Trials(NamedTuple):
    """One update of a calibrator: the binning, and per judged node its broad cell, its cell, and whether it hit."""

    binning: str
    broad: np.ndarray
    cells: np.ndarray
    hits: np.ndarray


class DriftWatch:
    """A CUSUM test (Page 1954) of hits against predictions, one sum per direction.

    Each sum adds log(q^h (1 - q)^(1 - h)) - log(p^h (1 - p)^(1 - h)) per trial, p the prediction and q the same with
    its odds times the factor, and never falls below 0. Where it left 0 last, the change may have begun.
    """

    def __init__(self) -> None:
        self._sums = [0.0, 0.0]
        self._since: list[list[Trials]] = [[], []]

    def add(self, trials: Trials, predicted: np.ndarray) -> list[Trials] | None:
        """Take in an update with its predictions in (0, 1). After an alarm, all updates since the change began."""
        missed = 1.0 - predicted
        scaled = _COLUMN * predicted
        changed = scaled / (missed + scaled)
        ratios = np.where(trials.hits, changed / predicted, (1.0 - changed) / missed)
        for side, evidence in enumerate(np.log(ratios).sum(axis=1).tolist()):
            self._sums[side] = max(0.0, self._sums[side] + evidence)
            if self._sums[side] == 0.0:
                self._since[side] = []
                continue
            self._since[side].append(trials)
            del self._since[side][:-KEPT]
            if self._sums[side] > THRESHOLD:
                since = self._since[side]
                self._sums, self._since = [0.0, 0.0], [[], []]
                return since
        return None

    def state_dict(self) -> dict[str, Any]:
        """The sums and the kept updates as plain values."""
        since = [
            [[t.binning, t.broad.tolist(), t.cells.tolist(), t.hits.tolist()] for t in side] for side in self._since
        ]
        return {"sums": list(self._sums), "since": since}

    def load_state_dict(self, state: Any, *, sizes: Mapping[str, tuple[int, int]]) -> None:
        """Restore `state_dict()`.

        Args:
            sizes: number of broad cells and of cells, by binning.

        Raises:
            ValueError: not such a state; nothing is changed then.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"state: watch must be a mapping, got {state!r:.80}")
        sums = read_array(state, "sums", (len(FACTORS),), minimum=0.0)
        since = state.get("since")
        if not isinstance(since, list) or len(since) != len(FACTORS) or any(len(side) > KEPT for side in since):
            raise ValueError(f"state: since must be {len(FACTORS)} lists of at most {KEPT} updates, got {since!r:.80}")
        restored = [[_trials(entry, sizes) for entry in side] for side in since]
        self._sums, self._since = sums.tolist(), restored


def _trials(entry: Any, sizes: Mapping[str, tuple[int, int]]) -> Trials:
    if not isinstance(entry, list) or len(entry) != 4 or entry[0] not in sizes:
        raise ValueError(f"state: an update must be a known binning and three lists, got {entry!r:.80}")
    binning, *columns = entry
    broad, cells, hits = (np.array(column, dtype=np.int64) for column in columns)
    limits = (*sizes[binning], 2)
    for column, limit in zip((broad, cells, hits), limits, strict=True):
        if column.shape != broad.shape or column.ndim != 1 or ((column < 0) | (column >= limit)).any():
            raise ValueError(f"state: an update must hold rows below {limits}, got {entry!r:.80}")
    return Trials(binning, broad, cells, hits.astype(np.bool_))
