"""One learner per kind of traffic or load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from adaptspec.bandits.base import Choice, Feedback, Policy, PolicyDecision
from adaptspec.bandits.checks import check_count
from adaptspec.bandits.wrapper import as_played, child_seed, context_key


class PerContext(Policy):
    """Keeps one policy per context bucket, made when the bucket first comes up.

    The context is `PolicyContext(bucket=...)`, or the bucket itself (text or a whole number). Steps without a bucket,
    and buckets beyond the first `max_buckets`, share one more policy, so memory is bounded and nothing is forgotten.

    Args:
        make: makes a policy from a seed, for example `lambda seed: make_policy("hedge", n_arms=64, seed=seed)`.
    """

    def __init__(self, make: Callable[[int], Policy], *, seed: int = 0, max_buckets: int = 64) -> None:
        self._make, self._seed = make, seed
        self._max_buckets = check_count("max_buckets", max_buckets, minimum=1)
        self._policies = [make(child_seed(check_count("seed", seed, minimum=0), 0))]
        shared = self._policies[0]
        super().__init__(shared.n_arms, seed)
        self.options["max_buckets"] = self._max_buckets
        self.name = f"per-context({shared.name})"
        self.full_information, self.off_policy = shared.full_information, shared.off_policy
        self._ordinals: dict[str | int, int] = {}

    def policy_of(self, bucket: str | int | None) -> Policy:
        """The learner that serves `bucket` now."""
        return self._policies[self._ordinals.get(bucket, 0)]

    def finish(self, request: str | int) -> None:
        for policy in self._policies:
            policy.finish(request)

    def _choose(self, context: Any) -> Choice:
        bucket = context_key(context, "bucket")
        ordinal = 0 if bucket is None else self._ordinals.get(bucket, -1)
        if ordinal < 0:
            ordinal = self._add(bucket) if len(self._ordinals) < self._max_buckets else 0
        # A bare bucket is not meant for the inner policy.
        inner = self._policies[ordinal].select(None if context is bucket else context)
        return inner.index, inner.propensity, inner.probabilities, (ordinal, inner)

    def _add(self, bucket: str | int) -> int:
        ordinal = len(self._policies)
        self._policies.append(self._make(child_seed(self._seed, ordinal)))
        self._ordinals[bucket] = ordinal
        return ordinal

    def _learn(self, decision: PolicyDecision, feedback: Feedback) -> None:
        ordinal, inner = decision.memo
        self._policies[ordinal].update(as_played(inner, decision), feedback)
        self.rounds += 1.0

    def _state(self) -> dict[str, Any]:
        return {"buckets": list(self._ordinals), "policies": [policy.state_dict() for policy in self._policies]}

    def _load(self, learned: Mapping[str, Any]) -> None:
        buckets, states = learned.get("buckets"), learned.get("policies")
        if not isinstance(buckets, list) or not isinstance(states, list) or len(states) != len(buckets) + 1:
            raise ValueError("state: buckets and policies must be lists, with one more policy than buckets")
        if len(buckets) > self._max_buckets or len({context_key(b, "bucket") for b in buckets} - {None}) != len(
            buckets
        ):
            raise ValueError(f"state: buckets must be at most {self._max_buckets} different keys, got {buckets!r:.80}")
        policies = [self._make(child_seed(self._seed, ordinal)) for ordinal in range(len(states))]
        for policy, state in zip(policies, states, strict=True):
            policy.load_state_dict(state)
        self._policies = policies
        self._ordinals = {bucket: ordinal for ordinal, bucket in enumerate(buckets, start=1)}
