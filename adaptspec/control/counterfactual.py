"""How far a proposal would have been accepted, known once the text that the target wrote there is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adaptspec.trees import budget_order
from adaptspec.types import DraftTree


@dataclass(frozen=True, slots=True)
class Reach:
    """How far one proposal agrees with the realised text.

    Attributes:
        ranks: per accepted node the place at which a growing budget takes it in, from the root down.
        complete: False if the text ended before the proposal did, which makes the reach a lower bound.
    """

    ranks: tuple[int, ...]
    complete: bool

    def length(self, budget: int) -> int:
        """Tokens that the step would have gained at a node budget, bonus included.

        Trees of growing budgets are nested (`budget_order`), so this is 1 + the accepted nodes of rank < budget: exact
        for every budget up to the one that was asked for.
        """
        return 1 + sum(rank < budget for rank in self.ranks)


class Follower:
    """Walks one tree along the text as it becomes known.

    The output does not depend on what is drafted, so one realised text judges every proposal made at its position:
    full information, exact for greedy output and for picked drafts under sampling. A tree that is deeper than what one
    step reveals stays open until later steps reveal more.
    """

    def __init__(self, tree: DraftTree) -> None:
        ranks = np.empty(len(tree), dtype=np.int64)
        ranks[budget_order(tree)] = np.arange(len(tree))
        self._ranks = ranks.tolist()
        self._children: dict[tuple[int, int], int] = {}
        for node, key in enumerate(zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True)):
            self._children.setdefault(key, node)
        self._inner = set(tree.parents.tolist())
        self._node = -1
        self._reached: list[int] = []
        self.reach: Reach | None = None if len(tree) else Reach((), True)

    def extend(self, tokens: Sequence[int]) -> bool:
        """Take in the next tokens of the text; True once the reach is known."""
        for token in tokens:
            if self.reach is not None:
                break
            child = self._children.get((self._node, token))
            if child is not None:
                self._node = child
                self._reached.append(self._ranks[child])
            if child is None or child not in self._inner:
                self.reach = Reach(tuple(self._reached), True)
        return self.reach is not None

    def close(self) -> Reach:
        """The reach so far: the text has ended."""
        if self.reach is None:
            self.reach = Reach(tuple(self._reached), False)
        return self.reach
