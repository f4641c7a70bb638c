"""How likely every draft token is to be proposed and accepted, for every row of a batch at once.

What is estimated is conditional on the position before, as in a survival analysis (Kaplan and Meier 1958):

    gamma[d, k] = P(token k accepted | k - 1 accepted, k verified)
    offer[d, k] = P(token k proposed | k - 1 proposed)

A draft that was accepted whole, or cut off by a scheduler or a grammar, has no trial at the position after it, so that
it neither counts as a rejection nor hides that more might have been accepted. A position without trials is taken to be
like the one before: a full accept makes the next length worth a try.

On top of these, odds are multiplied by factors, each learnt against what the ones before it expect: how the drafter
fares lately, at this context length, with this much evidence, and in this request. A factor for h hits in n trials of
which e were expected is (h + s/2) / (e + s/2) * (n - e + s/2) / (n - h + s/2), s trials of doubt.

Memory of the past fades with every trial beyond a limit, and slowly with every step, so that what was not tried for
long is doubted again. D drafters, K positions, R rows, C context buckets, E levels of evidence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from adaptspec.bandits.state import read_array
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

_RECENT = (24.0, 128.0, 1.0 - 1.0 / 256.0)
_CONTEXT = (40.0, HORIZON, 1.0 - 1.0 / 2000.0)
_EVIDENCE = (16.0, HORIZON, STEP_FADE)
_REQUEST = (6.0, 64.0, 1.0 - 1.0 / 128.0)
"""Of every factor: trials of doubt, trials that it remembers, and what is left of its counts after a step. A short bad
streak shows in all of them at once, so that none may be too sure of itself."""

SETTLED = 32.0
"""Trials of a drafter after which half of what is seen goes to the factors."""

OPTIMISM = 1.5
"""A drafter that was judged n times lately is taken to be better than it looks, by exp(OPTIMISM / sqrt(1 + n)) in odds:
one unlucky draft must not be its last."""

_LEAST, _MOST = 1e-4, 0.9995
_FLUSH_EVERY, _NOTHING = 256, 1e-9


@dataclass(frozen=True, slots=True)
class Prospects:
    """What drafting is worth, for every row that may draft.

    Attributes:
        accepted: float32 [D, K, R], expected accepted tokens at position k.
        verified: float32 [D, K, R], probability that the drafter proposes position k.
    """

    accepted: np.ndarray
    verified: np.ndarray


class _Factor:
    """Odds factors of some cells: hits, trials and expected hits, [cells]."""

    def __init__(self, cells: int, *, doubt: float, horizon: float, fade: float) -> None:
        self.counts = np.zeros((3, cells))
        self._half = 0.5 * doubt
        self._horizon = horizon
        self._fade = fade
        self._value: np.ndarray | None = None

    def value(self) -> np.ndarray:
        """[cells]. Do not change it."""
        if self._value is None:
            self._value = odds_factor(*self.counts, half=self._half)
        return self._value

    def add(self, hits: np.ndarray, trials: np.ndarray, expected: np.ndarray) -> None:
        """All [cells]."""
        for row, more in zip(self.counts, (hits, trials, expected), strict=True):
            row += more
        cap(self.counts, self.counts[1], self._horizon)
        self._value = None

    def fade(self) -> None:
        self.counts *= self._fade
        self._value = None

    def changed(self) -> None:
        """The counts were written from outside."""
        self._value = None


def _factor(cells: int, settings: tuple[float, float, float]) -> _Factor:
    doubt, horizon, fade = settings
    return _Factor(cells, doubt=doubt, horizon=horizon, fade=fade)


def odds_factor(hits: Any, trials: Any, expected: Any, *, half: float) -> Any:
    """How much better than expected, as a factor of the odds; 1 without trials."""
    return (hits + half) / (expected + half) * (trials - expected + half) / (trials - hits + half)


def cap(counts: np.ndarray, trials: np.ndarray, horizon: float) -> None:
    """Scale all counts down where there are more trials than the horizon."""
    if trials.size and trials.max() > horizon:
        counts *= np.minimum(1.0, horizon / np.maximum(trials, 1.0))


class AcceptanceModel:
    """See the module.

    Args:
        drafters: D.
        longest: K.
    """

    def __init__(self, drafters: int, longest: int) -> None:
        self._drafters, self._longest = drafters, longest
        self._accepts = np.zeros((2, drafters, longest))  # hits, trials
        self._offers = np.zeros((2, drafters, longest))
        self._recent = _factor(drafters, _RECENT)
        self._contexts = _factor(drafters * CONTEXTS, _CONTEXT)
        self._evidence = _factor(drafters * (EVIDENCE_LEVELS + 1), _EVIDENCE)
        self._declines = np.zeros(drafters, dtype=bool)  # who has ever had less than it was asked for
        self._odds: tuple[np.ndarray, np.ndarray] | None = None

    def curve(self, drafter: int) -> np.ndarray:
        """float64 [K], conditional acceptance by position over all requests, for reports."""
        odds = self._base()[0][drafter] * self._recent.value()[drafter]
        return odds / (1.0 + odds)

    def prospects(
        self,
        table: RequestTable,
        rows: np.ndarray,
        *,
        buckets: np.ndarray,
        evidence: np.ndarray | None,
        available: Mapping[int, np.ndarray],
        caps: np.ndarray,
    ) -> Prospects:
        """What every drafter is worth on these rows.

        Args:
            rows: int64 [R], rows of `table`.
            buckets: int64 [R], of `context_buckets`.
            evidence: int64 [D, R], -1 unknown; None if nothing is known.
            available: by drafter, int64 [R] tokens that it has, -1 unknown.
            caps: int64 [R], positions beyond are worth nothing.
        """
        odds, offer_odds = self._base()
        own = table.counts.take(rows, axis=2)  # [6, D, R]
        factors = self._shared(buckets, evidence) * odds_factor(*own[:3], half=0.5 * _REQUEST[0])
        # float32: these arrays are most of the work, and the sums need no more.
        accept = odds[:, :, None].astype(np.float32) * factors[:, None, :].astype(np.float32)
        accept /= 1.0 + accept
        places = np.arange(self._longest)[:, None]
        if available or self._declines.any():
            offers = odds_factor(*own[3:], half=0.5 * _REQUEST[0])
            offer = offer_odds[:, :, None].astype(np.float32) * offers[:, None, :].astype(np.float32)
            offer /= 1.0 + offer
            offer[~self._declines] = 1.0
            for drafter, known in available.items():
                np.copyto(offer[drafter], places < known, where=known >= 0)
            offer *= places < caps
        else:
            offer = np.broadcast_to((places < caps).astype(np.float32), accept.shape)
        shared = offer.strides[0] == 0  # the same for all drafters, and a product of ones and then zeros already
        for place in range(1, self._longest):  # much faster than cumprod along a short axis
            accept[:, place] *= accept[:, place - 1]
            if not shared:
                offer[:, place] *= offer[:, place - 1]
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
        censored: np.ndarray,
    ) -> None:
        """What came of the drafts of some rows, all int64 [R]; `drafters` says whose they were.

        `proposed` of -1 says nothing about what the drafter had to offer.
        """
        judged = np.where(censored, accepted, np.minimum(accepted + 1, verified))
        accepted = np.minimum(accepted, judged)
        self._declines[drafters[(proposed >= 0) & (proposed < asked)]] = True
        cells = drafters * CONTEXTS + buckets
        levels = EVIDENCE_LEVELS + 1
        where = None if evidence is None else drafters * levels + evidence % levels
        odds, offer_odds = self._base()
        # The first drafts of a drafter shape its curve alone; else every factor would count the same bad luck again.
        told = self._accepts[1].sum(axis=1)
        sure = told / (told + SETTLED)
        recent, contexts, by_level = self._recent.value(), self._contexts.value(), self._evidence.value()
        hits, trials = sure.take(drafters) * accepted, sure.take(drafters) * judged

        # What is common to a drafter and a context is counted by position: [D, C, K].
        tried = self._survivors(cells, judged, self._drafters * CONTEXTS).reshape(self._drafters, CONTEXTS, -1)
        lately = odds * recent[:, None]
        expected = tried @ (odds / (1.0 + odds))[:, :, None], tried @ (lately / (1.0 + lately))[:, :, None]
        by_cell = [np.bincount(cells, values, minlength=tried.size // self._longest) for values in (hits, trials)]
        by_drafter = [counts.reshape(self._drafters, CONTEXTS).sum(axis=1) for counts in by_cell]
        self._recent.add(*by_drafter, expected[0].sum(axis=(1, 2)) * sure)
        self._contexts.add(*by_cell, (expected[1][:, :, 0] * sure[:, None]).ravel())

        factors = (recent.take(drafters) * contexts.take(cells)).astype(np.float32)
        own = odds.T.astype(np.float32).take(drafters, axis=1)  # [K, R]
        trial = np.arange(self._longest)[:, None] < judged
        if where is not None:
            by_context = _expected(own * factors, trial) * sure.take(drafters)
            size = len(by_level)
            self._evidence.add(*(np.bincount(where, values, minlength=size) for values in (hits, trials, by_context)))
            factors *= by_level.take(where).astype(np.float32)
        accepting = hits, trials, _expected(own * factors, trial) * sure.take(drafters)
        offering = self._learn_offers(drafters, offer_odds, asked=asked, proposed=proposed)
        table.judge(rows, drafters, accepting, offering, horizon=_REQUEST[1])
        self._accepts[0] += self._survivors(drafters, accepted, self._drafters)
        self._accepts[1] += tried.sum(axis=1)
        cap(self._accepts, self._accepts[1], HORIZON)
        self._odds = None

    def _learn_offers(
        self, drafters: np.ndarray, odds: np.ndarray, *, asked: np.ndarray, proposed: np.ndarray
    ) -> tuple[np.ndarray, ...] | None:
        """Count what was proposed of what was asked; returns it by row, None where every drafter has always enough."""
        if not self._declines.any():
            return None
        asking = np.where(proposed >= 0, np.minimum(proposed + 1, asked), 0)
        offered = np.maximum(np.minimum(proposed, asking), 0)
        wanted = np.arange(self._longest)[:, None] < asking
        expected = _expected(odds.T.astype(np.float32).take(drafters, axis=1), wanted)
        self._offers[0] += self._survivors(drafters, offered, self._drafters)
        self._offers[1] += self._survivors(drafters, asking, self._drafters)
        cap(self._offers, self._offers[1], HORIZON)
        return offered, asking, expected

    def _survivors(self, cells: np.ndarray, lengths: np.ndarray, count: int) -> np.ndarray:
        """float64 [count, K], how many rows of each cell reach beyond each position."""
        width = self._longest + 1
        ended = np.bincount(cells * width + lengths, minlength=count * width).reshape(count, width)
        return ended[:, :0:-1].cumsum(axis=1)[:, ::-1].astype(np.float64)

    def fade(self, table: RequestTable, *, step: int) -> None:
        """A step passed: all that is known is a little older, and what was not tried for long is doubted again."""
        for counts in (self._accepts, self._offers):
            counts *= STEP_FADE
        for factor in (self._recent, self._contexts, self._evidence):
            factor.fade()
        table.counts *= _REQUEST[2]
        if step % _FLUSH_EVERY == 0:
            # What has faded to nothing would become denormal numbers, with which processors are slow.
            for counts in (self._accepts, self._offers, self._recent.counts, self._contexts.counts, table.counts):
                counts[counts < _NOTHING] = 0.0
        self._odds = None

    def _shared(self, buckets: np.ndarray, evidence: np.ndarray | None) -> np.ndarray:
        """[D, R], the factors that requests have in common."""
        factors = self._contexts.value().reshape(self._drafters, CONTEXTS)[:, buckets]
        hope = np.exp(OPTIMISM / np.sqrt(1.0 + self._recent.counts[1]))
        factors *= (self._recent.value() * hope)[:, None]
        by_level = self._evidence.value().reshape(self._drafters, EVIDENCE_LEVELS + 1)
        if evidence is None:
            factors *= by_level[:, EVIDENCE_LEVELS:]
        else:
            factors *= np.take_along_axis(by_level, evidence % (EVIDENCE_LEVELS + 1), axis=1)
        return factors

    def _base(self) -> tuple[np.ndarray, np.ndarray]:
        """Odds [D, K] of acceptance and, where any drafter ever declined, of an offer."""
        if self._odds is None:
            # Plain numbers: the positions depend on each other, and there are too few drafters for arrays to pay.
            offers = self._offers if self._declines.any() else None
            found = np.array(
                [
                    [_conditionals(*pair, first=first) for pair in zip(*counts.tolist(), strict=True)]
                    for counts, first in ((self._accepts, FIRST_ACCEPTANCE), (offers, FIRST_OFFER))
                    if counts is not None
                ]
            )
            found /= 1.0 - found
            self._odds = found[0], found[-1]
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
        for factor in (self._recent, self._contexts, self._evidence):
            factor.changed()
        self._odds = None

    def _counts(self) -> dict[str, np.ndarray]:
        return {
            "accepts": self._accepts,
            "offers": self._offers,
            "recent": self._recent.counts,
            "contexts": self._contexts.counts,
            "evidence": self._evidence.counts,
            "declines": self._declines,
        }


def context_buckets(contexts: np.ndarray) -> np.ndarray:
    """int64 [R] in [0, CONTEXTS), from committed tokens."""
    _, exponents = np.frexp(np.maximum(contexts, 1) - 0.5)  # 2 ** exponent is the next power of two, rounded up
    return np.minimum(np.maximum(exponents.astype(np.int64) - 9, 0), CONTEXTS - 1)


def _expected(odds: np.ndarray, trial: np.ndarray) -> np.ndarray:
    """float64 [R], expected hits in the trials [K, R]."""
    chances = odds / (1.0 + odds)
    chances *= trial
    return chances.sum(axis=0).astype(np.float64)


def _conditionals(hits: list[float], trials: list[float], *, first: float) -> list[float]:
    """[K], posterior means by position; every position's prior is the one before."""
    found = []
    for hit, trial in zip(hits, trials, strict=True):
        first = (hit + DOUBT * first) / (trial + DOUBT)
        found.append(min(max(first, _LEAST), _MOST))
    return found
