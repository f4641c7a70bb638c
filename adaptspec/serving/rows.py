"""The rows of a serving batch: their text, their drafters, and what became of the drafts they were given."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from adaptspec.serving.chains import DECLINED, Chain, ChainDrafter, Maker
from adaptspec.serving.types import count_drafts


@dataclass(slots=True, eq=False)
class Row:
    """One request in one step.

    Attributes:
        index: of the row in the batch.
        request_id: as captured, or a name that stands for its content.
        text: int32 [T], a view of vLLM's own tokens, those just sampled included.
        sampled: tokens of the last pass.
        prompt_length: tokens given.
        limit: draft tokens that the row may take at most.
        remaining: tokens that the request may still gain, None if unknown.
    """

    index: int
    request_id: Hashable
    text: np.ndarray
    sampled: Sequence[int]
    prompt_length: int
    limit: int
    remaining: int | None = None

    @property
    def before(self) -> int:
        """Tokens before the last pass."""
        return len(self.text) - len(self.sampled)


@dataclass(frozen=True, slots=True)
class Judged:
    """What became of one draft: how much of it the target looked at, how much it accepted, rows of padding."""

    verified: int
    accepted: int
    padding: int = 0


def judge(draft: Sequence[int], sampled: Sequence[int], scheduled: Sequence[int] | None) -> Judged:
    """Compare a draft with what its pass verified and emitted.

    The scheduler cuts drafts to its token budget and to a grammar, and fills them up with padding. A draft token that
    was not verified says nothing of the drafter.

    Args:
        draft: as proposed.
        sampled: accepted tokens and the bonus, at least one.
        scheduled: the draft tokens in the pass, None where that is unknown: then a draft counts as cut off if the text
            goes on as it said, because a wrong token is as wrong where nobody verified it.

    >>> judge([5, 6, 7], [5, 9], [5, 6, 7])
    Judged(verified=3, accepted=1, padding=0)
    >>> judge([5, 6, 7], [5, 6], None)              # cut off behind 5, and 6 was sampled all the same
    Judged(verified=1, accepted=1, padding=0)
    """
    accepted = len(sampled) - 1
    if scheduled is not None:
        verified = int(count_drafts([scheduled])[0])
        if list(scheduled[:verified]) != list(draft[:verified]):
            return Judged(0, 0, len(scheduled))
        return Judged(verified, min(accepted, verified), len(scheduled) - verified)
    if accepted > len(draft) or list(draft[:accepted]) != list(sampled[:-1]):
        return Judged(0, 0)
    cut_off = accepted < len(draft) and draft[accepted] == sampled[-1]
    return Judged(accepted if cut_off else len(draft), accepted)


@dataclass(slots=True, eq=False)
class Requests:
    """The drafters of all requests, made when they are first asked.

    Args:
        makers: by drafter name.
        max_context: longer texts are not looked up in.
        max_caches: requests for which a drafter that is not cheap may be open at once.
    """

    makers: Mapping[str, Maker]
    max_context: int
    max_caches: int
    _open: dict[Hashable, dict[str, ChainDrafter]] = field(default_factory=dict)
    _prompt_lengths: dict[Hashable, int] = field(default_factory=dict)
    _caches: int = 0

    def __len__(self) -> int:
        return len(self._open)

    def drafter(self, row: Row, name: str) -> ChainDrafter | None:
        """The row's drafter of this name, None where there is no room for one."""
        drafters = self._open.setdefault(row.request_id, {})
        self._prompt_lengths.setdefault(row.request_id, row.prompt_length)
        drafter = drafters.get(name)
        if drafter is not None:
            return drafter if not drafter.cheap or len(row.text) <= self.max_context else None
        if len(row.text) > self.max_context:
            return None
        drafter = self.makers[name]()
        if not drafter.cheap:
            if self._caches >= self.max_caches:
                return None
            self._caches += 1
        drafters[name] = drafter
        return drafter

    def draft(self, row: Row, name: str, length: int) -> Chain:
        """What the row's drafter says."""
        drafter = self.drafter(row, name) if length > 0 else None
        return DECLINED if drafter is None else drafter.draft(row.text, length)

    def catch_up(self, rows: Iterable[Row], name: str) -> float:
        """Bring the open drafters of this name up to date; returns the seconds."""
        started = perf_counter()
        for row in rows:
            drafter = self._open.get(row.request_id, {}).get(name)
            if drafter is not None:
                drafter.catch_up(row.text)
        return perf_counter() - started

    def is_stale(self, row: Row, name: str) -> bool:
        """Whether the row's drafter lacks more than what one step brings."""
        drafter = self._open.get(row.request_id, {}).get(name)
        return drafter is not None and drafter.seen < row.before

    def finish(self, request_ids: Iterable[Hashable]) -> list[Hashable]:
        """Let go of requests that ended; returns those that were known."""
        known = []
        for request_id in request_ids:
            drafters = self._open.pop(request_id, None)
            if drafters is None:
                continue
            known.append(request_id)
            prompt_length = self._prompt_lengths.pop(request_id)
            for drafter in drafters.values():
                drafter.finish(prompt_length)
                self._caches -= not drafter.cheap
        return known
