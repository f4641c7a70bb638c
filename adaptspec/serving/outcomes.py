"""What the counts of one step teach about drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from adaptspec.serving.acceptance import AcceptanceModel
from adaptspec.serving.batches import Batch
from adaptspec.serving.requests import RequestTable
from adaptspec.serving.types import Decision, StepOutcome


def count_outcome(
    table: RequestTable, slots: np.ndarray, outcome: StepOutcome, *, emitted: np.ndarray, drafting: np.ndarray
) -> None:
    """Add a step to the totals of its requests.

    Args:
        slots: int64 [R], rows of the table, -1 for requests that are gone.
        emitted: int64 [R].
        drafting: bool [R], where something was drafted and is known.
    """
    verified, accepted = outcome.verified, outcome.accepted
    here = slots >= 0
    if np.count_nonzero(here) < len(slots):
        slots, emitted, drafting, verified, accepted = (
            values[here] for values in (slots, emitted, drafting, verified, accepted)
        )
    told = np.empty((len(slots), 4), dtype=np.int64)
    for column, values in enumerate((emitted > 0, emitted, verified, accepted)):
        told[:, column] = values
    table.totals[slots] += told
    table.histogram[slots, accepted] += drafting & (verified > 0)


def learn_outcome(
    acceptance: AcceptanceModel,
    table: RequestTable,
    slots: np.ndarray,
    decision: Decision,
    outcome: StepOutcome,
    batch: Batch,
    *,
    drafters: Sequence[str],
    owners: np.ndarray,
    judged: np.ndarray,
) -> None:
    """Teach the acceptance model. Rows that were drafted from a stale state say nothing, and stay stale.

    Args:
        slots: int64 [R], rows of the table, -1 for requests that are gone.
        owners: int64 [R], the row's drafter, -1 for none.
        judged: bool [R], where something was drafted and is known.
    """
    judged = judged & (slots >= 0)
    if outcome.stale is not None and (stale := judged & outcome.stale).any():
        reached = batch.context.context_lengths[stale] - decision.cold_tokens[stale]
        table.seen_length[slots[stale], owners[stale]] = reached
        judged &= ~outcome.stale
    count = int(np.count_nonzero(judged))
    if not count:
        return
    rows = slice(None) if count == len(judged) else np.flatnonzero(judged)
    whose = owners[rows]
    proposed = outcome.proposed[rows]
    if batch.context.available:
        known = np.full((len(drafters), len(decision)), -1, dtype=np.int64)
        for name, values in batch.context.available.items():
            known[drafters.index(name)] = values
        proposed = np.where(known[whose, np.arange(len(judged))[rows]] >= 0, -1, proposed)
    acceptance.learn(
        table,
        slots[rows],
        drafters=whose,
        buckets=batch.contexts[rows],
        evidence=None if batch.evidence is None else batch.evidence[whose, np.arange(len(judged))[rows]],
        asked=decision.lengths[rows],
        proposed=proposed,
        verified=outcome.verified[rows],
        accepted=outcome.accepted[rows],
        censored=None if outcome.censored is None else outcome.censored[rows],
    )
