"""Clusters of similar rows, picked until a budget is used up that shrinks with depth."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from adaptspec.vocab.registry import register_vocab_head
from adaptspec.vocab.routed import RoutedHead, read_number_and_path

SHARE = 8
"""Without a number of rows the budget is the head's rows divided by this."""

SHRINK = 0.8
"""Factor on the budget per depth: deeper tokens are verified less often, so that missing one costs less."""

LEAST = 0.25
"""Share of the first depth's budget that every depth has."""


@register_vocab_head("dynaspec")
class DynaSpecHead(RoutedHead):
    """DynaSpec (2510.13847): clusters of rows in the order of a meta-classifier's scores, as many as fit into
    max(LEAST, SHRINK ** (depth - 1)) of the budget, one at least. The commonest tokens are always in.

    "dynaspec" has a budget of an eighth of the head, "dynaspec:4096" another one; "dynaspec:FOLDER" and
    "dynaspec:4096:FOLDER" take a router of one's own. The paper gives no code: the numbers above are ours.
    """

    summary = "clusters of rows that a trained classifier picks: dynaspec, dynaspec:ROWS or dynaspec:FOLDER"

    def __init__(self, name: str, budget: int | None = None, path: Path | None = None) -> None:
        super().__init__(name, path)
        if budget is not None and budget < 1:
            raise ValueError(f"vocab {name!r} must have a budget of at least 1 row, got {budget}")
        self.budget = budget

    @classmethod
    def parse(cls, name: str, argument: str) -> DynaSpecHead:
        return cls(name, *read_number_and_path(argument))

    @property
    def rows(self) -> int:
        """At depth 1, at most."""
        return 0 if self._router is None else len(self._always) + self.budget_at(1)

    def budget_at(self, depth: int) -> int:
        """Rows of clusters at a depth."""
        whole = len(self.weight) // SHARE if self.budget is None else self.budget
        return max(1, round(whole * max(LEAST, SHRINK ** (depth - 1))))

    def _pick(self, scores: np.ndarray, *, depth: int) -> np.ndarray:
        order = np.argsort(-scores, kind="stable")
        fitting = int(np.searchsorted(np.cumsum(self.sizes[order]), self.budget_at(depth), side="right"))
        return order[: max(1, fitting)]
