"""A step's context in the terms of the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adaptspec.serving.acceptance import context_buckets
from adaptspec.serving.planning import Load
from adaptspec.serving.requests import RequestTable
from adaptspec.serving.seconds import StepSeconds
from adaptspec.serving.types import StepContext


@dataclass(frozen=True, slots=True)
class Batch:
    """A context in the terms of the policy: all rows [R], and `may`, the rows that may draft."""

    context: StepContext
    slots: np.ndarray
    decoding: np.ndarray
    may: np.ndarray
    caps: np.ndarray
    contexts: np.ndarray  # buckets
    evidence: np.ndarray | None
    load: Load
    bucket: int
    cold: np.ndarray


def read_batch(
    context: StepContext,
    slots: np.ndarray,
    table: RequestTable,
    costs: StepSeconds,
    *,
    drafters: Sequence[str],
    stateful: np.ndarray,
    longest: int,
    catch_up_steps: int,
) -> Batch:
    """Read a context.

    Args:
        slots: int64 [R], rows of `table`.
        stateful: int64, drafters with a state of their own.
        longest: draft length.
        catch_up_steps: over which the price of catching up is spread.
    """
    lengths = context.context_lengths
    seen = table.seen_length
    decoding = np.ones(len(slots), dtype=bool) if context.decoding is None else context.decoding
    caps = np.full(len(slots), longest, dtype=np.int64)
    if context.remaining is not None:
        caps = np.minimum(caps, context.remaining - 1)  # one token of the step is the target's own
    if context.max_lengths is not None:
        caps = np.minimum(caps, context.max_lengths)
    may = decoding & (caps > 0)
    if context.speculate is not None:
        may &= context.speculate
    rows = int(np.count_nonzero(decoding))
    cold = np.zeros((len(slots), len(drafters)), dtype=np.int64)
    extra = np.zeros(len(drafters))
    for drafter in stateful.tolist():
        own = seen[slots, drafter]
        # The stack prefills a drafter with the prompt: its state is whole when the request is first seen.
        seen[slots, drafter] = own = np.where(own < 0, lengths, own)
        cold[:, drafter] = np.maximum(lengths - own, 0)
        if cold[:, drafter].any():
            extra[drafter] = costs.refresh(drafter) / catch_up_steps
    usable = np.array([name not in context.unavailable for name in drafters], dtype=bool)
    evidence = None
    if context.evidence:
        evidence = np.full((len(drafters), len(slots)), -1, dtype=np.int64)
        for name, levels in context.evidence.items():
            evidence[drafters.index(name)] = levels
    mean = float(lengths[decoding].mean()) if rows else 0.0
    load = Load(rows, rows + context.prefill_tokens, mean, extra, usable)
    bucket = max(rows - 1, 0).bit_length()
    contexts = context_buckets(lengths)
    return Batch(context, slots, decoding, may, caps, contexts, evidence, load, bucket, cold)
