"""What controllers share about the costs of a step."""

from __future__ import annotations

from collections.abc import Sequence

from adaptspec.control.controller import StepOutcome
from adaptspec.control.cost import CostModel
from adaptspec.types import Arm

CHEAP_SHARE = 0.02
"""Share of a step without speculation that drafters may take which are asked at every step."""


def observe_step(cost: CostModel, outcome: StepOutcome, *, asked: Sequence[Arm]) -> None:
    """Teach the cost model what a step took; `asked` says how each drafter was asked."""
    record = outcome.record
    cost.observe_verify(record.verified + outcome.extra_rows, record.verify_seconds, context=record.position)
    for arm in asked:
        if (seconds := outcome.draft_seconds.get(arm.source)) is not None:
            cost.observe_draft(arm.drafter, arm.budget, seconds, vocab=arm.vocab)
    for drafter, tokens in outcome.catch_up_tokens.items():
        cost.observe_catch_up(drafter, tokens, outcome.catch_up_seconds[drafter])
    cost.observe_overhead(record.overhead_seconds)


def cheap_together(cost: CostModel, arms: Sequence[Arm]) -> frozenset[str]:
    """The sources that are asked at every step whatever they are worth: those of the cheapest drafters, while all of
    them together take no more than `CHEAP_SHARE`. What was never measured costs nothing yet. A drafter is asked with
    one vocabulary at a time, and counts with its dearest."""
    left = CHEAP_SHARE * cost.verify_seconds(0)
    dearest: dict[str, float] = {}
    for arm in arms:
        seconds = cost.draft_seconds(arm.drafter, arm.budget, vocab=arm.vocab)
        dearest[arm.drafter] = max(seconds, dearest.get(arm.drafter, 0.0))
    cheap = set()
    for seconds, drafter in sorted((seconds, drafter) for drafter, seconds in dearest.items()):
        left -= seconds
        if left < 0.0:
            break
        cheap.add(drafter)
    return frozenset(arm.source for arm in arms if arm.drafter in cheap)
