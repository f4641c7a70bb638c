"""What a policy is: it chooses one of `n_arms` arms by index and learns from feedback that may come late or partly.

Arms are numbered from 0. Gains lie in [0, 1], larger is better; rescaling throughput into them is the caller's work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from adaptspec.bandits.checks import check_count
from adaptspec.bandits.feedback import Feedback
from adaptspec.bandits.state import check_equal, read_float, read_int, read_rng

PENDING_WINDOW = 4096
"""How many of the latest decisions may still get feedback; what keeps memory constant when some never do."""

STATE_VERSION = 1


@dataclass(frozen=True, slots=True, eq=False)
class PolicyContext:
    """What a policy may look at before it chooses. Policies that need none of it ignore it.

    Attributes:
        bucket: kind of traffic or load, read by `PerContext`.
        request: which request the step belongs to, read by `WithPrior`.
        features: float64 [d], read by `linucb`.
        evidence: how sure the preferred drafter is, read by `lookup-else`.
        baseline_seconds: expected seconds of a step without speculation now, read by `Guard`.
    """

    bucket: str | int | None = None
    request: str | int | None = None
    features: np.ndarray | None = None
    evidence: float | None = None
    baseline_seconds: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PolicyDecision:
    """One choice, with all that the policy needs to learn from it later.

    Whoever plays another arm than `index` may say so with `dataclasses.replace(decision, index=..., propensity=...)`,
    giving the probability with which that arm was played.

    Attributes:
        step_id: 0, 1, 2, ... per policy; feedback refers to it.
        index: the chosen arm.
        propensity: the probability with which it was chosen, given all earlier feedback.
        probabilities: float64 [n_arms], read-only, for policies that draw from a distribution; else None.
        memo: what the policy itself wants back with the feedback.
    """

    step_id: int
    index: int
    propensity: float = 1.0
    probabilities: np.ndarray | None = None
    memo: Any = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PolicyDecision):
            return NotImplemented
        same = (self.step_id, self.index, self.propensity) == (other.step_id, other.index, other.propensity)
        if self.probabilities is None or other.probabilities is None:
            return same and self.probabilities is other.probabilities
        return same and np.array_equal(self.probabilities, other.probabilities)

    def __hash__(self) -> int:
        return hash((self.step_id, self.index))


Choice = tuple[int, float, np.ndarray | None, Any]
"""What `Policy._choose` returns: index, propensity, probabilities, memo."""


class Policy(ABC):
    """An online learner over `n_arms` arms.

    Feedback may arrive late, in any order, or never: all that is kept per open decision is one bit for the latest
    `PENDING_WINDOW` of them. Everything is deterministic given seed, contexts and feedback.

    Attributes:
        name: the name in `POLICIES`; wrappers put the wrapped name in parentheses.
        full_information: learns from every observed arm; otherwise from the played arm only.
        off_policy: may also be told of an arm that somebody else chose to play. Not so for importance weighting, which
            is unbiased only for arms drawn with the stated propensities.
        additive: keys of the learnt state that replicas may add up (see `merge`).
        derived: keys of the learnt state that follow from the others; set to None when states are merged.
        rounds: number of updates that taught something.
        options: the constructor's options, which a restored state must share.
    """

    name: str = ""
    full_information: bool = False
    off_policy: bool = True
    additive: ClassVar[tuple[str, ...]] = ()
    derived: ClassVar[tuple[str, ...]] = ()

    def __init__(self, n_arms: int, seed: int = 0) -> None:
        self.n_arms = check_count("n_arms", n_arms, minimum=1)
        self.rounds = 0.0
        self.options: dict[str, Any] = {}
        self._rng = np.random.default_rng(check_count("seed", seed, minimum=0))
        self._next_step = 0
        self._open = bytearray(PENDING_WINDOW)

    def select(self, context: Any = None) -> PolicyDecision:
        """Choose an arm. `context` is a `PolicyContext`, or directly the one part of it that the policy reads."""
        index, propensity, probabilities, memo = self._choose(context)
        step_id = self._next_step
        self._next_step = step_id + 1
        self._open[step_id % PENDING_WINDOW] = 1
        return PolicyDecision(step_id, index, propensity, probabilities, memo)

    def update(self, decision: PolicyDecision, feedback: Feedback) -> None:
        """Learn what `decision` earned.

        Raises:
            TypeError: not a `PolicyDecision`, not a `Feedback`.
            ValueError: unknown step id, second feedback for one step, index out of range, wrong number of gains.
                The policy is then as it was before.
        """
        if not isinstance(decision, PolicyDecision):
            raise TypeError(f"decision must be a PolicyDecision, got {type(decision).__name__}")
        if not isinstance(feedback, Feedback):
            raise TypeError(f"feedback must be a Feedback, got {type(feedback).__name__}")
        step_id = decision.step_id
        if not 0 <= step_id < self._next_step:
            raise ValueError(f"step_id must be one that select() returned (0 to {self._next_step - 1}), got {step_id}")
        if step_id < self._next_step - PENDING_WINDOW:
            raise ValueError(f"step_id must be one of the latest {PENDING_WINDOW} decisions, got {step_id}")
        slot = step_id % PENDING_WINDOW
        if not self._open[slot]:
            raise ValueError(f"step_id {step_id} already had its feedback")
        if not 0 <= decision.index < self.n_arms:
            raise ValueError(f"index must be in [0, {self.n_arms}), got {decision.index}")
        if not 0.0 < decision.propensity <= 1.0:
            raise ValueError(f"propensity must be in (0, 1], got {decision.propensity}")
        if len(feedback.gains) != self.n_arms:
            raise ValueError(f"gains must have shape [{self.n_arms}], got [{len(feedback.gains)}]")
        self._learn(decision, feedback)
        self._open[slot] = 0

    def finish(self, request: str | int) -> None:
        """A request ended: what is kept for it alone can be dropped. Nothing is, by most policies."""

    @abstractmethod
    def _choose(self, context: Any) -> Choice: ...

    @abstractmethod
    def _learn(self, decision: PolicyDecision, feedback: Feedback) -> None: ...

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """What was learnt, as plain Python values."""

    @abstractmethod
    def _load(self, learned: Mapping[str, Any]) -> None:
        """Restore `_state()`; check everything before changing anything."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides the future, as plain Python values that survive JSON exactly."""
        last = self._next_step - 1
        slots = np.flatnonzero(np.frombuffer(self._open, dtype=np.uint8)).tolist()
        return {
            "version": STATE_VERSION,
            "policy": self.name,
            "n_arms": self.n_arms,
            "options": dict(self.options),
            "next_step": self._next_step,
            "pending": sorted(last - (last - slot) % PENDING_WINDOW for slot in slots),
            "rounds": self.rounds,
            "rng": self._rng.bit_generator.state,
            "learned": self._state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`: future decisions are then identical.

        Raises:
            ValueError: another version, policy, number of arms or option, or a damaged state; nothing is changed then.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"state must be a mapping from state_dict(), got {type(state).__name__}")
        check_equal(state, "version", STATE_VERSION)
        check_equal(state, "policy", self.name)
        check_equal(state, "n_arms", self.n_arms)
        check_equal(state, "options", self.options)
        next_step = read_int(state, "next_step")
        rounds = read_float(state, "rounds", minimum=0.0)
        rng = read_rng(state, "rng")
        pending = bytearray(PENDING_WINDOW)
        for step in state.get("pending", ()):
            if isinstance(step, bool) or not isinstance(step, int) or not 0 <= next_step - 1 - step < PENDING_WINDOW:
                raise ValueError(f"state: pending must hold steps of the latest {PENDING_WINDOW}, got {step!r}")
            pending[step % PENDING_WINDOW] = 1
        if not isinstance(state.get("learned"), Mapping):
            raise ValueError(f"state: learned must be a mapping, got {type(state.get('learned')).__name__}")
        self._load(state["learned"])
        self._next_step, self.rounds, self._rng, self._open = next_step, rounds, rng, pending
