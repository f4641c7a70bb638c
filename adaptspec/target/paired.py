"""Where the rows of `PairedRows` stand and what they see."""

from __future__ import annotations

import numpy as np


def pair_rows(depths: np.ndarray, visible: np.ndarray, *, prompts: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Depths [2 R + P] and visibility [2 R + P, 2 R + P] of R ordinary rows, P soft prompts and R paired rows, in this
    order. Ordinary rows see what they saw.

    Args:
        depths: int64 [R], positions relative to `length`.
        visible: bool [R, R].
        prompts: P. They stand at positions 0 .. P - 1; that they see nothing of the prefix is up to the caller.
        length: rows in front of all these.
    """
    rows = len(depths)
    first, total = rows + prompts, 2 * rows + prompts
    wide = np.zeros((total, total), dtype=bool)
    wide[:rows, :rows] = visible
    wide[rows:first, rows:first] = np.tri(prompts, dtype=bool)
    wide[first:, :rows] = visible
    wide[first:, rows:first] = True
    wide[first:, first:] = np.eye(rows, dtype=bool)
    return np.concatenate([depths, np.arange(prompts) - length, depths + 1]), wide
