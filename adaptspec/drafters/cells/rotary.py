"""Rotary position embeddings (RoFormer, arXiv 2104.09864), with the scalings of published checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

_SCALED = ("linear", "llama3", "yarn")


class Rotary:
    """Rotates heads by position. No module: frequencies stay float32 whatever type the layer is cast to.

    Args:
        dim: rotated numbers per head; what a head has beyond stays as it is.
        theta: base of the frequencies.
        scaling: see `rotary_frequencies`.
        interleaved: the two numbers that are rotated together lie next to each other (DeepSeek), not half a head apart.
    """

    def __init__(
        self, dim: int, theta: float, *, scaling: Mapping[str, Any] | None = None, interleaved: bool = False
    ) -> None:
        self.dim = dim
        self.interleaved = interleaved
        self.frequencies, self.scale = rotary_frequencies(dim, theta, scaling)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [B, heads, T, D] rotated for positions int64 [B, T]."""
        return rotate(x, self.angles(positions, x.dtype), interleaved=self.interleaved)

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [B, 1, T, dim / 2], times the scaling's factor."""
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        angles = positions[:, None, :, None].float() * self.frequencies
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


def rotate(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], *, interleaved: bool = False) -> torch.Tensor:
    """x [B, heads, T, D] with its first numbers rotated by `Rotary.angles`."""
    cos, sin = angles
    width = 2 * cos.shape[-1]
    turned = x[..., :width]
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    parts = [first * cos - second * sin, second * cos + first * sin]
    if width < x.shape[-1]:
        parts.append(x[..., width:])
    return torch.cat(parts, dim=-1)


def rotary_frequencies(dim: int, theta: float, scaling: Mapping[str, Any] | None = None) -> tuple[torch.Tensor, float]:
    """float32 [dim / 2] and the factor of cos and sin.

    Args:
        scaling: as in transformers configs ("rope_type" or "type": linear, llama3 or yarn, and its values), or None.

    Raises:
        ValueError: another kind of scaling, or one that lacks a value of its kind.
    """
    options = dict(scaling or {})
    kind = options.pop("type", None)
    kind = options.pop("rope_type", kind) or "default"
    if kind == "default":
        return theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim), 1.0
    if kind not in _SCALED:
        raise ValueError(f"rope_type of rope_scaling must be default, {', '.join(_SCALED)}, got {kind!r}")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    try:
        embedding = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=dim,
                num_attention_heads=1,
                num_key_value_heads=1,
                head_dim=dim,
                max_position_embeddings=2**20,  # the scalings above look at their own original length
                rope_parameters={**options, "rope_type": kind, "rope_theta": theta},
            )
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"rope_scaling of type {kind!r} is damaged: {error}") from error
    return embedding.inv_freq.float().clone(), float(embedding.attention_scaling)


def yarn_sharpness(factor: float, coefficient: float = 1.0) -> float:
    """YaRN's factor of attention scores (arXiv 2309.00071, equation 22): 0.1 coefficient ln(factor) + 1."""
    return 1.0 if factor <= 1.0 else 0.1 * coefficient * math.log(factor) + 1.0
