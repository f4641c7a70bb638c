"""Self-speculation on the target's own layers: exit early, or skip some (arXiv 2404.16710, 2309.08168)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from adaptspec.drafters.early_exit.own_layers import OwnLayers
from adaptspec.drafters.early_exit.skipped import middle_layers
from adaptspec.drafters.lookup import share, whole_number
from adaptspec.drafters.registry import register_drafter

if TYPE_CHECKING:
    import torch

    from adaptspec.target.hf import HFTarget


@register_drafter("layer-skip")
class LayerSkip(OwnLayers):
    """Drafts a chain with the target minus some of its layers, reading the target's own KV cache for the rest.

    Needs no weights and no memory. How much it gains depends on how well the target survives without the layers;
    models trained for early exit do, small ordinary ones hardly.

    Args:
        skip: layers left out, counted from 0; "auto" leaves out every second layer of the middle half.
        exit: LayerSkip (arXiv 2404.16710): run the first so many layers, then the target's own final norm and head. The
            verify pass goes on from there, so no layer runs twice for a drafted token. Excludes `skip`.
        min_confidence: the chain ends where the shortened model's probability for its token falls below this.
        max_depth: tokens drafted in a row at most, each a forward pass.

    Raises:
        ValueError: options out of range; on `bind`, layers the target does not have.
    """

    summary = "the target with layers skipped, or left early, on the target's own KV cache"

    def __init__(
        self,
        *,
        skip: Sequence[int] | str = "auto",
        exit: int | None = None,
        min_confidence: float = 0.4,
        max_depth: int = 6,
    ) -> None:
        if skip != "auto" and (isinstance(skip, str) or not isinstance(skip, Sequence)):
            raise ValueError(f"skip must be 'auto' or layer numbers, got {skip!r}")
        if exit is not None and skip != "auto":
            raise ValueError(f"give either skip or exit, got skip = {list(skip)} and exit = {exit}")
        super().__init__(max_depth=max_depth)
        self.skip = skip
        self.exit = None if exit is None else whole_number("exit", exit, 1)
        self.min_confidence = share("min_confidence", min_confidence)

    def _shorten(self, target: HFTarget) -> torch.nn.Module | int:
        from adaptspec.target.views import with_layers

        count = len(target.layout.layers)
        if self.exit is not None:
            if self.exit >= count:
                raise ValueError(f"exit must be in [1, {count - 1}], got {self.exit}")
            return self.exit
        skip = set(middle_layers(count) if isinstance(self.skip, str) else self.skip)
        if not all(isinstance(layer, int) and 0 <= layer < count for layer in skip) or len(skip) == count:
            raise ValueError(f"skip must hold layers in [0, {count}) and leave at least one, got {sorted(skip)}")
        return with_layers(target.model, [layer for layer in range(count) if layer not in skip])

    def _min_confidence(self) -> float:
        return self.min_confidence
