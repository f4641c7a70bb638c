"""What a drafting cell looks like, as plain values that can be written to a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import inf
from typing import Any

from adaptspec.names import unknown_name

KINDS = ("eagle1", "eagle3", "griffin", "mtp", "confu")
SIZES = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "num_layers",
)
"""Fields that must be whole numbers >= 1, of cells and of block drafters' backbones alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellConfig:
    """Sizes and variants of one cell. Fields that a kind does not know must keep their default.

    Attributes:
        kind: "eagle1", "eagle3", "griffin", "mtp", or "confu", which has all options of "eagle3".
        taps: hidden states of the target that are fused; `k` is after k decoder layers.
        num_layers: of "mtp": step k of the recursion uses layer k, the last one also for all later steps.
        final_norm: the tapped state goes through the target's final norm first (one tap only).
        draft_vocab_size: rows of a head of its own, None if the target's head is used.
        norm_before_residual: "eagle3": the residual is the normed hidden state.
        norm_before_fc: "eagle3": one RMS norm over the concatenated taps.
        fc_norm: "eagle3": one RMS norm per tap.
        norm_output: "eagle3", "mtp": the recursion feeds what comes after the last norm, not what goes into it.
        embedding_skip: "eagle3": `embed_proj(norm(embedding))` is added to the residual.
        bias: "eagle1", "griffin": of `fc`.
        attention_bias: of the query, key and value projections.
        qk_norm: RMS norm of queries and keys per head.
        output_gate: attention is multiplied by a sigmoid; `q_proj` then gives query and gate per head.
        rotary_dim: numbers per head that are rotated, None for all.
        rope_scaling: as in transformers configs, see `rotary.rotary_frequencies`; None for none.
        sliding_window: rows see keys of the last so many positions, None for all.
        soft_prompts, contemplates, mixed: "confu": soft prompts; vectors that contemplate tokens are made of; how many
            of them make one.
    """

    kind: str
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    taps: tuple[int, ...]
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    num_layers: int = 1
    final_norm: bool = False
    draft_vocab_size: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    embedding_skip: bool = False
    bias: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    output_gate: bool = False
    rotary_dim: int | None = None
    rope_scaling: Mapping[str, Any] | None = None
    sliding_window: int | None = None
    soft_prompts: int | None = None
    contemplates: int | None = None
    mixed: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise unknown_name("kind of cell", self.kind, KINDS)
        for name in SIZES:
            check_size(name, getattr(self, name))
        for name in ("draft_vocab_size", "rotary_dim", "sliding_window", "soft_prompts", "contemplates", "mixed"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        object.__setattr__(self, "taps", tuple(self.taps))
        if not self.taps:
            raise ValueError("taps must name at least one layer of the target, got none")
        for tap in self.taps:
            check_size("taps", tap)
        check_attention(self)
        rotated = self.rotary_dim or self.head_dim
        if rotated % 2 or rotated > self.head_dim:
            raise ValueError(f"rotary_dim must be even and at most head_dim = {self.head_dim}, got {rotated}")
        if self.kind not in _FUSING and len(self.taps) != 1:
            raise ValueError(f"a cell of kind {self.kind!r} takes one tap, got {list(self.taps)}")
        if self.final_norm and len(self.taps) != 1:
            raise ValueError(f"final_norm needs exactly one tap, got {list(self.taps)}")
        if self.num_layers > 1 and self.kind != "mtp":
            raise ValueError(f"num_layers of a cell of kind {self.kind!r} must be 1, got {self.num_layers}")
        for name, kinds in _ONLY.items():
            if getattr(self, name) and self.kind not in kinds:
                raise ValueError(f"{name} is an option of {' and '.join(kinds)}, not of {self.kind!r}")
        if self.kind == "confu":
            if None in (self.soft_prompts, self.contemplates, self.mixed):
                raise ValueError("a cell of kind 'confu' needs soft_prompts, contemplates and mixed")
            if self.mixed > self.contemplates:
                raise ValueError(f"mixed must be at most contemplates = {self.contemplates}, got {self.mixed}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; inverse of `from_dict`."""
        return {**asdict(self), "taps": list(self.taps)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CellConfig:
        """Read what `to_dict` gave.

        Raises:
            ValueError: unknown, missing or impossible fields.
        """
        check_fields(cls, values, of="a cell", needed=(*SIZES[:5], "kind", "taps"), layers=("taps",))
        return cls(**values)


_FUSING = ("eagle3", "confu")
"""Kinds that fuse several taps."""

_ONLY = {
    "norm_before_residual": _FUSING,
    "norm_before_fc": _FUSING,
    "fc_norm": _FUSING,
    "embedding_skip": _FUSING,
    "norm_output": (*_FUSING, "mtp"),
    "soft_prompts": ("confu",),
    "contemplates": ("confu",),
    "mixed": ("confu",),
    "bias": ("eagle1", "griffin"),
}


def check_fields(
    cls: type[Any],
    values: Any,
    *,
    of: str,
    needed: Sequence[str],
    layers: Sequence[str],
    optional_layers: Sequence[str] = (),
) -> None:
    """Raise ValueError unless `values`, read from a file, are fields of the dataclass `cls`.

    Args:
        of: what it is the config of, for messages.
        needed: fields that must be there.
        layers, optional_layers: fields that must be lists of layers; the optional ones may be None or absent.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"the config of {of} must be a mapping, got {type(values).__name__}")
    names = [field.name for field in fields(cls)]
    for name in values:
        if name not in names:
            raise unknown_name(f"field of the config of {of}", name, names)
    if missing := [name for name in needed if name not in values]:
        raise ValueError(f"the config of {of} lacks {', '.join(missing)}")
    for name in (*layers, *optional_layers):
        value = values.get(name)
        if not isinstance(value, list | tuple) and (value is not None or name in layers):
            raise ValueError(f"{name} must be a list of layers, got {value!r}")


def check_size(name: str, value: Any, *, least: int = 1) -> None:
    """Raise ValueError unless a field is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")


def check_attention(config: Any) -> None:
    """Raise ValueError unless the fields that configs of all drafters share fit each other: `num_attention_heads`,
    `num_key_value_heads`, `rms_norm_eps`, `rope_theta` and `rope_scaling`. Sizes have been checked before."""
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads must be a multiple of num_key_value_heads, "
            f"got {config.num_attention_heads} and {config.num_key_value_heads}"
        )
    numbers = (config.rms_norm_eps, config.rope_theta)
    if not all(isinstance(n, int | float) and not isinstance(n, bool) and 0 < n < inf for n in numbers):
        raise ValueError(f"rms_norm_eps and rope_theta must be > 0 and finite, got {numbers[0]!r} and {numbers[1]!r}")
    if config.rope_scaling is not None and not isinstance(config.rope_scaling, Mapping):
        raise ValueError(f"rope_scaling must be a mapping or None, got {config.rope_scaling!r}")
