"""Deciding less often where deciding takes too large a share of a step's time.

Times are those that the stack tells: the policy's own clock would differ between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np

_FADE = 0.9


@dataclass(slots=True)
class Reuse:
    """See the module.

    Attributes:
        share: of a step's time that deciding may take.
        left: steps for which the latest decision is kept.
        common_arm: number in a decision of the arm that most rows had in the latest one, 0 if none drafted.
        policy_seconds, step_seconds: running means.
    """

    share: float
    left: int = 0
    common_arm: int = 0
    policy_seconds: float = 0.0
    step_seconds: float = 0.0

    @property
    def due(self) -> bool:
        return bool(self.left and self.common_arm)

    def arms(self, before: np.ndarray, new: np.ndarray) -> np.ndarray:
        """int64 [R], index of the arm that each row keeps, -1 for none.

        Args:
            before: int64 [R], numbers in the latest decision.
            new: bool [R], rows that were in none; they get what most have.
        """
        self.left -= 1
        return np.where(new, self.common_arm, before) - 1

    def decided(self, arms: np.ndarray | None) -> None:
        """These arms [R] were found by thinking, -1 for none; None: nobody drafts."""
        self.common_arm = 0
        if arms is not None:
            rows = np.bincount(arms + 1)
            rows[0] = 0
            self.common_arm = int(rows.argmax())
        allowed = self.share * self.step_seconds
        if self.policy_seconds > allowed > 0.0:
            self.left = ceil(self.policy_seconds / allowed) - 1

    def took(self, step: float, *, policy: float | None) -> None:
        """What a step took, and deciding in it; None where nothing was thought about."""
        if policy is not None:
            self.policy_seconds = _faded(self.policy_seconds, policy)
        self.step_seconds = _faded(self.step_seconds, step)


def _faded(old: float, new: float) -> float:
    return new if old == 0.0 else _FADE * old + (1.0 - _FADE) * new
