"""What a block-parallel backbone looks like, as plain values that can be written to a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from adaptspec.drafters.cells.config import SIZES, check_attention, check_fields, check_size


@dataclass(frozen=True, slots=True, kw_only=True)
class BackboneConfig:
    """Sizes and variants of DFlash's draft model (arXiv 2602.06036).

    Attributes:
        num_layers: draft layers.
        block_size: S, rows of a block; it drafts S - 1 tokens.
        taps: hidden states of the target that are fused; `k` is after k decoder layers.
        mask_token_id: whose embedding stands for every token to be drafted; None: learnt vectors, one per place.
        rope_scaling: as in transformers configs, see `rotary.rotary_frequencies`; None for none.
        attention_bias: of all four projections.
        qk_norm: RMS norm of queries and keys per head.
        tap_norm: one RMS norm per tap before they are fused, since hidden states of one layer can be thousands of times
            larger than of another.
        sliding_window: rows see context of the last so many positions, None for all.
        sliding_layers: draft layers under that window, None for all.
    """

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    taps: tuple[int, ...]
    num_layers: int = 1
    block_size: int = 8
    mask_token_id: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = None
    attention_bias: bool = False
    qk_norm: bool = False
    tap_norm: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in SIZES:
            check_size(name, getattr(self, name))
        check_size("block_size", self.block_size, least=2)
        if self.mask_token_id is not None:
            check_size("mask_token_id", self.mask_token_id, least=0)
        object.__setattr__(self, "taps", tuple(self.taps))
        if not self.taps:
            raise ValueError("taps must name at least one layer of the target, got none")
        for tap in self.taps:
            check_size("taps", tap)
        check_attention(self)
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        if self.sliding_window is not None:
            check_size("sliding_window", self.sliding_window)
        if self.sliding_layers is not None:
            object.__setattr__(self, "sliding_layers", tuple(self.sliding_layers))
            if bad := [layer for layer in self.sliding_layers if layer not in range(self.num_layers)]:
                raise ValueError(f"sliding_layers must be in [0, {self.num_layers}), got {bad[0]!r}")
            if self.sliding_window is None:
                raise ValueError("sliding_layers need a sliding_window")

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of every draft layer."""
        chosen = range(self.num_layers) if self.sliding_layers is None else self.sliding_layers
        return tuple(self.sliding_window if layer in chosen else None for layer in range(self.num_layers))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; inverse of `from_dict`."""
        layers = None if self.sliding_layers is None else list(self.sliding_layers)
        return {**asdict(self), "taps": list(self.taps), "sliding_layers": layers}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BackboneConfig:
        """Read what `to_dict` gave.

        Raises:
            ValueError: unknown, missing or impossible fields.
        """
        check_fields(
            cls,
            values,
            of="a backbone",
            needed=(*SIZES[:5], "taps"),
            layers=("taps",),
            optional_layers=("sliding_layers",),
        )
        return cls(**values)
