"""What drafters share that need no weights: a chain drafted by a shortened target, on the target's own cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from adaptspec.drafters.base import Needs
from adaptspec.drafters.headed import HeadedDrafter
from adaptspec.drafters.lookup import whole_number
from adaptspec.types import DraftContext, DraftTree

if TYPE_CHECKING:
    import torch

    from adaptspec.drafters.model_rows import DraftHead
    from adaptspec.target.base import Target
    from adaptspec.target.hf import HFTarget
    from adaptspec.target.trunk import Trunk


class OwnLayers(HeadedDrafter):
    """Drafts a chain with a part of the target's layers. Keys and values of the committed text are the target's.

    A part that is the first layers leaves them behind as a trunk, from which the verify pass goes on. Any other part
    computes other states than the target does, so its rows are forgotten.

    Subclasses say which part in `_shorten`, and in `_min_confidence` where the chain ends: at a token to which the
    shortened model gives a smaller probability.

    Args:
        max_depth: tokens drafted in a row at most, each a pass of the part.
    """

    needs = Needs(target=True)

    def __init__(self, *, max_depth: int) -> None:
        super().__init__()
        self.max_depth = whole_number("max_depth", max_depth, 1)
        self._target: HFTarget | None = None
        self._view: torch.nn.Module | None = None
        self._exit: int | None = None
        self._norm: Callable[[torch.Tensor], torch.Tensor] | None = None

    @abstractmethod
    def _shorten(self, target: HFTarget) -> torch.nn.Module | int:
        """A view of the model that lacks layers, or how many of the first layers to run.

        Raises:
            ValueError: layers that the target does not have.
        """

    @abstractmethod
    def _min_confidence(self) -> float:
        """Now."""

    def bind(self, target: Target) -> None:
        from adaptspec.drafters.model_rows import without_head
        from adaptspec.drafters.target_parts import target_parts
        from adaptspec.target.hf import HFTarget

        if not isinstance(target, HFTarget):
            raise ValueError(f"{self.name} needs a transformers target, got {type(target).__name__}")
        self._target = target
        weight = target.model.get_output_embeddings().weight.detach()
        special_ids = target.special_ids()
        bound = (target.model, weight.data_ptr(), target.device, target.dtype, special_ids)
        if self._bound == bound:  # a target is made per request, the model behind it is mostly the same
            return
        self._bound = ()
        part = self._shorten(target)
        self._view, self._exit = (None, part) if isinstance(part, int) else (part, None)
        heads = self._head_sets()
        heads.bind([weight], vocab_size=target.vocab_size, keep=special_ids)
        self.needs = Needs(
            target=True,
            target_top_k=heads.needs_top_k,
            prompt_top_k=heads.needs_prompt_top_k,
            target_top_logits=heads.needs_top_logits,
        )
        if self._view is None:
            self._norm = target_parts(target, drafter=self.name).norm
        elif self.vocab != ("full",):  # else the model's own head gives logits
            self._view = without_head(self._view)
        self._bound = bound

    def prefill(
        self, token_ids: np.ndarray, features: Mapping[int, Any] | None = None, top_ids: np.ndarray | None = None
    ) -> None:
        self._head_sets().prefill(token_ids, top_ids)

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        import torch

        from adaptspec.drafters.model_rows import ModelRows, greedy_chain

        target = self._open()
        depth = min(budget, context.max_depth, self.max_depth)
        if depth < 1:
            return DraftTree.empty()
        options: dict[str, Any] = {
            "depth": depth,
            "min_confidence": self._min_confidence(),
            "vocab_size": target.vocab_size,
            "head": self._head(context.vocab),
            "stop": self._levels.stop(context, budget=budget, width=1),
        }
        root, above = np.array([context.root]), np.array([-1])
        if self._exit is not None:
            assert self._norm is not None
            exits: Any = ExitRows(target.trunk(), self._exit, self._norm)
            with torch.inference_mode():
                tree = greedy_chain(exits, exits.run(root, above), **options)
        else:
            rows = ModelRows(target, root_cached=False, model=self._view)
            try:
                tree = greedy_chain(rows, rows.run(root, above), **options)
            finally:
                target.rollback(target.length)  # the shortened model's rows are no part of the target's cache
        self._levels.proposed(tree)
        return tree

    def _head(self, vocab: str) -> DraftHead:
        from adaptspec.drafters.model_rows import ReducedHead, WholeHead

        if self._exit is None and self.vocab == ("full",):
            return WholeHead(self._open().vocab_size)
        return ReducedHead(self._head_sets()[0][vocab])

    def _open(self) -> HFTarget:
        if self._target is None:
            raise RuntimeError(f"{self.name} has no target yet; call bind first")
        return self._target


class ExitRows:
    """Rows of a trunk as a model's rows: what comes out after the last of the first layers, and the final norm."""

    def __init__(self, trunk: Trunk, layers: int, norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.trunk, self.layers, self.norm = trunk, layers, norm

    def run(self, token_ids: np.ndarray, parents: np.ndarray) -> torch.Tensor:
        """[R, H], what the head multiplies; see `Trunk.run`."""
        return self.norm(self.trunk.run(token_ids, parents, layers=self.layers))
