"""Open decisions and waiting feedback as plain Python values that survive JSON exactly."""

from __future__ import annotations

from typing import Any

import numpy as np

from adaptspec.bandits.base import Feedback, PolicyDecision


def encode(value: Any) -> Any:
    """Plain values for a decision's memo, a decision or feedback. Tuples and arrays are tagged so they come back."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": value.dtype.name}
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, PolicyDecision):
        fields = (value.step_id, value.index, value.propensity, value.probabilities, value.memo)
        return {"decision": [encode(item) for item in fields]}
    if isinstance(value, Feedback):
        fields = (value.gains, value.observed, value.tokens, value.seconds, value.drafted, value.accepted)
        return {"feedback": [encode(item) for item in fields]}
    raise TypeError(f"cannot save a {type(value).__name__} inside a decision")


def decode(value: Any) -> Any:
    """The inverse of `encode`. Raises ValueError on anything else."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    try:
        match value:
            case {"array": items, "dtype": "float64" | "bool" | "int64" as dtype}:
                array = np.array(items, dtype=dtype)
                array.flags.writeable = False
                return array
            case {"tuple": items}:
                return tuple(decode(item) for item in items)
            case {"decision": items}:
                return PolicyDecision(*(decode(item) for item in items))
            case {"feedback": items}:
                return Feedback(*(decode(item) for item in items))
    except TypeError as error:
        raise ValueError(f"state: damaged value: {error}") from error
    raise ValueError(f"state: cannot read {value!r}")
