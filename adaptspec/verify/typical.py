"""Typical acceptance: takes any draft token that is not too unlikely. Lossy."""

from __future__ import annotations

import math

from adaptspec.types import ROOT, DraftTree, Verdict
from adaptspec.verify.base import Rows, Uniforms, make_verdict, register_verifier
from adaptspec.verify.rows import Row, draw, entropy, pick, target_row


@register_verifier(
    "typical",
    summary="accept any token with p > min(tau, alpha exp(-entropy)); changes the output distribution",
    lossless=False,
    uses_draft_probs=False,
)
def verify_typical(
    tree: DraftTree, target_probs: Rows, rng: Uniforms, *, tau: float = 0.3, alpha: float = 0.09
) -> Verdict:
    """Typical acceptance (Medusa, arXiv 2401.10774, section 3.3.1; called "relaxed" elsewhere). NOT lossless.

    A node is acceptable if its parent is and p[x] > min(tau, alpha exp(-H(p))), H in nats. The deepest acceptable
    node wins, among equals the one whose path is most likely under the target; the bonus is sampled from its p.

    Args:
        tree: any tree; how siblings were chosen does not matter.
        target_probs: per row [V], see `Rows`.
        rng: source of uniforms; one is used, for the bonus.
        tau: hard threshold, in (0, 1].
        alpha: threshold relative to exp(-H), above 0.

    Raises:
        ValueError: `tau` or `alpha` out of range, or a visited row is not a distribution.
    """
    check_typical_options(tau=tau, alpha=alpha)
    acceptable: dict[int, tuple[int, float]] = {ROOT: (0, 0.0)}
    rows: dict[int, Row] = {}
    thresholds: dict[int, float] = {}
    parents, token_ids = tree.parents.tolist(), tree.token_ids.tolist()
    best = ROOT
    for node, (parent, token) in enumerate(zip(parents, token_ids, strict=True)):
        if parent not in acceptable:
            continue
        if parent not in rows:
            rows[parent] = target_row(target_probs, parent)
            thresholds[parent] = min(tau, alpha * math.exp(-entropy(rows[parent])))
        probability, _ = pick(rows[parent], None, token)
        if probability > thresholds[parent]:
            depth, log_likelihood = acceptable[parent]
            acceptable[node] = (depth + 1, log_likelihood + math.log(probability))
            best = max(best, node, key=acceptable.__getitem__)
    path: list[int] = []
    node = best
    while node != ROOT:
        path.append(node)
        node = parents[node]
    path.reverse()
    p = rows[best] if best in rows else target_row(target_probs, best)
    return make_verdict(path, [*(token_ids[i] for i in path), draw(p, rng.random())])


def check_typical_options(*, tau: float, alpha: float) -> None:
    """Raises ValueError unless `tau` is in (0, 1] and `alpha` is above 0 and finite."""
    if not 0.0 < tau <= 1.0:
        raise ValueError(f"tau must be in (0, 1], got {tau}")
    if not 0.0 < alpha < math.inf:
        raise ValueError(f"alpha must be > 0 and finite, got {alpha}")
