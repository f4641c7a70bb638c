"""A bounded store of past outputs that can be searched like a datastore and grows after every request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adaptspec.drafters.datastore import TokenIndex


@dataclass(frozen=True, slots=True)
class Segment:
    """Documents that are indexed together, oldest first."""

    documents: tuple[np.ndarray, ...]
    index: TokenIndex

    @classmethod
    def of(cls, documents: Sequence[np.ndarray]) -> Segment:
        """Index `documents`, int32 arrays."""
        return cls(tuple(documents), TokenIndex.build(documents))


class GrowingStore:
    """First in, first out; a log of segments, each sorted once (as log-structured merge trees keep their runs).

    A new document is a segment of its own. While the segment before the last is less than twice as long as the last,
    the two become one, up to a quarter of `max_tokens`. So at most 8 + log2(max_tokens / 4) segments are searched, a
    token is sorted about log2(max_tokens / 4 / document length) times in all, and no addition sorts more than a quarter
    of `max_tokens` (about 35 ms for 65,536 tokens) unless the document itself is longer. When there is no room, the
    oldest segment is dropped whole; three quarters of `max_tokens` stay filled unless a document is longer than a
    quarter. Twelve bytes per token.

    Args:
        max_tokens: tokens remembered at most; of a longer document only the end is kept. 0 remembers nothing.
    """

    def __init__(self, *, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.segments: list[Segment] = []

    def __len__(self) -> int:
        """Tokens remembered."""
        return sum(len(segment.index) for segment in self.segments)

    def add(self, document: Sequence[int]) -> None:
        """Remember one document."""
        kept = np.asarray(document, dtype=np.int32)[max(0, len(document) - self.max_tokens) :]
        if not len(kept):
            return
        pending = (kept,)
        pending_tokens = len(kept)
        while self.segments:
            before = self.segments[-1]
            together = len(before.index) + pending_tokens
            if len(before.index) >= 2 * pending_tokens or together > self.max_tokens // 4:
                break
            pending = before.documents + pending
            pending_tokens = together
            self.segments.pop()
        while self.segments and len(self) + pending_tokens > self.max_tokens:
            del self.segments[0]
        self.segments.append(Segment.of(pending))

    def indices(self) -> list[TokenIndex]:
        """What to search, newest first."""
        return [segment.index for segment in reversed(self.segments)]

    def clear(self) -> None:
        """Forget everything."""
        self.segments = []
