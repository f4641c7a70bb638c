"""The one place that knows how transformers moves between 5.16 and 5.24: argument names, attention registration."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from adaptspec.kernels.kv_compact import kv_compact

PACKED_SDPA = "adaptspec_sdpa"


@lru_cache(maxsize=64)
def cache_argument(model_class: type) -> str:
    """The name under which `forward` takes the key-value cache: `cache` from 5.20 on, `past_key_values` before.

    Raises:
        ValueError: the model takes neither, so it does not decode from a cache.
    """
    forward = model_class.forward
    parameters = inspect.signature(inspect.unwrap(forward)).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise ValueError(f"{model_class.__name__} takes no key-value cache; supported are decoder-only models that do")


def packed_sdpa_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention of tree queries that shares each key-value head with its group of query heads.

    The usual function repeats keys and values once per query head, which copies the whole prefix in every layer.
    Here the query heads of a group become extra query rows: query [B, Hq, N, D] -> [B, Hkv, G * N, D], and the mask
    comes already repeated, [1, 1, G * N, P + N]. Anything else (no mask, a mask of N rows, one head per group) goes to
    the usual function, so values elsewhere are the library's own.
    """
    groups = getattr(module, "num_key_value_groups", 1)
    rows = query.shape[2]
    if attention_mask is None or groups == 1 or attention_mask.shape[2] != groups * rows:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    batch, heads, _, size = query.shape
    packed = query.reshape(batch, heads // groups, groups * rows, size)
    output = torch.nn.functional.scaled_dot_product_attention(
        packed, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return output.reshape(batch, heads, rows, value.shape[-1]).transpose(1, 2).contiguous(), None


AttentionInterface.register(PACKED_SDPA, packed_sdpa_attention)
AttentionMaskInterface.register(PACKED_SDPA, sdpa_mask)


@contextmanager
def attention_implementation(config: Any, name: str) -> Iterator[None]:
    """Let the model's attention layers look up `name` inside the block; the config is as before afterwards."""
    before = config._attn_implementation_internal
    config._attn_implementation_internal = name
    try:
        yield
    finally:
        config._attn_implementation_internal = before


class GrowingLayer(DynamicLayer):
    """One layer's keys and values [B, Hkv, capacity, D] with a cursor: appending copies the new rows only, and rolling
    back moves the cursor."""

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.cursor = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device, self.dtype = key_states.device, key_states.dtype
        batch, heads, _, size = key_states.shape
        self.keys = key_states.new_empty((batch, heads, self.capacity, size))
        self.values = value_states.new_empty((batch, value_states.shape[1], self.capacity, value_states.shape[3]))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.cursor + key_states.shape[2]
        assert end <= self.capacity, "the cache grows before a forward pass, never inside one"
        self.keys[:, :, self.cursor : end] = key_states
        self.values[:, :, self.cursor : end] = value_states
        self.cursor = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.cursor

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        length = query_length if isinstance(query_length, int) else len(query_length)
        return self.cursor + length, 0


class GrowingCache(Cache):
    """Keys and values of all layers. Layers of one shape share one buffer [2 * layers, Hkv, capacity, D], so that
    moving accepted rows next to the prefix is one indexing operation and not two per layer."""

    def __init__(self, layers: int, capacity: int) -> None:
        super().__init__(layers=[GrowingLayer(capacity) for _ in range(layers)])
        self.capacity = capacity
        self.buffers: list[torch.Tensor] = []

    def set_length(self, length: int) -> None:
        """Put every layer's cursor at `length`; rows behind it are overwritten by the next forward."""
        for layer in self.layers:
            layer.cursor = length

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` rows in all, growing by at least half so that copies stay rare."""
        if capacity <= self.capacity:
            return
        self.capacity = max(capacity, self.capacity + self.capacity // 2)
        for layer in self.layers:
            layer.capacity = self.capacity
        self._share_buffers()

    def keep_rows(self, start: int, rows: torch.Tensor) -> None:
        """Copy rows `start + rows[i]` (ascending, `rows[i] >= i`) to `start + i` in every layer."""
        if not self.buffers:
            self._share_buffers()
        packed = torch.cat([rows.new_tensor([start]), rows])
        for buffer in self.buffers:
            there = packed.to(buffer.device)  # one transfer
            kv_compact(buffer[:, None], there[None, 1:], there[:1])

    def _share_buffers(self) -> None:
        """(Re)allocate: one buffer per device, dtype and shape; each layer's keys and values become views of it."""
        groups: dict[tuple[Any, ...], list[tuple[GrowingLayer, str, torch.Tensor]]] = {}
        for layer in self.layers:
            if not layer.is_initialized:
                continue
            for name in ("keys", "values"):
                old = getattr(layer, name)
                groups.setdefault((old.device, old.dtype, old.shape[1], old.shape[3]), []).append((layer, name, old))
        self.buffers = []
        for members in groups.values():
            old = members[0][2]
            buffer = old.new_empty((len(members), old.shape[1], self.capacity, old.shape[3]))
            for i, (layer, name, tensor) in enumerate(members):
                buffer[i, :, : layer.cursor] = tensor[0, :, : layer.cursor]
                setattr(layer, name, buffer[i : i + 1])
            self.buffers.append(buffer)
