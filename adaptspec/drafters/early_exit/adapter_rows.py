"""One request of an adapter: rows of the committed text, and the rows of one proposal behind them."""

from __future__ import annotations

import numpy as np
import torch

from adaptspec.drafters.cells.cache import CellCache
from adaptspec.drafters.early_exit.adapter import ExitAdapter

_CHUNK = 512
"""Committed rows per forward pass, which bounds the memory of their mask."""


class AdapterRows:
    """Cached rows of committed tokens, and draft rows, which the next proposal throws away.

    Committed rows always read the states of the verify pass, and run all together before the next proposal.

    Args:
        adapter: with its weights, on the target's device and of its type.
    """

    def __init__(self, adapter: ExitAdapter) -> None:
        self.adapter = adapter
        self.start()

    def start(self) -> None:
        """Forget everything: a request begins."""
        self.cache = CellCache()
        self.rows = 0
        self._pending: list[torch.Tensor] = []
        self._depths = np.zeros(0, np.int64)
        self._visible = np.zeros((0, 0), dtype=bool)

    @property
    def lag(self) -> int:
        """Committed rows that have not been run and came before the last `push`."""
        return sum(map(len, self._pending[:-1]))

    def push(self, hidden: torch.Tensor) -> None:
        """Take in the states [n, H] of committed rows, to be run later."""
        self._pending.append(hidden)

    @torch.inference_mode()
    def settle(self, *, but_last: bool = False) -> None:
        """Run the committed rows that are pending, or all but those of the last `push`."""
        blocks = len(self._pending) - but_last
        if blocks < 1:
            return
        hidden = torch.cat(self._pending[:blocks])
        del self._pending[:blocks]
        self.cache.truncate(self.rows)
        for first in range(0, len(hidden), _CHUNK):
            self._chain(hidden[first : first + _CHUNK])
            self.rows = self.cache.length()

    @torch.inference_mode()
    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """Begin a proposal: run the root, and the tokens of a chain behind it.

        Args:
            hidden: [R, H], the states of the root and of R - 1 tokens, each the parent of the next.

        Returns:
            [R, H], what the head multiplies.
        """
        self.settle()  # apart, so that a proposal is the same whether or not one was thrown away before
        self.cache.truncate(self.rows)
        count = len(hidden)
        self._depths = np.arange(count)
        self._visible = np.tri(count, dtype=bool)
        return self._chain(hidden)

    @torch.inference_mode()
    def draft(self, hidden: torch.Tensor, parents: np.ndarray) -> torch.Tensor:
        """Run more rows of the proposal; what the head multiplies, [R, H].

        Args:
            hidden: [R, H], the states of the rows.
            parents: int64 [R], rows of the proposal: 0 is the root, then in the order in which they were run.
        """
        before, count = len(self._depths), len(hidden)
        visible = np.zeros((before + count, before + count), dtype=bool)
        visible[:before, :before] = self._visible
        visible[before:, :before] = self._visible[parents]
        visible[before:, before:] = np.eye(count, dtype=bool)
        self._visible = visible
        self._depths = np.append(self._depths, self._depths[parents] + 1)
        seen = torch.from_numpy(visible[before:])
        mask = None
        if count > 1 or not seen.all():
            mask = torch.nn.functional.pad(seen, (self.rows, 0), value=True).to(hidden.device)[None, None]
        positions = torch.from_numpy(self._depths[before:] + self.rows).to(hidden.device)
        return self.adapter(hidden[None], positions=positions[None], mask=mask, cache=self.cache)[0]

    def _chain(self, hidden: torch.Tensor) -> torch.Tensor:
        first = self.cache.length()
        positions = torch.arange(first, first + len(hidden), device=hidden.device)
        return self.adapter(hidden[None], positions=positions[None], cache=self.cache)[0]
