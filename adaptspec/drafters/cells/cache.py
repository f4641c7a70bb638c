"""Keys and values of a cell's layers."""

from __future__ import annotations

import torch

_ROOM = 256


class CellCache:
    """One growing pair of tensors per layer. Without gradients rows are written in place; with gradients every append
    makes new tensors, so that training can differentiate through rows of earlier steps.

    Args:
        layers: of the cell.
    """

    def __init__(self, layers: int = 1) -> None:
        if layers < 1:
            raise ValueError(f"layers must be >= 1, got {layers}")
        self._keys: list[torch.Tensor | None] = [None] * layers
        self._values: list[torch.Tensor | None] = [None] * layers
        self._lengths = [0] * layers

    def length(self, layer: int = 0) -> int:
        """Rows that are cached."""
        return self._lengths[layer]

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add rows [B, heads, T, D]; returns all of the layer, [B, heads, S, D] each."""
        start = self._lengths[layer]
        end = self._lengths[layer] = start + keys.shape[2]
        if torch.is_grad_enabled():
            if start:
                keys = torch.cat([self._keys[layer][:, :, :start], keys], dim=2)
                values = torch.cat([self._values[layer][:, :, :start], values], dim=2)
            self._keys[layer], self._values[layer] = keys, values
            return keys, values
        stored = self._keys[layer]
        if stored is None or stored.shape[2] < end:
            shape = (*keys.shape[:2], max(end + _ROOM, 2 * start), keys.shape[3])
            for buffers, new in ((self._keys, keys), (self._values, values)):
                grown = new.new_empty(shape)
                if start:
                    grown[:, :, :start] = buffers[layer][:, :, :start]
                buffers[layer] = grown
        self._keys[layer][:, :, start:end] = keys
        self._values[layer][:, :, start:end] = values
        return self._keys[layer][:, :, :end], self._values[layer][:, :, :end]

    def truncate(self, length: int, *, layer: int = 0) -> None:
        """Forget all rows of a layer behind the first `length`."""
        if not 0 <= length <= self._lengths[layer]:
            raise ValueError(f"length must be in [0, {self._lengths[layer]}], got {length}")
        self._lengths[layer] = length

    def keep(self, rows: torch.Tensor, *, layer: int = 0) -> None:
        """Keep the rows int64 [R] of a layer, in this order, and forget the others."""
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < self._lengths[layer]:
            raise ValueError(f"rows must be in [0, {self._lengths[layer]}), got {rows.tolist()}")
        for buffers in (self._keys, self._values):
            if (stored := buffers[layer]) is not None:
                chosen = stored.index_select(2, rows.to(stored.device))
                if torch.is_grad_enabled():
                    buffers[layer] = chosen
                else:
                    stored[:, :, : len(rows)] = chosen
        self._lengths[layer] = len(rows)
