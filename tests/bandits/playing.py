"""Playing a policy against given gains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from adaptspec.bandits import POLICIES, Feedback, Policy, PolicyDecision, make_policy

SAMPLING = ("exp3", "exp3-ix", "exp3-s", "exp3spec", "tsallis-inf", "hedge", "adahedge", "fixed-share", "normal-hedge")
SAMPLING += ("ada-normal-hedge", "thompson")
FULL_INFORMATION = tuple(name for name, policy in POLICIES.items() if policy.full_information)


def teach(policy: Policy, index: int, gain: float, *, propensity: float = 1.0) -> None:
    """One step in which `index` was played, with the given propensity, and earned `gain`; no other arm was observed."""
    decision = replace(policy.select(), index=index, propensity=propensity)
    policy.update(decision, Feedback.of_arm(policy.n_arms, index, gain=gain))


def teach_all(policy: Policy, gains: Any, observed: Any = None) -> PolicyDecision:
    """One step as the policy chooses it, with gains for all (observed) arms."""
    decision = policy.select()
    policy.update(decision, Feedback.from_gains(gains, observed))
    return decision


def play(policy: Policy, gains: np.ndarray, *, context: Callable[[int], Any] | None = None) -> np.ndarray:
    """Expected gain of every round [rounds] for gains [rounds, n_arms]: p . g, or the played gain if there is no p.

    Full-information policies see every gain, the others the played arm's.
    """
    earned = np.empty(len(gains))
    for step, row in enumerate(gains):
        decision = policy.select(None if context is None else context(step))
        if policy.full_information:
            feedback = Feedback.from_gains(row)
        else:
            feedback = Feedback.of_arm(policy.n_arms, decision.index, gain=float(row[decision.index]))
        policy.update(decision, feedback)
        p = decision.probabilities
        earned[step] = row[decision.index] if p is None else p.dot(row)
    return earned


def trained(name: str, *, n_arms: int = 5, rounds: int = 40, seed: int = 3) -> Policy:
    """A policy after some rounds of random gains, half of the arms observed."""
    policy = make_policy(name, n_arms=n_arms, seed=seed)
    continue_playing(policy, rounds=rounds, seed=seed)
    return policy


def continue_playing(policy: Policy, *, rounds: int, seed: int, context: Any = None) -> list[PolicyDecision]:
    """Play on with gains that depend on `seed` alone."""
    rng = np.random.default_rng(seed)
    decisions = []
    for _ in range(rounds):
        decision = policy.select(context)
        gains, observed = rng.random(policy.n_arms), rng.random(policy.n_arms) < 0.5
        observed[decision.index] = True
        policy.update(decision, Feedback.from_gains(gains, observed, tokens=2.0, seconds=0.5 + rng.random()))
        decisions.append(decision)
    return decisions


def bernoulli(means: Any, *, rounds: int, seed: int) -> np.ndarray:
    """Gains of 0 and 1 [rounds, n_arms]."""
    return (np.random.default_rng(seed).random((rounds, len(means))) < np.asarray(means)).astype(float)


def best_with_switches(gains: np.ndarray, switches: int) -> float:
    """Total gain of the best sequence of arms with at most `switches` changes, by dynamic programming."""
    totals = np.full((switches + 1, gains.shape[1]), -np.inf)
    totals[0] = 0.0
    for row in gains:
        entered = np.vstack(
            [np.full(gains.shape[1], -np.inf), np.repeat(totals[:-1].max(axis=1)[:, None], gains.shape[1], 1)]
        )
        totals = np.maximum(totals, entered) + row
    return float(totals.max())
