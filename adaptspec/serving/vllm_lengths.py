"""The draft length of a vLLM step: what the schedulers of `vllm_scheduler` ask and tell. Imports nothing of vLLM."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from adaptspec.serving.policy import ServingPolicy
from adaptspec.serving.types import Decision, StepContext, StepOutcome

MOST_IN_FLIGHT = 16
"""Passes that may be scheduled before the first of them has come back."""

METHODS = ("ngram", "draft_model", "eagle", "eagle3", "mtp", "medusa")
"""Drafters of vLLM that take another length at every step."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that will draft after the pass being scheduled.

    Attributes:
        tokens: of its text so far.
        remaining: it may still gain.
        limit: draft tokens it may take at most.
    """

    request_id: Hashable
    tokens: int
    remaining: int
    limit: int


@dataclass(frozen=True, slots=True)
class Came:
    """What a pass brought for one request: draft tokens proposed and verified, tokens emitted (bonus counted)."""

    proposed: int
    verified: int
    emitted: int


@dataclass(slots=True, eq=False)
class _InFlight:
    """A pass: the decision whose drafts it verifies, and the prompt tokens that were expected in it and are."""

    key: Any
    decision: Decision | None
    prefill_expected: int
    prefill: int


class LengthControl:
    """Decides at every pass how long the drafts behind it shall be, and learns from the pass that verifies them.

    Args:
        policy: one with `uniform=True`.
        drafter: name of the only drafter in the policy's arms.
        longest: `num_speculative_tokens`.
    """

    def __init__(self, policy: ServingPolicy, *, drafter: str, longest: int) -> None:
        self.policy = policy
        self.drafter = drafter
        self.longest = longest
        self.length = 0
        self.lengths: dict[Hashable, int] = {}
        self._decision: Decision | None = None
        self._prefill_expected = 0
        self._in_flight: deque[_InFlight] = deque(maxlen=MOST_IN_FLIGHT)
        self._came_back: float | None = None

    def begin(self, key: Any, waiting: Sequence[Waiting], *, prefill: int, prefill_left: int, budget: int) -> int:
        """Decide the length of the drafts made at the end of a pass; 0 if nobody will draft.

        Args:
            key: stands for the pass; `end` gets the same object.
            waiting: who will draft.
            prefill: prompt tokens in the pass.
            prefill_left: prompt tokens expected in the next pass.
            budget: draft tokens that the next pass has room for.
        """
        self._in_flight.append(_InFlight(key, self._decision, self._prefill_expected, prefill))
        self._decision = None
        self._prefill_expected = prefill_left
        self.lengths = {}
        self.length = 0
        if waiting:
            decision = self.policy.decide(
                StepContext(
                    request_ids=[one.request_id for one in waiting],
                    context_lengths=[one.tokens for one in waiting],
                    remaining=[one.remaining for one in waiting],
                    speculate=[one.limit > 0 for one in waiting],
                    max_lengths=[one.limit for one in waiting],
                    prefill_tokens=prefill_left,
                    draft_budget=budget,
                )
            )
            self._decision = decision
            self.lengths = dict(zip(decision.request_ids, decision.lengths.tolist(), strict=True))
            self.length = min(self.longest, decision.length(self.drafter))
        return self.length

    def end(self, key: Any, came: Mapping[Hashable, Came]) -> None:
        """A pass came back.

        Args:
            came: by request, what it brought; requests that were preempted, aborted or are in their prompt are missing.
        """
        now = perf_counter()
        before, self._came_back = self._came_back, now
        entry = next((entry for entry in self._in_flight if entry.key is key), None)
        if entry is None:
            return
        self._in_flight.remove(entry)
        decision = entry.decision
        if decision is None:
            return
        rows = [came.get(request_id) for request_id in decision.request_ids]
        if not any(rows):
            return
        clean = before is not None and (entry.prefill > 0) == (entry.prefill_expected > 0)
        seconds = now - before if clean and before is not None else None
        proposed = np.array([0 if row is None else row.proposed for row in rows])
        verified = np.array([0 if row is None else min(row.verified, row.proposed) for row in rows])
        emitted = np.array([0 if row is None else row.emitted for row in rows])
        self.policy.observe(
            decision,
            StepOutcome(
                proposed=proposed,
                verified=verified,
                accepted=np.minimum(np.maximum(emitted - 1, 0), verified),
                emitted=emitted,
                observed=np.array([row is not None for row in rows]),
                seconds=seconds,
                verify_seconds=seconds,
            ),
        )

    def finish(self, request_ids: Collection[Hashable]) -> None:
        """These requests ended."""
        self.policy.finish(request_ids)

    def cut(self, request_id: Hashable, draft: Sequence[int]) -> list[int]:
        """A request's draft, cut to what it may have."""
        return list(draft[: self.lengths.get(request_id, self.longest)])
