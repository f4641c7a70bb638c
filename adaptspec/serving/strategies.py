"""Strategies of the serving policy: who picks among the experts of a step.

The experts are the model's own free choice, no speculation, and every drafter alone (its lengths chosen by the model).
The free choice is the best by what is expected; a policy above it learns, load by load, whether what is expected is
what comes.
"""

from __future__ import annotations

from functools import partial

from adaptspec.bandits import POLICIES, Lazy, PerContext, Policy, make_policy
from adaptspec.bandits.hedge import FixedShare
from adaptspec.names import unknown_name

FREE, OFF, ALONE = 0, 1, 2
"""Experts: the free choice, no speculation, and from here on the drafters."""

LEARNING_RATE, SHARE = 2.0, 0.002
"""Of "hedge": a step worth a token per row more makes an expert 1.6 times as likely; the share tracks changes."""

_NEED_MORE = frozenset(["fixed", "heuristic", "linucb", "lookup-else"])

STRATEGIES: dict[str, str] = {
    "greedy": "what is expected to be best, always",
    "hedge": "exponential weights over the free choice, no speculation and each drafter; keeps what it plays (lazy)",
}
"""Besides "fixed:<arm>" and the names of bandit policies, which choose among the same experts."""


def strategy_names() -> tuple[str, ...]:
    """What `strategy=` takes besides "fixed:<arm>"."""
    return tuple(sorted({*STRATEGIES, *POLICIES} - _NEED_MORE))


def make_chooser(strategy: str, *, experts: int, seed: int) -> Policy | None:
    """The policy over experts, one learner per load bucket; None where the free choice is always taken.

    Raises:
        ValueError: unknown strategy.
    """
    if strategy not in strategy_names():
        raise unknown_name("strategy", strategy, [*strategy_names(), "fixed:<arm>"])
    if strategy == "greedy":
        return None
    make = _lazy_hedge if strategy == "hedge" else _by_name
    return PerContext(partial(make, strategy, experts), seed=seed)


def _lazy_hedge(strategy: str, experts: int, seed: int) -> Policy:
    return Lazy(FixedShare(experts, seed, learning_rate=LEARNING_RATE, share=SHARE), method="coupling", seed=seed)


def _by_name(strategy: str, experts: int, seed: int) -> Policy:
    return make_policy(strategy, n_arms=experts, seed=seed)
