"""What a step earned, as a policy is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Feedback:
    """What one step earned, for the played arm and for every other arm whose outcome is known.

    Attributes:
        gains: float64 [n_arms], in [0, 1]; 0 where not observed.
        observed: bool [n_arms].
        tokens: tokens emitted by the step, bonus included.
        seconds: wall time of the step.
        drafted: draft nodes verified, root not counted.
        accepted: draft tokens accepted, bonus not counted.
        complete: every arm was observed (computed).

    Raises:
        ValueError: wrong shape, a gain outside [0, 1] or not a number, a negative count or time.
    """

    gains: np.ndarray
    observed: np.ndarray
    tokens: float | None = None
    seconds: float | None = None
    drafted: int | None = None
    accepted: int | None = None
    complete: bool = field(init=False)

    def __post_init__(self) -> None:
        gains, observed = self.gains, self.observed
        if not isinstance(gains, np.ndarray) or gains.ndim != 1 or gains.dtype != np.float64 or not len(gains):
            raise ValueError(f"gains must be a float64 array [n_arms] with n_arms >= 1, got {_describe(gains)}")
        if not isinstance(observed, np.ndarray) or observed.dtype != np.bool_ or observed.shape != gains.shape:
            raise ValueError(f"observed must be a bool array of shape {list(gains.shape)}, got {_describe(observed)}")
        # argmin and argmax report NaN as the extreme, and cost a fifth of min and max on short arrays.
        if not (gains.item(gains.argmin()) >= 0.0 and gains.item(gains.argmax()) <= 1.0):
            bad = int((~((gains >= 0.0) & (gains <= 1.0))).argmax())
            raise ValueError(f"gains must be in [0, 1], got {float(gains[bad])} for arm {bad}")
        for name in ("tokens", "seconds", "drafted", "accepted"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < float("inf"):
                raise ValueError(f"{name} must be >= 0 and finite, got {value}")
        object.__setattr__(self, "complete", bool(observed[observed.argmin()]))

    @classmethod
    def from_gains(
        cls,
        gains: Any,
        observed: Any = None,
        *,
        tokens: float | None = None,
        seconds: float | None = None,
        drafted: int | None = None,
        accepted: int | None = None,
    ) -> Feedback:
        """Feedback from anything array-like; values of unobserved arms are ignored, None for `observed` means all.

        >>> Feedback.from_gains([0.5, float("nan")], [True, False]).gains.tolist()
        [0.5, 0.0]
        """
        values = np.array(gains, dtype=np.float64)
        if values.ndim != 1 or not len(values):
            raise ValueError(f"gains must have shape [n_arms] with n_arms >= 1, got {list(values.shape)}")
        if observed is None:
            mask = np.ones(len(values), dtype=np.bool_)
        else:
            mask = np.array(observed)
            if mask.dtype != np.bool_ or mask.shape != values.shape:
                raise ValueError(f"observed must be bool of shape {list(values.shape)}, got {_describe(mask)}")
            values[~mask] = 0.0
        return cls(values, mask, tokens, seconds, drafted, accepted)

    @classmethod
    def of_arm(
        cls, n_arms: int, index: int, *, gain: float, tokens: float | None = None, seconds: float | None = None
    ) -> Feedback:
        """Feedback for the played arm alone."""
        if not 0 <= index < n_arms:
            raise ValueError(f"index must be in [0, {n_arms}), got {index}")
        gains = np.zeros(n_arms)
        observed = np.zeros(n_arms, dtype=np.bool_)
        gains[index] = gain
        observed[index] = True
        return cls(gains, observed, tokens, seconds)


def _describe(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
