"""Argument checks that the tree functions share."""

from __future__ import annotations

from numbers import Integral

import numpy as np

from adaptspec.types import DraftTree


def check_whole(name: str, value: object, minimum: int) -> int:
    """`value` as an int, or ValueError if it is not a whole number of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be a whole number >= {minimum}, got {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be >= {minimum}, got {value}")
    return int(value)


def check_deterministic(tree: DraftTree, action: str) -> None:
    """ValueError unless the siblings of `tree` were picked, not sampled."""
    if tree.siblings != "deterministic":
        raise ValueError(
            f"cannot {action} a tree with {tree.siblings} siblings: keeping or dropping a drawn token by its own value "
            "changes the distribution it was drawn from, and verification would no longer be lossless; "
            "limit_depth and keep_first do not look at the drawn tokens and are safe"
        )


def check_log_probs(name: str, log_probs: np.ndarray) -> np.ndarray:
    """float64 copy without rounding noise above 0, or ValueError on NaN and on values clearly above 0."""
    values = np.asarray(log_probs, dtype=np.float64)
    if values.size and not values.max() <= 1e-4:  # NaN fails the comparison too
        raise ValueError(f"{name} must be log-probabilities (<= 0, no NaN), got a maximum of {values.max()}")
    return np.minimum(values, 0.0)
