"""What the times of one step teach about costs."""

from __future__ import annotations

from collections.abc import Sequence

from adaptspec.serving.seconds import StepSeconds
from adaptspec.serving.types import StepOutcome


def learn_seconds(
    costs: StepSeconds,
    outcome: StepOutcome,
    *,
    names: Sequence[str],
    played: Sequence[tuple[int, int, int]],
    tokens: int,
    context: float,
) -> float | None:
    """Teach the costs what a step took, each part what is its own.

    A stack that knows only how long the whole step took is fine: what a pass of this size takes is known from steps
    without drafts, and the rest belongs to the drafters.

    Args:
        names: drafters.
        played: drafters in play, each with its rows and the longest draft that it was asked for.
        tokens: of the pass, drafts and padding included.
        context: mean committed tokens.

    Returns:
        The wall time of the step, None if it is unknown.
    """
    wall = outcome.wall_seconds
    if wall is None:
        return None
    for name, seconds in outcome.refresh_seconds.items():
        costs.observe_refresh(names.index(name), seconds)
    untimed = [drafter for drafter, _, _ in played if names[drafter] not in outcome.draft_seconds]
    drafting = sum(outcome.draft_seconds.values())
    other = sum(outcome.refresh_seconds.values()) + outcome.policy_seconds
    verify = outcome.verify_seconds
    rest = max(wall - drafting - other, 0.0)
    if verify is not None:
        costs.observe_verify(tokens, verify, context=context)
        rest = max(rest - verify, 0.0)
        if not untimed:
            costs.observe_overhead(rest + outcome.policy_seconds)
    elif not untimed or not costs.measured:
        costs.observe_verify(tokens, rest, context=context)
        rest = 0.0
    else:
        rest = max(rest - costs.verify(tokens, context=context), 0.0)
    for drafter, rows, length in played:
        seconds = outcome.draft_seconds.get(names[drafter], rest / max(len(untimed), 1))
        costs.drafting.observe(drafter, rows=rows, length=length, seconds=seconds)
    return wall
