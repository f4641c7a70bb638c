"""Multi-token prediction layers (DeepSeek-V3, arXiv 2412.19437, section 2.2) as a cell."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import nn

from adaptspec.drafters.cells.base import Attention, Cell, GatedMLP, RMSNorm
from adaptspec.drafters.cells.cache import CellCache
from adaptspec.drafters.cells.config import CellConfig


class PredictionLayers(Cell):
    """h_k = layer_k(eh_proj(cat[enorm(e), hnorm(h_{k-1})])), then a norm and the head.

    With one layer the recursion reuses it and its cached rows. With several, step k uses layer k, which has rows of its
    own in the cache: row i of layer k takes token i + 1 + k and what layer k - 1 returned for row i.

    Attributes:
        layers: one per step, each with the `norm` of its head; the last one also serves all later steps.
    """

    layers: nn.ModuleList

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
        output = self._run(number, embeddings, hidden, positions=positions, mask=mask, cache=cache)
        normed = self.layers[number].norm(output)
        return normed, normed if self.config.norm_output else output

    @abstractmethod
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
        """What layer `number` gives for rows, before its norm."""


class MTPCell(PredictionLayers):
    """Prediction layers with plain decoder layers."""

    def __init__(self, config: CellConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList([MTPLayer(config) for _ in range(config.num_layers)])

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
        rotation = self.rotary.angles(positions, hidden.dtype)
        return self.layers[number](embeddings, hidden, rotation=rotation, mask=mask, cache=cache, number=number)


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
