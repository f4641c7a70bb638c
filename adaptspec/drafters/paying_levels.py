"""How deep a drafter that runs once per depth should go (ours): as long as a level brings what its time is worth."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np

from adaptspec.trees import Expand, Stop, beam_rerank
from adaptspec.types import ROOT, DraftContext, DraftTree

FADE = 0.98
"""Weight of the past per step."""

SECONDS_RATE = 0.1
"""Weight of the latest measurement of a level's seconds."""

VERIFIED_RATE = 0.05
"""Weight of the latest step in the number of verified nodes."""

LEAST_NODES = 4
"""Levels are weighed by what they add to at least so many nodes."""

TRY_ALL = 32
"""Every so many proposals all levels are drafted, to learn whether deeper ones have begun to pay."""


class PayingLevels:
    """Ends the growth of trees. Level d + 1 is drafted if what it is expected to add is worth its time,

        m_d g_{d+1} c_{d+1} >= rate * seconds_{d+1},

    m_d the drafter's own probability that the text goes through one of the nodes it expands, g the share of it by which
    such a level raised the probability of the best n nodes so far (deeper nodes crowd out others), n about the nodes
    that are verified; c the share of what nodes at that depth promised that came true, rate the tokens per second that
    the run makes (`DraftContext.rate`). A level that was never measured is taken to last as long as the one before.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[tuple[str, int], float] = {}
        self._added = _Shares(0.5)
        self._came_true = _Shares(1.0)
        self._verified = 0.0  # nodes per step
        self._proposals = 0
        self._levels: list[np.ndarray] = []
        self._tree: DraftTree | None = None

    def grow(
        self, expand: Expand, context: DraftContext, *, budget: int, width: int, depth: int, stop: Stop | None = None
    ) -> DraftTree:
        """`beam_rerank` to at most this depth; without a `stop`, as deep as pays."""
        if stop is None:
            stop = self.stop(context, budget=budget, width=width)
        tree = beam_rerank(expand, root=context.root, budget=budget, width=width, max_depth=depth, stop=stop)
        self.proposed(tree)
        return tree

    def stop(self, context: DraftContext, *, budget: int, width: int) -> Stop | None:
        """Told after every level; None if nothing is to be decided, because time has no price.

        Args:
            budget: nodes of the tree.
            width: nodes expanded per level.
        """
        self.forget()
        if not context.rate > 0.0:
            return None
        self._proposals += 1
        everything = self._proposals % TRY_ALL == 0
        nodes = min(budget, max(LEAST_NODES, round(2.0 * self._verified))) if self._verified else budget
        last, kept, mass = self._clock(), 0.0, 0.0

        def stop(depth: int, scores: np.ndarray) -> bool:
            nonlocal last, kept, mass
            now = self._clock()
            self._measure(context.vocab, depth, now - last)
            last = now
            self._levels.append(scores)
            before, kept = kept, _best(np.concatenate(self._levels), nodes)
            if depth > 1:
                self._added.add(depth, kept - before, of=mass)
            mass = _best(scores, width)
            expected = mass * self._added.share(depth + 1) * self._came_true.share(depth + 1)
            seconds = self._seconds.get((context.vocab, depth + 1), self._seconds[context.vocab, depth])
            return not everything and expected < context.rate * seconds

        return stop

    def proposed(self, tree: DraftTree) -> None:
        """What became of the growth that `stop` watched."""
        self._tree = tree if self._levels else None

    def observe(self, tokens: np.ndarray, *, verified: int) -> None:
        """Take in how the text went on.

        Args:
            tokens: int64 [A + 1].
            verified: nodes.
        """
        if self._tree is None:
            return
        self._verified += VERIFIED_RATE * (verified - self._verified) if self._verified else verified
        reached, node = 0, ROOT
        for token in tokens.tolist():
            found = np.flatnonzero((self._tree.parents == node) & (self._tree.token_ids == token))
            if not len(found):
                break
            node, reached = int(found[0]), reached + 1
        depths = self._tree.depths()
        known = int(depths.max(initial=0)) if reached < len(tokens) else reached  # beyond the text nothing is known
        for depth in range(1, known + 1):
            promised = float(np.exp(self._tree.scores[depths == depth]).sum())
            self._came_true.add(depth, float(reached >= depth), of=promised)
        self.forget()

    def forget(self) -> None:
        """The latest proposal is not going to be judged."""
        self._levels, self._tree = [], None

    def _measure(self, vocab: str, depth: int, seconds: float) -> None:
        known = self._seconds.get((vocab, depth), seconds)
        seconds = min(seconds, 4.0 * known)  # one outlier must not decide
        self._seconds[vocab, depth] = known + SECONDS_RATE * (seconds - known)


class _Shares:
    """Fading ratios of sums by depth.

    >>> shares = _Shares(0.5)
    >>> shares.add(2, 1.0, of=1.0)
    >>> shares.share(2), shares.share(3)
    (0.75, 0.5)
    """

    def __init__(self, prior: float) -> None:
        self.prior = prior
        self._sums: dict[int, tuple[float, float]] = {}

    def add(self, depth: int, part: float, *, of: float) -> None:
        parts, wholes = self._sums.get(depth, (0.0, 0.0))
        self._sums[depth] = (FADE * parts + part, FADE * wholes + of)

    def share(self, depth: int) -> float:
        parts, wholes = self._sums.get(depth, (0.0, 0.0))
        return (self.prior + parts) / (1.0 + wholes)


def _best(scores: np.ndarray, count: int) -> float:
    """Sum of the probabilities of the best nodes."""
    return float(np.exp(np.sort(scores)[-count:]).sum())
