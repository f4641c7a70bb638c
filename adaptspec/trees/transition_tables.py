"""The best tree over transitions whose successors need not be candidates themselves.

TreeFlash (arXiv 2606.03819) as published: for each position and each of the M likeliest tokens before it, the K
likeliest tokens of the whole vocabulary given that one. A successor that is among the M candidates of its own position
goes on with that candidate's table; any other ends its path. The heap is DDTree's. The published `tree_size` counts the
root: a tree_size of n is a budget of n - 1 here.
"""

from __future__ import annotations

import numpy as np

from adaptspec.trees._checks import check_log_probs, check_whole
from adaptspec.trees._frontier import grow_best_first
from adaptspec.types import DraftTree


def transition_tables(
    token_ids: np.ndarray,
    log_probs: np.ndarray,
    candidates: np.ndarray,
    *,
    budget: int,
    max_depth: int | None = None,
) -> DraftTree:
    """The tree of at most `budget` nodes with the largest expected accepted length under the tables.

    Rows come in falling score order, so the tree for a smaller budget is a prefix of rows. Evidence: "rank" among the
    siblings, "log_prob" given the parent.

    Args:
        token_ids: int [D, M, K], successors: entry (d, i) lists tokens of position d after candidate i of the position
            before, different from each other. At position 0 only entry (0, 0) is read, the successors of the root.
        log_probs: [D, M, K], of them, falling along the last axis; -inf bars a token.
        candidates: int [D - 1, M], the candidates of positions 0 .. D - 2, different within a row.
        budget: nodes, the root not counted.
        max_depth: use only the first positions.

    Raises:
        ValueError: shapes that do not fit, values that are no log-probabilities or not in falling order.

    >>> tables = np.array([[[4, 7], [4, 7]], [[1, 2], [2, 1]]])  # the root's: 4, 7; those of 4: 1, 2; of 7: 2, 1
    >>> steps = np.log([[[0.6, 0.4], [0.6, 0.4]], [[0.9, 0.1], [0.8, 0.2]]])
    >>> transition_tables(tables, steps, np.array([[4, 7]]), budget=4).token_ids.tolist()
    [4, 1, 7, 2]
    """
    check_whole("budget", budget, 0)
    ids, before = np.asarray(token_ids), np.asarray(candidates)
    if ids.ndim != 3:
        raise ValueError(f"token_ids must have shape [D, M, K], got {list(ids.shape)}")
    depth, width, count = ids.shape
    if np.shape(log_probs) != ids.shape:
        raise ValueError(
            f"log_probs must have the shape of token_ids {list(ids.shape)}, got {list(np.shape(log_probs))}"
        )
    if before.shape != (max(depth - 1, 0), width):
        raise ValueError(f"candidates must have shape {[max(depth - 1, 0), width]}, got {list(before.shape)}")
    if max_depth is not None:
        depth = min(depth, check_whole("max_depth", max_depth, 0))
    if depth == 0 or width == 0 or count == 0 or budget == 0:
        return DraftTree.empty()
    count = min(count, budget)  # a sibling of a higher rank cannot be among the best
    ids, before = ids[:depth, :, :count], before[: depth - 1]
    values = check_log_probs("log_probs", np.asarray(log_probs)[:depth, :, :count])
    if (values[..., 1:] > values[..., :-1]).any():
        raise ValueError("log_probs must fall along each list of successors")
    following = np.full(ids.shape, -1, dtype=np.int64)
    if depth > 1:
        known = ids[:-1, :, :, None] == before[:, None, None, :]
        lists = np.arange(1, depth)[:, None, None] * width + known.argmax(axis=-1)
        following[:-1] = np.where(known.any(axis=-1), lists, -1)
    return grow_best_first(
        ids.reshape(-1, count).tolist(),
        values.reshape(-1, count).tolist(),
        following.reshape(-1, count).tolist(),
        budget=budget,
    )
