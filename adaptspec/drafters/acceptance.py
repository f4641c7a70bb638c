"""How often a drafter's guesses were right: a shipped table that is corrected by what the target commits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


class AcceptanceTable:
    """Acceptance probabilities [R, C]: in situation r, one of C exclusive outcomes, or none, turns out right.

    P(c | r) = (hits[r, c] + s prior[r, c]) / (trials[r] + s): the posterior mean under a Dirichlet prior worth s
    trials. Counts of a row are halved at `limit` trials, so that the estimate keeps following the text.

    Args:
        prior: float64 [R, C], all above 0, rows adding up to at most 1.
        strength: s, the trials that the prior counts for.
        limit: trials per row.
    """

    def __init__(self, prior: np.ndarray, *, strength: float = 30.0, limit: float = 2000.0) -> None:
        assert (prior > 0).all() and (prior.sum(axis=1) <= 1 + 1e-9).all()
        self.prior = prior
        self.strength = strength
        self.limit = limit
        self.reset()

    def reset(self) -> None:
        """Back to the prior."""
        self.hits = np.zeros(self.prior.shape)
        self.trials = np.zeros(len(self.prior))
        self._log: np.ndarray | None = None

    def record(self, row: int, column: int | None) -> None:
        """One trial in situation `row`: outcome `column` was right, or none."""
        if self.trials[row] >= self.limit:
            self.trials[row] /= 2
            self.hits[row] /= 2
        self.trials[row] += 1
        if column is not None:
            self.hits[row, column] += 1
        self._log = None

    def log_probabilities(self) -> np.ndarray:
        """float64 [R, C], at most 0; the same object until the next `record`."""
        if self._log is None:
            weights = self.hits + self.strength * self.prior
            self._log = np.log(weights / (self.trials + self.strength)[:, None])
        return self._log

    def state_dict(self) -> dict[str, np.ndarray]:
        """Counts."""
        return {"hits": self.hits.copy(), "trials": self.trials.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore counts.

        Raises:
            ValueError: not the counts of a table of this shape.
        """
        if not isinstance(state, Mapping) or set(state) != {"hits", "trials"}:
            raise ValueError("acceptance of the state must have the keys hits and trials")
        arrays = {name: np.asarray(state[name]) for name in ("hits", "trials")}
        for name, shape in (("hits", self.prior.shape), ("trials", self.prior.shape[:1])):
            array = arrays[name]
            if array.shape != shape or array.dtype.kind != "f":
                raise ValueError(
                    f"{name} of the state must be floats of shape {shape}, got {array.dtype} {array.shape}"
                )
            if not ((array >= 0) & (array <= self.limit)).all():
                raise ValueError(f"{name} of the state must be in [0, {self.limit:g}]")
        if (arrays["hits"].sum(axis=1) > arrays["trials"] + 1e-6).any():
            raise ValueError("hits of the state must add up to at most the trials of their row")
        self.hits, self.trials = arrays["hits"].copy(), arrays["trials"].copy()
        self._log = None
