"""Who decides what a step does. Knows nothing of torch."""

from __future__ import annotations

import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from adaptspec.types import Arm, Decision, DraftTree, StepRecord

if TYPE_CHECKING:
    from adaptspec.control.assembly import Candidates
    from adaptspec.types import ExtraRows, PairedRows


@dataclass(frozen=True, slots=True)
class StepContext:
    """What is known before a step.

    Attributes:
        length: committed tokens.
        remaining: tokens that may still be generated.
        unavailable: drafters set aside for this request.
        cold_tokens: by drafter, tokens that it would have to catch up on before it can propose; none where it is not
            named.
    """

    length: int
    remaining: int
    unavailable: Collection[str] = ()
    cold_tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What came of a step.

    Attributes:
        record: counts and times; its controller time lacks the update that is told of it.
        tree: what was verified.
        trees: what each asked drafter proposed, by `Arm.source`.
        tokens: int64, the tokens committed, bonus included.
        draft_seconds: by `Arm.source`.
        extra_rows: rows that a drafter added to the verify pass besides the tree.
        offered_rows: by `Arm.source`, the rows that asked drafters would add, were they played.
        finished: the request ended, so that `tokens` may be cut short.
        target_probs: float32 [T, V], row k is the distribution that `tokens[k]` was drawn from; None if the target is
            greedy or the controller does not want it.
        catch_up_tokens, catch_up_seconds: per asked drafter that had to catch up.
    """

    record: StepRecord
    tree: DraftTree
    trees: Mapping[str, DraftTree]
    tokens: np.ndarray
    draft_seconds: Mapping[str, float] = field(default_factory=dict)
    extra_rows: int = 0
    finished: bool = False
    target_probs: np.ndarray | None = None
    catch_up_tokens: Mapping[str, int] = field(default_factory=dict)
    catch_up_seconds: Mapping[str, float] = field(default_factory=dict)
    offered_rows: Mapping[str, ExtraRows | PairedRows] = field(default_factory=dict)


REASONS: Mapping[str, str] = {
    "fixed": "the strategy plays one arm always",
    "in turn": "the first drafter in the order of the pool that had something to propose",
    "policy": "the policy chose the arm",
    "guard": "the guard measured no speculation, or tried an arm again, instead of what the policy chose",
    "set aside": "the chosen drafter is set aside for this request",
    "cold": "the chosen drafter would have had to catch up for longer than it was known to be worth",
    "pays": "the verified nodes were worth their seconds",
    "nothing pays": "no proposed node was worth verifying",
    "no draft": "no drafter had anything to propose",
    "survey": "another size was verified to learn what sizes cost",
    "probe": "another size was verified to see whether costs have changed",
}
"""Why steps are decided as they are: the keys stand in step records."""


@dataclass(frozen=True, slots=True)
class StepNotes:
    """What a controller says about a step for its record; see `StepRecord`."""

    reason: str = ""
    expected_tokens: float | None = None
    expected_seconds: float | None = None
    gain: float | None = None
    digest: str = ""


class Digest:
    """A running hash of what a controller was told and what it decided. Not cryptographic."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def add(self, tokens: np.ndarray, *numbers: float) -> str:
        """Take in a step; the hash so far, as eight hexadecimal digits."""
        self.value = zlib.crc32(struct.pack(f"<{len(numbers)}d", *numbers), zlib.crc32(tokens.tobytes(), self.value))
        return f"{self.value:08x}"


@dataclass(frozen=True, slots=True)
class Assembly:
    """What a step verifies.

    Attributes:
        tree: the draft tree.
        arm: what the step's record names.
        used: the asked sources (`Arm.source`) whose time belongs to the arm; the others were asked to learn from.
    """

    tree: DraftTree
    arm: Arm
    used: frozenset[str]


class Controller(ABC):
    """`begin` with every request; `select` before a step, `assemble` once drafters have proposed, `update` after it.

    Attributes:
        wants_probabilities: the target's distributions along the accepted path are handed to `update` when the target
            samples.
    """

    wants_probabilities: bool = False

    @property
    def valued(self) -> Sequence[Candidates]:
        """The candidates of the step under way with their values, until `update`; none if the step values nothing."""
        return ()

    @abstractmethod
    def drafters_in_play(self, names: Collection[str]) -> list[str]:
        """Which drafters must be kept ready; the others cost nothing."""

    def begin(self) -> None:
        """A request starts. The one before may have ended anywhere, even by an error."""

    @abstractmethod
    def select(self, context: StepContext) -> Decision:
        """What to do in the next step."""

    def assemble(self, decision: Decision, trees: Mapping[str, DraftTree]) -> Assembly:
        """The tree to verify, out of what the asked drafters proposed, by `Arm.source`."""
        source = decision.arm.source
        return Assembly(trees.get(source, DraftTree.empty()), decision.arm, frozenset([source]))

    def trust_costs(self) -> None:
        """The costs were measured on this machine: nothing need be played to learn what it takes."""

    @abstractmethod
    def update(self, decision: Decision, outcome: StepOutcome) -> StepNotes:
        """What came of it. Returns what the step's record should say."""

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

    def update(self, decision: Decision, outcome: StepOutcome) -> StepNotes:
        """Nothing to learn."""
        off = self.arm.drafter != "ar" and decision.arm.drafter == "ar"
        return StepNotes("set aside" if off else "fixed")


class InTurnController(Controller):
    """Asks drafters in a fixed order and plays the first that has something to propose: "lookup, else the model".

    Args:
        arms: one per drafter, the preferred one first.
    """

    def __init__(self, arms: Sequence[Arm]) -> None:
        if not arms or len({arm.drafter for arm in arms}) < len(arms):
            raise ValueError(f"arms must be one or more, each of another drafter, got {', '.join(map(str, arms))}")
        self.arms = tuple(arms)
        self._steps = 0

    def drafters_in_play(self, names: Collection[str]) -> list[str]:
        return [arm.drafter for arm in self.arms if arm.drafter in names]

    def select(self, context: StepContext) -> Decision:
        self._steps += 1
        asked = tuple(arm for arm in self.arms if arm.drafter not in context.unavailable)
        arm = asked[0] if asked else Arm.autoregressive()
        return Decision(self._steps, arm, asked=asked, first_only=True)

    def assemble(self, decision: Decision, trees: Mapping[str, DraftTree]) -> Assembly:
        for arm in decision.asked:
            tree = trees.get(arm.source, DraftTree.empty())
            if len(tree):
                return Assembly(tree, arm, frozenset(trees))
        return Assembly(DraftTree.empty(), Arm.autoregressive(), frozenset(trees))

    def update(self, decision: Decision, outcome: StepOutcome) -> StepNotes:
        """Nothing to learn."""
        return StepNotes("in turn" if outcome.record.verified else "no draft")
