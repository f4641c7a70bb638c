"""The cell of EAGLE and EAGLE-2 (arXiv 2401.15077, 2406.16858)."""

from __future__ import annotations

import torch
from torch import nn

from adaptspec.drafters.cells.base import Attention, Cell, GatedMLP, RMSNorm
from adaptspec.drafters.cells.cache import CellCache
from adaptspec.drafters.cells.config import CellConfig


class Eagle1Cell(Cell):
    """h' = layer(fc(cat[e, h])) with h the target's state after its final norm; the layer has no input norm.

    What comes out is meant to be the target's next such state: it goes to the head and into the recursion as it is.
    """

    def __init__(self, config: CellConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
        self.layers = nn.ModuleList([Eagle1Layer(config, output_size=config.hidden_size)])

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
        x = self.fc(torch.cat([embeddings, hidden], dim=-1))
        output = self.layers[0](x, rotation=self.rotary.angles(positions, x.dtype), mask=mask, cache=cache)
        return output, output


class Eagle1Layer(nn.Module):
    """A decoder layer without a norm before its attention. With an output twice as wide (GRIFFIN) the residual goes
    into both halves."""

    def __init__(self, config: CellConfig, *, output_size: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config, output_size)
        self.copies = output_size // config.hidden_size

    def forward(
        self,
        x: torch.Tensor,
        *,
        rotation: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        cache: CellCache | None,
    ) -> torch.Tensor:
        x = x + self.self_attn(x, rotation=rotation, mask=mask, cache=cache, layer=0)
        residual = x if self.copies == 1 else torch.cat([x] * self.copies, dim=-1)
        return residual + self.mlp(self.post_attention_layernorm(x))
