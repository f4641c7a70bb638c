"""What one drafter costs: drafting by budget, and catching its state up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adaptspec.bandits.state import read_int
from adaptspec.control.cost_cell import CostCell, check_fields, merge_cells
from adaptspec.control.cost_curve import CostPrior
from adaptspec.control.cost_table import CostTable

MAX_TOKENS = 2**40
"""More tokens than any context holds."""


class DrafterCosts:
    """Drafting is a `CostTable` over budgets; catching up is seconds per token, by powers of two of the tokens.

    Attributes:
        touched: the model's clock at the latest measurement.
    """

    __slots__ = ("catch_up", "table", "touched")

    def __init__(self, prior: CostPrior) -> None:
        self.table = CostTable(prior)
        self.catch_up: dict[int, CostCell] = {}
        self.touched = 0

    def observe_catch_up(self, tokens: int, seconds: float) -> None:
        exponent, per_token = (tokens - 1).bit_length(), seconds / tokens
        cell = self.catch_up.get(exponent)
        if cell is None:
            self.catch_up[exponent] = CostCell(per_token, updated=self.touched)
        else:
            cell.add(per_token)
            cell.updated = self.touched

    def catch_up_seconds(self, tokens: int) -> float:
        """From the nearest power of two that was measured (a few tokens cost more each than many); else 0."""
        if not self.catch_up or tokens == 0:
            return 0.0
        exponent = (tokens - 1).bit_length()
        return tokens * self.catch_up[min(self.catch_up, key=lambda e: (abs(e - exponent), e))].value

    def lean_on(self, foreign: DrafterCosts) -> None:
        """Take what another machine measured where nothing was measured here."""
        self.table.lean_on(foreign.table)
        if not self.catch_up:
            self.catch_up = foreign.catch_up
            for cell in self.catch_up.values():
                cell.distrust()

    def merge(self, others: Sequence[DrafterCosts], *, base: DrafterCosts | None) -> None:
        """Take in what the replicas `others` measured since `base`."""
        self.table.merge([other.table for other in others], base=None if base is None else base.table)
        cells: dict[int, list[CostCell]] = {}
        for costs in (self, *others):
            for exponent, cell in costs.catch_up.items():
                cells.setdefault(exponent, []).append(cell)
        start = {} if base is None else base.catch_up
        self.catch_up = {e: merge_cells(found, base=start.get(e)) for e, found in cells.items()}
        self.touched = max(costs.touched for costs in (self, *others))

    def state_dict(self) -> dict[str, Any]:
        catch_up = [[exponent, cell.state_dict()] for exponent, cell in self.catch_up.items()]
        return {"table": self.table.state_dict(), "catch_up": catch_up, "touched": self.touched}

    @classmethod
    def from_state(cls, state: Any, *, prior: CostPrior) -> DrafterCosts:
        """Raises ValueError on anything but a `state_dict()`."""
        check_fields(state, ("table", "catch_up", "touched"), what="a drafter's costs")
        costs = cls(prior)
        costs.table = CostTable.from_state(state["table"], prior=prior)
        rows = state["catch_up"]
        if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == 2 for row in rows):
            raise ValueError(f"state: catch_up must be a list of pairs, got {rows!r:.80}")
        for exponent, cell in rows:
            exponent = read_int({"catch_up": exponent}, "catch_up", maximum=MAX_TOKENS.bit_length())
            costs.catch_up[exponent] = CostCell.from_state(cell)
        costs.touched = read_int(state, "touched")
        return costs
