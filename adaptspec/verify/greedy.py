"""Greedy verification: follow the target's argmax while the tree holds it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from adaptspec.types import ROOT, DraftTree, Verdict
from adaptspec.verify import device
from adaptspec.verify.base import make_verdict, register_verifier


@register_verifier(
    "greedy",
    summary="follow the target's most likely token while it is a child",
    reads="argmax",
    uses_draft_probs=False,
)
def verify_greedy(tree: DraftTree, target_argmax: np.ndarray | Sequence[int]) -> Verdict:
    """The tokens of greedy decoding, as far as the tree foresaw them, and one more. Exact at temperature 0.

    Args:
        tree: any tree; how siblings were chosen does not matter.
        target_argmax: int64 [N + 1], row 0 for the root, row i + 1 for node i; or a sequence that finds the rows it is
            asked for when it is asked.

    Raises:
        ValueError: `target_argmax` has another shape.

    >>> verify_greedy(DraftTree.chain([5, 6, 7]), np.array([5, 6, 9, 1])).token_ids.tolist()
    [5, 6, 9]
    """
    n = len(tree)
    shape = target_argmax.shape if isinstance(target_argmax, np.ndarray) else (len(target_argmax),)
    if shape != (n + 1,):
        raise ValueError(f"target_argmax must have shape [{n + 1}], got {list(shape)}")
    if (verdict := device.greedy_walk(tree, target_argmax)) is not None:
        return verdict
    argmax = target_argmax.tolist() if isinstance(target_argmax, np.ndarray) else target_argmax
    node, wanted, path, tokens = ROOT, argmax[0], [], []
    # Children are stored after their parent, so one pass over the nodes meets the whole path.
    for child, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True)):
        if parent == node and token == wanted:
            path.append(child)
            tokens.append(token)
            node, wanted = child, argmax[child + 1]
    tokens.append(wanted)
    return make_verdict(path, tokens)
