"""Rules that walk from the root towards the leaves and settle one position after the other.

p is the target's distribution at the node reached, q the one its children were drawn from; both after temperature,
top-k and top-p, both summing to 1. (x)+ is the positive part, norm(x) divides by the sum.
"""

from __future__ import annotations

import math

import numpy as np

from adaptspec.types import ROOT, DraftTree, Verdict
from adaptspec.verify import device
from adaptspec.verify.base import Rows, Uniforms, children_of, make_verdict, register_verifier
from adaptspec.verify.rows import Row, draft_row, draw, pick, positive_part, residual, sample, target_row, without


@register_verifier(
    "deterministic", summary="sample from the target, follow the sample while it is a child", uses_draft_probs=False
)
def verify_deterministic(tree: DraftTree, target_probs: Rows, rng: Uniforms) -> Verdict:
    """The target walk: sample a token from p, follow it if it is a child, else it is the bonus.

    Equal in law to accepting each child x with probability p[x], zeroing p[x] and renormalising on rejection, the
    lossless rule for siblings that were chosen, not drawn. It never looks at q and is lossless for every tree, but
    accepts less than the rules made for drawn siblings.

    Uses exactly one uniform per emitted token, so a seeded run emits the same tokens whatever was drafted.

    Args:
        tree: any tree.
        target_probs: per row [V], see `Rows`.
        rng: source of uniforms.

    Raises:
        ValueError: a visited row is not a distribution.
    """
    if (verdict := device.target_walk(tree, target_probs, rng)) is not None:
        return verdict
    node, path, tokens = ROOT, [], []
    wanted = sample(target_probs[0], rng.random(), name="target_probs[0]")
    for child, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True)):
        if parent == node and token == wanted:
            path.append(child)
            tokens.append(token)
            node = child
            wanted = sample(target_probs[child + 1], rng.random(), name=f"target_probs[{child + 1}]")
    tokens.append(wanted)
    return make_verdict(path, tokens)


@register_verifier("token-wise", summary="chain: accept with min(1, p/q), else sample from (p - q)+", shape="chain")
def verify_token_wise(tree: DraftTree, target_probs: Rows, rng: Uniforms) -> Verdict:
    """Speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

    Accept x with probability min(1, p[x]/q[x]); the first rejected position emits a sample from norm((p - q)+).
    Takes chains of any kind: with one child per node, drawing with and without replacement are the same, and a chosen
    child has a one-hot q.

    Raises:
        ValueError: a node has two children, or a visited row is not a distribution.
    """
    if (verdict := device.chain_rejection(tree, target_probs, rng)) is not None:
        return verdict
    return _walk(tree, target_probs, rng, remove=False)


@register_verifier(
    "multi-round",
    summary="tree of i.i.d. siblings: per sibling min(1, p/q), on rejection p <- norm((p - q)+)",
    siblings=("iid", "deterministic"),
)
def verify_multi_round(tree: DraftTree, target_probs: Rows, rng: Uniforms) -> Verdict:
    """Multi-round speculative sampling (SpecInfer, arXiv 2305.09781, algorithm 2), q unchanged between siblings.

    Siblings must be drawn independently from q. Deterministic siblings are taken too: each has its own one-hot q.

    Raises:
        ValueError: siblings drawn without replacement (q would have to change), or a visited row is not a distribution.
    """
    return _walk(tree, target_probs, rng, remove=False)


@register_verifier(
    "recursive",
    summary="tree of siblings drawn without replacement: multi-round with q renormalised over what is left",
    siblings=("without-replacement", "deterministic"),
)
def verify_recursive(tree: DraftTree, target_probs: Rows, rng: Uniforms) -> Verdict:
    """Recursive rejection sampling (RRS, arXiv 2402.14160; Sequoia, arXiv 2402.12374).

    As multi-round, and after each rejected x also q[x] <- 0, q <- norm(q), the law the next sibling was drawn from.
    Deterministic siblings are taken too: each has its own one-hot q.

    Raises:
        ValueError: i.i.d. siblings (their q does not change), or a visited row is not a distribution.
    """
    return _walk(tree, target_probs, rng, remove=True)


def _walk(tree: DraftTree, target_probs: Rows, rng: Uniforms, *, remove: bool) -> Verdict:
    children, token_ids = children_of(tree), tree.token_ids.tolist()
    node, path = ROOT, []
    while True:
        p = target_row(target_probs, node)
        accepted = None
        siblings = children[node + 1]
        q = draft_row(tree, node, like=p) if siblings else None
        for child in siblings:
            token = token_ids[child]
            p_token, q_token = pick(p, q, token)
            if q_token <= 0.0:
                continue  # Never drawn under q (underflow, or nothing was left to draw): as if it were not there.
            if rng.random() * q_token < p_token:
                accepted = child
                break
            p = residual(p, q, token)
            if remove and child != siblings[-1]:
                q = without(q, token)
        if accepted is None:
            return make_verdict(path, [*(token_ids[i] for i in path), draw(p, rng.random())])
        path.append(accepted)
        node = accepted


@register_verifier("spectr", summary="tree of i.i.d. siblings: k-sequential selection", siblings=("iid",))
def verify_spectr(tree: DraftTree, target_probs: Rows, rng: Uniforms) -> Verdict:
    """K-sequential selection (k-SEQ; SpecTr, arXiv 2310.15141, algorithm 2) at every node, k its number of children.

    Accept the first sibling x for which u < p[x] / (rho q[x]). rho in [1, k] solves 1 - (1 - b)^k = rho b with
    b = sum min(p / rho, q). If none is accepted, sample from norm(p - min(p / rho, q) (1 - (1 - b)^k) / b).
    k must not depend on which of these siblings were drawn.

    Raises:
        ValueError: siblings not drawn independently, or a visited row is not a distribution.
    """
    children, token_ids = children_of(tree), tree.token_ids.tolist()
    node, path = ROOT, []
    while True:
        p = target_row(target_probs, node)
        accepted = None
        if siblings := children[node + 1]:
            q = draft_row(tree, node, like=p)
            assert q is not None
            ratios = [(child, *pick(p, q, token_ids[child])) for child in siblings]
            ratios = [ratio for ratio in ratios if ratio[2] > 0.0]  # The others were never drawn under q.
            rho = _k_seq_scale(p, q, len(ratios))
            accepted = next((child for child, p_x, q_x in ratios if rng.random() * rho * q_x < p_x), None)
            if accepted is None:
                p = _k_seq_residual(p, q, rho=rho, k=len(ratios))
        if accepted is None:
            return make_verdict(path, [*(token_ids[i] for i in path), draw(p, rng.random())])
        path.append(accepted)
        node = accepted


def _any_of(b: float, k: int) -> float:
    """1 - (1 - b)^k without cancellation, for b in [0, 1]."""
    return 1.0 if b >= 1.0 else -math.expm1(k * math.log1p(-b))


def _k_seq_scale(p: Row, q: Row, k: int) -> float:
    """rho, from above: every rho with 1 - (1 - b)^k <= rho b is lossless, the smallest one accepts most."""
    if k <= 1:
        return 1.0
    # Only tokens with 1 < p/q < k change sides between p/rho and q. Sorted by p/q they make b = a / rho + c, where a
    # and c change from one ratio to the next.
    below, above = p <= q, p >= k * q
    between = ~(below | above)
    some_p, some_q = (x if isinstance(x, np.ndarray) else x.cpu().numpy() for x in (p[between], q[between]))
    ratios = some_p / some_q
    order = ratios.argsort()
    edges = np.concatenate([[1.0], ratios[order], [float(k)]])
    a = np.concatenate([[float(p[below].sum())], some_p[order]]).cumsum()
    c = np.concatenate([[float(q[above].sum())], some_q[order][::-1]]).cumsum()[::-1]
    b = np.minimum(a / edges[1:] + c, 1.0 - 1e-16)
    enough = -np.expm1(k * np.log1p(-b)) <= edges[1:] * b
    enough[-1] = True  # rho = k always is
    segment = int(enough.argmax())
    low, high = float(edges[segment]), float(edges[segment + 1])
    a_here, c_here = float(a[segment]), float(c[segment])
    for _ in range(40):
        rho = 0.5 * (low + high)
        b_here = a_here / rho + c_here
        if _any_of(b_here, k) <= rho * b_here:
            high = rho
        else:
            low = rho
    return high


def _k_seq_residual(p: Row, q: Row, *, rho: float, k: int) -> Row:
    if k == 0:
        return p
    common = np.minimum(p / rho, q) if isinstance(p, np.ndarray) else (p / rho).minimum(q)
    b = float(common.sum())
    if b <= 0.0:
        return p
    row = positive_part(p - common * (_any_of(b, k) / b))
    total = float(row.sum())
    return row / total if total > 0.0 else p
