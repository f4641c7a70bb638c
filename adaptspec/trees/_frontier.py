"""The heap that best-first builders share.

Candidates come in lists: list r holds the possible children of one kind of node, most likely first. A frontier entry
is "candidate j of list r below parent n". Taking it out adds a node, and makes two more candidates available: its next
sibling (j + 1) and its own best child (candidate 0 of the list that follows it). Every node has exactly one node that
makes it available and whose score is not lower, so nodes leave the heap in the order of their path scores: the first B
are the B best of the whole, possibly exponential, tree (DDTree, arXiv 2604.12989). O(B log B).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush, heapreplace
from math import exp, inf
from typing import TypeVar

import numpy as np

from adaptspec.types import DraftTree

T = TypeVar("T", int, float)
Lists = Sequence[Sequence[T]] | Mapping[int, Sequence[T]]


def grow_best_first(
    token_ids: Lists[int],
    log_probs: Lists[float],
    next_list: Lists[int],
    *,
    budget: int,
    seconds: Sequence[float] | None = None,
) -> DraftTree:
    """Add up to `budget` nodes in the order of their path scores. Ties go to the candidate found first.

    Args:
        token_ids: list r, candidate j -> token. For every list, `log_probs` is looked up first.
        log_probs: list r, candidate j -> log-probability given the parent; falling in j, at most 0; -inf is skipped.
        next_list: list r, candidate j -> the list of its children, -1 for none. List 0 belongs to the root.
        seconds: [budget + 1], time of a step with n nodes. If given, stop as soon as expected tokens per second fall:
            (1 + Phi + delta) / seconds[n + 1] < (1 + Phi) / seconds[n].
    """
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    ranks: list[int] = []
    steps: list[float] = []
    heap: list[tuple[float, int, int, int, int, float]] = []
    if budget > 0 and len(log_probs[0]) > 0 and log_probs[0][0] > -inf:
        heap.append((-log_probs[0][0], 0, 0, 0, -1, 0.0))
    serial = 0
    expected = 1.0
    while heap:
        negative, _, row, rank, parent, base = heap[0]
        node = len(tokens)
        if seconds is not None:
            delta = exp(-negative)
            if (expected + delta) * seconds[node] < expected * seconds[node + 1]:
                break
            expected += delta
        candidates = log_probs[row]
        tokens.append(token_ids[row][rank])
        parents.append(parent)
        scores.append(-negative)
        ranks.append(rank)
        steps.append(candidates[rank])
        if node + 1 == budget:
            break
        sibling = rank + 1
        if sibling < len(candidates) and candidates[sibling] > -inf:
            serial += 1
            heapreplace(heap, (-(base + candidates[sibling]), serial, row, sibling, parent, base))
        else:
            heappop(heap)
        child = next_list[row][rank]
        if child >= 0 and (best := log_probs[child][0]) > -inf:
            serial += 1
            heappush(heap, (negative - best, serial, child, 0, node, -negative))
    return DraftTree(
        np.array(tokens, dtype=np.int64),
        np.array(parents, dtype=np.int64),
        np.array(scores, dtype=np.float64),
        evidence={"rank": np.array(ranks, dtype=np.float64), "log_prob": np.array(steps, dtype=np.float64)},
    )
