"""Drafters that get a whole block of tokens out of one pass of DFlash's backbone; what they share."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from adaptspec.drafters.base import Needs
from adaptspec.drafters.headed import HeadedDrafter
from adaptspec.drafters.lookup import whole_number
from adaptspec.types import DraftContext, DraftTree, Observation

if TYPE_CHECKING:
    import torch

    from adaptspec.drafters.block import BlockContext
    from adaptspec.drafters.target_parts import TargetParts
    from adaptspec.target.base import Target
    from adaptspec.vocab import VocabHead


class BlockDrafter(HeadedDrafter):
    """The target's hidden states at all committed positions are the context that one pass over a block of masks reads;
    row j of the block gives the marginal distribution of the j-th token after the root (DFlash, arXiv 2602.06036).

    Keys and values are kept for the context only, and only new positions get projected: a proposal depends on the
    committed text alone. While it is not asked it keeps the features, and catches up in one batched pass.

    Args:
        path: a trained folder, a published checkpoint (folder, file or hub id), a module, or None for the weights
            shipped for the target.
        max_depth: tokens drafted in a row at most, by default all of the block.
        window: the block sees context of the last so many positions at most, which keeps long texts cheap and near to
            what the backbone was trained on; None: as the weights say.
        backbone: folder of the backbone, for weights that name one; see `adaptspec.drafters.block.weights.load_block`.

    Raises:
        ValueError: options out of range; on `bind`, weights that are missing or do not fit the target.
    """

    weights = "dflash"
    kind: ClassVar[str] = "dflash"
    """Of the weights."""

    def __init__(
        self,
        path: str | os.PathLike[str] | torch.nn.Module | None = None,
        *,
        max_depth: int | None = None,
        window: int | None = None,
        backbone: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        if backbone is not None and self.kind == "dflash":
            raise ValueError(f"backbone is no option of {self.name}, whose weights are the backbone; give path=")
        self.path = path
        self.max_depth = None if max_depth is None else whole_number("max_depth", max_depth, 1)
        self.window = None if window is None else whole_number("window", window, 1)
        self.backbone = backbone
        self._block: BlockContext | None = None
        self._model: Any = None
        self._parts: TargetParts | None = None

    def bind(self, target: Target) -> None:
        from adaptspec.drafters.block import BlockContext
        from adaptspec.drafters.block.weights import backbone_of, load_block
        from adaptspec.drafters.target_parts import target_parts

        parts = target_parts(target, drafter=self.name)
        bound = (parts.embed, parts.head.data_ptr(), parts.device, parts.dtype, parts.special_ids)
        if self._bound == bound:  # a target is made per request, the model behind it is mostly the same
            return
        module = load_block(self.path, name=self.name, kind=self.kind, target=target, backbone=self.backbone)
        module = module.to(device=parts.device, dtype=parts.dtype).eval().requires_grad_(False)
        backbone = backbone_of(module)
        heads = self._head_sets()
        heads.bind([parts.head], vocab_size=parts.vocab_size, keep=parts.special_ids)
        self.needs = Needs(
            taps=tuple(sorted(set(backbone.config.taps))),
            target_top_k=heads.needs_top_k,
            prompt_top_k=heads.needs_prompt_top_k,
            target_top_logits=heads.needs_top_logits,
        )
        self._block = BlockContext(backbone, parts.embed, window=self.window)
        self._model, self._parts, self._bound = module, parts, bound

    def prefill(
        self,
        token_ids: np.ndarray,
        features: Mapping[int, Any] | None = None,
        top_ids: np.ndarray | None = None,
    ) -> None:
        block = self._open()
        block.start()
        self._head_sets().prefill(token_ids, top_ids)
        if features is None:
            raise ValueError(f"{self.name} needs the hidden states of the layers {list(self.needs.taps)}, got none")
        block.push(features, count=len(token_ids) - 1)
        block.settle()

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        import torch

        block = self._open()
        places = block.backbone.config.block_size - 1
        depth = min(budget, context.max_depth, places, self.max_depth or places)
        if depth < 1 or not block.ready:
            return DraftTree.empty()
        block.settle()
        with torch.inference_mode():
            return self._draft(context, block.draft(context.root)[:depth], budget=budget)

    def observe(self, observation: Observation) -> None:
        block = self._open()
        super().observe(observation)
        block.push(observation.features, count=len(observation.tokens))

    @property
    def lag(self) -> int:
        # What the last step committed is projected by every proposal.
        return 0 if self._block is None else self._block.lag

    def catch_up(self) -> None:
        self._open().settle(but_last=True)

    def finish(self) -> None:
        super().finish()
        self._open().start()

    def reset(self) -> None:
        super().reset()
        if self._block is not None:
            self._block.start()

    @abstractmethod
    def _draft(self, context: DraftContext, hidden: torch.Tensor, *, budget: int) -> DraftTree:
        """A tree from un-normed hidden states [D, H] of the places after the root, D >= 1."""

    def _norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the head multiplies."""
        return self._open().backbone.norm(hidden)

    def _likeliest(self, inputs: torch.Tensor, *, vocab: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The `count` likeliest tokens of every row of head inputs [M, H], likeliest first: ids and log-probabilities
        [M, K]. Places without a token have -inf."""
        from adaptspec.kernels.vocab_head import MAX_K

        head = self._head(vocab)
        count = max(1, min(count, head.rows))
        if count <= MAX_K:
            top = head.top(inputs, k=count, depth=1)
            return top.ids.cpu().numpy(), np.minimum(top.log_probs.double().cpu().numpy(), 0.0)
        import torch

        ids, logits = head.logits(inputs, depth=1)
        values, places = torch.log_softmax(logits.float(), dim=-1).topk(min(count, logits.shape[-1]), dim=-1)
        return ids[places].cpu().numpy(), np.minimum(values.double().cpu().numpy(), 0.0)

    def _head(self, vocab: str) -> VocabHead:
        return self._head_sets()[0][vocab]

    def _embed(self, token_ids: np.ndarray) -> torch.Tensor:
        """Embeddings [..., H] of tokens int64 [...]."""
        import torch

        assert self._parts is not None
        return self._parts.embed(torch.from_numpy(np.asarray(token_ids, dtype=np.int64)).to(self._parts.device))

    def _open(self) -> BlockContext:
        if self._block is None:
            raise RuntimeError(f"{self.name} has no target yet; call bind first")
        return self._block
