"""What a policy is up to, for dashboards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicyStatus:
    """Of a policy at one moment.

    Attributes:
        steps, off_streak: decisions so far, and the latest of them in a row without speculation.
        requests: remembered.
        probabilities: weight of every expert of the strategy at the latest load, by name: "free" (the model's own
            choice), "ar", and the drafters; empty where the strategy weighs nothing.
        guard_balance: what speculation may still lose, in steps without it; None without a guard.
        acceptance: by drafter, the estimated conditional acceptance per position over all requests.
        pass_seconds: expected seconds of a pass by its tokens, where it was measured.
    """

    steps: int
    off_streak: int
    requests: int
    probabilities: Mapping[str, float]
    guard_balance: float | None
    acceptance: Mapping[str, tuple[float, ...]]
    pass_seconds: Mapping[int, float]
