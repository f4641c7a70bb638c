"""Medusa's heads (arXiv 2401.10774, section 2.1): one residual block per position ahead, all from one hidden state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Shape of `MedusaHeads`.

    Attributes:
        heads: positions drafted, the token right after the root being the first.
        layers: residual blocks per head.
        vocab_size: rows of an own output matrix per head, as published heads have; None to use the target's.
    """

    hidden_size: int
    heads: int = 4
    layers: int = 1
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "heads", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")


class ResBlock(nn.Module):
    """r(x) + silu(W x + b), where r is the identity, or a projection if the input is wider than the output.

    Starts as the identity (or the projection): W is zero.
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(input_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        if input_size != hidden_size:
            self.res_connection = nn.Linear(input_size, hidden_size)
        else:
            self.res_connection = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.res_connection(x) + functional.silu(self.linear(x))


class MedusaHeads(nn.Module):
    """Head i maps the final-norm hidden state of position p to what the output matrix multiplies to predict the token
    of position p + 2 + i; the token of position p + 1 is known by then, it is the root.

    >>> MedusaHeads(MedusaConfig(hidden_size=8, heads=3))(torch.zeros(1, 5, 8))[2].shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResBlock(size, size) for _ in range(config.layers))) for _ in range(config.heads)
        )
        if config.vocab_size is not None:
            self.outputs = nn.ModuleList(nn.Linear(size, config.vocab_size, bias=False) for _ in range(config.heads))

    def forward(self, features: torch.Tensor) -> list[torch.Tensor]:
        """Head inputs per depth: element i is [..., H] for features [..., H], at the same positions.

        For training: row p of element i is to predict token p + 2 + i of the same text.
        """
        return [block(features) for block in self.blocks]

    def output_weights(self) -> list[torch.Tensor] | None:
        """Own output matrices [V, H], one per head; None if the target's is used."""
        return None if self.config.vocab_size is None else [output.weight for output in self.outputs]
