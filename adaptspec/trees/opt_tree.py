"""Draft deeper only while it pays: OPT-Tree (arXiv 2406.17276)."""

from __future__ import annotations

from adaptspec.trees._layers import Expand, grow_layers
from adaptspec.types import DraftTree


def opt_tree(
    expand: Expand, *, root: int, budget: int, max_depth: int, threshold: float = 0.2, width: int | None = None
) -> DraftTree:
    """Per depth keep the n nodes with the largest path probabilities; stop when the kept sum grows too little.

    The rule of OPT-Tree: with E_d the sum of path probabilities of the best n nodes after d depths, draft one more
    depth while E_d - E_{d-1} >= threshold. Rows come in falling score order. Evidence as in `beam_rerank`.

    Args:
        expand: the drafter, called once per depth with the frontier (see `Expand` for the convention).
        root: the last committed token.
        budget: n, nodes kept, the root not counted.
        max_depth: depths drafted at most.
        threshold: least growth, in expected tokens, that justifies another draft pass: about the cost of one draft
            pass over the cost of a verification per token.
        width: nodes expanded per depth; `budget` as published.

    Raises:
        ValueError: negative sizes or threshold, or an `expand` that returns shapes or values that do not fit.
    """
    if not threshold >= 0.0:
        raise ValueError(f"threshold must be >= 0, got {threshold}")
    return grow_layers(
        expand,
        root=root,
        budget=budget,
        width=max(budget, 1) if width is None else width,
        max_depth=max_depth,
        min_gain=threshold,
    )
