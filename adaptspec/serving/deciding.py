"""From a batch to the arms of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from adaptspec.serving.acceptance import Prospects
from adaptspec.serving.arms import ArmTable
from adaptspec.serving.batches import Batch
from adaptspec.serving.choosing import Choice
from adaptspec.serving.fitting import fit_budget
from adaptspec.serving.knowledge import Knowledge
from adaptspec.serving.plans import Plan

KeepWarm = Literal["auto", "always", "never"]

WARM_STEPS = 8
"""Steps for which a drafter's state is kept up to date after it was last in play."""


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What the rows of a batch that may draft are given.

    Attributes:
        choice: of a plan, None where there was none to make.
        arms: int64 [rows that may draft], index of the arm, -1 for none; None: nobody drafts.
        reason: as in a decision.
        thought: whether plans were compared.
    """

    choice: Choice | None
    arms: np.ndarray | None
    reason: str
    thought: bool = False


class Decider:
    """Finds the arms of a batch by what is known.

    Args:
        arms: to choose from.
        knowledge: what was learnt.
        fixed: index of the arm to play always, -1 for no speculation; None to choose.
        uniform: one arm for the whole batch.
        stateful: int64, drafters with a state of their own.
        keep_warm: whether their state is kept up to date while they are off.
    """

    def __init__(
        self,
        arms: ArmTable,
        knowledge: Knowledge,
        *,
        fixed: int | None,
        uniform: bool,
        stateful: np.ndarray,
        keep_warm: KeepWarm,
    ) -> None:
        self._arms, self._known, self._fixed, self._uniform = arms, knowledge, fixed, uniform
        self._stateful = stateful.tolist()
        self._keep_warm = keep_warm

    def decide(self, batch: Batch) -> Answer:
        """What the rows that may draft are given."""
        known, load = self._known, batch.load
        if not batch.rows or not np.count_nonzero(load.usable) or batch.context.draft_budget == 0:
            return Answer(None, None, "nothing to do")
        if self._fixed is not None:
            if self._fixed < 0 or not load.usable[self._arms.whose[self._fixed]]:
                return Answer(None, None, "fixed")
            return Answer(None, self._fit(batch, np.full(batch.rows, self._fixed), None), "fixed")
        chooser = known.chooser
        assert chooser is not None
        reason = chooser.shortcut(batch.bucket)
        if reason is not None:
            return Answer(Choice(known.planner.off(load), reason), None, reason)
        if known.reuse.due and load.usable.all():
            choice = chooser.reuse()
            return Answer(choice, self._fit(batch, self._reused(batch), None), choice.reason)
        return self._think(batch)

    def _think(self, batch: Batch) -> Answer:
        known, load = self._known, batch.load
        chooser, planner = known.chooser, known.planner
        assert chooser is not None
        prospects = self._prospects(batch)
        off = planner.off(load)
        usable = load.usable.tolist()
        if self._uniform:
            every = planner.uniform(prospects, load, known.seconds)
            mixed = [plan for plan in every if usable[plan.drafters[0]]]
            alone = [_best(mixed, drafter) for drafter in range(len(usable))]
        else:
            plans, mixed = planner.plans(prospects, load, known.seconds, keep=chooser.under_way)
            alone = [plan if able else None for plan, able in zip(plans, usable, strict=True)]

        def shortest() -> list[Plan | None]:
            plans = planner.uniform(prospects, load, known.seconds, arms=planner.starts)
            return [plan if able else None for plan, able in zip(plans, usable, strict=True)]

        choice = chooser.choose(off, alone, mixed, shortest, load=batch.bucket, rows=batch.rows)
        arms = None if choice.plan.arms is None else self._fit(batch, choice.plan.arms, prospects)
        known.reuse.decided(arms)
        return Answer(choice, arms, choice.reason, True)

    def _prospects(self, batch: Batch) -> Prospects:
        may, context = batch.may, batch.context
        return self._known.acceptance.prospects(
            self._known.table,
            batch.slots[may],
            buckets=batch.contexts[may],
            evidence=None if batch.evidence is None else batch.evidence[:, may],
            available={self._arms.drafters.index(name): known[may] for name, known in context.available.items()},
            caps=None if batch.caps is None else batch.caps[may],
        )

    def _reused(self, batch: Batch) -> np.ndarray:
        """What the rows had before; new ones get what most have, and so do all where all get the same."""
        table, slots = self._known.table, batch.slots[batch.may]
        new = table.totals[slots, 0] == 0
        if self._uniform:
            new[:] = True
        return self._known.reuse.arms(table.arms[slots], new)

    def _fit(self, batch: Batch, arms: np.ndarray, prospects: Prospects | None) -> np.ndarray:
        """Arms that fit the step's draft budget."""
        return fit_budget(
            arms,
            self._arms.whose,
            self._arms.lengths,
            caps=None if batch.caps is None else batch.caps[batch.may],
            budget=batch.context.draft_budget,
            uniform=self._uniform,
            worth=None if prospects is None else prospects.accepted,
        )

    def refresh(self, batch: Batch, in_play: Sequence[int]) -> list[int]:
        """Stateful drafters to bring up to date although they draft nothing."""
        if self._keep_warm == "never" or batch.cold is None or not batch.load.rows:
            return []
        chooser = self._known.chooser
        found = []
        for drafter in self._stateful:
            if drafter in in_play or not batch.load.usable[drafter] or not batch.cold[:, drafter].any():
                continue
            recent = chooser is not None and max(chooser.last_played(drafter), chooser.off_streak) <= WARM_STEPS
            if self._keep_warm == "always" or recent:
                found.append(drafter)
        return found


def _best(plans: Sequence[Plan], drafter: int) -> Plan | None:
    return max((plan for plan in plans if plan.drafters == (drafter,)), key=lambda plan: plan.rate, default=None)
