"""The adapter between an early layer of the target and its head: one attention and two norms (arXiv 2404.18911)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import nn

from adaptspec.drafters.cells.base import Attention, RMSNorm
from adaptspec.drafters.cells.cache import CellCache
from adaptspec.drafters.cells.config import CellConfig, check_fields, check_size
from adaptspec.drafters.cells.rotary import Rotary
from adaptspec.names import unknown_name

EXITS = {"kangaroo": 1, "cats": 2}
"""Adapters by kind: Kangaroo's drafts, CATS has a second one at a later layer that corrects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """Sizes of the adapters of one drafter.

    Attributes:
        kind: "kangaroo" or "cats".
        exits: the target layers after which the adapters read, ascending.
        rope_scaling: see `adaptspec.drafters.cells.rotary.rotary_frequencies`.
    """

    kind: str
    exits: tuple[int, ...]
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in EXITS:
            raise unknown_name("kind of adapter", self.kind, EXITS)
        exits = tuple(self.exits)
        object.__setattr__(self, "exits", exits)
        for exit in exits:
            check_size("exits", exit)
        if len(exits) != EXITS[self.kind] or not all(a < b for a, b in zip(exits, exits[1:], strict=False)):
            raise ValueError(f"exits of {self.kind!r} must be {EXITS[self.kind]} ascending layers, got {list(exits)}")
        self.attention()  # checks sizes

    def attention(self) -> CellConfig:
        """The same sizes, as cells of feature-recursive drafters have them."""
        return CellConfig(
            kind="eagle1",
            taps=self.exits[:1],
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            intermediate_size=1,  # there is no feed-forward part
            rms_norm_eps=self.rms_norm_eps,
            rope_theta=self.rope_theta,
            rope_scaling=self.rope_scaling,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; inverse of `from_dict`."""
        return {**asdict(self), "exits": list(self.exits)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AdapterConfig:
        """Read what `to_dict` gave.

        Raises:
            ValueError: unknown, missing or impossible fields.
        """
        needed = [field.name for field in fields(cls)][:6]
        check_fields(cls, values, of="adapters", needed=needed, layers=("exits",))
        return cls(**values)


class ExitAdapter(nn.Module):
    """norm(x + attention(input_layernorm(x))), which goes to the target's head. Row i reads the target's hidden state
    of token i after the exit layer and predicts token i + 1."""

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__()
        cell = config.attention()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(cell, config.hidden_size)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config.head_dim, config.rope_theta, scaling=config.rope_scaling)

    def forward(
        self,
        hidden: torch.Tensor,
        *,
        positions: torch.Tensor,
        mask: torch.Tensor | None = None,
        cache: CellCache | None = None,
    ) -> torch.Tensor:
        """What the head multiplies, [B, T, H].

        Args:
            hidden: [B, T, H], the target's after the exit layer, un-normed.
            positions: int64 [B, T].
            mask: see `Cell.forward`.
            cache: rows of earlier calls, None for none.
        """
        rotation = self.rotary.angles(positions, hidden.dtype)
        attended = self.self_attn(self.input_layernorm(hidden), rotation=rotation, mask=mask, cache=cache, layer=0)
        return self.norm(hidden + attended)


class Adapters(nn.Module):
    """All adapters of one drafter, one per exit.

    >>> config = AdapterConfig(kind="kangaroo", exits=(2,), hidden_size=8, num_attention_heads=2,
    ...                        num_key_value_heads=1, head_dim=4)
    >>> Adapters(config).exits[0].self_attn.k_proj.weight.shape
    torch.Size([4, 8])
    """

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__()
        self.config = config
        self.exits = nn.ModuleList(ExitAdapter(config) for _ in config.exits)
