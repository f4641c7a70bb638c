"""Traversal verification: whole paths are judged from the leaves upwards."""

from __future__ import annotations

from dataclasses import dataclass

from adaptspec.types import ROOT, DraftTree, Verdict
from adaptspec.verify.base import Rows, Uniforms, children_of, make_verdict, register_verifier
from adaptspec.verify.rows import Row, draft_row, draw, excess, pick, target_row, without


@dataclass(slots=True)
class _Node:
    """A node on the path from the root to the leaf under test.

    `weight`: the probability with which the path down to here is still to be accepted. `p`: the target's distribution
    after it, less what deleted children have used up; `q`: the law of the next child. Both unread until needed.
    """

    index: int
    weight: float
    pending: list[int]
    p: Row | None = None
    q: Row | None = None


@register_verifier("traversal", summary="tree: paths judged from leaf to root, deleting leaves that fail")
def verify_traversal(tree: DraftTree, target_probs: Rows, rng: Uniforms) -> Verdict:
    """Traversal verification (Weng et al., arXiv 2505.12398).

    Going down, a child's weight is P_child = min(1, P p[x] / q[x]). A leaf is accepted, with its whole path, with
    probability P, and the bonus is drawn from its p. Else it is deleted: its parent takes S = sum (P p - q)+,
    p <- norm((P p - q)+), P <- S / (S + 1 - P), and the next sibling is tried; a parent without children left is a
    leaf. The root always accepts. On a chain this is block verification.

    Siblings may be i.i.d. (q stays), drawn without replacement (q is renormalised over what is left), or chosen (each
    has its own one-hot q). A node's subtree may depend on the tokens down to the node.

    Raises:
        ValueError: a visited row is not a distribution.
    """
    remove = tree.siblings == "without-replacement"
    children, token_ids = children_of(tree), tree.token_ids.tolist()
    path = [_Node(ROOT, 1.0, children[0][::-1])]
    while True:
        node = path[-1]
        if node.pending:
            if node.p is None:
                node.p = target_row(target_probs, node.index)
                node.q = draft_row(tree, node.index, like=node.p)
            child = node.pending.pop()
            p_token, q_token = pick(node.p, node.q, token_ids[child])
            if q_token <= 0.0:
                continue  # Never drawn under q (underflow, or nothing was left to draw): as if it were not there.
            if (weight := min(1.0, node.weight * p_token / q_token)) > 0.0:
                path.append(_Node(child, weight, children[child + 1][::-1]))
            else:
                _delete_child(node, token_ids[child], remove=remove)
        elif len(path) == 1 or (node.weight > 0.0 and rng.random() < node.weight):
            p = target_row(target_probs, node.index) if node.p is None else node.p
            accepted = [step.index for step in path[1:]]
            return make_verdict(accepted, [*(token_ids[i] for i in accepted), draw(p, rng.random())])
        else:
            path.pop()
            _delete_child(path[-1], token_ids[node.index], remove=remove)


def _delete_child(node: _Node, token: int, *, remove: bool) -> None:
    row, surplus = excess(node.p, node.q, token, weight=node.weight)
    if surplus > 0.0:
        node.p = row / surplus
        node.weight = surplus / (surplus + 1.0 - node.weight)
    elif node.weight < 1.0:
        # The path's whole weight went through the deleted child: nothing below can be accepted any more.
        node.weight = 0.0
        node.pending.clear()
    # else p equals q up to rounding and the deletion had no probability: leave the node as it is.
    if remove and node.pending:
        node.q = without(node.q, token)
