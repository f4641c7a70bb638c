"""A contextual bandit: the gain of every arm is linear in a feature vector. Bandit feedback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from adaptspec.bandits.base import Choice, Feedback, Policy, PolicyContext, PolicyDecision
from adaptspec.bandits.checks import check_between, check_count
from adaptspec.bandits.registry import register_policy
from adaptspec.bandits.state import read_array

_REFRESH_EVERY = 256


@register_policy("linucb")
class LinUCB(Policy):
    """LinUCB with disjoint arms (Li, Chu, Langford and Schapire 2010, Algorithm 1).

    theta_i = A_i^-1 b_i, A_i = ridge I + sum x x^T, b_i = sum g x over the plays of arm i; plays the arm of the largest
    theta_i . x + width * sqrt(x^T A_i^-1 x). The inverse is kept by rank-one updates and recomputed now and then.

    The context is `PolicyContext(features=...)` or the vector itself, float64 [d] with d = `dimension`; scale features
    to about 1 and include a constant 1. Without context (None) it must be one-dimensional, and x = [1].

    Args:
        dimension: d.
        width: alpha of the paper.
        ridge: 1 in the paper.
    """

    additive = ("grams", "targets")
    derived = ("inverses",)

    def __init__(
        self, n_arms: int, seed: int = 0, *, dimension: int = 1, width: float = 1.0, ridge: float = 1.0
    ) -> None:
        super().__init__(n_arms, seed)
        self._dimension = check_count("dimension", dimension, minimum=1)
        self._width = check_between("width", width, low=0.0, high=1e6, open_low=False)
        self._ridge = check_between("ridge", ridge, low=0.0, high=1e6)
        self.options |= {"dimension": self._dimension, "width": self._width, "ridge": self._ridge}
        shape = (self.n_arms, self._dimension, self._dimension)
        self._grams = np.broadcast_to(self._ridge * np.eye(self._dimension), shape).copy()
        self._inverses = np.linalg.inv(self._grams)
        self._targets = np.zeros((self.n_arms, self._dimension))
        self._thetas = np.zeros((self.n_arms, self._dimension))
        self._updates = np.zeros(self.n_arms, dtype=np.int64)

    def _features(self, context: Any) -> np.ndarray:
        features = context.features if isinstance(context, PolicyContext) else context
        if features is None and self._dimension == 1:
            return np.ones(1)
        vector = np.array(features, dtype=np.float64) if features is not None else np.empty(0)
        if vector.shape != (self._dimension,) or not np.isfinite(vector).all():
            raise ValueError(f"context features must be {self._dimension} finite numbers, got {features!r:.80}")
        return vector

    def _choose(self, context: Any) -> Choice:
        features = self._features(context)
        variances = (self._inverses @ features) @ features
        scores = self._thetas @ features + self._width * np.sqrt(np.maximum(variances, 0.0))
        return int(scores.argmax()), 1.0, None, features

    def _learn(self, decision: PolicyDecision, feedback: Feedback) -> None:
        index, features = decision.index, decision.memo
        if not feedback.observed[index]:
            return
        self._grams[index] += np.outer(features, features)
        self._targets[index] += feedback.gains.item(index) * features
        self._updates[index] += 1
        if self._updates[index] % _REFRESH_EVERY == 0:
            self._inverses[index] = np.linalg.inv(self._grams[index])
        else:
            direction = self._inverses[index] @ features
            self._inverses[index] -= np.outer(direction, direction) / (1.0 + features @ direction)
        self._thetas[index] = self._inverses[index] @ self._targets[index]
        self.rounds += 1.0

    def _state(self) -> dict[str, Any]:
        return {
            "grams": self._grams.tolist(),
            "targets": self._targets.tolist(),
            "inverses": self._inverses.tolist(),
            "updates": self._updates.tolist(),
        }

    def _load(self, learned: Mapping[str, Any]) -> None:
        shape = (self.n_arms, self._dimension, self._dimension)
        grams = read_array(learned, "grams", shape)
        targets = read_array(learned, "targets", shape[:2])
        updates = read_array(learned, "updates", shape[:1], minimum=0.0).astype(np.int64)
        if learned.get("inverses") is None:
            try:
                inverses = np.linalg.inv(grams)
            except np.linalg.LinAlgError as error:
                raise ValueError("state: grams must be invertible") from error
        else:
            inverses = read_array(learned, "inverses", shape)
        self._grams, self._targets, self._inverses, self._updates = grams, targets, inverses, updates
        # One product per arm, as in `_learn`: a batched product may round differently.
        for index in range(self.n_arms):
            self._thetas[index] = inverses[index] @ targets[index]
