"""How likely every draft token is to be proposed and accepted, for every row of a batch at once.

What is estimated is conditional on the position before, as in a survival analysis (Kaplan and Meier 1958):

    gamma[k, d] = P(token k accepted | k - 1 accepted, k verified)
    offer[k, d] = P(token k proposed | k - 1 proposed)

A draft that was accepted whole, or cut off by a scheduler or a grammar, has no trial at the position after it, so that
it neither counts as a rejection nor hides that more might have been accepted. A position without trials is taken to be
like the one before: a full accept makes the next length worth a try.

On top of these, odds are multiplied by factors (`odds`), each learnt against what the ones before it expect: how the
drafter fares lately, at this context length, with this much evidence, and in this request.

Memory of the past fades with every trial beyond a limit, and slowly with every step, so that what was not tried for
long is doubted again. D drafters, K positions, R rows, C context buckets, E levels of evidence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from adaptspec.bandits.state import read_array
from adaptspec.serving.odds import Factors, Memory, cap, odds_factor
from adaptspec.serving.requests import RequestTable
from adaptspec.serving.types import EVIDENCE_LEVELS

CONTEXTS = 12
"""Context buckets: up to 512 committed tokens, then powers of two."""

FIRST_ACCEPTANCE, FIRST_OFFER = 0.7, 0.95
"""What is assumed of a drafter that was never tried."""

DOUBT = 6.0
"""Trials that the assumption is worth."""

HORIZON = 2000.0
"""Trials that a position remembers: the slow prior."""

STEP_FADE = 1.0 - 1.0 / 4000.0
"""What is left of its counts after a step."""

_RECENT = Memory(24.0, 128.0, 1.0 - 1.0 / 256.0)
_CONTEXT = Memory(40.0, HORIZON, 1.0 - 1.0 / 2000.0)
_EVIDENCE = Memory(16.0, HORIZON, STEP_FADE)
_REQUEST = Memory(6.0, 64.0, 1.0 - 1.0 / 128.0)
"""A short bad streak shows in all factors at once, so that none may be too sure of itself."""

SETTLED = 32.0
"""Trials of a drafter after which half of what is seen goes to the factors."""

OPTIMISM = 1.5
"""A drafter that was judged n times lately is taken to be better than it looks, by exp(OPTIMISM / sqrt(1 + n)) in odds:
one unlucky draft must not be its last."""

_LEAST, _MOST = 1e-4, 0.9995
_FLUSH_EVERY, _NOTHING = 256, 1e-9
_LEVELS = EVIDENCE_LEVELS + 1  # the last one: nothing is known
_BUCKET_ENDS = 512 * 2 ** np.arange(CONTEXTS - 1)


@dataclass(frozen=True, slots=True)
class Prospects:
    """What drafting is worth, for every row that may draft.

    Attributes:
        accepted: float32 [K, D, R], expected accepted tokens at position k.
        verified: float32 [K, D, R], probability that the drafter proposes position k; [K, 1, R] where every drafter has
            always enough, and only the limits of the rows count; [K, 1, 1] where they have none.
    """

    accepted: np.ndarray
    verified: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class _Odds:
    """What the curves of all requests say.

    Attributes:
        accept, chances: float64 [D, K], odds of acceptance, and as probabilities.
        accept_by_position: float32 [K, D].
        offer_by_position: float32 [K, D], odds of an offer, once any drafter has declined.
    """

    accept: np.ndarray
    chances: np.ndarray
    accept_by_position: np.ndarray
    offer_by_position: np.ndarray


class AcceptanceModel:
    """See the module.

    Args:
        drafters: D.
        longest: K.
    """

    def __init__(self, drafters: int, longest: int) -> None:
        self._drafters, self._longest = drafters, longest
        self._curves = np.zeros((2, 2, drafters, longest))  # acceptance and offers: hits, trials
        self._factors = Factors([(drafters, _RECENT), (drafters * CONTEXTS, _CONTEXT), (drafters * _LEVELS, _EVIDENCE)])
        self._declines = np.zeros(drafters, dtype=bool)  # who has ever had less than it was asked for
        self._declining = False  # whether any has
        self._places = np.arange(longest)[:, None]
        self._reach = (self._places < np.arange(longest + 1)).astype(
            np.float32
        )  # positions within a length: [K, K + 1]
        self._certain = np.ones((longest, 1, 1), dtype=np.float32)
        self._odds: _Odds | None = None

    def curve(self, drafter: int) -> np.ndarray:
        """float64 [K], conditional acceptance by position over all requests, for reports."""
        recent, _, _ = self._factors.values()
        odds = self._base().accept[drafter] * recent[drafter]
        return odds / (1.0 + odds)

    def prospects(
        self,
        table: RequestTable,
        rows: np.ndarray,
        *,
        buckets: np.ndarray,
        evidence: np.ndarray | None,
        available: Mapping[int, np.ndarray],
        caps: np.ndarray | None,
    ) -> Prospects:
        """What every drafter is worth on these rows.

        Args:
            rows: int64 [R], rows of `table`.
            buckets: int64 [R], of `context_buckets`.
            evidence: int64 [D, R], -1 unknown; None if nothing is known.
            available: by drafter, int64 [R] tokens that it has, -1 unknown.
            caps: int64 [R], positions beyond are worth nothing; None where no row has a limit.
        """
        base = self._base()
        offering = bool(available) or self._declining
        own = table.counts[: 6 if offering else 3].take(rows, axis=2)  # [6 or 3, D, R]
        factors = self._shared(buckets, evidence)
        factors *= odds_factor(*own[:3], half=0.5 * _REQUEST.doubt)
        # float32: these arrays are most of the work, and the sums need no more.
        accept = base.accept_by_position[:, :, None] * factors.astype(np.float32)
        accept /= 1.0 + accept
        if offering:
            offers = odds_factor(*own[3:], half=0.5 * _REQUEST.doubt)
            offer = base.offer_by_position[:, :, None] * offers.astype(np.float32)
            offer /= 1.0 + offer
            offer[:, ~self._declines] = 1.0
            for drafter, known in available.items():
                np.copyto(offer[:, drafter], self._places < known, where=known >= 0)
            if caps is not None:
                offer *= (self._places < caps)[:, None]
        elif caps is not None:
            offer = (self._places < caps)[:, None].astype(np.float32)
        else:
            offer = self._certain
        for part in (accept, offer) if offering else (accept,):
            for before, place in zip(part[:-1], part[1:], strict=True):  # much faster than cumprod along a short axis
                np.multiply(before, place, out=place)
        if offering or caps is not None:
            accept *= offer
        return Prospects(accept, offer)

    def learn(
        self,
        table: RequestTable,
        rows: np.ndarray,
        *,
        drafters: np.ndarray,
        buckets: np.ndarray,
        evidence: np.ndarray | None,
        asked: np.ndarray,
        proposed: np.ndarray,
        verified: np.ndarray,
        accepted: np.ndarray,
        censored: np.ndarray | None,
    ) -> None:
        """What came of the drafts of some rows, all [R]; `drafters` says whose they were.

        `proposed` of -1 says nothing about what the drafter had to offer.
        """
        judged = np.minimum(accepted + 1, verified)
        if censored is not None:
            judged = np.where(censored, accepted, judged)
        short = proposed < asked
        if np.count_nonzero(short):
            self._declines[drafters[short & (proposed >= 0)]] = True
            self._declining = bool(self._declines.any())
        base, sure = self._base(), self._sureness()
        recent, contexts, by_level = self._factors.values()
        of_drafters, of_contexts, of_levels = self._factors.parts
        more = np.zeros(self._factors.counts.shape)

        # What is common to a drafter and a context is counted by position.
        cells = drafters * CONTEXTS + buckets
        reached = self._survivors(cells, accepted, judged)
        tried = reached[1]
        by_cell = reached.sum(axis=3) * sure[:, None]
        more[:2, of_contexts] = by_cell.reshape(2, -1)
        more[:2, of_drafters] = by_cell.sum(axis=2)
        lately = base.accept * recent[:, None]
        more[2, of_drafters] = (tried @ base.chances[:, :, None])[:, :, 0].sum(axis=1) * sure
        more[2, of_contexts] = ((tried @ (lately / (1.0 + lately))[:, :, None])[:, :, 0] * sure[:, None]).ravel()

        sure_by_row = sure.take(drafters)
        hits, trials = sure_by_row * accepted, sure_by_row * judged
        factors = (recent.take(drafters) * contexts.take(cells)).astype(np.float32)
        own = base.accept_by_position.take(drafters, axis=1)  # [K, R]
        trial = self._reach.take(judged, axis=1)
        if evidence is not None:
            where = drafters * _LEVELS + evidence % _LEVELS
            by_context = _expected(own * factors, trial) * sure_by_row
            for row, values in enumerate((hits, trials, by_context)):
                more[row, of_levels] = np.bincount(where, values, minlength=len(by_level))
            factors *= by_level.take(where).astype(np.float32)
        accepting = hits, trials, _expected(own * factors, trial) * sure_by_row
        offering = self._learn_offers(drafters, base, asked=asked, proposed=proposed)
        table.judge(rows, drafters, accepting, offering, horizon=_REQUEST.horizon)
        self._factors.add(more)
        self._curves[0] += reached.sum(axis=2)
        cap(self._curves[0], self._curves[0, 1], HORIZON)
        self._odds = None

    def _sureness(self) -> np.ndarray:
        """[D], the share of what is seen that goes to the factors. The first drafts of a drafter shape its curve alone;
        else every factor would count the same bad luck again."""
        told = self._curves[0, 1].sum(axis=1)
        return told / (told + SETTLED)

    def _learn_offers(
        self, drafters: np.ndarray, base: _Odds, *, asked: np.ndarray, proposed: np.ndarray
    ) -> tuple[np.ndarray, ...] | None:
        """Count what was proposed of what was asked; returns it by row, None where every drafter has always enough."""
        if not self._declining:
            return None
        asking = np.where(proposed >= 0, np.minimum(proposed + 1, asked), 0)
        offered = np.maximum(np.minimum(proposed, asking), 0)
        expected = _expected(base.offer_by_position.take(drafters, axis=1), self._reach.take(asking, axis=1))
        self._curves[1] += self._survivors(drafters * CONTEXTS, offered, asking).sum(axis=2)
        cap(self._curves[1], self._curves[1, 1], HORIZON)
        return offered, asking, expected

    def _survivors(self, cells: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """float64 [2, D, C, K], how many rows of each cell reach beyond each position: by the first and by the second
        lengths [R]."""
        width = self._longest + 1
        places = cells * width
        half = self._drafters * CONTEXTS * width
        ended = np.bincount(np.concatenate([places + first, places + (second + half)]), minlength=2 * half)
        beyond = ended.reshape(2, self._drafters, CONTEXTS, width)[..., :0:-1].cumsum(axis=3)
        return beyond[..., ::-1].astype(np.float64, order="C")

    def fade(self, table: RequestTable, *, step: int) -> None:
        """A step passed: all that is known is a little older, and what was not tried for long is doubted again."""
        self._curves *= STEP_FADE
        self._factors.fade()
        table.counts *= _REQUEST.fade
        if step % _FLUSH_EVERY == 0:
            # What has faded to nothing would become denormal numbers, with which processors are slow.
            for counts in (self._curves, self._factors.counts, table.counts):
                counts[counts < _NOTHING] = 0.0
        self._odds = None

    def _shared(self, buckets: np.ndarray, evidence: np.ndarray | None) -> np.ndarray:
        """[D, R], the factors that requests have in common."""
        recent, contexts, by_level = self._factors.values()
        hope = np.exp(OPTIMISM / np.sqrt(1.0 + self._factors.counts[1, : self._drafters]))
        by_bucket = contexts.reshape(self._drafters, CONTEXTS) * (recent * hope)[:, None]
        by_level = by_level.reshape(self._drafters, _LEVELS)
        if evidence is None:
            by_bucket *= by_level[:, EVIDENCE_LEVELS:]
            return by_bucket.take(buckets, axis=1)
        return by_bucket.take(buckets, axis=1) * np.take_along_axis(by_level, evidence % _LEVELS, axis=1)

    def _base(self) -> _Odds:
        if self._odds is None:
            # Plain numbers: the positions depend on each other, and there are too few drafters for arrays to pay.
            curves = self._curves if self._declining else self._curves[:1]
            firsts = (FIRST_ACCEPTANCE, FIRST_OFFER)
            chances = np.array(
                [
                    [_conditionals(*pair, first) for pair in zip(*counts, strict=True)]
                    for counts, first in zip(curves.tolist(), firsts, strict=False)
                ]
            )
            odds = chances / (1.0 - chances)
            by_position = odds.transpose(0, 2, 1).astype(np.float32, order="C")
            self._odds = _Odds(odds[0], chances[0], by_position[0], by_position[-1])
        return self._odds

    def state_dict(self) -> dict[str, Any]:
        return {name: counts.tolist() for name, counts in self._counts().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`. Raises ValueError on anything else; nothing changes then."""
        own = self._counts()
        if not isinstance(state, Mapping) or state.keys() != own.keys():
            raise ValueError(f"state: acceptance must be a mapping of {', '.join(own)}")
        read = {name: read_array(state, name, counts.shape, minimum=0.0) for name, counts in own.items()}
        for name, counts in own.items():
            counts[...] = read[name]
        self._declining = bool(self._declines.any())
        self._factors.changed()
        self._odds = None

    def _counts(self) -> dict[str, np.ndarray]:
        recent, contexts, evidence = (self._factors.counts[:, part] for part in self._factors.parts)
        accepts, offers = self._curves
        return {
            "accepts": accepts,
            "offers": offers,
            "recent": recent,
            "contexts": contexts,
            "evidence": evidence,
            "declines": self._declines,
        }


def context_buckets(contexts: np.ndarray) -> np.ndarray:
    """int64 [R] in [0, CONTEXTS), from committed tokens."""
    return _BUCKET_ENDS.searchsorted(contexts)


def _expected(odds: np.ndarray, trial: np.ndarray) -> np.ndarray:
    """float64 [R], expected hits in the trials [K, R]."""
    chances = odds / (1.0 + odds)
    chances *= trial
    return chances.sum(axis=0).astype(np.float64)


def _conditionals(hits: list[float], trials: list[float], first: float) -> list[float]:
    """[K], posterior means by position; every position's prior is the one before."""
    found = []
    for hit, trial in zip(hits, trials, strict=True):
        first = (hit + DOUBT * first) / (trial + DOUBT)
        found.append(first if _LEAST <= first <= _MOST else min(max(first, _LEAST), _MOST))
    return found
