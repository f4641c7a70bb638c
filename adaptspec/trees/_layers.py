"""Drafting depth by depth with a model: what EAGLE-2 and OPT-Tree share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from adaptspec.trees._checks import check_log_probs, check_whole
from adaptspec.types import DraftTree

Expand = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""`expand(token_ids int64 [F], parents int64 [F]) -> (ids int [F, K], log_probs [F, K])`, most likely first.

The rows ever passed to the callable form a tree of their own, parents first, in the order in which they are passed:
row 0 is the root, alone in the first call, with parent -1; `parents` point into these rows. A drafter with a KV cache
appends the rows of each call and attends along `parents`. `ids` must differ within a row; -inf marks an unused place.
"""


Stop = Callable[[int, np.ndarray], bool]
"""`stop(depth, scores float64 [M])`, told after every depth of the path scores of the nodes it added; True ends growth.
Which nodes are kept of those seen does not depend on it."""


def grow_layers(
    expand: Expand,
    *,
    root: int,
    budget: int,
    width: int,
    max_depth: int,
    min_gain: float,
    stop: Stop | None = None,
) -> DraftTree:
    """Per depth expand the `width` best new nodes by path score; in the end keep the best `budget` of all seen.

    Stops early once what is kept can no longer change (no expanded node beats the worst kept), or once another depth
    adds less than `min_gain` to the expected accepted tokens of the kept nodes.
    """
    check_whole("budget", budget, 0)
    check_whole("width", width, 1)
    check_whole("max_depth", max_depth, 0)
    if budget == 0 or max_depth == 0:
        return DraftTree.empty()
    tokens: list[np.ndarray] = []
    parents: list[np.ndarray] = []
    steps: list[np.ndarray] = []
    ranks: list[np.ndarray] = []
    scores = np.zeros(0)  # of all nodes seen so far
    frontier_tokens = np.array([root], dtype=np.int64)
    frontier_nodes = np.array([-1], dtype=np.int64)  # their rows among all nodes seen
    frontier_parents = np.array([-1], dtype=np.int64)  # among the expanded rows
    frontier_scores = np.zeros(1)
    expanded = 0
    kept_tokens = 0.0
    for depth in range(1, max_depth + 1):
        ids, log_probs = expand(frontier_tokens, frontier_parents)
        ids = np.asarray(ids)
        if ids.ndim != 2 or len(ids) != len(frontier_tokens) or np.shape(log_probs) != ids.shape:
            raise ValueError(
                f"expand must return ids and log_probs of one shape [{len(frontier_tokens)}, K], "
                f"got {list(ids.shape)} and {list(np.shape(log_probs))}"
            )
        values = check_log_probs("log_probs of expand", log_probs)
        places = np.flatnonzero(values.ravel() > -np.inf)
        if not places.size:
            break
        owners, columns = np.divmod(places, ids.shape[1])
        step = values.ravel()[places]
        new_scores = frontier_scores[owners] + step
        first = len(scores)
        tokens.append(ids.ravel()[places])
        parents.append(frontier_nodes[owners])
        steps.append(step)
        ranks.append(columns)
        scores = np.concatenate((scores, new_scores))

        kept = scores if len(scores) <= budget else np.partition(scores, len(scores) - budget)[len(scores) - budget :]
        kept_before, kept_tokens = kept_tokens, float(np.exp(kept).sum())
        best = np.argsort(-new_scores, kind="stable")[:width]
        cannot_enter = len(scores) >= budget and new_scores[best[0]] <= kept.min()
        stopped = stop is not None and stop(depth, new_scores)
        if stopped or depth == max_depth or cannot_enter or kept_tokens - kept_before < min_gain:
            break
        frontier_tokens = tokens[-1][best].astype(np.int64, copy=False)
        frontier_nodes = first + best
        frontier_parents = expanded + owners[best]
        frontier_scores = new_scores[best]
        expanded += len(ids)
    if not tokens:
        return DraftTree.empty()
    # Stable on falling scores: a node never precedes its parent, which has an earlier row and no lower score.
    order = np.argsort(-scores, kind="stable")[:budget]
    position = np.full(len(scores) + 1, -1, dtype=np.int64)
    position[order] = np.arange(len(order))
    return DraftTree(
        np.concatenate(tokens)[order].astype(np.int64, copy=False),
        position[np.concatenate(parents)[order]],
        scores[order],
        evidence={
            "rank": np.concatenate(ranks)[order].astype(np.float64),
            "log_prob": np.concatenate(steps)[order],
        },
    )
