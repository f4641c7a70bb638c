"""TAPS: a large trie out of DFlash's block, and the prefixes that the target is likely to reach (arXiv 2606.00487)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from adaptspec.drafters.block_drafter import BlockDrafter
from adaptspec.drafters.lookup import real_number, whole_number
from adaptspec.drafters.registry import register_drafter
from adaptspec.trees import lattice_trie, select_prefixes
from adaptspec.trees.prefix_selection import DEPTH_PENALTY
from adaptspec.types import DraftContext, DraftTree

if TYPE_CHECKING:
    import torch

CANDIDATES = 64
BEAM = 48
MOST_NODES = 768


@register_drafter("taps")
class Taps(BlockDrafter):
    """The likeliest tokens of every place span a lattice, a beam through it gives a trie, a small scorer says for each
    edge how likely the target is to take it, and the prefixes most likely to be reached make the tree. Trees are
    deterministic at any temperature, and those of smaller budgets are part of those of larger ones. Budgets mean what
    they mean for other drafters, while published gains over DDTree compare trees of different sizes.

    Args:
        path, max_depth, window, backbone: see `BlockDrafter`. Trained folders hold the scorer alone.
        candidates: tokens per place.
        beam: prefixes per depth of the trie.
        depth_penalty: lambda, see `adaptspec.trees.prefix_selection`.

    Raises:
        ValueError: options out of range; on `bind`, weights that are missing or do not fit the target.
    """

    summary = "prefixes of DFlash's block chosen by a small scorer (TAPS, 2606.00487)"
    weights = "taps"
    kind = "taps"

    def __init__(
        self,
        path: str | os.PathLike[str] | torch.nn.Module | None = None,
        *,
        candidates: int = CANDIDATES,
        beam: int = BEAM,
        depth_penalty: float = DEPTH_PENALTY,
        max_depth: int | None = None,
        window: int | None = None,
        backbone: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(path, max_depth=max_depth, window=window, backbone=backbone)
        self.candidates = whole_number("candidates", candidates, 1)
        self.beam = whole_number("beam", beam, 1)
        self.depth_penalty = real_number("depth_penalty", depth_penalty, 0.0)

    def _draft(self, context: DraftContext, hidden: torch.Tensor, *, budget: int) -> DraftTree:
        import torch

        from adaptspec.drafters.block.scorer import edge_log_probs

        normed = self._norm(hidden)
        rows_in_use, logits = self._head(context.vocab).logits(normed, depth=1)
        marginals = torch.log_softmax(logits.float(), dim=-1)
        top = marginals.topk(min(self.candidates, marginals.shape[-1]), dim=-1)
        entropy = -torch.special.xlogy(marginals.exp(), marginals.exp()).sum(dim=-1)
        ids = rows_in_use[top.indices].cpu().numpy()
        log_probs = np.minimum(top.values.double().cpu().numpy(), 0.0)
        trie = lattice_trie(log_probs, ids, beam=self.beam, most_nodes=MOST_NODES)
        if not len(trie):
            return trie
        above = np.concatenate([[context.root], trie.token_ids])[trie.parents + 1]
        steps = edge_log_probs(
            self._model.scorer,
            trie,
            children=self._embed(trie.token_ids),
            parents=self._embed(above),
            hidden=normed,
            best=log_probs[:, 0],
            entropy=entropy.double().cpu().numpy(),
        )
        return select_prefixes(trie, steps, budget=budget, depth_penalty=self.depth_penalty)
