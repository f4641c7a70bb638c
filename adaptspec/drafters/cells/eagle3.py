"""The EAGLE-3 cell (arXiv 2503.01840)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from adaptspec.drafters.cells.base import Attention, Cell, GatedMLP, RMSNorm
from adaptspec.drafters.cells.cache import CellCache
from adaptspec.drafters.cells.config import CellConfig


class Eagle3Cell(Cell):
    """Hidden states of several target layers are fused by `fc`; one layer reads cat[norm(embedding), norm(hidden)].

    x = attention(cat[input_layernorm(e), hidden_norm(h)]) + h; y = x + mlp(post_attention_layernorm(x)). The head gets
    norm(y), the recursion y, which skips `fc`.
    """

    def __init__(self, config: CellConfig) -> None:
        super().__init__(config)
        size, taps, eps = config.hidden_size, len(config.taps), config.rms_norm_eps
        self.fc_norm = nn.ModuleList([RMSNorm(size, eps) for _ in config.taps]) if config.fc_norm else None
        self.input_norm = RMSNorm(taps * size, eps) if config.norm_before_fc else None
        self.fc = nn.Linear(taps * size, size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(size, eps)

    def _combine(self, features: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.fc_norm is not None:
            features = [norm(feature) for norm, feature in zip(self.fc_norm, features, strict=True)]
        joined = torch.cat(list(features), dim=-1)
        return self.fc(joined if self.input_norm is None else self.input_norm(joined))

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
        rotation = self.rotary.angles(positions, hidden.dtype)
        output = self.midlayer(embeddings, hidden, rotation=rotation, mask=mask, cache=cache)
        normed = self.norm(output)
        return normed, normed if self.config.norm_output else output


class Eagle3Layer(nn.Module):
    """The one decoder layer; its attention reads two vectors at once."""

    def __init__(self, config: CellConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.embed_proj = nn.Linear(size, size, bias=False) if config.embedding_skip else None
        self.self_attn = Attention(config, 2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = GatedMLP(config, size)

    def forward(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        *,
        rotation: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        cache: CellCache | None,
        future: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`future` [B, T, H] is added behind the attention, so that no key and no value depends on it."""
        embeddings = self.input_layernorm(embeddings)
        if self.embed_proj is not None:
            hidden = hidden + self.embed_proj(embeddings)
        normed = self.hidden_norm(hidden)
        attended = self.self_attn(
            torch.cat([embeddings, normed], dim=-1), rotation=rotation, mask=mask, cache=cache, layer=0
        )
        x = attended + (normed if self.norm_before_residual else hidden)
        if future is not None:
            x = x + future
        return x + self.mlp(self.post_attention_layernorm(x))
