"""What trained drafters borrow from the target: its embedding, its final norm and its language-model head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from adaptspec.target.hf import HFTarget
from adaptspec.target.layout import decoder_layers

if TYPE_CHECKING:
    from adaptspec.target.base import Target

_FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f")


@dataclass(frozen=True, slots=True)
class TargetParts:
    """Modules and weights of one target, used in place: never written, never saved, never trained.

    Attributes:
        embed: the embedding module, token ids [...] -> [..., H].
        norm: the final norm, un-normed hidden states [..., H] -> what the head multiplies.
        head: [V, H], the head's weight.
        layers: how many decoder layers there are; the tap of this number is what `norm` takes.
        special_ids: tokens that reduced vocabularies keep.
    """

    embed: Callable[[torch.Tensor], torch.Tensor]
    norm: Callable[[torch.Tensor], torch.Tensor]
    head: torch.Tensor
    hidden_size: int
    vocab_size: int
    layers: int
    special_ids: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype
    config: Any


def target_parts(target: Target, *, drafter: str) -> TargetParts:
    """The parts of a transformers target.

    Raises:
        ValueError: another kind of target, or no final norm is found.
    """
    if not isinstance(target, HFTarget):
        raise ValueError(f"{drafter} needs a transformers target, got {type(target).__name__}")
    model = target.model
    backbone, _ = decoder_layers(model)
    norm = next((found for name in _FINAL_NORMS if callable(found := getattr(backbone, name, None))), None)
    if norm is None:
        raise ValueError(
            f"{drafter} needs the target's final norm; {type(backbone).__name__} has none called "
            f"{', '.join(_FINAL_NORMS)}"
        )
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    head = model.get_output_embeddings().weight.detach()
    return TargetParts(
        embed=model.get_input_embeddings(),
        norm=norm,
        head=head,
        hidden_size=head.shape[1],
        vocab_size=target.vocab_size,
        layers=len(target.layout.layers),
        special_ids=target.special_ids(),
        device=target.device,
        dtype=target.dtype,
        config=config,
    )
