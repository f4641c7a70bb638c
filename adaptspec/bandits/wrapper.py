"""What policies that stand in front of other policies share."""

from __future__ import annotations

from typing import Any

import numpy as np

from adaptspec.bandits.base import Policy, PolicyContext, PolicyDecision


class Wrapper(Policy):
    """A policy that changes how one other policy is played or taught. It has its own step ids and randomness."""

    kind: str = ""

    def __init__(self, policy: Policy, *, seed: int = 0) -> None:
        if not isinstance(policy, Policy):
            raise TypeError(f"policy must be a Policy, got {type(policy).__name__}")
        super().__init__(policy.n_arms, seed)
        self.policy = policy
        self.name = f"{self.kind}({policy.name})"
        self.full_information = policy.full_information
        self.off_policy = policy.off_policy

    def finish(self, request: str | int) -> None:
        self.policy.finish(request)


def as_played(inner: PolicyDecision, outer: PolicyDecision) -> PolicyDecision:
    """The inner policy's own decision, with the arm and the probabilities that were really played."""
    return PolicyDecision(inner.step_id, outer.index, outer.propensity, outer.probabilities, inner.memo)


def child_seed(seed: int, ordinal: int) -> int:
    """A seed for the `ordinal`-th policy made by a wrapper with seed `seed`."""
    return int(np.random.SeedSequence([seed, ordinal]).generate_state(1)[0])


def context_key(context: Any, field: str) -> str | int | None:
    """`context.bucket` or `context.request`, or the context itself if it is text or a whole number.

    Raises:
        TypeError: anything else.
    """
    key = getattr(context, field) if isinstance(context, PolicyContext) else context
    if key is not None and (isinstance(key, bool) or not isinstance(key, (str, int))):
        raise TypeError(f"{field} must be text, a whole number or None, got {type(key).__name__}")
    return key
