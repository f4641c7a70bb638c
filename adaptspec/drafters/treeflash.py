"""TreeFlash: DFlash's block, corrected for the token before (arXiv 2606.03819)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from adaptspec.drafters.block_drafter import BlockDrafter
from adaptspec.drafters.lookup import whole_number
from adaptspec.drafters.registry import register_drafter
from adaptspec.trees import transition_tables
from adaptspec.types import DraftContext, DraftTree

if TYPE_CHECKING:
    import torch

MOST = 32
"""Candidates per place, and successors per candidate, that can be asked for."""


@register_drafter("treeflash")
class TreeFlash(BlockDrafter):
    """For each place and each of the `width` likeliest tokens before it, a small module says how the distribution
    changes; the tree is the best of its size under these transitions. Still one backbone pass. Trees are deterministic
    at any temperature, and those of smaller budgets are part of those of larger ones.

    Budgets count draft nodes; the published `tree_size` counts the root, too: `budget_of(64)` is 63.

    Args:
        path, max_depth, window, backbone: see `BlockDrafter`. Trained folders hold the small module alone.
        width: candidates per place that the next one is conditioned on. The head is computed for 1 + (D - 1) width
            rows; published code uses 16.
        successors: kept per candidate.

    Raises:
        ValueError: options out of range; on `bind`, weights that are missing or do not fit the target.
    """

    summary = "DFlash's block corrected for the token before (TreeFlash, 2606.03819)"
    weights = "treeflash"
    kind = "treeflash"

    def __init__(
        self,
        path: str | os.PathLike[str] | torch.nn.Module | None = None,
        *,
        width: int = 8,
        successors: int = 16,
        max_depth: int | None = None,
        window: int | None = None,
        backbone: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(path, max_depth=max_depth, window=window, backbone=backbone)
        self.width = whole_number("width", width, 1, MOST)
        self.successors = whole_number("successors", successors, 1, MOST)

    @staticmethod
    def budget_of(tree_size: int) -> int:
        """The budget of a published tree size, which counts the root.

        Raises:
            ValueError: a size below 1.
        """
        return whole_number("tree_size", tree_size, 1) - 1

    def _draft(self, context: DraftContext, hidden: torch.Tensor, *, budget: int) -> DraftTree:
        import torch

        depth, size = hidden.shape
        count = min(self.successors, budget)  # a sibling of a higher rank cannot be among the best
        root = self._embed(np.array([context.root]))
        inputs = [self._model.corrected(hidden[:1], root)]
        before = np.zeros((0, 1), dtype=np.int64)
        if depth > 1:
            before, known = self._likeliest(self._norm(hidden[:-1]), vocab=context.vocab, count=self.width)
            before = _distinct(before, known)
            width = before.shape[1]
            embedded = self._embed(np.maximum(before, 0))
            states = hidden[1:, None].expand(-1, width, -1)
            inputs.append(self._model.corrected(states, embedded).reshape(-1, size))
        else:
            width = 1
        ids, log_probs = self._likeliest(torch.cat(inputs), vocab=context.vocab, count=count)
        count = ids.shape[1]
        tables = [np.repeat(rows[:1], width, axis=0)[None] for rows in (ids, log_probs)]
        later = [rows[1:].reshape(depth - 1, width, count) for rows in (ids, log_probs)]
        token_ids, steps = (np.concatenate(pair) for pair in zip(tables, later, strict=True))
        return transition_tables(token_ids, steps, before.reshape(depth - 1, width), budget=budget)


def _distinct(token_ids: np.ndarray, log_probs: np.ndarray) -> np.ndarray:
    """Candidates [D, M] with -1 in places without a token, which no successor is equal to."""
    return np.where(np.isfinite(log_probs), token_ids, -1)
