"""Attention layers of published draft heads: grouped queries with the usual extras, and DeepSeek's latent attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from adaptspec.drafters.cells.base import RMSNorm
from adaptspec.drafters.cells.rotary import Rotary, yarn_sharpness

Store = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Takes new keys and values [B, heads, T, dim] and returns all of them, the new ones last."""


@dataclass(frozen=True, slots=True)
class GroupedConfig:
    """Grouped-query attention.

    Attributes:
        value_dim: numbers per value head, `head_dim` if None.
        rotary_dim: rotated numbers per head, all if None.
        rope_scaling: see `adaptspec.drafters.cells.rotary.rotary_frequencies`.
        qk_norm: RMS norm on every query and key head.
        bias: on queries, keys and values; `output_bias` on the output.
        window: a row sees the last so many positions, its own included; None for all.
        sinks: a learnt score per head that takes part in the softmax and has no value (MiMo-V2).
        value_scale: factor on the values (MiMo-V2).
        gate: "none"; "head": a sigmoid per head from `g_proj` (Step-3.5); "element": a sigmoid per number, from the
            second half of every head of `q_proj` (Qwen3.5).
    """

    hidden_size: int
    heads: int
    key_value_heads: int
    head_dim: int
    rope_theta: float
    eps: float = 1e-6
    value_dim: int | None = None
    rotary_dim: int | None = None
    rope_scaling: Mapping[str, Any] | None = None
    qk_norm: bool = False
    bias: bool = False
    output_bias: bool = False
    window: int | None = None
    sinks: bool = False
    value_scale: float = 1.0
    gate: str = "none"


class GroupedAttention(nn.Module):
    """Rows attend to rows before them; see `GroupedConfig`."""

    def __init__(self, config: GroupedConfig) -> None:
        super().__init__()
        assert config.gate in ("none", "head", "element")
        self.config = config
        hidden, heads, groups, dim = config.hidden_size, config.heads, config.key_value_heads, config.head_dim
        value_dim = config.value_dim or dim
        self.q_proj = nn.Linear(hidden, heads * dim * (2 if config.gate == "element" else 1), bias=config.bias)
        self.k_proj = nn.Linear(hidden, groups * dim, bias=config.bias)
        self.v_proj = nn.Linear(hidden, groups * value_dim, bias=config.bias)
        self.o_proj = nn.Linear(heads * value_dim, hidden, bias=config.output_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(dim, config.eps)
            self.k_norm = RMSNorm(dim, config.eps)
        if config.gate == "head":
            self.g_proj = nn.Linear(hidden, heads, bias=False)
        if config.sinks:
            self.attention_sink_bias = nn.Parameter(torch.zeros(heads))
        self.rotary = Rotary(config.rotary_dim or dim, config.rope_theta, scaling=config.rope_scaling)

    def forward(
        self, x: torch.Tensor, *, positions: torch.Tensor, mask: torch.Tensor | None, store: Store | None = None
    ) -> torch.Tensor:
        config = self.config
        queries, keys, values = (
            projection(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for projection, heads in (
                (self.q_proj, config.heads),
                (self.k_proj, config.key_value_heads),
                (self.v_proj, config.key_value_heads),
            )
        )
        gate = None
        if config.gate == "element":
            queries, gate = queries.chunk(2, dim=-1)
        elif config.gate == "head":
            gate = self.g_proj(x).transpose(1, 2)[..., None]
        if config.qk_norm:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = self.rotary(queries, positions), self.rotary(keys, positions)
        values = values * config.value_scale
        if store is not None:
            keys, values = store(keys, values)
        output = attend(
            queries,
            keys,
            values,
            mask=windowed(mask, positions, keys=keys.shape[2], window=config.window),
            scale=config.head_dim**-0.5,
            sinks=self.attention_sink_bias if config.sinks else None,
        )
        if gate is not None:
            output = output * torch.sigmoid(gate)
        return self.o_proj(output.transpose(1, 2).flatten(2))


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Attributes:
        query_rank: width of the compressed query, None if queries are not compressed.
        key_value_rank: width of the compressed keys and values.
        plain_dim, rotary_dim: numbers per query and key head that are not rotated, and that are.
        interleaved: see `Rotary`.
    """

    hidden_size: int
    heads: int
    query_rank: int | None
    key_value_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    rope_theta: float
    eps: float = 1e-6
    rope_scaling: Mapping[str, Any] | None = None
    interleaved: bool = True
    bias: bool = False


class LatentAttention(nn.Module):
    """Latent attention with keys and values kept expanded: one layer's cache is small, and rows of a draft few."""

    def __init__(self, config: LatentConfig) -> None:
        super().__init__()
        self.config = config
        hidden, heads = config.hidden_size, config.heads
        query_dim = config.plain_dim + config.rotary_dim
        if config.query_rank is None:
            self.q_proj = nn.Linear(hidden, heads * query_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, config.query_rank, bias=config.bias)
            self.q_a_layernorm = RMSNorm(config.query_rank, config.eps)
            self.q_b_proj = nn.Linear(config.query_rank, heads * query_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, config.key_value_rank + config.rotary_dim, bias=config.bias)
        self.kv_a_layernorm = RMSNorm(config.key_value_rank, config.eps)
        self.kv_b_proj = nn.Linear(config.key_value_rank, heads * (config.plain_dim + config.value_dim), bias=False)
        self.o_proj = nn.Linear(heads * config.value_dim, hidden, bias=config.bias)
        scaling = config.rope_scaling
        self.rotary = Rotary(config.rotary_dim, config.rope_theta, scaling=scaling, interleaved=config.interleaved)
        self.scale = query_dim**-0.5
        if scaling and scaling.get("mscale_all_dim") and (scaling.get("rope_type") or scaling.get("type")) == "yarn":
            self.scale *= yarn_sharpness(float(scaling["factor"]), float(scaling["mscale_all_dim"])) ** 2

    def forward(
        self, x: torch.Tensor, *, positions: torch.Tensor, mask: torch.Tensor | None, store: Store | None = None
    ) -> torch.Tensor:
        config = self.config
        compressed = config.query_rank is not None
        queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if compressed else self.q_proj(x)
        queries = queries.unflatten(-1, (config.heads, -1)).transpose(1, 2)
        plain, turned = queries.split([config.plain_dim, config.rotary_dim], dim=-1)
        queries = torch.cat([plain, self.rotary(turned, positions)], dim=-1)
        latent, turned = self.kv_a_proj_with_mqa(x).split([config.key_value_rank, config.rotary_dim], dim=-1)
        both = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (config.heads, -1)).transpose(1, 2)
        plain, values = both.split([config.plain_dim, config.value_dim], dim=-1)
        turned = self.rotary(turned[:, None], positions).expand(-1, config.heads, -1, -1)
        keys = torch.cat([plain, turned], dim=-1)
        if store is not None:
            keys, values = store(keys, values)
        mask = windowed(mask, positions, keys=keys.shape[2], window=None)
        output = attend(queries, keys, values, mask=mask, scale=self.scale)
        return self.o_proj(output.transpose(1, 2).flatten(2))


def windowed(mask: torch.Tensor | None, positions: torch.Tensor, *, keys: int, window: int | None) -> torch.Tensor:
    """The mask [B, 1, T, S] with what lies outside the window hidden; causal if `mask` is None.

    A prefix is kept from position 0 on, so that key number and position agree there; draft rows behind it lie within
    the window of each other, which is longer than any draft is deep.

    Args:
        mask: bool (True is visible) or additive.
        positions: int64 [B, T].
        keys: S.
    """
    rows = positions.shape[1]
    if mask is None:
        mask = torch.ones((rows, keys), dtype=torch.bool, device=positions.device).tril(keys - rows)[None, None]
    if window is None:
        return mask
    inside = torch.arange(keys, device=positions.device) > (positions - window)[:, None, :, None]
    return mask & inside if mask.dtype == torch.bool else mask.masked_fill(~inside, torch.finfo(mask.dtype).min)


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    mask: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention [B, heads, T, value_dim]; `sinks` [heads] are scores of a key without a value."""
    if (group := queries.shape[1] // keys.shape[1]) > 1:
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    if sinks is None:
        if mask.dtype != torch.bool:
            mask = mask.to(queries.dtype)
        return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    scores = (queries @ keys.transpose(2, 3)).float() * scale
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.float()
    sink = sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
    weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
    return weights.to(values.dtype) @ values
