"""Chosen rows of a language-model head in one contiguous buffer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from adaptspec.kernels.backend import Backend
from adaptspec.kernels.vocab_head import TopTokens, vocab_head


class DenseRows:
    """Copies of some rows of a head, packed so that a product with them reads memory in order; a change of the choice
    copies the rows that came in and no others.

    Rows in use lie in the slots 0 to `len(self) - 1`. The head itself, which may be tied to the target's embeddings,
    is only read.

    Args:
        weight: [V, H].
        ids: the rows to begin with, int [V'], all different.
        capacity: the largest number of rows; the buffer never moves, so a captured graph may hold it.

    Attributes:
        buffer: [capacity, H], on the device and of the type of `weight`.
        ids: int32 [capacity] on the device: the token in each slot, -1 where a slot is not in use.

    Raises:
        ValueError: an id outside [0, V), a repeated one, or more than `capacity` of them; here and in all methods.

    >>> rows = DenseRows(torch.arange(6.0)[:, None], [1, 3], capacity=3)
    >>> rows.update([3, 5, 4]), rows.ids.tolist(), rows.buffer[:, 0].tolist()
    (2, [5, 3, 4], [5.0, 3.0, 4.0])
    """

    def __init__(self, weight: torch.Tensor, ids: Sequence[int] | np.ndarray | torch.Tensor, capacity: int) -> None:
        if weight.dim() != 2 or weight.stride(1) != 1:
            raise ValueError(
                f"weight must have shape [V, H] and contiguous rows, got {list(weight.shape)} of strides "
                f"{list(weight.stride())}"
            )
        if capacity < 1:
            raise ValueError(f"capacity must be >= 1, got {capacity}")
        self.capacity = capacity
        self._weight = weight.detach()
        self.buffer = self._weight.new_zeros((capacity, weight.shape[1]))
        self._token_in = np.full(capacity, -1, dtype=np.int32)
        self._slot_of = np.full(len(weight), -1, dtype=np.int32)
        self._order = np.arange(capacity, dtype=np.int32)
        self._count = 0
        self._bytes = None if weight.device.type != "cpu" else (_as_bytes(self._weight), _as_bytes(self.buffer))
        on_host = torch.from_numpy(self._token_in)  # shares its memory
        self.ids = on_host if weight.device.type == "cpu" else on_host.to(weight.device)
        self.update(ids)

    def __len__(self) -> int:
        return self._count

    def token_ids(self) -> np.ndarray:
        """int32 [V'], the tokens in use by slot; a view that must not be written to."""
        return self._token_in[: self._count]

    def top(self, hidden: torch.Tensor, *, k: int, backend: Backend | None = None) -> TopTokens:
        """The k most likely tokens for hidden states [M, H]; see `vocab_head`."""
        count = self._count
        return vocab_head(hidden, self.buffer[:count], self.ids[:count], k=k, gathered=True, backend=backend)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [M, V'] of the tokens in use, by slot."""
        return hidden @ self.buffer[: self._count].T

    def update(self, ids: Sequence[int] | np.ndarray | torch.Tensor) -> int:
        """Make `ids` the rows in use. Rows that stay keep their slots, except where slots behind the new last one are
        given up. Returns the number of rows copied."""
        wanted = self._read(ids)
        size, count = len(wanted), self._count
        if size > self.capacity:
            raise ValueError(f"ids must be at most capacity = {self.capacity}, got {size}")
        slots = self._slot_of.take(wanted)
        stays = np.zeros(self.capacity + 1, dtype=bool)
        stays[:size] = in_place = slots == self._order[:size]  # most, where the caller keeps the order of the slots
        stays[slots[~in_place]] = True  # the spare last entry collects the -1 of those that are new
        stays = stays[:-1]
        entering = wanted[slots < 0]
        if np.count_nonzero(stays) + _count_different(entering) != size:
            raise ValueError("ids must be all different, got a repeated one")
        free = np.flatnonzero(~stays[:size])
        left = free if size == count else np.flatnonzero(~stays[:count])
        if size < count:  # rows behind the new end come forward
            entering = np.concatenate([entering, self._token_in[size:count][stays[size:count]]])
        self._slot_of[self._token_in[left]] = -1
        self._count = size
        self._write(free, entering)
        if size < count:
            self._token_in[size:count] = -1
            if self.ids.device.type != "cpu":
                self.ids[size:count] = -1
        return len(free)

    def replace(self, slots: Sequence[int] | np.ndarray, ids: Sequence[int] | np.ndarray | torch.Tensor) -> None:
        """Put the tokens `ids` into `slots`, in time proportional to their number. The slots right behind the last one
        in use may be among them.

        Raises:
            ValueError: also for slots that repeat or would leave a gap, and for a token that is in another slot.
        """
        wanted, places = self._read(ids), np.asarray(slots, dtype=np.int64)
        if places.shape != wanted.shape:
            raise ValueError(f"slots and ids must be as many, got {places.shape} and {wanted.shape}")
        if len(wanted) == 0:
            return
        if _count_different(places) != len(places) or _count_different(wanted) != len(wanted):
            raise ValueError("slots and ids must be all different, got a repeated one")
        old = places[places < self._count]
        end = self._count + len(places) - len(old)
        if places.min() < 0 or places.max() >= min(self.capacity, max(end, self._count)):
            raise ValueError(
                f"slots must be in [0, {self._count}) or follow without a gap up to capacity = {self.capacity}, "
                f"got {places.min()} to {places.max()}"
            )
        self._slot_of[self._token_in[old]] = -1
        elsewhere = self._slot_of[wanted]
        if elsewhere.max() >= 0:
            self._slot_of[self._token_in[old]] = old
            i = int(elsewhere.argmax())
            raise ValueError(f"ids must not be in use in another slot, got {wanted[i]} of slot {elsewhere[i]}")
        self._count = end
        self._write(places, wanted)

    def _write(self, slots: np.ndarray, ids: np.ndarray) -> None:
        self._slot_of[ids] = slots
        self._token_in[slots] = ids
        if self._bytes is not None:  # numpy copies few rows in half the time of torch
            weight, buffer = self._bytes
            buffer[slots] = weight[ids]
            return
        rows, places = (torch.from_numpy(array).to(self.buffer.device) for array in (ids, slots))
        self.buffer.index_copy_(0, places, self._weight.index_select(0, rows))
        self.ids.index_copy_(0, places, rows)

    def _read(self, ids: Sequence[int] | np.ndarray | torch.Tensor) -> np.ndarray:
        """int32, one-dimensional, in range."""
        array = ids.cpu().numpy() if isinstance(ids, torch.Tensor) else np.asarray(ids)
        if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
            raise ValueError(f"ids must be whole numbers of shape [V'], got {array.dtype} {list(array.shape)}")
        if len(array):
            low, high = int(array.min()), int(array.max())
            if low < 0 or high >= len(self._slot_of):
                raise ValueError(f"ids must be in [0, {len(self._slot_of)}), got {low if low < 0 else high}")
        return array.astype(np.int32, copy=False)


def _as_bytes(matrix: torch.Tensor) -> np.ndarray:
    """The same memory as uint8, for types that numpy does not know."""
    return matrix.view(torch.uint8).numpy()


def _count_different(values: np.ndarray) -> int:
    return len(set(values.tolist()))  # for a few dozen several times faster than numpy
