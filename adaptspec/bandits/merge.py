"""Adding up what replicas of one policy learnt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from adaptspec.bandits.base import Policy
from adaptspec.bandits.registry import POLICIES, make_policy
from adaptspec.names import unknown_name


def merge(states: Sequence[Mapping[str, Any]], *, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """One state with the knowledge of all `states` of replicas that began from `base` (None: from nothing).

    Counts, sums, regrets and weighted estimates add up: base + sum(state - base). Step ids, open decisions and
    randomness are those of the first state, so a replica that gives its own state first can load the result while
    decisions are open, and the result is the `base` of the next merge.

    Raises:
        ValueError: no states; states of different policies, arms or options; a policy whose state does not add up.
    """
    if not states:
        raise ValueError("states must hold at least one state, got none")
    name = states[0].get("policy")
    cls = POLICIES.get(name)
    if cls is None or not cls.additive:
        raise unknown_name("policy to merge", name, [key for key, policy in POLICIES.items() if policy.additive])
    replicas = [_restored(cls, state) for state in states]
    start = _restored(cls, base) if base is not None else _fresh(cls, states[0])
    for policy in (start, *replicas[1:]):
        for field in ("name", "n_arms", "options"):
            expected, got = getattr(replicas[0], field), getattr(policy, field)
            if expected != got:
                raise ValueError(f"states must agree on {field}, got {expected!r} and {got!r}")
    own, *others = (policy.state_dict() for policy in replicas)
    merged = combine(start, own=own, base=start.state_dict(), states=[own, *others])
    replicas[0].load_state_dict(merged)  # recomputes what is derived and checks the sums
    return replicas[0].state_dict()


def combine(
    policy: Policy,
    *,
    own: Mapping[str, Any],
    base: Mapping[str, Any],
    states: Sequence[Mapping[str, Any]],
    factor: float = 1.0,
) -> dict[str, Any]:
    """`own` with its additive part replaced by base + factor * sum(state - base)."""
    learned = dict(own["learned"])
    for key in policy.additive:
        start = np.array(base["learned"][key], dtype=np.float64)
        total = sum((np.array(state["learned"][key]) - start for state in states), start=np.zeros_like(start))
        learned[key] = (start + factor * total).tolist()
    for key in policy.derived:
        learned[key] = None
    rounds = base["rounds"] + factor * sum(state["rounds"] - base["rounds"] for state in states)
    return {**own, "rounds": max(rounds, 0.0), "learned": learned}


def _fresh(cls: type[Policy], state: Mapping[str, Any]) -> Policy:
    n_arms, options = state.get("n_arms"), state.get("options")
    if not isinstance(options, Mapping):
        raise ValueError(f"state: options must be a mapping, got {options!r}")
    return make_policy(cls.name, n_arms=n_arms, **options)


def _restored(cls: type[Policy], state: Mapping[str, Any]) -> Policy:
    if state.get("policy") != cls.name:
        raise ValueError(f"states must agree on the policy, got {cls.name!r} and {state.get('policy')!r}")
    policy = _fresh(cls, state)
    policy.load_state_dict(state)
    return policy
