"""How far a proposal would have been accepted, known once the text that the target wrote there is known."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adaptspec.trees import budget_order
from adaptspec.types import ROOT, DraftTree


@dataclass(frozen=True, slots=True)
class Reach:
    """How far one proposal agrees with the realised text.

    Attributes:
        ranks: per accepted node the place at which a growing budget takes it in, from the root down.
        complete: False if the text ended before the proposal did, which makes the reach a lower bound.
        masses: where the target samples: per node of the text that has children in the tree, the root first, the
            children's ranks and the target's probabilities of them. None where it is greedy.
    """

    ranks: tuple[int, ...]
    complete: bool
    masses: tuple[tuple[np.ndarray, np.ndarray], ...] | None = None

    def length(self, budget: int) -> int:
        """Tokens that this very text would have gained the step at a node budget, bonus included.

        Trees of growing budgets are nested (`budget_order`), so this is 1 + the accepted nodes of rank < budget: exact
        for every budget up to the one that was asked for.
        """
        return 1 + bisect_left(self.ranks, budget)  # ranks rise along the path: parents come first

    def expected_length(self, budget: int) -> float:
        """An estimate of the mean of `length` over what the target might have written, of lower variance.

        L = 1 + sum_k [text still in the tree at depth k - 1] gamma_k, gamma_k the target's mass on the children there:
        each token's chance instead of its coming or not (ours; a Rao-Blackwell form of the tree estimate in HedgeSpec,
        arXiv 2510.20064, Theorem 3, whose plain product of gammas along the text is unbiased only where acceptance does
        not depend on which token it is). Equal to `length` where the target is greedy.
        """
        if self.masses is None:
            return float(self.length(budget))
        length = 1.0
        for depth, (ranks, probabilities) in enumerate(self.masses):
            if depth and self.ranks[depth - 1] >= budget:
                break
            length += float(probabilities[ranks < budget].sum())
        return length


class Follower:
    """Walks one tree along the text as it becomes known.

    The output does not depend on what is drafted, so one realised text judges every proposal made at its position:
    full information, exact for greedy output and for picked drafts under sampling. A tree that is deeper than what one
    step reveals stays open until later steps reveal more.
    """

    def __init__(self, tree: DraftTree) -> None:
        self._tree = tree
        self._parents, self._token_ids = tree.parents.tolist(), tree.token_ids.tolist()
        self._path: list[int] = []
        self._masses: list[tuple[np.ndarray, np.ndarray]] | None = None  # children and probabilities, per node passed
        self.reach: Reach | None = None if len(tree) else Reach((), True)

    def extend(self, tokens: Sequence[int], probabilities: np.ndarray | None = None) -> bool:
        """Take in the next tokens of the text; True once the reach is known.

        Args:
            tokens: [T].
            probabilities: [T, V], row k is the target's distribution that `tokens[k]` was drawn from; None where it is
                greedy. Given always or never.
        """
        for place, token in enumerate(tokens):
            if self.reach is not None:
                break
            node = self._path[-1] if self._path else ROOT
            if probabilities is not None:
                self._weigh(node, probabilities[place])
            child = self._child(node, token)
            if child is not None:
                self._path.append(child)
            if child is None or child not in self._parents:  # nobody's parent: the proposal ends here
                self.reach = self._reach(complete=True)
        return self.reach is not None

    def _child(self, node: int, token: int) -> int | None:
        """The child of a node that carries the token."""
        row = node
        try:
            while True:
                row = self._parents.index(node, row + 1)  # children come behind their parents
                if self._token_ids[row] == token:
                    return row
        except ValueError:
            return None

    def _weigh(self, node: int, probabilities: np.ndarray) -> None:
        """Note the children of a node and the target's probabilities [V] of them."""
        children = np.flatnonzero(self._tree.parents == node)
        if len(children):
            mass = probabilities[self._tree.token_ids[children]].astype(np.float64)
            self._masses = [*(self._masses or ()), (children, mass)]

    def close(self) -> Reach:
        """The reach so far: the text has ended."""
        if self.reach is None:
            self.reach = self._reach(complete=False)
        return self.reach

    def _reach(self, *, complete: bool) -> Reach:
        if not self._path and self._masses is None:
            return Reach((), complete)
        ranks = np.empty(len(self._tree), dtype=np.int64)
        ranks[budget_order(self._tree)] = np.arange(len(self._tree))
        masses = None if self._masses is None else tuple((ranks[children], mass) for children, mass in self._masses)
        return Reach(tuple(ranks[self._path].tolist()), complete, masses)
