"""The part shared by policies that compare mean gains: play every arm once, then the arm of the largest score."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from adaptspec.bandits.base import Choice, Feedback, Policy, PolicyDecision
from adaptspec.bandits.state import read_array

_NEVER = np.iinfo(np.int64).max
_LONGEST_PATIENCE = 1 << 20


class MeanPolicy(Policy):
    """Keeps per arm how often it was observed and the sum of its gains, and plays the arm of the largest score.

    Arms without an observation come first, in turn. One that was tried and not observed (feedback late, or lost because
    the arm fails) is tried again after 1, 2, 4, ... steps, and in between the best mean is played: an arm that never
    answers cannot hold up the others. Ties go to the lowest index.
    """

    additive = ("counts", "sums")
    stored: ClassVar[tuple[str, ...]] = ("counts", "sums")
    """Per-arm arrays that make up the learnt state; each lives in the attribute of that name with an underscore."""

    def __init__(self, n_arms: int, seed: int = 0) -> None:
        super().__init__(n_arms, seed)
        self._counts = np.zeros(self.n_arms)
        self._sums = np.zeros(self.n_arms)
        self._means = np.zeros(self.n_arms)
        self._untried = self.n_arms
        self._retry_at = np.zeros(self.n_arms, dtype=np.int64)
        self._patience = np.ones(self.n_arms, dtype=np.int64)
        self._scratch = np.empty(self.n_arms)

    @abstractmethod
    def scores(self) -> np.ndarray:
        """[n_arms], what `select` compares once every arm was observed; valid until the next call."""

    def _choose(self, context: Any) -> Choice:
        index = self._next_untried() if self._untried else int(self.scores().argmax())
        return index, 1.0, None, None

    def _next_untried(self) -> int:
        waiting = np.where(self._counts == 0.0, self._retry_at, _NEVER)
        index = int(waiting.argmin())
        if waiting[index] > self._next_step and self._untried < self.n_arms:
            return int(np.where(self._counts > 0.0, self._means, -1.0).argmax())
        patience = self._patience.item(index)
        self._retry_at[index] = self._next_step + patience
        self._patience[index] = min(2 * patience, _LONGEST_PATIENCE)
        return index

    def _learn(self, decision: PolicyDecision, feedback: Feedback) -> None:
        index = decision.index
        if feedback.observed[index]:
            self.rounds += 1.0
            self._add(index, feedback.gains.item(index))

    def _add(self, index: int, gain: float) -> None:
        count = self._counts.item(index)
        if count == 0.0:
            self._untried -= 1
            self._retry_at[index], self._patience[index] = 0, 1
        self._counts[index] = count = count + 1.0
        self._sums[index] = total = self._sums.item(index) + gain
        self._means[index] = total / count
        self._refresh(index)

    def _refresh(self, index: int) -> None:
        """Called after the statistics of one arm changed."""

    def _state(self) -> dict[str, Any]:
        arrays = {name: getattr(self, f"_{name}").tolist() for name in self.stored}
        return arrays | {"retry_at": self._retry_at.tolist(), "patience": self._patience.tolist()}

    def _load(self, learned: Mapping[str, Any]) -> None:
        arrays = {name: read_array(learned, name, (self.n_arms,), minimum=0.0) for name in self.stored}
        retry_at = read_array(learned, "retry_at", (self.n_arms,), minimum=0.0, maximum=2.0**52)
        patience = read_array(learned, "patience", (self.n_arms,), minimum=1.0, maximum=_LONGEST_PATIENCE)
        self._retry_at, self._patience = retry_at.astype(np.int64), patience.astype(np.int64)
        for name, array in arrays.items():
            setattr(self, f"_{name}", array)
        self._untried = int((self._counts == 0.0).sum())
        self._means = np.divide(self._sums, self._counts, out=np.zeros(self.n_arms), where=self._counts > 0.0)
        for index in np.flatnonzero(self._counts):
            self._refresh(int(index))
