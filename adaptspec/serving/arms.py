"""The arms of a serving policy: drafters x draft lengths."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from adaptspec.names import unknown_name
from adaptspec.serving.types import OFF, drafter_of
from adaptspec.types import Arm


def read_arms(arms: Sequence[str | Arm]) -> tuple[Arm, ...]:
    """The arms by drafter, in the order of the drafters' first arms, and by length; without "ar".

    Raises:
        ValueError: a single string, no arm that drafts, an arm without a number, an arm twice.
    """
    if isinstance(arms, str):
        raise ValueError(f"arms must be a list such as ['eagle3@2', 'eagle3@4'], got the string {arms!r}")
    parsed = [arm if isinstance(arm, Arm) else Arm.parse(arm) for arm in arms]
    drafting = [arm for arm in parsed if arm.drafter != OFF]
    for arm in drafting:
        if not isinstance(arm.budget, int):
            raise ValueError(f"arms must have a draft length that is a number, got {str(arm)!r}")
    if len(set(drafting)) < len(drafting):
        raise ValueError(f"arms must be different, got {', '.join(map(str, drafting))}")
    if not drafting:
        raise ValueError("arms must hold at least one that drafts, such as 'eagle3@4'")
    order = list(dict.fromkeys(drafter_of(str(arm)) for arm in drafting))
    return tuple(sorted(drafting, key=lambda arm: (order.index(drafter_of(str(arm))), arm.budget)))


@dataclass(frozen=True, slots=True, eq=False)
class ArmTable:
    """The arms in arrays. Arms that draft are numbered from 0; a decision counts from 1, since its 0 is "ar".

    Attributes:
        arms: those that draft, by drafter and by length.
        names: as in decisions.
        drafters: in the order of their arms.
        whose: int64 [A], index of the arm's drafter.
        lengths: int64 [A], draft tokens.
        longest: of them.
        owner_of: int64 [A + 1], by the number in a decision: index of the drafter, -1 for "ar".
        length_of: int64 [A + 1], by the number in a decision.
    """

    arms: tuple[Arm, ...]
    names: tuple[str, ...] = field(init=False)
    drafters: tuple[str, ...] = field(init=False)
    whose: np.ndarray = field(init=False)
    lengths: np.ndarray = field(init=False)
    longest: int = field(init=False)
    owner_of: np.ndarray = field(init=False)
    length_of: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        fill = object.__setattr__
        fill(self, "names", (OFF, *map(str, self.arms)))
        labels = [drafter_of(name) for name in self.names[1:]]
        fill(self, "drafters", tuple(dict.fromkeys(labels)))
        fill(self, "whose", np.array([self.drafters.index(label) for label in labels], dtype=np.int64))
        fill(self, "lengths", np.array([arm.budget for arm in self.arms], dtype=np.int64))
        fill(self, "longest", int(self.lengths.max()))
        fill(self, "owner_of", np.append(-1, self.whose))
        fill(self, "length_of", np.append(0, self.lengths))

    def played(self, owners: np.ndarray, lengths: np.ndarray) -> list[tuple[int, int, int]]:
        """Drafters in play, ascending, each with its rows and the longest draft that it is asked for.

        Args:
            owners: int64 [R], index of the row's drafter, -1 for none.
            lengths: int64 [R], what is asked of it.
        """
        width = self.longest + 1
        by_length = np.bincount((owners + 1) * width + lengths, minlength=width * (len(self.drafters) + 1))
        found = []
        for drafter, row in enumerate(by_length.reshape(-1, width)[1:].tolist()):
            if rows := sum(row):
                longest = self.longest
                while not row[longest]:
                    longest -= 1
                found.append((drafter, rows, longest))
        return found


def check_drafters(field: str, names: Collection[str], valid: Sequence[str]) -> tuple[str, ...]:
    """The named drafters in the order of the policy. Raises ValueError on an unknown one."""
    if isinstance(names, str):
        raise ValueError(f"{field} must be a collection of drafters, got the string {names!r}")
    for name in names:
        if name not in valid:
            raise unknown_name(f"drafter in {field}:", name, valid)
    return tuple(name for name in valid if name in names)


def fixed_arm(strategy: Any, names: Sequence[str]) -> int | None:
    """Index of the arm that "fixed:<arm>" plays, -1 for no speculation; None for other strategies."""
    if not isinstance(strategy, str):
        raise ValueError(f"strategy must be a name, got {strategy!r}")
    if not strategy.startswith("fixed:"):
        return None
    arm = str(Arm.parse(strategy.removeprefix("fixed:")))
    if arm not in names:
        raise unknown_name("arm", arm, names)
    return names.index(arm) - 1
