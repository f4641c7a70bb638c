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
        if (seconds := outcome.draft_seconds.get(arm.drafter)) is not None:
            cost.observe_draft(arm.drafter, arm.budget, seconds, vocab=arm.vocab)
        if tokens := outcome.catch_up_tokens.get(arm.drafter):
            cost.observe_catch_up(arm.drafter, tokens, outcome.catch_up_seconds[arm.drafter])
    cost.observe_overhead(record.overhead_seconds)


def cheap_together(cost: CostModel, names: Sequence[str], nodes: int) -> frozenset[str]:
    """The drafters that are asked at every step whatever they are worth: the cheapest, while all of them together take
    no more than `CHEAP_SHARE`. What was never measured costs nothing yet."""
    left = CHEAP_SHARE * cost.verify_seconds(0)
    cheap = []
    for seconds, name in sorted((cost.draft_seconds(name, nodes), name) for name in names):
        left -= seconds
        if left < 0.0:
            break
        cheap.append(name)
    return frozenset(cheap)
