"""DFlash and DDTree: one distribution per place of the block, as a chain or as the best tree."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import numpy as np

from adaptspec.drafters.block_drafter import BlockDrafter
from adaptspec.drafters.lookup import real_number
from adaptspec.drafters.registry import register_drafter
from adaptspec.names import unknown_name
from adaptspec.trees import ExpandRows, best_first, chain, cost_aware, sampled_chain
from adaptspec.types import DraftContext, DraftTree, Sampling, Siblings

if TYPE_CHECKING:
    import torch

    from adaptspec.trees.cost_aware import VerifySeconds

Tree = Literal["chain", "best-first"]
_SIBLINGS: tuple[Siblings, ...] = ("deterministic", "iid")


class BlockMarginals(BlockDrafter):
    """Drafts from the marginals of the block as they are.

    The token of a place is drawn without looking at the tokens before it, so q of a node of a drawn chain is the
    marginal of its place whatever lies above, and the usual ratio p / q keeps the target's law. Trees are deterministic
    at any temperature, and those of smaller budgets are part of those of larger ones.

    Args:
        path, max_depth, window: see `BlockDrafter`.
        tree: "chain" of the likeliest token of every place; "best-first" takes the nodes with the largest products of
            the marginals, the best tree of its size if they are right (DDTree, arXiv 2604.12989).
        siblings: how the chain is chosen when the target samples: "iid" (the default) draws it after the target's
            temperature, top-k and nucleus; "deterministic" keeps the likeliest tokens.
        verify_seconds: of a verification with n draft nodes, a callable or a table; the tree then stops growing where
            expected tokens per second fall (CaDDTree). The budget "auto" sizes trees by measured costs instead.
        draft_seconds: of drafting, for that rule.

    Raises:
        ValueError: see `BlockDrafter`; options that do not go with the tree.
    """

    default_tree: ClassVar[Tree] = "chain"

    def __init__(
        self,
        path: str | os.PathLike[str] | torch.nn.Module | None = None,
        *,
        tree: Tree | None = None,
        siblings: Siblings | None = None,
        max_depth: int | None = None,
        window: int | None = None,
        verify_seconds: VerifySeconds | None = None,
        draft_seconds: float = 0.0,
    ) -> None:
        super().__init__(path, max_depth=max_depth, window=window)
        self.tree: Tree = self.default_tree if tree is None else tree
        if self.tree not in get_args(Tree):
            raise unknown_name("tree", self.tree, get_args(Tree))
        self.siblings = ("iid" if self.tree == "chain" else "deterministic") if siblings is None else siblings
        if self.siblings not in _SIBLINGS:
            raise unknown_name("siblings", self.siblings, _SIBLINGS)
        if self.siblings != "deterministic" and self.tree != "chain":
            raise ValueError(f"siblings of a tree must be 'deterministic', got {self.siblings!r}")
        if verify_seconds is not None and self.tree == "chain":
            raise ValueError("verify_seconds is an option of tree='best-first'")
        self.verify_seconds = verify_seconds
        self.draft_seconds = real_number("draft_seconds", draft_seconds, 0.0)

    def draft_probs_along(self, context: DraftContext, token_ids: np.ndarray) -> np.ndarray:
        """q along given tokens: float32 [n, V], row j is what token j would be drawn from; it does not depend on the
        tokens before. For judging steps in which the drafter was not played.

        Args:
            context: of the proposal; at temperature 0 q is that of temperature 1.
            token_ids: int64 [n], the tokens after the root; n is at most the places of a block.

        Raises:
            RuntimeError: no request is open.
            ValueError: more tokens than places.
        """
        import torch

        block = self._open()
        block.settle()
        with torch.inference_mode():
            hidden = block.draft(context.root)
            if len(token_ids) > len(hidden):
                raise ValueError(
                    f"token_ids must be at most {len(hidden)}, the places of a block, got {len(token_ids)}"
                )
            if context.sampling.greedy:
                context = replace(context, sampling=Sampling(temperature=1.0))
            return self._rows(context, hidden[: len(token_ids)])

    def _draft(self, context: DraftContext, hidden: torch.Tensor, *, budget: int) -> DraftTree:
        if self.siblings != "deterministic" and not context.sampling.greedy:
            expand = _in_turn(self._rows(context, hidden))
            tree = sampled_chain(expand, root=context.root, length=len(hidden), rng=context.rng)
            return replace(tree, evidence={"log_prob": np.diff(tree.scores, prepend=0.0)}) if len(tree) else tree
        count = 1 if self.tree == "chain" else budget
        ids, log_probs = self._likeliest(self._norm(hidden), vocab=context.vocab, count=count)
        if self.tree == "chain":
            ids, log_probs = ids[:, 0], log_probs[:, 0]
            length = len(ids) if np.isfinite(log_probs).all() else int(np.isinf(log_probs).argmax())
            return chain(ids[:length], log_probs[:length], evidence={"log_prob": log_probs[:length]})
        if self.verify_seconds is None:
            return best_first(log_probs, ids, budget=budget)
        return cost_aware(
            log_probs, ids, budget=budget, verify_seconds=self.verify_seconds, draft_seconds=self.draft_seconds
        )

    def _rows(self, context: DraftContext, hidden: torch.Tensor) -> np.ndarray:
        """q of every place, float32 [D, V]: over the rows in use, 0 elsewhere."""
        from adaptspec.drafters.model_rows import ReducedHead

        head = ReducedHead(self._head(context.vocab))
        return head.distribution(self._norm(hidden), context.sampling, depth=1).cpu().numpy()


def _in_turn(rows: np.ndarray) -> ExpandRows:
    """One row after the other, whatever has been drawn."""
    left = iter(rows)

    def expand(token_ids: np.ndarray, parents: np.ndarray) -> np.ndarray:
        return next(left)[None]

    return expand


@register_drafter("dflash")
class DFlash(BlockMarginals):
    """DFlash (arXiv 2602.06036): the block as a chain."""

    summary = "a block of tokens in one pass over the target's hidden states (DFlash, 2602.06036)"
    default_tree = "chain"


@register_drafter("ddtree")
class DDTree(BlockMarginals):
    """DDTree (arXiv 2604.12989): DFlash's weights, and the best tree under its marginals."""

    summary = "DFlash's block as the best tree of its size (DDTree, 2604.12989)"
    default_tree = "best-first"
