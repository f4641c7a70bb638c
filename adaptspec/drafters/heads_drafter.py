"""Drafters that read the target's last hidden state with a few small heads: what Medusa and Hydra share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from adaptspec.drafters.base import Needs
from adaptspec.drafters.headed import HeadedDrafter
from adaptspec.types import DraftContext, DraftTree, Observation

if TYPE_CHECKING:
    import torch

    from adaptspec.drafters.target_parts import TargetParts
    from adaptspec.kernels.vocab_head import TopTokens
    from adaptspec.target.base import Target

CANDIDATES = 16
"""Most likely tokens looked at per position."""


class HeadsDrafter(HeadedDrafter):
    """Drafts from the target's final-norm hidden states.

    The root is not in the target's cache yet when it is drafted from, so the newest hidden state belongs to the token
    before it. Head 0 takes that state as it was trained to: it predicts the token after next, a child of the root.

    Args:
        path: a trained folder, a published checkpoint (folder, file or hub id), a module, or None for the weights
            shipped for the target.
        max_depth: heads used at most.

    Raises:
        ValueError: options out of range; on `bind`, weights that do not fit the target.
    """

    module: ClassVar[str] = ""
    """Name of the module class, for messages."""

    def __init__(self, path: str | torch.nn.Module | None = None, *, max_depth: int = 8) -> None:
        if max_depth < 1:
            raise ValueError(f"max_depth must be >= 1, got {max_depth}")
        super().__init__()
        self.path = path
        self.max_depth = max_depth
        self._heads: Any = None
        self._parts: TargetParts | None = None

    def bind(self, target: Target) -> None:
        import copy

        from adaptspec.drafters.head_weights import load_heads
        from adaptspec.drafters.target_parts import target_parts

        parts = target_parts(target, drafter=self.name)
        bound = (target.model, parts.device, parts.dtype, parts.special_ids)  # type: ignore[attr-defined]
        if len(self._bound) == len(bound) and all(a is b or a == b for a, b in zip(self._bound, bound, strict=True)):
            self._parts = parts
            return
        module = self.path if _is_module(self.path) else load_heads(self.path, kind=self.name, target=target)
        if type(module).__name__ != self.module:
            raise ValueError(f"{self.name} needs {self.module}, got {type(module).__name__}")
        config = module.config
        if config.hidden_size != parts.hidden_size:
            raise ValueError(
                f"hidden_size of {self.name} must be the target's {parts.hidden_size}, got {config.hidden_size}"
            )
        if config.vocab_size is not None and config.vocab_size > parts.vocab_size:
            raise ValueError(
                f"vocab_size of {self.name} must be at most the target's {parts.vocab_size}, got {config.vocab_size}"
            )
        # A copy: the module that was handed in keeps its own type, device and gradients.
        module = copy.deepcopy(module).to(device=parts.device, dtype=parts.dtype).eval().requires_grad_(False)
        weights = module.output_weights() or [parts.head]
        heads = self._head_sets()
        heads.bind(weights, vocab_size=parts.vocab_size, keep=parts.special_ids)
        self.needs = Needs(
            taps=(parts.layers,),
            target_top_k=heads.needs_top_k,
            prompt_top_k=heads.needs_prompt_top_k,
            target_top_logits=heads.needs_top_logits,
        )
        self._heads, self._parts, self._bound = module, parts, bound
        self._close()

    def prefill(
        self,
        token_ids: np.ndarray,
        features: Mapping[int, Any] | None = None,
        top_ids: np.ndarray | None = None,
    ) -> None:
        parts = self._open()
        self._head_sets().prefill(token_ids, top_ids)
        if features is None or parts.layers not in features:
            raise ValueError(f"{self.name} needs the hidden states of layer {parts.layers}, got none")
        self._close()
        self._take(self._normed(features[parts.layers]), first=0)

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        import torch

        self._open()
        depth = min(budget, context.max_depth, self.max_depth, self._heads.config.heads)
        if depth < 1:
            return DraftTree.empty()
        with torch.inference_mode():
            return self._draft(context, budget=budget, depth=depth)

    def observe(self, observation: Observation) -> None:
        parts = self._open()
        super().observe(observation)
        if parts.layers in observation.features:
            self._take(self._normed(observation.features[parts.layers]), first=None)

    def finish(self) -> None:
        super().finish()
        self._close()

    def reset(self) -> None:
        super().reset()

    @abstractmethod
    def _take(self, hidden: torch.Tensor, *, first: int | None) -> None:
        """New final-norm hidden states [T, H] of committed tokens, the root left out; `first` is 0 at prefill."""

    @abstractmethod
    def _draft(self, context: DraftContext, *, budget: int, depth: int) -> DraftTree:
        """A tree of `depth` >= 1 levels at most."""

    @abstractmethod
    def _close(self) -> None:
        """Forget the request."""

    def _top(self, hidden: torch.Tensor, *, head: int, vocab: str, count: int) -> TopTokens:
        """The most likely tokens under head number `head` for its inputs [M, H]."""
        import torch

        sets = self._head_sets()
        heads = sets[min(head, len(sets) - 1)][vocab]
        if heads.weight.shape[1] > hidden.shape[1]:  # the last column is the bias
            hidden = torch.cat([hidden, hidden.new_ones((len(hidden), 1))], dim=1)
        return heads.top(hidden.to(heads.weight.dtype), k=min(count, heads.rows), depth=head + 1)

    def _normed(self, hidden: torch.Tensor) -> torch.Tensor:
        import torch

        with torch.inference_mode():
            return self._open().norm(hidden)

    def _open(self) -> TargetParts:
        if self._parts is None:
            raise RuntimeError(f"{self.name} has no target yet; call bind first")
        return self._parts


def _is_module(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "forward")
