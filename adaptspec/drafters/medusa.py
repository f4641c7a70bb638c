"""Medusa: several positions at once from the target's last hidden state (arXiv 2401.10774)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from adaptspec.drafters.heads_drafter import CANDIDATES, HeadsDrafter
from adaptspec.drafters.registry import register_drafter
from adaptspec.names import unknown_name
from adaptspec.trees import best_first, fill_by_rank, medusa_template
from adaptspec.types import DraftContext, DraftTree

if TYPE_CHECKING:
    import torch

TREES = ("best-first", "template")


@register_drafter("medusa")
class Medusa(HeadsDrafter):
    """Head i predicts the token i + 2 places after the hidden state it reads, without seeing the ones in between.

    One matrix product for all heads, then one with the output matrix: the cheapest trained draft there is. Trees are
    deterministic at any temperature. Nothing has to be caught up: every step brings the hidden state it needs.

    Args:
        path: see `HeadsDrafter`; published checkpoints hold `medusa_lm_head.pt`, from which the number of heads is
            read and not from their config.
        tree: "best-first" takes the nodes with the largest products of the heads' probabilities (DDTree's heap), which
            is the best tree if they are right; "template" fills Medusa's fixed 63 nodes by rank.
        max_depth: heads used at most.
    """

    summary = "several heads on the target's last hidden state (2401.10774)"
    module = "MedusaHeads"
    weights = "medusa"

    def __init__(
        self, path: str | torch.nn.Module | None = None, *, tree: str = "best-first", max_depth: int = 8
    ) -> None:
        if tree not in TREES:
            raise unknown_name("tree", tree, TREES)
        super().__init__(path, max_depth=max_depth)
        self.tree = tree
        self._hidden: torch.Tensor | None = None

    def _take(self, hidden: torch.Tensor, *, first: int | None) -> None:
        self._hidden = hidden[-1:]

    def _draft(self, context: DraftContext, *, budget: int, depth: int) -> DraftTree:
        import torch

        if self._hidden is None:
            return DraftTree.empty()
        inputs = [block(self._hidden) for block in self._heads.blocks[:depth]]
        if len(self._head_sets()) == 1:
            # One product for all heads: the output matrix is far larger than what it multiplies, and read once.
            tops = [self._top(torch.cat(inputs), head=0, vocab=context.vocab, count=CANDIDATES)]
        else:
            tops = [
                self._top(hidden, head=head, vocab=context.vocab, count=CANDIDATES)
                for head, hidden in enumerate(inputs)
            ]
        ids = torch.cat([top.ids for top in tops]).cpu().numpy()
        log_probs = np.minimum(torch.cat([top.log_probs for top in tops]).double().cpu().numpy(), 0.0)
        if self.tree == "best-first":
            return best_first(log_probs, ids, budget=budget)
        return fill_by_rank(medusa_template(), ids, log_probs, budget=budget)

    def _close(self) -> None:
        self._hidden = None
