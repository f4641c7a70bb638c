"""Policies that draw their arm from a distribution, and how they handle arms that were not observed."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from adaptspec.bandits.base import Choice, Feedback, Policy, PolicyDecision


def draw(weights: np.ndarray, cumulative: np.ndarray, *, uniform: float) -> tuple[int, np.ndarray]:
    """Draw in proportion to `weights` [n_arms] (not all 0) with one uniform number from [0, 1).

    Returns the index, never one of weight 0, and the read-only probabilities. `cumulative` [n_arms] is scratch space.
    """
    np.add.accumulate(weights, out=cumulative)
    total = cumulative.item(-1)
    index = int(cumulative.searchsorted(uniform * total, side="right"))
    if index >= len(weights):  # uniform * total rounded up to total
        index = int(weights.argmax())
    probabilities = weights / total
    probabilities.flags.writeable = False
    return index, probabilities


class SamplingPolicy(Policy):
    """A policy that plays arm i with probability weights[i] / sum(weights)."""

    def __init__(self, n_arms: int, seed: int = 0) -> None:
        super().__init__(n_arms, seed)
        self._weights = np.ones(self.n_arms)
        self._cumulative = np.empty(self.n_arms)
        self._scratch = np.empty(self.n_arms)

    @abstractmethod
    def _fill_weights(self) -> Any:
        """Write weights >= 0, not all 0, to `self._weights` and return the decision's memo. Changes nothing else."""

    def _choose(self, context: Any) -> Choice:
        memo = self._fill_weights()
        index, probabilities = draw(self._weights, self._cumulative, uniform=self._rng.random())
        return index, probabilities.item(index), probabilities, memo

    def probabilities(self) -> np.ndarray:
        """float64 [n_arms], what the next `select` will draw from; draws nothing."""
        self._fill_weights()
        return self._weights / self._weights.sum()

    def _fill_exponential(self, scores: np.ndarray, rate: float) -> None:
        """weights[i] = exp(rate * (scores[i] - max scores)): the shift keeps the largest at 1, so nothing overflows."""
        weights = self._weights
        np.subtract(scores, scores.item(scores.argmax()), out=weights)
        np.multiply(weights, rate, out=weights)
        np.exp(weights, out=weights)


def mixture_gain(decision: PolicyDecision, feedback: Feedback) -> float | None:
    """Expected gain of the played distribution among the observed arms; None if nothing was observed.

    The sleeping-experts rule (Freund, Schapire, Singer and Warmuth 1997): an arm that was not observed is taken to have
    earned what the mixture earned, so its standing against the mixture stays as it was. Counting it as gain 0 would
    punish every arm that is expensive to evaluate. Where the distribution puts no mass on the observed arms, their
    plain mean stands for the mixture. A round in which a single arm was observed therefore teaches nothing: there is no
    other to compare it with. Where only played arms are ever observed, use a bandit policy.

    Raises:
        ValueError: the decision carries no probabilities.
    """
    probabilities = decision.probabilities
    if probabilities is None or probabilities.shape != feedback.gains.shape:
        raise ValueError(f"probabilities must have shape {list(feedback.gains.shape)}, got {probabilities}")
    gain = probabilities.dot(feedback.gains)  # unobserved gains are 0
    if feedback.complete:
        return float(gain)
    mass = float(probabilities[feedback.observed].sum())
    if mass > 0.0:
        return float(gain) / mass
    count = int(feedback.observed.sum())
    return float(feedback.gains.sum()) / count if count else None


def filled_gains(feedback: Feedback, mixture: float) -> np.ndarray:
    """Gains [n_arms] with unobserved entries set to the mixture's gain."""
    return feedback.gains if feedback.complete else np.where(feedback.observed, feedback.gains, mixture)
