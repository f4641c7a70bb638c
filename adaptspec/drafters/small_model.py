"""A small Llama that drafts for one target: built beside it, trained by distillation, kept as a folder of weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from adaptspec.drafters.cell_weights import check_target, target_fingerprint
from adaptspec.drafters.target_parts import target_parts
from adaptspec.pretrained import load_weights, save_weights
from adaptspec.target.hf import HFTarget

KIND = "draft-model"
_SHARED = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class SmallModelConfig:
    """Shape of a draft model.

    Attributes:
        shared: embedding and output matrix are the target's own memory, which is read and never trained or saved; the
            hidden size must then be the target's. Else it has one matrix of its own for both.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int = 3
    attention_heads: int = 4
    key_value_heads: int = 4
    head_dim: int | None = None
    rope_theta: float = 10_000.0
    eps: float = 1e-5
    context: int = 8192
    shared: bool = True

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "layers", "attention_heads", "key_value_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.attention_heads % self.key_value_heads:
            raise ValueError(
                f"attention_heads must be a multiple of key_value_heads, got {self.attention_heads} and "
                f"{self.key_value_heads}"
            )


def config_like(target: nn.Module, *, layers: int = 3, shared: bool = True) -> SmallModelConfig:
    """The shape of a Llama-like target with fewer layers.

    Raises:
        ValueError: `layers` is out of range.
    """
    config = target.config.get_text_config()
    if not 1 <= layers <= config.num_hidden_layers:
        raise ValueError(f"layers must be in [1, {config.num_hidden_layers}], got {layers}")
    rope = getattr(config, "rope_parameters", None) or {}
    return SmallModelConfig(
        vocab_size=target.get_output_embeddings().weight.shape[0],
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layers=layers,
        attention_heads=config.num_attention_heads,
        key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None),
        rope_theta=float(rope.get("rope_theta", 10_000.0)),
        eps=float(getattr(config, "rms_norm_eps", 1e-5)),
        context=config.max_position_embeddings,
        shared=shared,
    )


def build_small_model(
    config: SmallModelConfig, target: nn.Module, *, copy_layers: Sequence[int] | None = None, seed: int = 0
) -> nn.Module:
    """A transformers `LlamaForCausalLM`, ready to train: `model(input_ids).logits` are [B, T, V].

    Args:
        target: lends embedding and head if `config.shared`, and gives device and type.
        copy_layers: layers of the target whose weights (and final norm) the new ones start from, one per layer; the
            target must be of the same shape. None starts from random weights.

    Raises:
        ValueError: sizes that do not fit the target.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    parts = target_parts(HFTarget(target), drafter=KIND)
    if config.vocab_size != parts.vocab_size:
        raise ValueError(f"vocab_size must be the target's {parts.vocab_size}, got {config.vocab_size}")
    if config.shared and config.hidden_size != parts.hidden_size:
        raise ValueError(
            f"hidden_size must be the target's {parts.hidden_size} to share its embedding, got {config.hidden_size}"
        )
    theirs = parts.config
    special = {name: getattr(theirs, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    settings = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.attention_heads,
        num_key_value_heads=config.key_value_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.context,
        rms_norm_eps=config.eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=not config.shared,
        **special,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(settings)
    model.to(device=parts.device, dtype=parts.dtype)
    if config.shared:
        embedding = getattr(parts.embed, "weight", None)
        if not isinstance(embedding, torch.Tensor):
            raise ValueError(f"{type(parts.embed).__name__} has no weight that could be shared")
        # Parameters of their own over the same memory: gradients and optimisers of the draft model pass them by.
        model.model.embed_tokens.weight = nn.Parameter(embedding.detach(), requires_grad=False)
        model.lm_head.weight = nn.Parameter(parts.head.detach(), requires_grad=False)
    if copy_layers is not None:
        _copy_layers(model, target, copy_layers)
    return model


def save_small_model(
    folder: str | os.PathLike[str],
    model: nn.Module,
    config: SmallModelConfig,
    *,
    target: nn.Module,
    card: Mapping[str, Any],
    bits: int = 8,
) -> None:
    """Write a folder that `draft-model:FOLDER` reads. Shared matrices are not in it; see
    `adaptspec.pretrained.save_weights`."""
    state = {name: value for name, value in model.state_dict().items() if not (config.shared and name in _SHARED)}
    if not config.shared:
        state.pop("lm_head.weight", None)  # tied
    own = {"kind": KIND, "config": asdict(config), "target": target_fingerprint(target)}
    save_weights(folder, state, {**card, **own}, bits=bits)


def load_small_model(folder: str | os.PathLike[str], target: HFTarget) -> nn.Module:
    """The model in a folder of `save_small_model`, on the target's device and in its type.

    Raises:
        ValueError: weights of another kind or for another target, or tensors that do not fit their config.
    """
    state, card = load_weights(folder)
    if card.get("kind") != KIND:
        raise ValueError(f"{folder} holds weights of kind {card.get('kind')!r}, {KIND!r} was asked for")
    check_target(card, target, where=str(folder))
    values = card.get("config")
    if not isinstance(values, Mapping) or set(values) - set(SmallModelConfig.__slots__):
        raise ValueError(f"{folder}: config of the card must hold fields of SmallModelConfig, got {values!r:.200}")
    if missing := [name for name in ("vocab_size", "hidden_size", "intermediate_size") if name not in values]:
        raise ValueError(f"{folder}: config of the card lacks {', '.join(missing)}")
    config = SmallModelConfig(**values)
    model = build_small_model(config, target.model)
    wanted = {name: value.shape for name, value in model.state_dict().items()}
    for name in _SHARED if config.shared else ("lm_head.weight",):
        wanted.pop(name, None)
    found = {name: value.shape for name, value in state.items()}
    if wrong := sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)):
        raise ValueError(f"{folder}: weights do not fit their config at {', '.join(wrong[:8])}")
    model.load_state_dict(state, strict=False)  # the shared matrices are in place
    return model.eval()


def _copy_layers(model: Any, target: Any, layers: Sequence[int]) -> None:
    """Weights of `layers` of the target, and its final norm."""
    own = model.model.layers
    theirs = HFTarget(target).layout.layers
    if len(layers) != len(own) or not all(0 <= layer < len(theirs) for layer in layers):
        raise ValueError(f"copy_layers must be {len(own)} layers in [0, {len(theirs)}), got {list(layers)}")
    for layer, source in zip(own, layers, strict=True):
        state = {name: value for name, value in theirs[source].state_dict().items() if not name.endswith("inv_freq")}
        shapes = {name: value.shape for name, value in layer.state_dict().items()}
        if shapes != {name: value.shape for name, value in state.items()}:
            raise ValueError(f"layer {source} of {type(target).__name__} has other tensors than a Llama of this shape")
        layer.load_state_dict(state)
    norm = target_parts(HFTarget(target), drafter=KIND).norm
    model.model.norm.weight.data.copy_(norm.weight)  # type: ignore[attr-defined]
