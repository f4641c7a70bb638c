"""Hydra: Medusa's heads made to see what was drafted before them (arXiv 2402.05109)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from adaptspec.drafters.heads_drafter import CANDIDATES, HeadsDrafter
from adaptspec.drafters.registry import register_drafter
from adaptspec.types import DraftContext, DraftTree

if TYPE_CHECKING:
    import torch

    from adaptspec.drafters.cells.cache import CellCache


@register_drafter("hydra")
class Hydra(HeadsDrafter):
    """Head i reads the hidden state and the embeddings of the root and of the i tokens drafted after it.

    The tree is EAGLE-2's: the `width` best nodes are expanded per depth, the `budget` best of all seen are kept. Trees
    are deterministic at any temperature. With a prefix layer it keeps that layer's keys and values over the request,
    and works off in one batch the hidden states of steps in which it was not asked.

    Args:
        path: see `HeadsDrafter`; published checkpoints hold `hydra_lm_head.pt`.
        width: nodes expanded per depth.
        max_depth: heads used at most.

    Raises:
        ValueError: options out of range; on `bind`, weights that do not fit the target.
    """

    summary = "Medusa's heads that see the drafted tokens (2402.05109)"
    module = "HydraHeads"
    weights = "hydra"

    def __init__(self, path: str | torch.nn.Module | None = None, *, width: int = 8, max_depth: int = 8) -> None:
        if width < 1:
            raise ValueError(f"width must be >= 1, got {width}")
        super().__init__(path, max_depth=max_depth)
        self.width = width
        self._close()

    def _take(self, hidden: torch.Tensor, *, first: int | None) -> None:
        self._pending.append(hidden)
        # What one step brings has to be run at every step anyway and is no lag. The prompt is run at once.
        self._fresh = len(hidden) if first is None else 0
        if first is not None or self._heads.prefix is None:
            self._run(sum(map(len, self._pending)))

    def _draft(self, context: DraftContext, *, budget: int, depth: int) -> DraftTree:
        import torch

        parts = self._open()
        self._run(sum(map(len, self._pending)))
        if self._hidden is None:
            return DraftTree.empty()
        paths: list[torch.Tensor] = []  # [h; embeddings of the path] of every row passed to `expand`
        levels: list[int] = []

        def expand(token_ids: np.ndarray, parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            embedded = parts.embed(torch.from_numpy(token_ids).to(parts.device)).to(parts.dtype)
            if parents[0] < 0:
                level, above = 0, self._hidden
            else:
                level, above = levels[parents[0]] + 1, torch.stack([paths[parent] for parent in parents.tolist()])
            inputs = torch.cat([above, embedded], dim=-1)
            paths.extend(inputs)
            levels.extend([level] * len(inputs))
            top = self._top(self._heads.blocks[level](inputs), head=level, vocab=context.vocab, count=CANDIDATES)
            return top.ids.cpu().numpy(), np.minimum(top.log_probs.double().cpu().numpy(), 0.0)

        return self._levels.grow(expand, context, budget=budget, width=self.width, depth=depth)

    @property
    def lag(self) -> int:
        return max(0, sum(map(len, self._pending)) - self._fresh)

    def catch_up(self) -> None:
        self._run(self.lag)

    def _run(self, count: int) -> None:
        """Take in the first `count` pending hidden states."""
        import torch

        from adaptspec.drafters.cells.cache import CellCache

        if not count:
            return
        pending = torch.cat(self._pending)
        now, later = pending[:count], pending[count:]
        self._pending = [later] if len(later) else []
        if self._heads.prefix is None:
            self._hidden = now[-1:]
            return
        self._cache = self._cache or CellCache()
        with torch.inference_mode():
            positions = torch.arange(self._length, self._length + count, device=now.device)[None]
            output = self._heads.prefix(now[None], positions=positions, store=partial(self._cache.append, 0))
        self._length += count
        self._hidden = output[0, -1:]

    def _close(self) -> None:
        self._pending: list[torch.Tensor] = []
        self._fresh = 0
        self._hidden: torch.Tensor | None = None
        self._cache: CellCache | None = None
        self._length = 0
