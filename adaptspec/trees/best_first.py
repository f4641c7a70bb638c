"""The best tree under factorised marginals: one distribution per position, as block-parallel drafters give.

DDTree (arXiv 2604.12989). With q(y_1..y_D) = prod_d q_d(y_d) the probability that a node is reached is the product of
the marginals along its path, and the expected accepted length of a tree is 1 + sum over nodes of that product. It is
largest for the B nodes with the largest products, which a heap over rank tuples finds in O(B log B).
"""

from __future__ import annotations

import numpy as np

from adaptspec.trees._checks import check_log_probs, check_whole
from adaptspec.trees._frontier import grow_best_first
from adaptspec.types import DraftTree


def top_candidates(log_probs: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` most likely tokens of every row, most likely first: ids int64 [D, K] and log-probabilities [D, K].

    Ties go to the lower id, so that a smaller `count` gives a prefix of what a larger one gives.

    Args:
        log_probs: [D, V].
        count: K is the smaller of `count` and V.

    Raises:
        ValueError: another shape, a negative count, NaN.
    """
    values = np.asarray(log_probs)
    if values.ndim != 2:
        raise ValueError(f"log_probs must have shape [D, V], got {list(values.shape)}")
    rows, vocab = values.shape
    keep = min(check_whole("count", count, 0), vocab)
    if keep == 0 or rows == 0:
        return np.empty((rows, keep), dtype=np.int64), values[:, :keep]
    if (bad := np.isnan(values.max(axis=1))).any():
        raise ValueError(f"log_probs must not be NaN, got NaN in row {int(bad.argmax())}")
    bars = np.partition(values, vocab - keep, axis=1)[:, vocab - keep]
    at_least = values >= bars[:, None]
    places = np.flatnonzero(at_least)
    if len(places) > rows * keep:  # ties at the bar: which of the tied tokens come in must not depend on K
        ids = np.empty((rows, keep), dtype=np.int64)
        for row in range(rows):
            candidates = np.flatnonzero(at_least[row])
            ids[row] = candidates[np.argsort(-values[row, candidates], kind="stable")[:keep]]
    else:
        candidates = (places % vocab).reshape(rows, keep)
        order = np.argsort(-np.take_along_axis(values, candidates, axis=1), axis=1, kind="stable")
        ids = np.take_along_axis(candidates, order, axis=1)
    return ids, np.take_along_axis(values, ids, axis=1)


def best_first(
    log_probs: np.ndarray,
    token_ids: np.ndarray | None = None,
    *,
    budget: int,
    max_depth: int | None = None,
) -> DraftTree:
    """The tree of at most `budget` nodes with the largest expected accepted length under factorised marginals.

    Rows come in falling score order, so the tree for a smaller budget is a prefix of rows. Evidence: "rank" among the
    candidates of its position, "log_prob" there.

    Args:
        log_probs: [D, V] log-probabilities per position, or [D, K] already cut to the K most likely per position.
        token_ids: int [D, K], the tokens of the K candidates, different within a row; None if `log_probs` is [D, V].
        budget: nodes, the root not counted.
        max_depth: use only the first positions.

    Raises:
        ValueError: shapes that do not fit, candidates not in falling order, or values that are no log-probabilities.

    >>> best_first(np.log([[0.7, 0.3], [0.6, 0.4]]), budget=4).token_ids.tolist()
    [0, 0, 1, 1]
    """
    ids, values = _factorised_candidates(log_probs, token_ids, budget, max_depth)
    return grow_best_first(ids, values, _next_position(ids), budget=budget)


def _factorised_candidates(
    log_probs: np.ndarray, token_ids: np.ndarray | None, budget: int, max_depth: int | None
) -> tuple[list[list[int]], list[list[float]]]:
    """Checked candidate lists per position, at most `budget` per position since no more siblings can be taken."""
    check_whole("budget", budget, 0)
    values = np.asarray(log_probs)
    if values.ndim != 2:
        raise ValueError(f"log_probs must have shape [D, V] or [D, K], got {list(values.shape)}")
    if max_depth is not None:
        values = values[: check_whole("max_depth", max_depth, 0)]
    if token_ids is None:
        ids, values = top_candidates(values, budget)
    else:
        ids = np.asarray(token_ids)[: len(values), :budget]
        values = values[:, :budget]
        if ids.shape != values.shape:
            raise ValueError(
                f"token_ids must have the shape of log_probs, got {np.shape(token_ids)} and {np.shape(log_probs)}"
            )
    values = check_log_probs("log_probs", values)
    if (values[:, 1:] > values[:, :-1]).any():
        raise ValueError("log_probs must fall along each row when token_ids are given; use top_candidates to sort them")
    return ids.tolist() or [[]], values.tolist() or [[]]


def _next_position(ids: list[list[int]]) -> list[list[int]]:
    """Candidates of position d are followed by the list of position d + 1, those of the last by none."""
    last = len(ids) - 1
    return [[row + 1 if row < last else -1] * len(candidates) for row, candidates in enumerate(ids)]
