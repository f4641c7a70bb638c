"""The best tree when the next token's distribution depends on the token before it.

TreeFlash (arXiv 2606.03819): a block-parallel drafter names m candidate tokens per position, and a small head gives for
every candidate the distribution over the candidates of the next position. The heap is that of DDTree, with
q(y_1..y_D) = q_1(y_1) * prod_d q_d(y_d | y_{d-1}).
"""

from __future__ import annotations

import numpy as np

from adaptspec.trees._checks import check_log_probs, check_whole
from adaptspec.trees._frontier import grow_best_first
from adaptspec.types import DraftTree


def transitions(
    token_ids: np.ndarray,
    first_log_probs: np.ndarray,
    log_probs: np.ndarray,
    *,
    budget: int,
    max_depth: int | None = None,
) -> DraftTree:
    """The tree of at most `budget` nodes with the largest expected accepted length under a position-wise Markov chain.

    Rows come in falling score order. Evidence: "rank" among the siblings (by the transition), "log_prob" given the
    parent.

    Args:
        token_ids: int [D, M], candidate tokens per position, different within a row.
        first_log_probs: [M], of the candidates of the first position.
        log_probs: [D - 1, M, M]; entry (d, i, j) is log P(token_ids[d + 1, j] | token_ids[d, i]). In any order; -inf
            bars a transition.
        budget: nodes, the root not counted.
        max_depth: use only the first positions.

    Raises:
        ValueError: shapes that do not fit, or values that are no log-probabilities.
    """
    check_whole("budget", budget, 0)
    ids = np.asarray(token_ids)
    if ids.ndim != 2:
        raise ValueError(f"token_ids must have shape [D, M], got {list(ids.shape)}")
    depth, width = ids.shape
    if np.shape(first_log_probs) != (width,):
        raise ValueError(f"first_log_probs must have shape [{width}], got {list(np.shape(first_log_probs))}")
    if np.shape(log_probs) != (max(depth - 1, 0), width, width):
        raise ValueError(
            f"log_probs must have shape {[max(depth - 1, 0), width, width]}, got {list(np.shape(log_probs))}"
        )
    if max_depth is not None:
        depth = min(depth, check_whole("max_depth", max_depth, 0))
    if depth == 0 or width == 0:
        return DraftTree.empty()

    first = check_log_probs("first_log_probs", first_log_probs)
    steps = check_log_probs("log_probs", np.asarray(log_probs)[: depth - 1])
    sorted_lists = _SortedLists(ids, first, steps, depth)
    return grow_best_first(sorted_lists.token_ids, sorted_lists, sorted_lists.next_list, budget=budget)


class _SortedLists(dict[int, list[float]]):
    """Candidate lists for the heap, sorted when first asked for: a tree touches few of the D * M lists.

    List 0 is the first position; list 1 + d * M + i holds the successors of candidate i of position d. The dict maps
    a list to its log-probabilities; `token_ids` and `next_list` are filled along with it.
    """

    def __init__(self, ids: np.ndarray, first: np.ndarray, steps: np.ndarray, depth: int) -> None:
        super().__init__()
        self.token_ids: dict[int, list[int]] = {}
        self.next_list: dict[int, list[int]] = {}
        self._ids = ids.tolist()
        self._first = first
        self._steps = steps
        self._width = ids.shape[1]
        self._depth = depth

    def __missing__(self, row: int) -> list[float]:
        if row == 0:
            position, values = 0, self._first.tolist()
        else:
            before, candidate = divmod(row - 1, self._width)
            position, values = before + 1, self._steps[before, candidate].tolist()
        order = sorted(range(self._width), key=values.__getitem__, reverse=True)  # stable: ties keep candidate order
        ids = self._ids[position]
        first_child = 1 + position * self._width
        last = position == self._depth - 1
        self.token_ids[row] = [ids[candidate] for candidate in order]
        self.next_list[row] = [-1 if last else first_child + candidate for candidate in order]
        self[row] = [values[candidate] for candidate in order]
        return self[row]
