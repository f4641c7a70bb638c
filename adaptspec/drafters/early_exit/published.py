"""Kangaroo's published adapters: `layers.0.self_attn.{q,k,v,o}_proj`, `layers.0.input_layernorm` and `norm`, next to a
Llama config. The exit layer is not written down there."""

from __future__ import annotations

import os
from pathlib import Path

from adaptspec.drafters.checkpoints.common import attention_sizes, epsilon, rope, whole
from adaptspec.drafters.checkpoints.reader import Checkpoint, take
from adaptspec.drafters.early_exit.adapter import AdapterConfig, Adapters


def default_exit(layers: int) -> int:
    """Kangaroo's exit: after 2 layers of 32, after 3 of 40 (arXiv 2404.18911, section 4)."""
    return min(2 if layers < 36 else 3, layers - 1)


def load_published(path: str | os.PathLike[str], *, exit: int) -> Adapters:
    """The adapter of a published folder or hub id.

    Args:
        exit: the target layer after which it was trained.

    Raises:
        FileNotFoundError, ValueError: nothing found, or missing or wrongly shaped tensors; with names.
    """
    checkpoint = Checkpoint(path if isinstance(path, str) else Path(path))
    config = checkpoint.config
    hidden = whole(checkpoint, config, "hidden_size")
    theta, scaling = rope(config)
    adapters = Adapters(
        AdapterConfig(
            kind="kangaroo",
            exits=(exit,),
            hidden_size=hidden,
            rms_norm_eps=epsilon(checkpoint, config),
            rope_theta=theta,
            rope_scaling=scaling,
            **attention_sizes(checkpoint, config, hidden),
        )
    )
    wanted = {name: (_theirs(name), tuple(tensor.shape)) for name, tensor in adapters.state_dict().items()}
    adapters.load_state_dict(take(checkpoint, wanted))
    return adapters


def _theirs(name: str) -> str:
    """Their name of one of our tensors."""
    name = name.removeprefix("exits.0.")
    return name if name.startswith("norm.") else f"layers.0.{name}"
