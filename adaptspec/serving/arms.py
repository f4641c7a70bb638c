"""The arms of a serving policy: drafters x draft lengths."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

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
