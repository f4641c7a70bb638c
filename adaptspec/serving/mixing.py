"""Plans that mix drafters row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from adaptspec.serving.plans import Load, Plan

MOST_MIXED = 3
"""Drafters in one step."""


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What mixtures are made from: of every drafter's own plan what every row has of it. D drafters, R rows that may
    draft.

    Attributes:
        arms: int64 [D, R].
        shares: [3, D, R], expected tokens less the price of what they take; expected accepted tokens; draft tokens in
            the pass.
        seconds: [D, R], of drafting, that are paid per row; None where none are.
        fixed: [D], seconds of having a drafter on.
    """

    arms: np.ndarray
    shares: np.ndarray
    seconds: np.ndarray | None
    fixed: np.ndarray


def mix(
    alone: Sequence[Plan],
    parts: Parts,
    *,
    first: int,
    load: Load,
    keep: Sequence[int],
    pass_seconds: Callable[[np.ndarray], np.ndarray],
) -> list[Plan]:
    """Add drafters to the best one, for the rows where they are worth more, as long as the step gains by it.

    Args:
        alone: every drafter's own plan.
        first: the best of them.
        keep: drafters whose mixture with the best one is wanted too: the plan under way.
        pass_seconds: of a step without drafting, by draft tokens in the pass.

    Returns:
        The best pair, those of `keep`, and what grew from the best pair, up to `MOST_MIXED` drafters.
    """
    arms, shares, seconds = parts.arms, parts.shares, parts.seconds
    mine, paid_rows = shares[:, first], None if seconds is None else seconds[first]
    reach = np.arange(arms.shape[1])
    owner = np.zeros(len(reach), dtype=np.int64) + first
    chosen, paid, rate = [first], float(parts.fixed[first]), alone[first].rate
    found: list[Plan] = []
    open_ = load.usable.copy()
    open_[first] = False
    while np.count_nonzero(open_) and len(chosen) < MOST_MIXED:
        takes = shares[0] > np.maximum(mine[0], 0.0)
        more, passed = np.where(takes, shares[1:], mine[1:, None]).sum(axis=2)
        total = pass_seconds(passed) + paid + parts.fixed
        if seconds is not None:
            total += np.where(takes, seconds, paid_rows).sum(axis=1)
        rates = np.where(open_, (load.rows + more) / total, 0.0)
        best = int(rates.argmax())
        for drafter in {best, *(keep if len(chosen) == 1 else ())}:
            if open_[drafter]:
                mixed = arms[np.where(takes[drafter], drafter, owner), reach]
                drafters = tuple(sorted({*chosen, drafter}))
                sums = (load.rows + more[drafter], passed[drafter], total[drafter])
                found.append(Plan(drafters, mixed, bool(np.count_nonzero(mixed >= 0)), *map(float, sums)))
        if rates[best] <= rate:
            break
        owner = np.where(takes[best], best, owner)
        mine = np.where(takes[best], shares[:, best], mine)
        if seconds is not None:
            paid_rows = np.where(takes[best], seconds[best], paid_rows)
        rate, paid = float(rates[best]), paid + float(parts.fixed[best])
        chosen.append(best)
        open_[best] = False
    return found
