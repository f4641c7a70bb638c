"""Hydra's heads (arXiv 2402.05109, section 3): Medusa's, that also see the tokens drafted so far."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from adaptspec.drafters.cells.attention import GroupedConfig, Store
from adaptspec.drafters.cells.base import RMSNorm
from adaptspec.drafters.cells.blocks import Block, BlockConfig
from adaptspec.drafters.medusa_heads import ResBlock


@dataclass(frozen=True, slots=True)
class HydraConfig:
    """Shape of `HydraHeads`.

    Attributes:
        heads: positions drafted, the token right after the root being the first.
        layers: residual blocks per head, the first of which reads the drafted tokens.
        prefix: a decoder layer and a norm over the target's hidden states in front of the heads (Hydra++,
            "prefix-mlp"); the four attributes that follow shape it.
        vocab_size: rows of an own output matrix per head, as published heads have; None to use the target's.
        output_bias: these matrices have a bias, which is kept as a column of its own.
    """

    hidden_size: int
    heads: int = 4
    layers: int = 1
    prefix: bool = False
    attention_heads: int = 1
    key_value_heads: int = 1
    head_dim: int = 2
    intermediate_size: int = 1
    rope_theta: float = 10_000.0
    eps: float = 1e-6
    vocab_size: int | None = None
    output_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden_size", "heads", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")


class Prefix(nn.Module):
    """One Llama layer and a norm over hidden states [B, T, H]."""

    def __init__(self, config: HydraConfig) -> None:
        super().__init__()
        attention = GroupedConfig(
            hidden_size=config.hidden_size,
            heads=config.attention_heads,
            key_value_heads=config.key_value_heads,
            head_dim=config.head_dim,
            rope_theta=config.rope_theta,
            eps=config.eps,
        )
        self.layer = Block(BlockConfig(attention, config.intermediate_size, config.eps))
        self.norm = RMSNorm(config.hidden_size, config.eps)

    def forward(
        self,
        features: torch.Tensor,
        *,
        positions: torch.Tensor,
        mask: torch.Tensor | None = None,
        store: Store | None = None,
    ) -> torch.Tensor:
        return self.norm(self.layer(features, positions=positions, mask=mask, store=store))


class HydraHeads(nn.Module):
    """Head i maps [h_p; e_{p+1}; ...; e_{p+1+i}] to what the output matrix multiplies to predict the token of position
    p + 2 + i: the hidden state of position p (through the prefix layer, if there is one), and the embeddings of the
    root and of the i tokens drafted after it.
    """

    def __init__(self, config: HydraConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.prefix = Prefix(config) if config.prefix else None
        self.blocks = nn.ModuleList(
            nn.Sequential(ResBlock((i + 2) * size, size), *(ResBlock(size, size) for _ in range(config.layers - 1)))
            for i in range(config.heads)
        )
        if config.vocab_size is not None:
            self.outputs = nn.ModuleList(
                nn.Linear(size, config.vocab_size, bias=config.output_bias) for _ in range(config.heads)
            )

    def forward(
        self,
        features: torch.Tensor,
        embeddings: torch.Tensor,
        *,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Head inputs per depth over whole texts, teacher-forced.

        Args:
            features: [B, T, H], final-norm hidden states of the target.
            embeddings: [B, T, H], the target's embeddings of the same T tokens.
            positions: int64 [B, T]; 0 to T - 1 if None. Only the prefix layer looks at them and at `mask`.
            mask: [B, 1, T, T] for the prefix layer, bool or additive; causal if None.

        Returns:
            Element i is [B, T - 1 - i, H]: row p is to predict token p + 2 + i, which lies outside the text for the
            last row.
        """
        length = features.shape[1]
        if self.prefix is not None:
            if positions is None:
                positions = torch.arange(length, device=features.device).expand(len(features), -1)
            features = self.prefix(features, positions=positions, mask=mask)
        outputs = []
        for i, block in enumerate(self.blocks):
            rows = max(length - 1 - i, 0)
            seen = [embeddings[:, k + 1 : k + 1 + rows] for k in range(i + 1)]
            outputs.append(block(torch.cat([features[:, :rows], *seen], dim=-1)))
        return outputs

    def output_weights(self) -> list[torch.Tensor] | None:
        """Own output matrices [V, H], one per head, [V, H + 1] with their biases; None if the target's is used."""
        if self.config.vocab_size is None:
            return None
        if not self.config.output_bias:
            return [output.weight for output in self.outputs]
        return [torch.cat([output.weight, output.bias[:, None]], dim=1) for output in self.outputs]
