"""What controllers share about the costs of a step."""

from __future__ import annotations

from collections.abc import Mapping

from adaptspec.control.controller import StepOutcome
from adaptspec.control.cost import CostModel

CHEAP_SHARE = 0.02
"""Drafters that cost less than this share of a step without speculation are asked at every step, to learn from."""


def observe_step(cost: CostModel, outcome: StepOutcome, *, budgets: Mapping[str, int]) -> None:
    """Teach the cost model what a step took; `budgets` says with how many nodes each drafter was asked."""
    record = outcome.record
    cost.observe_verify(record.verified + outcome.extra_rows, record.verify_seconds, context=record.position)
    for drafter, seconds in outcome.draft_seconds.items():
        if drafter in budgets:
            cost.observe_draft(drafter, budgets[drafter], seconds)
    cost.observe_overhead(
        record.commit_seconds + record.observe_seconds + record.controller_seconds + record.other_seconds
    )


def is_cheap(cost: CostModel, drafter: str, budget: int) -> bool:
    """Whether asking the drafter hardly counts; what was never measured costs nothing yet."""
    return cost.draft_seconds(drafter, budget) <= CHEAP_SHARE * cost.verify_seconds(0)
