"""Checks of options at the public boundary; every error names the field, the value and what is allowed."""

from __future__ import annotations

from typing import Any

import numpy as np


def check_count(name: str, value: Any, *, minimum: int) -> int:
    """`value` if it is a whole number of at least `minimum`, else ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < minimum:
        raise ValueError(f"{name} must be a whole number >= {minimum}, got {value!r}")
    return int(value)


def check_between(name: str, value: float, *, low: float, high: float, open_low: bool = True) -> float:
    """`value` if it lies in (low, high] (or [low, high]), else ValueError."""
    number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not number or not (low < value <= high or (value == low and not open_low)):
        raise ValueError(f"{name} must be in {'(' if open_low else '['}{low:g}, {high:g}], got {value!r}")
    return float(value)


def check_arm(name: str, index: int, *, n_arms: int) -> int:
    """`index` if it is an arm, else ValueError."""
    if isinstance(index, bool) or not isinstance(index, (int, np.integer)) or not 0 <= index < n_arms:
        raise ValueError(f"{name} must be a whole number in [0, {n_arms}), got {index!r}")
    return int(index)


def check_gain_range(gain_range: tuple[float, float]) -> tuple[float, float]:
    """(low, high) with 0 <= low < high <= 1, else ValueError."""
    if not (isinstance(gain_range, (tuple, list)) and len(gain_range) == 2 and 0 <= gain_range[0] < gain_range[1] <= 1):
        raise ValueError(f"gain_range must be (low, high) with 0 <= low < high <= 1, got {gain_range!r}")
    return float(gain_range[0]), float(gain_range[1])
