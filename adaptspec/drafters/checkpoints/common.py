"""What the loaders share: where weights go besides the module, and reading model configs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from adaptspec.drafters.checkpoints.reader import Checkpoint


@dataclass(frozen=True, slots=True)
class Extras:
    """What a checkpoint holds besides the cell or the heads.

    Attributes:
        layout: which published layout it is, for people.
        head: own output matrix [R, H]; None if the target's is used.
        token_ids: int64 [R], the target's token of each row of `head`; None if row i is token i.
        heads: own output matrices of the steps of a multi-token predictor, where they differ; else empty.
        embeddings: own embedding matrix [V, H] where it differs from the target's, else None.
        config: the checkpoint's `config.json`.
    """

    layout: str
    head: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None
    heads: tuple[torch.Tensor, ...] = ()
    embeddings: torch.Tensor | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Facts:
    """What loaders need to know of the target."""

    hidden_size: int
    vocab_size: int
    layers: int
    embeddings: torch.Tensor | None
    head: torch.Tensor | None
    dtype: torch.dtype = torch.float32
    config: Any = None


def whole(checkpoint: Checkpoint, config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """The first of the entries `names` of a config as a whole number >= 1.

    Raises:
        ValueError: none is there and there is no default, or it is no whole number >= 1.
    """
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{checkpoint.where}: {name} of config.json must be a whole number >= 1, got {value!r}")
        return value
    if default is None:
        raise ValueError(f"{checkpoint.where}: config.json lacks {' or '.join(names)}")
    return default


def epsilon(checkpoint: Checkpoint, config: Mapping[str, Any], *names: str) -> float:
    """Of RMS norms: the first of the entries `names`, by default `rms_norm_eps`; 1e-6 if none is there.

    Raises:
        ValueError: it is no number > 0.
    """
    found = [config[name] for name in names or ("rms_norm_eps",) if config.get(name) is not None]
    value = found[0] if found else 1e-6
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < math.inf:
        raise ValueError(f"{checkpoint.where}: rms_norm_eps of config.json must be a number > 0, got {value!r}")
    return float(value)


def rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling of rotary embeddings, from old entries (`rope_theta`, `rope_scaling`) or `rope_parameters`.

    Raises:
        ValueError: they are no number and no object.
    """
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or parameters
    if not isinstance(scaling, Mapping):
        raise ValueError(f"rope_scaling of config.json must be an object, got {scaling!r:.80}")
    scaling = dict(scaling)
    theta = config.get("rope_theta") or scaling.get("rope_theta") or 10_000.0
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        raise ValueError(f"rope_theta of config.json must be a number, got {theta!r:.80}")
    theta = float(theta)
    kind = scaling.get("rope_type", scaling.get("type", "default")) or "default"
    if kind in ("default", "mrope"):  # sections of a multimodal embedding agree on text
        return theta, None
    scaling.setdefault("rope_type", kind)
    return theta, scaling


def attention_sizes(checkpoint: Checkpoint, config: Mapping[str, Any], hidden_size: int) -> dict[str, int]:
    """Heads, key-value heads and head size of ordinary attention."""
    heads = whole(checkpoint, config, "num_attention_heads")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": whole(checkpoint, config, "num_key_value_heads", default=heads),
        "head_dim": whole(checkpoint, config, "head_dim", default=hidden_size // heads),
    }


def check_hidden(checkpoint: Checkpoint, size: int, facts: Facts) -> None:
    """Raise ValueError unless the hidden size is the target's."""
    if size != facts.hidden_size:
        raise ValueError(
            f"{checkpoint.where} was made for hidden size {size}, the target has {facts.hidden_size}: another model"
        )


def check_vocab(checkpoint: Checkpoint, size: int, facts: Facts, *, what: str) -> None:
    """Raise ValueError unless rows of an embedding or head are those of the target's vocabulary."""
    if size != facts.vocab_size:
        raise ValueError(
            f"{checkpoint.where}: {what} has {size} rows, the target's vocabulary {facts.vocab_size}: another model"
        )


def own_matrix(
    checkpoint: Checkpoint, name: str | None, facts: Facts, *, like: torch.Tensor | None
) -> torch.Tensor | None:
    """A [V, H] matrix of the checkpoint, None if it is missing or agrees with the target's.

    Many checkpoints repeat the target's embedding or head. Agreement is judged by 64 rows spread over the vocabulary.

    Raises:
        ValueError: another shape.
    """
    if name is None or name not in checkpoint:
        return None
    rows, width = checkpoint.shape(name)
    check_vocab(checkpoint, rows, facts, what=name)
    check_hidden(checkpoint, width, facts)
    matrix = checkpoint.read(name)
    if like is not None:
        sample = torch.arange(0, rows, max(1, rows // 64))
        theirs, ours = matrix[sample].float(), like[sample.to(like.device)].float().cpu()
        if torch.allclose(theirs, ours, rtol=1e-2, atol=1e-4):  # apart from rounding to bfloat16
            return None
    return matrix


def llama_names(prefix: str, *, bias: bool = False, skip: Sequence[str] = ()) -> list[str]:
    """Tensor names of an ordinary decoder layer below `prefix`."""
    attention = [f"self_attn.{part}_proj.weight" for part in "qkvo"]
    if bias:
        attention += [f"self_attn.{part}_proj.bias" for part in "qkv"]
    mlp = [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    norms = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    return [f"{prefix}{name}" for name in (*attention, *mlp, *norms) if name not in skip]
