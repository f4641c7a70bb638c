"""Beam, then rerank: the dynamic draft tree of EAGLE-2 (arXiv 2406.16858)."""

from __future__ import annotations

from adaptspec.trees._layers import Expand, Stop, grow_layers
from adaptspec.types import DraftTree


def beam_rerank(
    expand: Expand, *, root: int, budget: int, width: int = 10, max_depth: int = 6, stop: Stop | None = None
) -> DraftTree:
    """Expand the `width` most valuable nodes per depth, then keep the `budget` most valuable of all nodes seen.

    EAGLE-2, section 4: the value of a node is the product of the drafter's confidences along its path, V_i = prod c_j;
    expansion keeps the top-k per depth, reranking keeps the global top-m, ties to the shallower node, so the result is
    closed under ancestors. Depths that cannot change the result any more are not drafted. Rows come in falling score
    order. Evidence: "rank" in the list the drafter returned, "log_prob" given the parent.

    Args:
        expand: the drafter, called once per depth with the frontier (see `Expand` for the convention).
        root: the last committed token.
        budget: nodes kept, the root not counted (60 in the paper).
        width: nodes expanded per depth (8-10).
        max_depth: depths drafted (5-8).
        stop: ends drafting early (see `Stop`).

    Raises:
        ValueError: negative sizes, or an `expand` that returns shapes or values that do not fit.
    """
    return grow_layers(expand, root=root, budget=budget, width=width, max_depth=max_depth, min_gain=0.0, stop=stop)
