"""How far every traced proposal agrees with the output, for all positions at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from adaptspec.control.counterfactual import Reach
from adaptspec.control.trace import Proposals, TracedRequest


@dataclass(frozen=True, slots=True)
class Reaches:
    """`adaptspec.control.counterfactual.Reach` at the positions 0..P-1.

    Attributes:
        offsets: int64 [P + 1]; `offsets[p]` to `offsets[p + 1]` are the accepted nodes of position p.
        ranks: int64 [K], per accepted node the place at which a growing budget takes it in, from the root down.
        complete: bool [P], False where the output ended before the proposal did: a lower bound.
    """

    offsets: np.ndarray
    ranks: np.ndarray
    complete: np.ndarray

    def at(self, position: int) -> Reach:
        """The reach at one position."""
        ranks = self.ranks[self.offsets[position] : self.offsets[position + 1]]
        return Reach(tuple(ranks.tolist()), bool(self.complete[position]))

    def lengths(self, budget: int) -> np.ndarray:
        """int64 [P], tokens that a step at each position would have gained at a node budget, bonus included."""
        taken = np.append(0, np.cumsum(self.ranks < budget))
        return 1 + taken[self.offsets[1:]] - taken[self.offsets[:-1]]


def reaches(request: TracedRequest, drafter: str) -> Reaches:
    """How far one drafter was right at every position; equal to walking each tree with `Follower`."""
    proposals = request.proposals[drafter]
    count, last = len(proposals.token_ids), len(request.tokens) - 1
    positions, above = proposals.places()
    above = np.append(above, count)  # the root, above itself
    depths = _along_paths(np.append(np.ones(count, np.int64), 0), above, np.add)[:count]
    where = positions + depths
    foreseen = (where <= last) & (proposals.token_ids == request.tokens[np.minimum(where, last)])
    accepted = _along_paths(np.append(foreseen, True), above, np.logical_and)[:count]
    inner = np.zeros(count + 1, dtype=bool)
    inner[above[:count]] = True
    complete = np.ones(request.positions, dtype=bool)
    complete[positions[accepted & (where == last) & inner[:count]]] = False
    counts = np.bincount(positions[accepted], minlength=request.positions)
    return Reaches(
        np.cumsum(np.append(0, counts), dtype=np.int64), _ranks(proposals, positions, above)[accepted], complete
    )


def _ranks(proposals: Proposals, positions: np.ndarray, above: np.ndarray) -> np.ndarray:
    """int64 [M], the place of every node in `adaptspec.trees.budget_order` of its tree."""
    count = len(positions)
    scores = _along_paths(np.append(proposals.scores, np.inf), above, np.minimum)[:count]
    ranks = np.empty(count, dtype=np.int64)
    ranks[np.lexsort((-scores, positions))] = np.arange(count) - proposals.offsets[positions]
    return ranks


def _along_paths(
    values: np.ndarray, above: np.ndarray, combine: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> np.ndarray:
    """[M + 1], per node the values from the root down to it, combined. Row M is the root, which is above itself and
    holds what changes nothing. Reaches twice as far with every round: log2 of the deepest path rounds."""
    root = len(above) - 1
    while (above != root).any():
        values = combine(values, values[above])
        above = above[above]
    return values


def stops(lengths: np.ndarray) -> np.ndarray:
    """int64 [S], the positions at which an arm of these lengths [P] stops when it is played from the start: its own
    trajectory. A long match counts once there, and not again at every position inside it.

    P / S is its mean accepted length, bonus included.
    """
    gained = lengths.tolist()
    visited = []
    position = 0
    while position < len(gained):
        visited.append(position)
        position += gained[position]
    return np.array(visited, dtype=np.int64)
