"""How deep a drafter that runs once per depth should go (ours): as long as a level brings what its time is worth."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np

from adaptspec.trees import Stop
from adaptspec.types import ROOT, DraftContext, DraftTree

FADE = 0.98
"""Weight of the past per step."""

SECONDS_RATE = 0.1
"""Weight of the latest measurement of a level's seconds."""

TRY_ALL = 32
"""Every so many proposals all levels are drafted, to learn whether deeper ones have begun to pay."""


class PayingLevels:
    """Ends the growth of trees. Level d + 1 is drafted if

        E[tokens at depth d + 1] = trust_{d+1} m_d >= rate * seconds_{d+1},

    m_d the drafter's own probability that the text goes through one of the nodes it expands, trust the share of it that
    came true so far, rate the tokens per second that the run makes (`DraftContext.rate`). A level that was never
    measured is drafted. What a level adds to verification is not counted here: which nodes are verified is decided
    afterwards.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[tuple[str, int], float] = {}
        self._sums: dict[int, tuple[float, float]] = {}  # by depth: tokens that came true, and mass that promised them
        self._proposals = 0
        self._masses: list[float] = []
        self._tree: DraftTree | None = None

    def stop(self, context: DraftContext, *, width: int) -> Stop | None:
        """Told after every level; None if nothing is to be decided, because time has no price.

        Args:
            width: nodes expanded per level.
        """
        self.forget()
        if not context.rate > 0.0:
            return None
        self._proposals += 1
        everything = self._proposals % TRY_ALL == 0
        last = self._clock()

        def stop(depth: int, scores: np.ndarray) -> bool:
            nonlocal last
            now = self._clock()
            self._measure(context.vocab, depth, now - last)
            last = now
            best = np.sort(scores)[-width:]
            mass = float(np.exp(best).sum())
            self._masses.append(mass)
            expected = self.trust(depth + 1) * mass
            return not everything and expected < context.rate * self._seconds.get((context.vocab, depth + 1), 0.0)

        return stop

    def proposed(self, tree: DraftTree) -> None:
        """What became of the growth that `stop` watched."""
        self._tree = tree if self._masses else None

    def observe(self, tokens: np.ndarray) -> None:
        """Take in how the text went on: int64 [A + 1]."""
        if self._tree is None:
            return
        reached, node = 0, ROOT
        for token in tokens.tolist():
            found = np.flatnonzero((self._tree.parents == node) & (self._tree.token_ids == token))
            if not len(found):
                break
            node, reached = int(found[0]), reached + 1
        known = len(self._masses) if reached < len(tokens) else reached  # beyond the text nothing is known
        for depth in range(2, known + 1):
            hits, mass = self._sums.get(depth, (0.0, 0.0))
            self._sums[depth] = (FADE * hits + float(reached >= depth), FADE * mass + self._masses[depth - 2])
        self.forget()

    def trust(self, depth: int) -> float:
        """Share of the promised tokens at a depth that came true; 1 before anything is known."""
        hits, mass = self._sums.get(depth, (0.0, 0.0))
        return (1.0 + hits) / (1.0 + mass)

    def forget(self) -> None:
        """The latest proposal is not going to be judged."""
        self._masses, self._tree = [], None

    def _measure(self, vocab: str, depth: int, seconds: float) -> None:
        known = self._seconds.get((vocab, depth), seconds)
        seconds = min(seconds, 4.0 * known)  # one outlier must not decide
        self._seconds[vocab, depth] = known + SECONDS_RATE * (seconds - known)
