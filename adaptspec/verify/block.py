"""Rules for chains that judge prefixes by their joint probability, from the longest to the empty one.

With P_i the weight of the prefix x_1..x_i, at most 1, the prefix is kept with probability

    h_i = S_i / (S_i + 1 - P_i),   S_i = sum (P_i p - q)+,   h_last = P_last

where p and q are the distributions after the prefix; the token after it is drawn from norm((P_i p - q)+), after the
whole chain from p. The empty prefix has P = h = 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from adaptspec.types import DraftTree, Verdict
from adaptspec.verify.base import Rows, Uniforms, make_verdict, register_verifier
from adaptspec.verify.rows import Row, draft_row, draw, excess, pick, positive_part, target_row


@register_verifier(
    "block", summary="chain: the longest prefix that passes a test of its joint probability", shape="chain"
)
def verify_block(tree: DraftTree, target_probs: Rows, rng: Uniforms) -> Verdict:
    """Block verification (Sun et al., arXiv 2403.10444): P_i = min(1, P_{i-1} p[x_i] / q[x_i]).

    Accepts at least as many tokens as token-wise verification, in expectation. Takes chains of any kind; a chosen
    child has a one-hot q. The chain's length may depend on its tokens.

    Raises:
        ValueError: a node has two children, or a visited row is not a distribution.
    """
    return _longest_prefix(tree, target_probs, rng, weights=_running_minimum, deficit=_deficit_by_balance)


@register_verifier("hsd", summary="chain: hierarchical verification with every position capped", shape="chain")
def verify_hsd(tree: DraftTree, target_probs: Rows, rng: Uniforms) -> Verdict:
    """Hierarchical speculative decoding (Zhou et al., arXiv 2601.05724), with the last position capped too.

    The joint ratio r_i = p(x_1..x_i) / q(x_1..x_i) is divided by its largest value so far where that exceeds 1; the
    prefix is kept with the ratio of the two branch divergences, sum (r p - q)+ over sum (q - r p)+. Leaving the last
    position out of the maximum, as in the paper's definition 5, is not lossless. Capped, the rule is equal in law to
    `block`; it is here under its own name and in its own arithmetic.

    Raises:
        ValueError: a node has two children, or a visited row is not a distribution.
    """
    return _longest_prefix(tree, target_probs, rng, weights=_capped_joint_ratio, deficit=_deficit_by_sum)


def _running_minimum(ratios: Sequence[float]) -> list[float]:
    weights = [1.0]
    for ratio in ratios:
        weights.append(min(1.0, weights[-1] * ratio))
    return weights


def _capped_joint_ratio(ratios: Sequence[float]) -> list[float]:
    weights, joint, largest = [1.0], 0.0, 0.0
    for ratio in ratios:
        joint = joint + math.log(ratio) if ratio > 0.0 else -math.inf
        largest = max(largest, joint)
        weights.append(math.exp(joint - largest))
    return weights


def _deficit_by_balance(p: Row, q: Row | None, token: int, weight: float, surplus: float) -> float:
    return surplus + 1.0 - weight


def _deficit_by_sum(p: Row, q: Row | None, token: int, weight: float, surplus: float) -> float:
    if q is None:
        return max(0.0, 1.0 - weight * float(p[token]))
    return float(positive_part(q - p * weight).sum())


def _longest_prefix(
    tree: DraftTree,
    target_probs: Rows,
    rng: Uniforms,
    *,
    weights: Callable[[Sequence[float]], list[float]],
    deficit: Callable[[Row, Row | None, int, float, float], float],
) -> Verdict:
    token_ids = tree.token_ids.tolist()
    length, rows, ratios = len(token_ids), [], []
    for i, token in enumerate(token_ids):
        p = target_row(target_probs, i - 1)
        q = draft_row(tree, i - 1, like=p)
        p_token, q_token = pick(p, q, token)
        if q_token <= 0.0:
            length = i  # Never drawn under q: the chain ends before it.
        rows.append((p, q))
        if q_token <= 0.0:
            break
        ratios.append(p_token / q_token)
        if p_token <= 0.0:
            break  # This prefix and all longer ones have weight 0.
    weight = weights(ratios)
    kept = len(ratios)
    if kept == length and weight[kept] > 0.0 and (kept == 0 or rng.random() < weight[kept]):
        p = rows[kept][0] if kept < len(rows) else target_row(target_probs, kept - 1)
        return make_verdict(range(kept), [*token_ids[:kept], draw(p, rng.random())])
    while True:
        kept -= 1
        p, q = rows[kept]
        token = token_ids[kept]
        row, surplus = excess(p, q, token, weight=weight[kept])
        lacking = deficit(p, q, token, weight[kept], surplus)
        # Nothing lacking: p equals q up to rounding, and having got here had no probability.
        if kept == 0 or lacking <= 0.0 or rng.random() * lacking < surplus:
            p = row / surplus if surplus > 0.0 else p
            return make_verdict(range(kept), [*token_ids[:kept], draw(p, rng.random())])
