"""The GRIFFIN cell (arXiv 2502.11018)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from adaptspec.drafters.cells.base import Cell, RMSNorm
from adaptspec.drafters.cells.cache import CellCache
from adaptspec.drafters.cells.config import CellConfig
from adaptspec.drafters.cells.eagle1 import Eagle1Layer


class GriffinCell(Cell):
    """EAGLE's cell with token guidance on both sides: embedding and feature are fused by a small MLP, and the layer
    gives two vectors, one for the head and one for the recursion."""

    def __init__(self, config: CellConfig) -> None:
        super().__init__(config)
        self.fc = TokenGuidedFusion(config)
        self.layers = nn.ModuleList([Eagle1Layer(config, output_size=2 * config.hidden_size)])

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
        x = self.fc(embeddings, hidden)
        output = self.layers[0](x, rotation=self.rotary.angles(positions, x.dtype), mask=mask, cache=cache)
        head_input, next_hidden = output.chunk(2, dim=-1)
        return head_input, next_hidden


class TokenGuidedFusion(nn.Module):
    """z = fc(cat[e, h]); z + mlp(norm(z), e)."""

    def __init__(self, config: CellConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = EmbeddingMLP(config)

    def forward(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        x = self.fc(torch.cat([embeddings, hidden], dim=-1))
        return x + self.mlp(self.post_attention_layernorm(x), embeddings)


class EmbeddingMLP(nn.Module):
    """down(silu(up(cat[norm(x), norm(e)]))), one norm for both."""

    def __init__(self, config: CellConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.up_proj = nn.Linear(2 * config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self.input_layernorm(x), self.input_layernorm(embeddings)], dim=-1)
        return self.down_proj(functional.silu(self.up_proj(joined)))
