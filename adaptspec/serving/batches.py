"""A step's context in the terms of the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adaptspec.serving.acceptance import context_buckets
from adaptspec.serving.plans import Load
from adaptspec.serving.requests import RequestTable
from adaptspec.serving.seconds import StepSeconds
from adaptspec.serving.types import StepContext


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A context in the terms of the policy. R rows, D drafters.

    Attributes:
        context: as it was told.
        slots: int64 [R], rows of the request table.
        may: which rows may draft, to index arrays with: bool [R], or a slice where all may.
        rows: how many these are.
        caps: int64 [R], draft tokens that a row may take at most; None where no row has a limit.
        contexts: int64 [R], buckets.
        evidence: int64 [D, R], -1 unknown; None if nothing is known.
        load: what the step costs whatever is drafted.
        bucket: of the decoding rows, two to the power of it at most.
        cold: int64 [R, D], committed tokens that a drafter has not seen; None without drafters that have a state.
    """

    context: StepContext
    slots: np.ndarray
    may: np.ndarray | slice
    rows: int
    caps: np.ndarray | None
    contexts: np.ndarray
    evidence: np.ndarray | None
    load: Load
    bucket: int
    cold: np.ndarray | None


class BatchReader:
    """Reads contexts for one set of drafters.

    Args:
        drafters: their names.
        stateful: int64, those with a state of their own.
        longest: draft length.
        catch_up_steps: over which the price of catching up is spread.
    """

    def __init__(self, drafters: Sequence[str], *, stateful: np.ndarray, longest: int, catch_up_steps: int) -> None:
        self._drafters = drafters
        self._stateful = stateful.tolist()
        self._longest = longest
        self._catch_up_steps = catch_up_steps
        self._all_usable = np.ones(len(drafters), dtype=bool)
        self._no_extra = np.zeros(len(drafters))

    def read(self, context: StepContext, slots: np.ndarray, table: RequestTable, costs: StepSeconds) -> Batch:
        """Read a context whose requests have the rows `slots` of `table`."""
        lengths, decoding = context.context_lengths, context.decoding
        caps = self._caps(context)
        may: np.ndarray | None = decoding
        for limit in (None if caps is None else caps > 0, context.speculate):
            if limit is not None:
                may = limit if may is None else may & limit
        able = len(slots) if may is None else int(np.count_nonzero(may))
        rows = len(slots) if decoding is None else int(np.count_nonzero(decoding))
        mean = 0.0
        if rows:
            mean = float((lengths if decoding is None else lengths[decoding]).sum()) / rows
        cold, extra = None, self._no_extra
        if self._stateful:
            cold, extra = self._catching_up(lengths, slots, table, costs)
        usable = self._all_usable
        if context.unavailable:
            usable = np.array([name not in context.unavailable for name in self._drafters], dtype=bool)
        tokens = rows + context.prefill_tokens
        off_seconds = costs.verify(max(tokens, 1), context=mean) + costs.overhead
        return Batch(
            context,
            slots,
            slice(None) if may is None or able == len(slots) else may,
            able,
            caps,
            context_buckets(lengths),
            self._evidence(context),
            Load(rows, tokens, mean, off_seconds, extra, usable),
            max(rows - 1, 0).bit_length(),
            cold,
        )

    def _caps(self, context: StepContext) -> np.ndarray | None:
        caps = None
        if context.remaining is not None:
            caps = context.remaining - 1  # one token of the step is the target's own
        if context.max_lengths is not None:
            caps = context.max_lengths if caps is None else np.minimum(caps, context.max_lengths)
        if caps is None or not np.count_nonzero(caps < self._longest):
            return None
        return np.minimum(caps, self._longest)

    def _catching_up(
        self, lengths: np.ndarray, slots: np.ndarray, table: RequestTable, costs: StepSeconds
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens that drafters have not seen [R, D], and what catching up adds to a step [D]."""
        cold = np.zeros((len(slots), len(self._drafters)), dtype=np.int64)
        extra = np.zeros(len(self._drafters))
        seen = table.seen_length
        for drafter in self._stateful:
            own = seen[slots, drafter]
            # The stack prefills a drafter with the prompt: its state is whole when the request is first seen.
            seen[slots, drafter] = own = np.where(own < 0, lengths, own)
            cold[:, drafter] = np.maximum(lengths - own, 0)
            if np.count_nonzero(cold[:, drafter]):
                extra[drafter] = costs.refresh(drafter) / self._catch_up_steps
        return cold, extra

    def _evidence(self, context: StepContext) -> np.ndarray | None:
        if not context.evidence:
            return None
        evidence = np.full((len(self._drafters), len(context)), -1, dtype=np.int64)
        for name, levels in context.evidence.items():
            evidence[self._drafters.index(name)] = levels
        return evidence
