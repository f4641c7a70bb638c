"""Who decides what a step does. Knows nothing of torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

from adaptspec.types import Arm, Decision, StepRecord


@dataclass(frozen=True, slots=True)
class StepContext:
    """What is known before a step.

    Attributes:
        length: committed tokens.
        remaining: tokens that may still be generated.
        unavailable: drafters set aside for this request.
    """

    length: int
    remaining: int
    unavailable: Collection[str] = ()


class Controller(ABC):
    """`select` before a step, `update` after it."""

    @abstractmethod
    def drafters_in_play(self, names: Collection[str]) -> list[str]:
        """Which drafters must be kept ready; the others cost nothing."""

    @abstractmethod
    def select(self, context: StepContext) -> Decision:
        """What to do in the next step."""

    @abstractmethod
    def update(self, decision: Decision, record: StepRecord) -> None:
        """What came of it."""


class FixedController(Controller):
    """Plays one arm always; no speculation while its drafter is set aside."""

    def __init__(self, arm: Arm) -> None:
        self.arm = arm
        self._steps = 0

    def drafters_in_play(self, names: Collection[str]) -> list[str]:
        return [self.arm.drafter] if self.arm.drafter in names else []

    def select(self, context: StepContext) -> Decision:
        arm = Arm.autoregressive() if self.arm.drafter in context.unavailable else self.arm
        self._steps += 1
        return Decision(self._steps, arm)

    def update(self, decision: Decision, record: StepRecord) -> None:
        """Nothing to learn."""
