"""The `tree_attention` kernel inside a transformers model: prefix and tree are views of the cache, no mask is built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.modeling_utils import AttentionInterface

from adaptspec.kernels.backend import choose
from adaptspec.kernels.tree_attention import MAX_HEAD_SIZE, pack_ancestors, tree_attention
from adaptspec.target.compat import attention_implementation
from adaptspec.target.layout import TESTED_FAMILIES, Layout

TREE_KERNEL = "adaptspec_tree"

MOST_ROWS = 256
"""Rows of one forward that the kernel is made for; chunks of a prompt are larger and take the usual way."""

_NOT_COVERED = ("sliding_window", "s_aux", "position_bias")
"""What a layer may pass that would change its scores, and that the kernel does not know."""


@dataclass(slots=True)
class TreeForward:
    """What the attention layers of one forward are told.

    Attributes:
        length: tokens of prefix.
        lengths: int64 [1], the same on the device.
        ancestors: int64 [1, R, words], what each row sees of the rows behind the prefix.
        layers: attention layers that were served.
    """

    length: int
    lengths: torch.Tensor
    ancestors: torch.Tensor
    layers: int = 0


_FORWARD: ContextVar[TreeForward | None] = ContextVar("adaptspec_tree_forward", default=None)


def uses_kernel(model: torch.nn.Module, layout: Layout) -> bool:
    """Whether forwards of draft rows go through the kernel: on a GPU (or where `ADAPTSPEC_KERNELS=triton` asks for it),
    if there is no `kernel_problem`."""
    device = model.get_input_embeddings().weight.device
    return choose("tree_attention", device) == "triton" and kernel_problem(model, layout) is None


def kernel_problem(model: torch.nn.Module, layout: Layout) -> str | None:
    """Why the kernel does not cover a model, None if it does; models that it does not cover keep the way with masks.

    It does not cover sliding windows, attention sinks, head sizes above `MAX_HEAD_SIZE`, keys and values of different
    size, families outside `TESTED_FAMILIES`, and models that were loaded with eager attention on purpose. Dropout does
    not occur, see `inspect_model`.
    """
    name, config, parts = type(model).__name__, model.config, list(model.modules())
    if layout.kinds != {"full_attention"} or layout.window is not None:
        return f"{name} has layers with a sliding window"
    if layout.attention == "eager":
        return f"{name} was loaded with eager attention"
    if (family := getattr(config, "model_type", "")) not in TESTED_FAMILIES:
        return f"{name} is of the family {family!r}, tested are {', '.join(TESTED_FAMILIES)}"
    if getattr(config, "reorder_and_upcast_attn", False):  # GPT-2: its own attention, which asks no interface
        return f"{name} upcasts its attention"
    sizes = [part.head_dim for part in parts if isinstance(getattr(part, "head_dim", None), int)]
    if not 0 < max(sizes, default=0) <= MAX_HEAD_SIZE:
        return f"{name} has heads of size {max(sizes, default=0)}, the kernel takes 1 to {MAX_HEAD_SIZE}"
    if any(hasattr(part, "sinks") or hasattr(part, "v_head_dim") for part in parts):
        return f"{name} has attention sinks, or keys and values of different size"
    return None


@contextmanager
def tree_forward(model: torch.nn.Module, *, length: int, visible: np.ndarray) -> Iterator[None]:
    """The forward inside the block attends through the kernel.

    Args:
        model: its config is switched to the kernel inside the block.
        length: tokens of prefix.
        visible: bool [R, W], what each row sees of the W rows behind the prefix, itself included.

    Raises:
        RuntimeError: no layer asked the attention interface: the model attends in a way of its own.
    """
    device = model.get_input_embeddings().weight.device
    words = pack_ancestors(visible)
    packed = torch.from_numpy(np.concatenate([[length], words.reshape(-1)])).to(device)  # one transfer
    forward = TreeForward(length, packed[:1], packed[1:].view(1, *words.shape))
    token = _FORWARD.set(forward)
    try:
        with attention_implementation(model.config, TREE_KERNEL):
            yield
    finally:
        _FORWARD.reset(token)
    if not forward.layers:
        raise RuntimeError(f"{type(model).__name__} does not ask the attention interface, so its rows were not masked")


def tree_kernel_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls per layer: query [1, Hq, R, D], key and value [1, Hkv, length + W, D] -> [1, R, Hq, D].

    Raises:
        RuntimeError: called outside `tree_forward`, or with something that the kernel does not cover.
    """
    forward = _FORWARD.get()
    strange = [name for name in _NOT_COVERED if kwargs.get(name) is not None]
    if forward is None or strange or dropout or attention_mask is not None:
        what = "outside tree_forward" if forward is None else f"with {', '.join(strange) or 'a mask or dropout'}"
        raise RuntimeError(f"{TREE_KERNEL} attention was called {what}, by {type(module).__name__}")
    forward.layers += 1
    length = forward.length
    output = tree_attention(
        query,
        key[:, :, :length],
        value[:, :, :length],
        key[:, :, length:],
        value[:, :, length:],
        lengths=forward.lengths.to(query.device),
        ancestors=forward.ancestors.to(query.device),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
    )
    return output.transpose(1, 2), None


# No mask function is registered under this name: models then make no mask at all.
AttentionInterface.register(TREE_KERNEL, tree_kernel_attention)
