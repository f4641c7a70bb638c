"""One decoder layer out of parts: norm, attention, norm, feed-forward, each with its residual."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from adaptspec.drafters.cells.attention import (
    GroupedAttention,
    GroupedConfig,
    LatentAttention,
    LatentConfig,
    Store,
)
from adaptspec.drafters.cells.base import RMSNorm
from adaptspec.drafters.cells.experts import ExpertsConfig, FeedForward, MixtureOfExperts


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """A pre-norm decoder layer.

    Attributes:
        attention: `GroupedConfig` or `LatentConfig`.
        intermediate_size: of a dense feed-forward layer; ignored with `experts`.
        experts: a mixture of experts in its place.
        limit: see `FeedForward`.
    """

    attention: GroupedConfig | LatentConfig
    intermediate_size: int
    eps: float
    experts: ExpertsConfig | None = None
    limit: float | None = None

    @property
    def hidden_size(self) -> int:
        return self.attention.hidden_size


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)): the layer of Llama, Qwen, GLM, DeepSeek, MiMo, Step."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.input_layernorm = RMSNorm(hidden, config.eps)
        self.self_attn: nn.Module
        if isinstance(config.attention, GroupedConfig):
            self.self_attn = GroupedAttention(config.attention)
        else:
            self.self_attn = LatentAttention(config.attention)
        self.post_attention_layernorm = RMSNorm(hidden, config.eps)
        self.mlp: nn.Module
        if config.experts is None:
            self.mlp = FeedForward(hidden, config.intermediate_size, limit=config.limit)
        else:
            self.mlp = MixtureOfExperts(config.experts)

    def forward(
        self,
        hidden: torch.Tensor,
        *,
        positions: torch.Tensor,
        mask: torch.Tensor | None = None,
        store: Store | None = None,
    ) -> torch.Tensor:
        """The layer's output [B, T, H], un-normed.

        Args:
            hidden: [B, T, H].
            positions: int64 [B, T], for rotary embeddings and windows.
            mask: [B, 1, T, S], bool (True is visible) or additive; None is causal.
            store: keeps keys and values of earlier rows; None without any.
        """
        attended = self.self_attn(self.input_layernorm(hidden), positions=positions, mask=mask, store=store)
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
