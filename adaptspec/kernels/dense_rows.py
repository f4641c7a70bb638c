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
        self._marked = np.zeros(capacity, dtype=np.bool_)
        self._count = 0
        on_cpu = weight.device.type == "cpu"
        self._arrays = (_as_integers(self._weight), _as_integers(self.buffer)) if on_cpu else None
        on_host = torch.from_numpy(self._token_in)  # shares its memory
        self.ids = on_host if on_cpu else on_host.to(weight.device)
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
        given up. Returns the number of rows copied.

        Cheap where `ids` has kept the order of the slots: then only what differs from it is looked at.
        """
        wanted = self._read(ids)
        size, count = len(wanted), self._count
        if size > self.capacity:
            raise ValueError(f"ids must be at most capacity = {self.capacity}, got {size}")
        both = min(size, count)
        changed = np.flatnonzero(wanted[:both] != self._token_in[:both])
        if size > both:
            changed = np.concatenate([changed, np.arange(both, size)])
        named = wanted[changed]
        self._check_range(named)
        slots = self._slot_of[named]
        if size == count and len(named) and slots.max() < 0:  # the usual case: new tokens take the places of others
            if _count_different(named) != len(named):
                raise ValueError("ids must be all different, got a repeated one")
            self._slot_of[self._token_in[changed]] = -1
            self._write(changed, named)
            return len(changed)
        moved = slots[slots >= 0]  # hold a token that is wanted in another place: it stays where it is
        inside = moved[moved < both]
        if _count_different(named) != len(named) or (wanted[inside] == self._token_in[inside]).any():
            raise ValueError("ids must be all different, got a repeated one")
        self._marked[inside] = True
        free = changed[~self._marked[changed]]
        self._marked[inside] = False
        entering = named[slots < 0]
        left = free if size == count else free[free < count]
        if size < count:  # rows behind the new end come forward
            entering = np.concatenate([entering, self._token_in[moved[moved >= size]]])
            left = np.concatenate([left, np.arange(size, count)])
        self._slot_of[self._token_in[left]] = -1
        self._count = size
        self._write(free, entering)
        self._empty(size, count)
        return len(free)

    def truncate(self, count: int) -> None:
        """Keep the rows in the first `count` slots only."""
        if not 0 <= count <= self._count:
            raise ValueError(f"count must be in [0, {self._count}], got {count}")
        old, self._count = self._count, count
        self._slot_of[self._token_in[count:old]] = -1
        self._empty(count, old)

    def slots_of(self, ids: np.ndarray) -> np.ndarray:
        """int32, the slots of tokens in [0, V); -1 where a token is not in use."""
        return self._slot_of[ids]

    def replace(self, slots: Sequence[int] | np.ndarray, ids: Sequence[int] | np.ndarray | torch.Tensor) -> None:
        """Put the tokens `ids` into `slots`, in time proportional to their number. The slots right behind the last one
        in use may be among them.

        Raises:
            ValueError: also for slots that repeat or would leave a gap, and for a token that is in another slot.
        """
        wanted, places = self._read(ids), np.asarray(slots, dtype=np.int64)
        self._check_range(wanted)
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
        if self._arrays is not None:  # numpy copies few rows in half the time of torch
            weight, buffer = self._arrays
            buffer[slots] = weight[ids]
            return
        rows, places = (torch.from_numpy(array).to(self.buffer.device) for array in (ids, slots))
        self.buffer.index_copy_(0, places, self._weight.index_select(0, rows))
        self.ids.index_copy_(0, places, rows)

    def _read(self, ids: Sequence[int] | np.ndarray | torch.Tensor) -> np.ndarray:
        """int32, one-dimensional."""
        array = ids.cpu().numpy() if isinstance(ids, torch.Tensor) else np.asarray(ids)
        if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
            raise ValueError(f"ids must be whole numbers of shape [V'], got {array.dtype} {list(array.shape)}")
        if array.dtype != np.int32:
            self._check_range(array)  # before it could be cut to 32 bits
        return array.astype(np.int32, copy=False)

    def _check_range(self, ids: np.ndarray) -> None:
        if len(ids):
            if ids.dtype == np.int32 and ids.view(np.uint32).max() < len(self._slot_of):
                return  # negative numbers would be large ones
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= len(self._slot_of):
                raise ValueError(f"ids must be in [0, {len(self._slot_of)}), got {low if low < 0 else high}")

    def _empty(self, start: int, end: int) -> None:
        """Mark slots that are no longer in use."""
        if start < end:
            self._token_in[start:end] = -1
            if self.ids.device.type != "cpu":
                self.ids[start:end] = -1


def _as_integers(matrix: torch.Tensor) -> np.ndarray:
    """The same memory as integers, for types that numpy does not know."""
    return matrix.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[matrix.element_size()]).numpy()


def _count_different(values: np.ndarray) -> int:
    return len(set(values.tolist()))  # for a few dozen several times faster than numpy
