"""What controllers share about the costs of a step."""

from __future__ import annotations

from collections.abc import Sequence

from adaptspec.control.controller import StepOutcome
from adaptspec.control.cost import CostModel
from adaptspec.types import Arm

CHEAP_SHARE = 0.02
"""Drafters that cost less than this share of a step without speculation are asked at every step, to learn from."""


def observe_step(cost: CostModel, outcome: StepOutcome, *, asked: Sequence[Arm]) -> None:
    """Teach the cost model what a step took; `asked` says how each drafter was asked."""
    record = outcome.record
    cost.observe_verify(record.verified + outcome.extra_rows, record.verify_seconds, context=record.position)
    for arm in asked:
        if (seconds := outcome.draft_seconds.get(arm.drafter)) is not None:
            cost.observe_draft(arm.drafter, arm.budget, seconds, vocab=arm.vocab)
        if tokens := outcome.catch_up_tokens.get(arm.drafter):
            cost.observe_catch_up(arm.drafter, tokens, outcome.catch_up_seconds[arm.drafter])
    cost.observe_overhead(
        record.commit_seconds + record.observe_seconds + record.controller_seconds + record.other_seconds
    )


def is_cheap(cost: CostModel, drafter: str, budget: int) -> bool:
    """Whether asking the drafter hardly counts; what was never measured costs nothing yet."""
    return cost.draft_seconds(drafter, budget) <= CHEAP_SHARE * cost.verify_seconds(0)
