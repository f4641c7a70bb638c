"""Reading and writing learnt state as plain Python values that survive JSON exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def check_equal(state: Mapping[str, Any], key: str, expected: Any) -> None:
    """ValueError unless `state[key] == expected`."""
    if key not in state:
        raise ValueError(f"state: {key} is missing, expected {expected!r}")
    if state[key] != expected:
        raise ValueError(f"state: {key} must be {expected!r}, got {state[key]!r}")


def read_array(
    state: Mapping[str, Any], key: str, shape: tuple[int, ...], *, minimum: float = -np.inf, maximum: float = np.inf
) -> np.ndarray:
    """float64 array `state[key]`, of this shape, finite and within the limits; else ValueError."""
    try:
        array = np.array(state[key], dtype=np.float64)
    except (KeyError, TypeError, ValueError):
        array = None
    if array is None or array.shape != shape:
        got = f"{state.get(key)!r:.80}" if array is None else f"shape {list(array.shape)}"
        raise ValueError(f"state: {key} must be numbers of shape {list(shape)}, got {got}")
    if not (np.isfinite(array).all() and (array >= minimum).all() and (array <= maximum).all()):
        raise ValueError(f"state: {key} must be finite and in [{minimum}, {maximum}]")
    return array


def read_float(state: Mapping[str, Any], key: str, *, minimum: float = -np.inf, maximum: float = np.inf) -> float:
    """Finite number `state[key]` within the limits; else ValueError."""
    value = state.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < np.inf:
        raise ValueError(f"state: {key} must be a finite number, got {value!r}")
    if not minimum <= value <= maximum:
        raise ValueError(f"state: {key} must be in [{minimum}, {maximum}], got {value}")
    return float(value)


def read_int(state: Mapping[str, Any], key: str, *, minimum: int = 0, maximum: float = np.inf) -> int:
    """Whole number `state[key]` within the limits; else ValueError."""
    value = state.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise ValueError(f"state: {key} must be a whole number in [{minimum}, {maximum}], got {value!r}")
    return value


def read_rng(state: Mapping[str, Any], key: str) -> np.random.Generator:
    """A generator in the state `state[key]`; else ValueError."""
    generator = np.random.Generator(np.random.PCG64(0))
    try:
        generator.bit_generator.state = state[key]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"state: {key} must be the state of a PCG64 generator, got {state.get(key)!r}") from error
    return generator


def read_indices(state: Mapping[str, Any], key: str, *, length: int, maximum: int) -> np.ndarray:
    """int64 array `state[key]` of at most `length` whole numbers in [0, maximum]; else ValueError."""
    values = state.get(key)
    if not isinstance(values, list) or len(values) > length:
        raise ValueError(f"state: {key} must be a list of at most {length} whole numbers, got {values!r:.80}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= maximum:
            raise ValueError(f"state: {key} must hold whole numbers in [0, {maximum}], got {value!r}")
    return np.array(values, dtype=np.int64)
