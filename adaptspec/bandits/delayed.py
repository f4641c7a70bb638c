"""Feedback that comes late and in any order, applied in the order of the decisions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adaptspec.bandits.base import PENDING_WINDOW, Choice, Feedback, Policy, PolicyDecision
from adaptspec.bandits.checks import check_count
from adaptspec.bandits.encoding import decode, encode
from adaptspec.bandits.state import read_int
from adaptspec.bandits.wrapper import Wrapper, as_played


class Delayed(Wrapper):
    """Holds feedback back until that of every earlier decision was applied (or given up on).

    Policies accept late feedback as they are; this wrapper adds that its order does not matter at all: the same set of
    feedback ends in bit-identical state however it was shuffled. The price is waiting: a missing one holds up the later
    ones until `skip`, or until `capacity` later decisions were made.

    Attributes:
        dropped: feedback that came after its decision was given up on.
    """

    kind = "delayed"

    def __init__(self, policy: Policy, *, capacity: int = 1024) -> None:
        super().__init__(policy)
        self._capacity = check_count("capacity", capacity, minimum=1)
        if capacity > PENDING_WINDOW // 2:
            raise ValueError(f"capacity must be at most {PENDING_WINDOW // 2}, got {capacity}")
        self.options["capacity"] = self._capacity
        self.dropped = 0
        self._waiting: dict[int, tuple[PolicyDecision, Feedback] | None] = {}
        self._next_applied = 0

    @property
    def waiting(self) -> int:
        """Feedback that was received and not applied yet."""
        return len(self._waiting)

    def skip(self, decision: PolicyDecision) -> None:
        """Say that `decision` will get no feedback, so that later ones need not wait for it.

        Raises:
            ValueError: unknown step id, or one that already had its feedback.
        """
        step_id = decision.step_id
        if not max(0, self._next_step - PENDING_WINDOW) <= step_id < self._next_step:
            raise ValueError(f"step_id must be one of the latest {PENDING_WINDOW} decisions, got {step_id}")
        if not self._open[step_id % PENDING_WINDOW]:
            raise ValueError(f"step_id {step_id} already had its feedback")
        self._open[step_id % PENDING_WINDOW] = 0
        if step_id >= self._next_applied:
            self._waiting[step_id] = None
            self._apply()

    def _choose(self, context: Any) -> Choice:
        self._apply()
        inner = self.policy.select(context)
        return inner.index, inner.propensity, inner.probabilities, inner

    def _learn(self, decision: PolicyDecision, feedback: Feedback) -> None:
        if decision.step_id < self._next_applied:
            self.dropped += 1
            return
        self._waiting[decision.step_id] = (as_played(decision.memo, decision), feedback)
        self._apply()

    def _apply(self) -> None:
        waiting = self._waiting
        given_up = self._next_step - self._capacity
        while self._next_applied in waiting or self._next_applied < given_up:
            item = waiting.pop(self._next_applied, None)
            self._next_applied += 1
            if item is not None:
                self.policy.update(*item)
                self.rounds += 1.0

    def _state(self) -> dict[str, Any]:
        waiting = [[step, encode(item)] for step, item in sorted(self._waiting.items())]
        state = {"dropped": self.dropped, "next_applied": self._next_applied, "waiting": waiting}
        return state | {"policy": self.policy.state_dict()}

    def _load(self, learned: Mapping[str, Any]) -> None:
        dropped = read_int(learned, "dropped")
        next_applied = read_int(learned, "next_applied")
        pairs = learned.get("waiting")
        if not isinstance(pairs, list) or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
            raise ValueError(f"state: waiting must be a list of pairs, got {pairs!r:.80}")
        waiting = {read_int({"waiting": step}, "waiting", minimum=next_applied): decode(item) for step, item in pairs}
        self.policy.load_state_dict(learned.get("policy"))
        self.dropped, self._next_applied, self._waiting = dropped, next_applied, waiting
