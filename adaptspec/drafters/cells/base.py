"""A drafting cell: one or a few decoder layers that run on the target's features and then on their own output.

Row i of a cell takes the embedding of token i + 1 and the hidden state of position i, and predicts token i + 2. At
verified positions the hidden state comes from the target (`Cell.fuse`); in the recursion it is what the cell itself
returned for the row before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from adaptspec.drafters.cells.cache import CellCache
from adaptspec.drafters.cells.config import CellConfig
from adaptspec.drafters.cells.rotary import Rotary, rotate


class Cell(nn.Module, ABC):
    """What drafters and trainers share. Parameter names are those of the public checkpoints of each kind.

    Shapes: B batch, T rows, S cached rows and new ones, H hidden.
    """

    def __init__(self, config: CellConfig) -> None:
        super().__init__()
        self.config = config
        self.rotary = Rotary(config.rotary_dim or config.head_dim, config.rope_theta, scaling=config.rope_scaling)
        self._final_norm: tuple[nn.Module, ...] = ()

    def use_final_norm(self, norm: nn.Module) -> None:
        """Lend the target's final norm to `fuse`; it is no part of the cell: neither saved nor trained nor moved."""
        self._final_norm = (norm,)

    def fuse(self, features: Sequence[torch.Tensor]) -> torch.Tensor:
        """Hidden states [..., H] from the target's, one tensor [..., H] per tap in the order of `config.taps`.

        Raises:
            ValueError: another number of tensors than taps.
            RuntimeError: the config asks for the target's final norm and none was lent.
        """
        if len(features) != len(self.config.taps):
            raise ValueError(f"features must be one tensor per tap {list(self.config.taps)}, got {len(features)}")
        if not self.config.final_norm:
            return self._combine(features)
        if not self._final_norm:
            raise RuntimeError("this cell needs the target's final norm; call use_final_norm first")
        return self._combine([self._final_norm[0](features[0])])

    def _combine(self, features: Sequence[torch.Tensor]) -> torch.Tensor:
        return features[0]

    @abstractmethod
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
        """Run rows behind those in the cache, which gets their keys and values.

        Args:
            embeddings: [B, T, H], of the tokens after the rows' positions.
            hidden: [B, T, H], fused features or the cell's own `next_hidden`.
            positions: int64 [B, T], for the rotary embedding.
            mask: bool (True: visible) or additive, [B or 1, 1, T, S]. None: every row sees all cached rows and, of the
                new ones, itself and those before it.
            cache: rows of earlier calls, None for none.
            step: of the recursion; chooses the layer of a cell that has several, and nothing else.

        Returns:
            head_input [B, T, H], which the language-model head multiplies, and next_hidden [B, T, H] for the recursion.
        """


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention under a mask that the caller makes. `input_size` may be wider than the hidden size."""

    def __init__(self, config: CellConfig, input_size: int) -> None:
        super().__init__()
        self.heads, self.groups, self.head_dim = (
            config.num_key_value_heads,
            config.num_attention_heads // config.num_key_value_heads,
            config.head_dim,
        )
        width, narrow = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.output_gate = config.output_gate
        self.q_proj = nn.Linear(input_size, width * (2 if config.output_gate else 1), bias=config.attention_bias)
        self.k_proj = nn.Linear(input_size, narrow, bias=config.attention_bias)
        self.v_proj = nn.Linear(input_size, narrow, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self,
        x: torch.Tensor,
        *,
        rotation: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        cache: CellCache | None,
        layer: int,
    ) -> torch.Tensor:
        batch, rows = x.shape[:2]
        query = self.q_proj(x).view(batch, rows, self.heads * self.groups, -1)
        gate = None
        if self.output_gate:
            query, gate = query.chunk(2, dim=-1)
        key = self.k_proj(x).view(batch, rows, self.heads, self.head_dim)
        value = self.v_proj(x).view(batch, rows, self.heads, self.head_dim).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query.transpose(1, 2), rotation), rotate(key.transpose(1, 2), rotation)
        if cache is not None:
            key, value = cache.append(layer, key, value)
        # All query heads of a key-value head go into its rows: the keys need not be copied once per query head.
        packed = query.reshape(batch, self.heads, self.groups * rows, self.head_dim)
        visible = _row_mask(mask, rows=rows, keys=key.shape[2], like=x)
        if visible is not None and self.groups > 1:
            visible = visible.repeat(1, 1, self.groups, 1)
        out = functional.scaled_dot_product_attention(packed, key, value, attn_mask=visible)
        out = out.view(batch, self.heads * self.groups, rows, self.head_dim).transpose(1, 2).reshape(batch, rows, -1)
        return self.o_proj(out if gate is None else out * torch.sigmoid(gate.reshape(batch, rows, -1)))


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)); `output_size` may be wider than the hidden size."""

    def __init__(self, config: CellConfig, output_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, output_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


def _row_mask(mask: torch.Tensor | None, *, rows: int, keys: int, like: torch.Tensor) -> torch.Tensor | None:
    """A mask in a type that attention takes; None where every row sees everything."""
    if mask is None:
        if rows == 1:
            return None
        return torch.ones((rows, keys), dtype=torch.bool, device=like.device).tril(keys - rows)[None, None]
    return mask if mask.dtype == torch.bool else mask.to(like.dtype)
