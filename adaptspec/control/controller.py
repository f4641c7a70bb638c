"""Who decides what a step does. Knows nothing of torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from adaptspec.types import Arm, Decision, DraftTree, StepRecord


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


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What came of a step.

    Attributes:
        record: counts and times; its controller time lacks the update that is told of it.
        tree: what was verified.
        trees: what each asked drafter proposed, by drafter.
        tokens: int64, the tokens committed, bonus included.
        draft_seconds: per asked drafter.
        extra_rows: rows that a drafter added to the verify pass besides the tree.
        finished: the request ended, so that `tokens` may be cut short.
    """

    record: StepRecord
    tree: DraftTree
    trees: Mapping[str, DraftTree]
    tokens: np.ndarray
    draft_seconds: Mapping[str, float] = field(default_factory=dict)
    extra_rows: int = 0
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Assembly:
    """What a step verifies.

    Attributes:
        tree: the draft tree.
        arm: what the step's record names.
        used: the asked drafters whose time belongs to the arm; the others were asked to learn from.
    """

    tree: DraftTree
    arm: Arm
    used: frozenset[str]


class Controller(ABC):
    """`select` before a step, `assemble` once drafters have proposed, `update` after it."""

    @abstractmethod
    def drafters_in_play(self, names: Collection[str]) -> list[str]:
        """Which drafters must be kept ready; the others cost nothing."""

    @abstractmethod
    def select(self, context: StepContext) -> Decision:
        """What to do in the next step."""

    def assemble(self, decision: Decision, trees: Mapping[str, DraftTree]) -> Assembly:
        """The tree to verify, out of what the asked drafters proposed."""
        drafter = decision.arm.drafter
        return Assembly(trees.get(drafter, DraftTree.empty()), decision.arm, frozenset([drafter]))

    @abstractmethod
    def update(self, decision: Decision, outcome: StepOutcome) -> None:
        """What came of it."""

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, between requests; empty if nothing is."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`. Raises ValueError on a foreign or damaged state."""
        if state:
            raise ValueError(f"this strategy keeps no state, got the keys {', '.join(sorted(state))}")


class FixedController(Controller):
    """Plays one arm always; no speculation while its drafter is set aside."""

    def __init__(self, arm: Arm) -> None:
        self.arm = arm
        self._steps = 0

    def drafters_in_play(self, names: Collection[str]) -> list[str]:
        return [self.arm.drafter] if self.arm.drafter in names else []

    def select(self, context: StepContext) -> Decision:
        off = self.arm.drafter == "ar" or self.arm.drafter in context.unavailable
        self._steps += 1
        return (
            Decision(self._steps, Arm.autoregressive()) if off else Decision(self._steps, self.arm, asked=(self.arm,))
        )

    def update(self, decision: Decision, outcome: StepOutcome) -> None:
        """Nothing to learn."""
