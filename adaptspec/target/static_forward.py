"""A tree forward of a fixed number of rows on memory that stays where it is, as a CUDA graph needs it.

The cache has a fixed capacity. What changes from pass to pass, the length of the prefix included, is read from device
memory: new keys and values go to the rows named there, and the attention kernel takes the used length from there. No
mask is built. Ordinary forwards (prompts, drafts, trees that are too large) run on the same cache.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from transformers.modeling_utils import AttentionInterface

from adaptspec.kernels.tree_attention import WORD, pack_ancestors, tree_attention
from adaptspec.target.compat import GrowingCache, GrowingLayer, attention_implementation
from adaptspec.target.graphs import Outputs, TreeRows
from adaptspec.target.layout import Layout

STATIC_KERNEL = "adaptspec_static_tree"


class FixedLayer(GrowingLayer):
    """One layer's keys and values [1, Hkv, capacity, D]. A static pass writes its rows where its inputs say and is
    given only these rows back; the prefix is read from the buffers. Other forwards append at the cursor."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        forward = _FORWARD.get()
        if forward is None:
            return super().update(key_states, value_states, *args, **kwargs)
        self.keys.index_copy_(2, forward.cache_rows, key_states)
        self.values.index_copy_(2, forward.cache_rows, value_states)
        return key_states, value_states


class FixedCache(GrowingCache):
    """Keys and values for at most `capacity` tokens of one sequence, for all requests of a model one after the other.

    Args:
        layers: number of layers.
        capacity: tokens, draft rows included.
    """

    def __init__(self, layers: int, capacity: int) -> None:
        super().__init__(layers, capacity)
        self.layers = [FixedLayer(capacity) for _ in range(layers)]

    def share(self) -> None:
        """Take the final memory, if that was not done; every layer has run once. From then on no buffer moves."""
        if not self.buffers:
            self._share_buffers()

    def reserve(self, capacity: int) -> None:
        """Checks only.

        Raises:
            ValueError: more rows than there are; go on with `moved`.
        """
        if capacity > self.capacity:
            raise ValueError(f"capacity must be <= {self.capacity}, got {capacity}")

    def moved(self, capacity: int) -> GrowingCache:
        """A copy that grows, with room for `capacity` rows."""
        copy = GrowingCache(len(self.layers), capacity)
        for layer, own in zip(copy.layers, self.layers, strict=True):
            if own.is_initialized:
                layer.lazy_initialization(own.keys, own.values)
                layer.cursor = own.cursor
                layer.keys[:, :, : own.cursor] = own.keys[:, :, : own.cursor]
                layer.values[:, :, : own.cursor] = own.values[:, :, : own.cursor]
        return copy


class StaticForward:
    """The forward of exactly `rows` tree rows. A `StaticPass`.

    Args:
        model: one without a `kernel_problem`; referred to weakly, so that what is kept per model does not keep it.
        layout: of the model.
        cache: shared; its buffers are what the pass reads and writes.
        rows: the root and the nodes.
        taps: layers whose outputs are wanted too, counted from 1.

    Raises:
        ValueError: the rotary embedding depends on the length in a way that only the host can decide.
    """

    def __init__(
        self, model: torch.nn.Module, layout: Layout, cache: FixedCache, *, rows: int, taps: tuple[int, ...] = ()
    ) -> None:
        if kind := length_dependent_rotation(model.config):
            raise ValueError(f"rotary embeddings of type {kind!r} look at the length on the host; graphs cannot")
        self._model = weakref.ref(model)
        self.layout = layout
        self.cache = cache
        self.rows = rows
        self.taps = taps
        words = -(-rows // WORD)
        device = model.get_input_embeddings().weight.device
        self._inputs = torch.zeros(3 * rows + 1 + rows * words, dtype=torch.int64, device=device)
        self.token_ids, self.positions, self.cache_rows = self._inputs[: 3 * rows].view(3, rows)
        self.lengths = self._inputs[3 * rows : 3 * rows + 1]
        self.ancestors = self._inputs[3 * rows + 1 :].view(1, rows, words)

    def load(self, rows: TreeRows) -> None:
        """All inputs in one transfer.

        Raises:
            ValueError: another number of rows, or more than the cache can take.
        """
        if len(rows) != self.rows:
            raise ValueError(f"rows must be {self.rows}, got {len(rows)}")
        if rows.length + self.rows > self.cache.capacity:
            raise ValueError(f"length must be <= {self.cache.capacity - self.rows}, got {rows.length}")
        parts = [
            rows.token_ids,
            rows.depths + rows.length,
            np.arange(rows.length, rows.length + self.rows),
            [rows.length],
            pack_ancestors(rows.visible).reshape(-1),
        ]
        self._inputs.copy_(torch.from_numpy(np.concatenate(parts)))

    @torch.inference_mode()
    def run(self) -> Outputs:
        """{"logits": [rows, V], "tap 3": [rows, H], ...}."""
        model = self._model()
        assert model is not None, "whoever runs a pass holds its model"
        tapped: dict[str, torch.Tensor] = {}
        with (
            _inside(self),
            attention_implementation(model.config, STATIC_KERNEL),
            _recording([(f"tap {k}", self.layout.layers[k - 1]) for k in self.taps], tapped),
        ):
            output = model(
                input_ids=self.token_ids[None],
                position_ids=self.positions[None],
                attention_mask=None,
                use_cache=True,
                **{self.layout.cache_argument: self.cache},
            )
        return {"logits": output.logits[0], **tapped}


_FORWARD: ContextVar[StaticForward | None] = ContextVar("adaptspec_static_forward", default=None)


@contextmanager
def _inside(forward: StaticForward) -> Iterator[None]:
    token = _FORWARD.set(forward)
    try:
        yield
    finally:
        _FORWARD.reset(token)


@contextmanager
def _recording(layers: list[tuple[str, torch.nn.Module]], tapped: dict[str, torch.Tensor]) -> Iterator[None]:
    """Put the hidden states [R, H] that the layers return inside the block into `tapped`."""

    def hook(name: str) -> Any:
        def record(module: torch.nn.Module, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            tapped[name] = hidden[0] if hidden.dim() == 3 else hidden

        return record

    handles = [layer.register_forward_hook(hook(name)) for name, layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def static_attention(
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
    """What transformers calls per layer: query [1, Hq, R, D], key and value [1, Hkv, R, D] -> [1, R, Hq, D]."""
    forward = _FORWARD.get()
    if forward is None:
        raise RuntimeError(f"{STATIC_KERNEL} attention was called outside StaticForward, by {type(module).__name__}")
    layer = forward.cache.layers[module.layer_idx]
    output = tree_attention(
        query,
        layer.keys,
        layer.values,
        key,
        value,
        lengths=forward.lengths,
        ancestors=forward.ancestors,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
    )
    return output.transpose(1, 2), None


# No mask function is registered under this name: models then make no mask at all.
AttentionInterface.register(STATIC_KERNEL, static_attention)


def length_dependent_rotation(config: Any) -> str | None:
    """The type of a rotary embedding whose angles depend on how long the sequence is, None for all others."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = parameters.get("rope_type", parameters.get("type"))
        if kind in ("longrope", "dynamic"):
            return kind
    return None
