"""Rows that drafters add to a verify pass besides their nodes: a pass with them takes longer, played or only judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from adaptspec.control.cost import MAX_NODES, CostModel

if TYPE_CHECKING:
    from adaptspec.types import ExtraRows, PairedRows


class AddedRows:
    """How many rows each source adds, as it last offered them: so many, and so many more per node."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int]] = {}

    def learn(self, offered: Mapping[str, ExtraRows | PairedRows]) -> None:
        """Take in what the asked sources offered at a step, by `Arm.source`."""
        for source, rows in offered.items():
            self._counts[source] = (rows.count(0), rows.count(1) - rows.count(0))

    def __contains__(self, source: str) -> bool:
        return source in self._counts

    def count(self, source: str, nodes: int) -> int:
        """Rows besides the root and so many nodes; 0 for a source that never offered any."""
        fixed, per_node = self._counts.get(source, (0, 0))
        return fixed + per_node * nodes

    def verify_curve(self, cost: CostModel, source: str, most: int, *, context: int) -> np.ndarray:
        """float64 [most + 1], expected seconds of a pass with 0..most nodes of a source and the rows it adds."""
        if source not in self:
            return cost.verify_curve(most, context=context)
        rows = [min(nodes + self.count(source, nodes), MAX_NODES) for nodes in range(most + 1)]
        return cost.verify_curve(rows[-1], context=context)[rows]

    def state(self) -> dict[str, list[int]]:
        """By source, both numbers."""
        return {source: list(counts) for source, counts in self._counts.items()}

    @classmethod
    def from_state(cls, state: Any) -> AddedRows:
        """Raises ValueError on anything that is not of `state()`."""
        made = cls()
        if not isinstance(state, dict):
            raise ValueError(f"added_rows must be an object, got {state!r}")
        for source, counts in state.items():
            if not (isinstance(counts, list) and len(counts) == 2 and all(type(n) is int and n >= 0 for n in counts)):
                raise ValueError(f"added_rows of {source!r} must be two whole numbers >= 0, got {counts!r}")
            made._counts[str(source)] = (counts[0], counts[1])
        return made
