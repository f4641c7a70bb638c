"""What is remembered of each request, in arrays: a row per request, kept as long as it lives and there is room."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from adaptspec.bandits.state import read_array

_FIRST_ROOM = 64
_PER_ROW = ("seen_length", "arms", "histogram", "totals", "last_step")


class RequestTable:
    """Rows for request ids. A row's content starts at zero; the request seen longest ago makes room.

    Args:
        drafters: columns of most arrays.
        max_requests: rows at most.

    Attributes:
        counts: float64 [6, D, S], draft tokens accepted, judged, and expected to be accepted; then tokens proposed,
            asked for, and expected to be proposed.
        seen_length: int64 [S, D], committed tokens up to which a drafter's own state is known to reach; -1 unknown.
        arms: int64 [S], what the row was last given after thinking.
        histogram: int64 [S, K + 1], steps by accepted draft tokens; steps with a draft only.
        totals: int64 [S, 4], steps, tokens emitted, draft tokens verified, draft tokens accepted.
    """

    def __init__(self, drafters: int, *, longest: int, max_requests: int) -> None:
        self.max_requests = max_requests
        self._drafters = drafters
        self._longest = longest
        self._slots: dict[Hashable, int] = {}
        self._free: list[int] = []
        self._ids: tuple[Hashable, ...] | None = None
        self._rows = np.zeros(0, np.int64)
        self._allocate(0)
        self._grow()

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._slots

    def rows(self, ids: Sequence[Hashable], *, step: int) -> np.ndarray:
        """int64 [R], the rows of these requests, made where they are new.

        Raises:
            ValueError: more requests at once than there may be rows.
        """
        ids = tuple(ids)
        if ids != self._ids:
            if len(ids) > self.max_requests:
                raise ValueError(f"a step may have at most max_requests = {self.max_requests} requests, got {len(ids)}")
            slots = self._slots
            missing = [request for request in ids if request not in slots]
            if missing:
                self._add(missing, present=set(ids))
            self._rows = np.array([slots[request] for request in ids], dtype=np.int64)
            self._ids = ids
        self.last_step[self._rows] = step
        return self._rows

    def known(self, ids: Sequence[Hashable]) -> np.ndarray:
        """int64 [R], the rows of these requests, -1 where there is none."""
        if self._ids is not None and (ids is self._ids or ids == self._ids):
            return self._rows
        return np.array([self._slots.get(request, -1) for request in ids], dtype=np.int64)

    def judge(
        self,
        rows: np.ndarray,
        drafters: np.ndarray,
        accepted: Sequence[np.ndarray],
        offered: Sequence[np.ndarray] | None,
        *,
        horizon: float,
    ) -> None:
        """Add to `counts` of these rows and drafters [R], and forget what is older than `horizon` trials.

        Args:
            accepted, offered: three arrays [R] each, in the order of `counts`; None for nothing.
        """
        told = (*accepted, *(offered or ()))
        flat, room = self.counts.reshape(-1), self.counts.shape[2]
        where = self._offsets[: len(told)] + (drafters * room + rows)
        own = flat.take(where)  # [6 or 3, R]
        own += told
        for part in (own[:3], own[3:]):
            if len(part) and np.count_nonzero(part[1] > horizon):
                part *= np.minimum(1.0, horizon / np.maximum(part[1], 1.0))
        flat[where] = own

    def finish(self, ids: Iterable[Hashable]) -> None:
        """Forget these requests; unknown ones are ignored."""
        for request in ids:
            slot = self._slots.pop(request, None)
            if slot is not None:
                self._free.append(slot)
                self._ids = None

    def _add(self, missing: Sequence[Hashable], *, present: set[Hashable]) -> None:
        while len(self._slots) + len(missing) > self.max_requests:
            absent = [request for request in self._slots if request not in present]
            self.finish([min(absent, key=lambda request: self.last_step[self._slots[request]])])
        while len(self._free) < len(missing):
            self._grow()
        for request in missing:
            slot = self._free.pop()
            self._clear(slot)
            self._slots[request] = slot

    def _clear(self, slot: int) -> None:
        self.counts[:, :, slot] = 0.0
        for name in ("arms", "histogram", "totals"):
            getattr(self, name)[slot] = 0
        self.seen_length[slot] = -1

    def _grow(self) -> None:
        old = len(self.last_step)
        room = min(max(_FIRST_ROOM, 2 * old), max(self.max_requests, 1))
        kept, counts = {name: getattr(self, name) for name in _PER_ROW}, self.counts
        self._allocate(room)
        for name, array in kept.items():
            getattr(self, name)[:old] = array
        self.counts[:, :, :old] = counts
        self._free += range(room - 1, old - 1, -1)

    def _allocate(self, room: int) -> None:
        self.counts = np.zeros((6, self._drafters, room))
        self._offsets = np.arange(6)[:, None] * (self._drafters * room)  # of each of the six, in `counts` laid flat
        self.seen_length = np.full((room, self._drafters), -1, dtype=np.int64)
        self.arms = np.zeros(room, dtype=np.int64)
        self.histogram = np.zeros((room, self._longest + 1), dtype=np.int64)
        self.totals = np.zeros((room, 4), dtype=np.int64)
        self.last_step = np.zeros(room, dtype=np.int64)

    def state_dict(self) -> dict[str, object]:
        """Requests whose id is text or a whole number, in the order of their latest step."""
        kept = [request for request in self._slots if isinstance(request, (str, int)) and not isinstance(request, bool)]
        kept.sort(key=lambda request: self.last_step[self._slots[request]])
        rows = self.known(kept)
        values = {name: getattr(self, name)[rows].tolist() for name in _PER_ROW}
        return {"ids": kept, "counts": self.counts[:, :, rows].tolist(), **values}

    def load_state_dict(self, state: object) -> None:
        """Replace all requests by those of `state_dict()`. Raises ValueError on anything else; nothing changes then."""
        if not isinstance(state, dict) or state.keys() != {"ids", "counts", *_PER_ROW}:
            raise ValueError(f"state: requests must be a mapping of ids, counts, {', '.join(_PER_ROW)}")
        ids = state["ids"]
        if not isinstance(ids, list) or len(ids) > self.max_requests or len(set(ids)) != len(ids):
            raise ValueError(f"state: ids must be at most {self.max_requests} different requests, got {ids!r:.80}")
        if not all(isinstance(request, (str, int)) and not isinstance(request, bool) for request in ids):
            raise ValueError(f"state: ids must be text or whole numbers, got {ids!r:.80}")
        fresh = RequestTable(self._drafters, longest=self._longest, max_requests=self.max_requests)
        rows = fresh.rows(ids, step=0)
        shape = (6, self._drafters, len(ids))
        fresh.counts[:, :, rows] = read_array(state, "counts", shape, minimum=0.0) if ids else 0.0
        for name in _PER_ROW:
            target = getattr(fresh, name)
            shape = (len(ids), *target.shape[1:])
            values = np.asarray(state[name], dtype=target.dtype) if ids else np.zeros(shape, target.dtype)
            if values.shape != shape or not np.isfinite(values).all():
                raise ValueError(f"state: {name} must be finite numbers of shape {list(shape)}")
            target[rows] = values
        self.__dict__.update(fresh.__dict__)
