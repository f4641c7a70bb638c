"""Multi-token prediction with decoder layers out of parts: latent attention, experts, sinks, windows, gates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from adaptspec.drafters.cells.attention import Store
from adaptspec.drafters.cells.base import RMSNorm
from adaptspec.drafters.cells.blocks import Block, BlockConfig
from adaptspec.drafters.cells.cache import CellCache
from adaptspec.drafters.cells.config import CellConfig
from adaptspec.drafters.cells.mtp import PredictionLayers


class BlockMTPCell(PredictionLayers):
    """Prediction layers with decoder layers out of parts (DeepSeek-V3, arXiv 2412.19437, equations 21 to 23).

    Args:
        config: of kind "mtp"; `norm_output` says whether the recursion feeds the normed state.
        blocks: one decoder layer per prediction layer.
    """

    def __init__(self, config: CellConfig, blocks: Sequence[BlockConfig]) -> None:
        super().__init__(config)
        if len(blocks) != config.num_layers:
            raise ValueError(f"blocks must be one per prediction layer, {config.num_layers}, got {len(blocks)}")
        self.layers = nn.ModuleList(BlockMTPLayer(block) for block in blocks)

    def _run(
        self,
        number: int,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        *,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        cache: CellCache | None,
    ) -> torch.Tensor:
        store = None if cache is None else partial(_append, cache, number)
        return self.layers[number](embeddings, hidden, positions=positions, mask=mask, store=store)


class BlockMTPLayer(nn.Module):
    """The projection of embedding and hidden state, a decoder layer, and the norm of its head."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.enorm = RMSNorm(size, config.eps)
        self.hnorm = RMSNorm(size, config.eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = Block(config)
        self.norm = RMSNorm(size, config.eps)

    def forward(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        *,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        store: Store | None,
    ) -> torch.Tensor:
        joined = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], dim=-1))
        return self.block(joined, positions=positions, mask=mask, store=store)


def _append(
    cache: CellCache, layer: int, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cached rows are of one width; values that are narrower than keys are filled up in the cache."""
    missing = keys.shape[-1] - values.shape[-1]
    keys, padded = cache.append(layer, keys, functional.pad(values, (0, missing)) if missing else values)
    return keys, padded[..., : padded.shape[-1] - missing]
