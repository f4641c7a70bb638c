"""Policies of Learning to Draft for tests."""

from __future__ import annotations

import numpy as np

from adaptspec.drafters.draft_policies import FEATURES, SIZES, DraftPolicies, Network


def random_policies(seed: int = 0) -> DraftPolicies:
    """Policies that choose differently from one tree to the next."""
    rng = np.random.default_rng(seed)

    def network(out: int) -> Network:
        return Network(rng.normal(size=(5, FEATURES)), rng.normal(size=5), rng.normal(size=(out, 5)), np.zeros(out))

    return DraftPolicies(np.zeros(FEATURES), np.full(FEATURES, 0.5), network(1), network(len(SIZES)))


def fixed_policies(*, depth: int, size: int) -> DraftPolicies:
    """Policies that stop at one depth, and take one size, whatever they see."""
    hidden = np.zeros((1, FEATURES))
    hidden[0, 0] = 1e3  # the depth
    stop = Network(hidden, np.array([-1e3 * (depth - 0.5) / 12]), np.ones((1, 1)), np.zeros(1))
    chosen = np.zeros(len(SIZES))
    chosen[SIZES.index(size)] = 1.0
    nodes = Network(np.zeros((1, FEATURES)), np.zeros(1), np.zeros((len(SIZES), 1)), chosen)
    return DraftPolicies(np.zeros(FEATURES), np.ones(FEATURES), stop, nodes)
