"""Multi-token prediction layers (DeepSeek-V3, arXiv 2412.19437, section 2.2) as a cell."""

from __future__ import annotations

import torch
from torch import nn

from adaptspec.drafters.cells.base import Attention, Cell, GatedMLP, RMSNorm
from adaptspec.drafters.cells.cache import CellCache
from adaptspec.drafters.cells.config import CellConfig


class MTPCell(Cell):
    """h_k = layer_k(eh_proj(cat[enorm(e), hnorm(h_{k-1})])), then a norm and the head.

    With one layer the recursion reuses it and its cached rows. With several, step k uses layer k, which has rows of its
    own in the cache: row i of layer k takes token i + 1 + k and what layer k - 1 returned for row i.
    """

    def __init__(self, config: CellConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList([MTPLayer(config) for _ in range(config.num_layers)])

    def forward(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        *,
        positions: torch.Tensor,
        mask: torch.Tensor | None = None,
        cache: CellCache | None = None,
        step: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        number = min(step, len(self.layers) - 1)
        layer = self.layers[number]
        rotation = self.rotary.angles(positions, hidden.dtype)
        output = layer(embeddings, hidden, rotation=rotation, mask=mask, cache=cache, number=number)
        normed = layer.norm(output)
        return normed, normed if self.config.norm_output else output


class MTPLayer(nn.Module):
    """One prediction layer: the projection of embedding and hidden state, a decoder layer, and the norm of its head."""

    def __init__(self, config: CellConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(size, eps)
        self.hnorm = RMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = Attention(config, size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = GatedMLP(config, size)
        self.norm = RMSNorm(size, eps)

    def forward(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        *,
        rotation: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        cache: CellCache | None,
        number: int,
    ) -> torch.Tensor:
        x = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], dim=-1))
        normed = self.input_layernorm(x)
        x = x + self.self_attn(normed, rotation=rotation, mask=mask, cache=cache, layer=number)
        return x + self.mlp(self.post_attention_layernorm(x))
