"""What drafting takes, per drafter, learnt from what it took.

    draft_d(rows, length) = a_d + b_d length + c_d rows * length

One row costs a drafter that runs as a batch as much as all rows do; least squares that forget let what is shared and
what is paid per row come out apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from adaptspec.bandits.state import read_array
from adaptspec.control.cost_cell import CLIP

_FADE = 0.97
_RIDGE = 0.02
_LENGTH_UNIT, _WORK_UNIT = 4.0, 256.0
_FIRST_USE = 0.05
_MOST_MEASURED = 1e6


class DraftSeconds:
    """See the module.

    Args:
        drafters: their number, D.

    Attributes:
        weights: float64 [D, 3]: a, b, c of every drafter; 0 of one that was never measured, so that it gets its first
            try. Do not change it.
    """

    def __init__(self, drafters: int) -> None:
        # Of [1, length, rows * length] against themselves and seconds. Plain numbers: each step touches few of them.
        self._moments = [[[0.0] * 4 for _ in range(3)] for _ in range(drafters)]
        self._measured = [0.0] * drafters
        self.weights = np.zeros((drafters, 3))

    def expected(self, drafter: int, *, rows: int, length: int) -> float:
        """Expected seconds of drafting `length` tokens on `rows` rows."""
        if not rows or not length:
            return 0.0
        fixed, per_length, per_token = self.weights[drafter].tolist()
        return max(fixed + per_length * length + per_token * rows * length, 0.0)

    def observe(self, drafter: int, *, rows: int, length: int, seconds: float) -> None:
        """Drafting up to `length` tokens on `rows` rows took `seconds`."""
        if not rows or not length:
            return
        count = self._measured[drafter]
        moments = self._moments[drafter]
        if count >= 2.0:
            seconds = min(seconds, CLIP * max(self.expected(drafter, rows=rows, length=length), 1e-9))
        elif count == 1.0:
            # The first use pays for compilation and cold caches.
            moments = [[_FIRST_USE * value for value in row] for row in moments]
        features = (1.0, length / _LENGTH_UNIT, rows * length / _WORK_UNIT)
        told = (*features, seconds)
        self._moments[drafter] = [
            [_FADE * value + feature * other for value, other in zip(row, told, strict=True)]
            for row, feature in zip(moments, features, strict=True)
        ]
        self._measured[drafter] = min(count + 1.0, _MOST_MEASURED)
        self._fit(drafter)

    def _fit(self, drafter: int) -> None:
        if self._measured[drafter]:
            fixed, per_length, per_token = _solve(self._moments[drafter])
            self.weights[drafter] = fixed, per_length / _LENGTH_UNIT, per_token / _WORK_UNIT

    def state_dict(self) -> dict[str, Any]:
        return {"moments": [[list(row) for row in rows] for rows in self._moments], "measured": list(self._measured)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError on anything but a `state_dict()` with as many drafters; nothing changes then."""
        moments = read_array(state, "moments", (len(self._measured), 3, 4))
        measured = read_array(state, "measured", (len(self._measured),), minimum=0.0)
        self._moments, self._measured = moments.tolist(), measured.tolist()
        self.weights = np.zeros((len(measured), 3))
        for drafter in range(len(measured)):
            self._fit(drafter)


def _solve(moments: list[list[float]]) -> tuple[float, float, float]:
    """Ridge regression from three rows of moments, the last column against seconds. Cramer's rule: a fifth of the time
    that a library takes for three unknowns."""
    (a, b, c, x), (_, d, e, y), (_, _, f, z) = moments
    a, d, f = a + _RIDGE, d + _RIDGE, f + _RIDGE
    p, q, r = d * f - e * e, c * e - b * f, b * e - c * d
    determinant = a * p + b * q + c * r
    return (
        (p * x + q * y + r * z) / determinant,
        (q * x + (a * f - c * c) * y + (b * c - a * e) * z) / determinant,
        (r * x + (b * c - a * e) * y + (a * d - b * b) * z) / determinant,
    )
