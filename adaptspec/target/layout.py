"""What a transformers model must be told and asked for a tree forward, found once per model."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from adaptspec.target.compat import PACKED_SDPA, cache_argument

TESTED_FAMILIES = (
    "gemma2",
    "gemma3_text",
    "gpt2",
    "llama",
    "mistral",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
)
"""`config.model_type` of the families in the test suite. Others are probed at first use, see `HFTarget`."""

_ATTENTION_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class Layout:
    """Facts about one model.

    Attributes:
        layers: the decoder layers in order.
        cache_argument: name of the cache argument of `forward`.
        attention: attention implementation to use inside our forwards.
        group: query heads per key-value head, by which masks are repeated; 1 when masks are plain.
        window: sliding window in tokens of the layers that have one, None if none has.
        kinds: attention kinds present; with two kinds masks are passed as a mapping.
        mapping: masks are passed as a mapping from kind to mask.
        context_limit: number of positions, None if the config does not say.
    """

    layers: tuple[torch.nn.Module, ...]
    cache_argument: str
    attention: str
    group: int
    window: int | None
    kinds: frozenset[str]
    mapping: bool
    context_limit: int | None


def decoder_layers(model: torch.nn.Module) -> tuple[torch.nn.Module, Any]:
    """The backbone module that holds the decoder layers, and the name of the attribute.

    Raises:
        ValueError: no list of decoder layers is found.
    """
    count = model.config.num_hidden_layers
    backbone = model.get_decoder() if hasattr(model, "get_decoder") else model
    for module in (backbone, *backbone.children()):
        for name in ("layers", "h", "blocks"):
            found = getattr(module, name, None)
            if isinstance(found, torch.nn.ModuleList) and len(found) == count:
                return module, name
    raise ValueError(
        f"{type(model).__name__} has no list of {count} decoder layers; supported are decoder-only transformers models"
    )


def inspect_model(model: torch.nn.Module) -> Layout:
    """Find the layout of a transformers causal language model.

    Raises:
        TypeError: not a transformers model.
        ValueError: the model cannot score trees, with the reason.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "generate"):
        raise TypeError(f"model must be a transformers causal language model, got {type(model).__name__}")
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder model; supported are decoder-only models")
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{name} keeps a recurrent state that cannot be rolled back; supported are attention-only models"
        )
    if getattr(config, "alibi", False) or getattr(config, "model_type", "") in ("bloom", "mpt"):
        raise ValueError(f"{name} uses ALiBi, which takes positions from the row order; trees need explicit positions")
    if getattr(config, "attention_types", None) is not None or getattr(config, "attn_temperature_tuning", False):
        raise ValueError(
            f"{name} takes attention windows or temperatures from the row order; trees need explicit positions"
        )
    if model.training and _has_dropout(model):
        raise ValueError(f"{name} is in training mode with dropout, which makes its output random; call model.eval()")
    types = getattr(config, "layer_types", None)
    if types is not None and (strange := sorted(set(types) - set(_ATTENTION_KINDS))):
        raise ValueError(f"{name} has {', '.join(strange)} layers; supported are {' and '.join(_ATTENTION_KINDS)}")
    window = getattr(config, "sliding_window", None)
    if types is not None and "sliding_attention" not in types:
        window = None
    if getattr(config, "use_sliding_window", True) is False and types is None:
        window = None
    implementation = config._attn_implementation
    if implementation not in ("sdpa", "eager", None, PACKED_SDPA):
        raise ValueError(
            f"attn_implementation {implementation!r} takes no tree mask; load the model with "
            "attn_implementation='sdpa' or 'eager'"
        )
    if "position_ids" not in inspect.signature(inspect.unwrap(type(model).forward)).parameters:
        raise ValueError(f"{name}.forward takes no position_ids; trees need explicit positions")
    module, attribute = decoder_layers(model)
    groups = {getattr(part, "num_key_value_groups", 1) for part in module.modules() if hasattr(part, "head_dim")} or {1}
    sdpa = implementation in ("sdpa", PACKED_SDPA)
    packed = sdpa and len(groups) == 1  # layers of different grouping take the usual way
    return Layout(
        layers=tuple(getattr(module, attribute)),
        cache_argument=cache_argument(type(model)),
        attention=PACKED_SDPA if packed else "sdpa" if sdpa else "eager",
        group=groups.pop() if packed else 1,
        window=window,
        kinds=frozenset(types)
        if types is not None
        else frozenset(["sliding_attention" if window else "full_attention"]),
        mapping=types is not None and "sliding_attention" in types,
        context_limit=_context_limit(config),
    )


def _context_limit(config: Any) -> int | None:
    """Positions within which rotary embeddings do not depend on how long the sequence is.

    "dynamic" and "longrope" embeddings change beyond a length, for keys that are cached already too: such contexts end
    there.
    """
    limits = [getattr(config, "max_position_embeddings", None)]
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type", parameters.get("type")) in ("longrope", "dynamic"):
            original = parameters.get("original_max_position_embeddings")
            limits.append(original or getattr(config, "original_max_position_embeddings", None))
    found = [limit for limit in limits if isinstance(limit, int) and limit > 0]
    return min(found) if found else None


def _has_dropout(model: torch.nn.Module) -> bool:
    return any(
        (isinstance(part, torch.nn.Dropout) and part.p > 0.0) or (getattr(part, "attention_dropout", 0.0) or 0.0) > 0.0
        for part in model.modules()
    )
