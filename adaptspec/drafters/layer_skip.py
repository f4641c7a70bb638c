"""Self-speculation on the target's own layers: some are skipped while drafting (arXiv 2309.08168, 2404.16710)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from adaptspec.drafters.base import Drafter, Needs
from adaptspec.drafters.registry import register_drafter
from adaptspec.types import DraftContext, DraftTree, Observation

if TYPE_CHECKING:
    import torch

    from adaptspec.target.base import Target
    from adaptspec.target.hf import HFTarget


@register_drafter("layer-skip")
class LayerSkip(Drafter):
    """Drafts a chain with the target minus some of its layers, reading the target's own KV cache for the rest.

    Needs no weights and no memory. How much it gains depends on how well the target survives without the layers;
    models trained for early exit do, small ordinary ones hardly.

    Args:
        skip: layers left out, counted from 0; "auto" leaves out every second layer of the middle half.
        min_confidence: the chain ends where the shortened model's probability for its token falls below this.
        max_depth: tokens drafted in a row at most, each a forward pass.

    Raises:
        ValueError: options out of range; on `bind`, layers the target does not have.
    """

    summary = "the target with layers skipped, on the target's own KV cache"
    needs = Needs(target=True)
    isolate = False

    def __init__(self, *, skip: Sequence[int] | str = "auto", min_confidence: float = 0.4, max_depth: int = 6) -> None:
        if isinstance(skip, str) and skip != "auto":
            raise ValueError(f"skip must be 'auto' or layer numbers, got {skip!r}")
        if not 0.0 <= min_confidence < 1.0:
            raise ValueError(f"min_confidence must be in [0, 1), got {min_confidence}")
        if max_depth < 1:
            raise ValueError(f"max_depth must be >= 1, got {max_depth}")
        self.skip = skip
        self.min_confidence = min_confidence
        self.max_depth = max_depth
        self._target: HFTarget | None = None
        self._view: torch.nn.Module | None = None

    def bind(self, target: Target) -> None:
        from adaptspec.drafters.model_rows import with_layers
        from adaptspec.target.hf import HFTarget

        if not isinstance(target, HFTarget):
            raise ValueError(f"layer-skip needs a transformers target, got {type(target).__name__}")
        count = len(target.layout.layers)
        skip = set(range(count // 4 + 1, count - count // 4, 2) if isinstance(self.skip, str) else self.skip)
        if not all(isinstance(layer, int) and 0 <= layer < count for layer in skip) or len(skip) == count:
            raise ValueError(f"skip must hold layers in [0, {count}) and leave at least one, got {sorted(skip)}")
        self._target = target
        self._view = with_layers(target.model, [layer for layer in range(count) if layer not in skip])

    def prefill(self, token_ids: np.ndarray, features: Mapping[int, Any] | None = None) -> None:
        """Nothing to keep: the target's cache serves."""

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        from adaptspec.drafters.model_rows import ModelRows, greedy_chain

        target = self._target
        if target is None:
            raise RuntimeError("layer-skip has no target yet; call bind first")
        depth = min(budget, context.max_depth, self.max_depth)
        if depth < 1:
            return DraftTree.empty()
        rows = ModelRows(target, root_cached=False, model=self._view)
        try:
            root_logits = rows.run(np.array([context.root]), np.array([-1]))
            return greedy_chain(
                rows,
                root_logits,
                depth=depth,
                min_confidence=self.min_confidence,
                vocab_size=target.vocab_size,
            )
        finally:
            target.rollback(target.length)  # the shortened model's rows are no part of the target's cache

    def observe(self, observation: Observation) -> None:
        """Nothing to keep."""
