"""From what every draft token is worth to what the whole batch should do.

A plan is a set of drafters with a length for every row. It is judged by the ratio

    (rows + expected accepted tokens) / seconds of the whole step,

not row by row: tokens of all rows share one pass, and a drafter that runs as a batch costs the same for one row as for
all. At a given price of a verified token (Dinkelbach: rate * seconds per token) every row takes draft tokens as long as
the next one is worth its price; acceptance falls along a draft, so that the taken ones are a prefix. The price follows
from the plan, the plan from the price; one round per step suffices, because the price of the step before is a good
start. A drafters, A arms, R rows that may draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adaptspec.bandits.state import read_array, read_int
from adaptspec.serving.acceptance import Prospects
from adaptspec.serving.seconds import StepSeconds

ROUNDS = 2
"""How often price and plan follow each other in the first step at a load."""

MIX_MARGIN = 0.01
"""What a mixture must promise, as a share of the tokens, to be looked at."""

MOST_MIXED = 3
"""Drafters in one step."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the step costs whatever is drafted.

    Attributes:
        rows: decoding rows, all of them.
        tokens: tokens of the pass without drafts.
        context: mean committed tokens.
        extra: float64 [D], seconds that playing a drafter costs besides drafting (its state has gone stale).
        usable: bool [D].
    """

    rows: int
    tokens: int
    context: float
    extra: np.ndarray
    usable: np.ndarray


@dataclass(frozen=True, slots=True)
class Plan:
    """What the rows that may draft are given.

    Attributes:
        drafters: in play, in the order of the policy; none is "off".
        arms: int64 [R], index into the arms, -1 for none.
        tokens, verified, seconds: expected of the whole step: tokens of all rows, draft tokens in the pass.
    """

    drafters: tuple[int, ...]
    arms: np.ndarray
    tokens: float
    verified: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Planner:
    """Finds plans for one set of arms.

    Args:
        drafters: int64 [A], whose arm it is; ascending.
        lengths: int64 [A], ascending within a drafter.
        timed: False judges plans by tokens alone.

    Attributes:
        starts: int64 [D], the first arm of every drafter.
    """

    def __init__(self, drafters: np.ndarray, lengths: np.ndarray, *, timed: bool) -> None:
        self.drafters, self.lengths, self.timed = drafters, lengths, timed
        self.count = int(drafters[-1]) + 1
        self.starts = np.searchsorted(drafters, np.arange(self.count))
        sizes = np.diff(self.starts, append=len(drafters))
        # Arms of a drafter side by side, the last one repeated where a drafter has fewer than others: [D, M].
        self._grid = self.starts[:, None] + np.minimum(np.arange(sizes.max()), sizes[:, None] - 1)
        before = np.where(np.arange(len(drafters)) == self.starts[drafters], 0, np.append(0, lengths[:-1]))
        self._steps = (lengths - before).astype(np.float64)
        self._blocks = _Blocks(drafters, before, lengths)
        self._prices = np.full(self.count, 0.05 if timed else 0.0)  # in tokens, of a verified token
        self._draft_prices = np.zeros(self.count)  # of a token that is asked for
        self._bucket = -1

    def off(self, load: Load, costs: StepSeconds, *, rows: int) -> Plan:
        """Nobody drafts."""
        return Plan((), np.full(rows, -1), float(load.rows), 0.0, float(self._seconds(load, costs, 0.0)))

    def plans(
        self, prospects: Prospects, load: Load, costs: StepSeconds, *, keep: Sequence[int] = ()
    ) -> tuple[list[Plan], list[Plan]]:
        """The best plan with each drafter alone [D], and plans that mix drafters row by row; `keep` are the drafters of
        the plan under way."""
        gains, passes = self._blocks.sums(prospects.accepted), self._blocks.sums(prospects.verified)
        weights, extra = self._drafting(costs), self._extra(load)
        by_length = weights[:, 1][self.drafters] * self.lengths + weights[:, 0][self.drafters]
        bucket = load.rows.bit_length()
        rounds, self._bucket = (1 if bucket == self._bucket else ROUNDS), bucket
        for _ in range(rounds):
            worth = passes * -self._prices[self.drafters, None].astype(np.float32)
            worth += gains
            if self._draft_prices.any():
                worth -= (self._draft_prices[self.drafters] * self._steps)[:, None].astype(np.float32)
            taken = (worth > 0.0).astype(np.float32)
            tokens = self._running(np.einsum("ar,ar->a", gains, taken))
            passed = self._running(np.einsum("ar,ar->a", passes, taken))
            rows = taken.sum(axis=1)
            asked = self._running(rows * self._steps)
            drafting = np.maximum(by_length + weights[:, 2][self.drafters] * asked, 0.0)
            seconds = self._seconds(load, costs, passed) + drafting + extra[self.drafters]
            rates = (load.rows + tokens) / seconds
            # The cap of a drafter is the longest length that it plays: what a length costs is paid for the longest row.
            caps = rates[self._grid].argmax(axis=1)
            best = self._grid[np.arange(self.count), caps]
            if self.timed:
                price = costs.price(load.tokens + passed[best], context=load.context)
                self._prices = rates[best] * price
                self._draft_prices = rates[best] * np.maximum(weights[:, 2], 0.0)
        taken *= (np.arange(len(self.drafters)) <= best[self.drafters])[:, None]
        ranks = self._by_drafter(taken).astype(np.int64)  # [D, R]
        arms = np.where(ranks > 0, self.starts[:, None] + ranks - 1, -1)
        alone = [
            Plan((drafter,), arms[drafter], load.rows + more, through, took)
            for drafter, (more, through, took) in enumerate(
                zip(tokens[best].tolist(), passed[best].tolist(), seconds[best].tolist(), strict=True)
            )
        ]
        if np.count_nonzero(load.usable) < 2:
            return alone, []
        rates = np.where(load.usable, rates[best], 0.0)
        first = int(rates.argmax())
        worth *= taken
        surplus = self._by_drafter(worth)
        # Where no other drafter's rows are worth what it costs to have it on, there is nothing to mix.
        better = np.maximum(surplus - surplus[first], 0.0).sum(axis=1)
        needed = rates[first] * (weights[:, 0] + weights[:, 1] * self.lengths[self.starts] + extra)
        needed += MIX_MARGIN * alone[first].tokens
        if not ((better > 0.0) & (better >= needed) & load.usable).any():
            return alone, []
        parts = [self._by_drafter(array * taken) for array in (gains, passes)]
        return alone, self._mixed(alone, first, arms, surplus, *parts, load=load, costs=costs, keep=keep)

    def _by_drafter(self, by_arm: np.ndarray) -> np.ndarray:
        """[D, R], sums over the arms of each drafter."""
        if by_arm.shape[0] == self._grid.size:
            return by_arm.reshape(*self._grid.shape, -1).sum(axis=1)
        return np.add.reduceat(by_arm, self.starts, axis=0)

    def _running(self, by_arm: np.ndarray) -> np.ndarray:
        """[A], sums up to each arm within its drafter."""
        total = np.cumsum(by_arm)
        return total - (total[self.starts] - by_arm[self.starts])[self.drafters]

    def _mixed(
        self,
        alone: Sequence[Plan],
        first: int,
        arms: np.ndarray,
        worth: np.ndarray,
        tokens: np.ndarray,
        passes: np.ndarray,
        *,
        load: Load,
        costs: StepSeconds,
        keep: Sequence[int],
    ) -> list[Plan]:
        """Add drafters to the best one, for the rows where they are worth more, as long as the step gains by it.

        Args:
            first: the best drafter.
            arms, worth, tokens, passes: [D, R], of every drafter's own plan.
            keep: drafters whose mixture with the best one is wanted too: the plan under way.

        Returns:
            The best pair, those of `keep`, and what grew from the best pair, up to `MOST_MIXED` drafters.
        """
        weights, reach = self._drafting(costs), np.arange(arms.shape[1])
        lengths = np.where(arms >= 0, self.lengths[arms], 0)
        per_row = weights[:, 2:].clip(min=0.0) * lengths
        fixed = np.maximum(weights[:, 0] + weights[:, 1] * lengths.max(axis=1), 0.0) + self._extra(load)
        mine = [array[first] for array in (worth, tokens, passes, per_row)]
        owner = np.full(arms.shape[1], first)
        chosen, paid, rate = [first], float(fixed[first]), alone[first].rate
        found: list[Plan] = []
        open_ = load.usable.copy()
        open_[first] = False
        while open_.any() and len(chosen) < MOST_MIXED:
            takes = worth > np.maximum(mine[0], 0.0)
            more, passed, drafting = (
                np.where(takes, theirs, own).sum(axis=1)
                for theirs, own in zip((tokens, passes, per_row), mine[1:], strict=True)
            )
            seconds = self._seconds(load, costs, passed) + paid + fixed + drafting
            rates = np.where(open_, (load.rows + more) / seconds, 0.0)
            best = int(rates.argmax())
            for drafter in {best, *(keep if len(chosen) == 1 else ())}:
                if open_[drafter]:
                    owners = np.where(takes[drafter], drafter, owner)
                    drafters = tuple(sorted({*chosen, drafter}))
                    sums = (load.rows + more[drafter], passed[drafter], seconds[drafter])
                    found.append(Plan(drafters, arms[owners, reach], *map(float, sums)))
            if rates[best] <= rate:
                break
            owner = np.where(takes[best], best, owner)
            pairs = zip((worth, tokens, passes, per_row), mine, strict=True)
            mine = [np.where(takes[best], theirs[best], own) for theirs, own in pairs]
            rate, paid = float(rates[best]), paid + float(fixed[best])
            chosen.append(best)
            open_[best] = False
        return found

    def uniform(
        self, prospects: Prospects, load: Load, costs: StepSeconds, *, arms: np.ndarray | None = None
    ) -> list[Plan]:
        """Every arm (or these), played on all rows."""
        arms = np.arange(len(self.drafters)) if arms is None else arms
        rows = prospects.accepted.shape[2]
        drafters, lengths = self.drafters[arms], self.lengths[arms]
        tokens, verified = (
            np.cumsum(values.sum(axis=2), axis=1)[drafters, lengths - 1]
            for values in (prospects.accepted, prospects.verified)
        )
        fixed, per_length, per_token = self._drafting(costs)[drafters].T
        drafting = np.maximum(fixed + per_length * lengths + per_token * lengths * rows, 0.0)
        seconds = self._seconds(load, costs, verified) + drafting + self._extra(load)[drafters]
        return [
            Plan((drafter,), np.full(rows, arm), load.rows + more, passed, took)
            for arm, drafter, more, passed, took in zip(
                *(part.tolist() for part in (arms, drafters, tokens, verified, seconds)), strict=True
            )
        ]

    def _drafting(self, costs: StepSeconds) -> np.ndarray:
        return costs.draft_weights() if self.timed else np.zeros((self.count, 3))

    def _extra(self, load: Load) -> np.ndarray:
        return load.extra if self.timed else np.zeros(self.count)

    def _seconds(self, load: Load, costs: StepSeconds, drafts: np.ndarray | float) -> np.ndarray | float:
        """Of a step without drafting, with so many draft tokens in the pass."""
        if not self.timed:
            return np.ones_like(drafts) if isinstance(drafts, np.ndarray) else 1.0
        return costs.verify(load.tokens + drafts, context=load.context) + costs.overhead

    def state_dict(self) -> dict[str, Any]:
        return {
            "prices": self._prices.tolist(),
            "draft_prices": self._draft_prices.tolist(),
            "bucket": self._bucket,
        }

    def load_state_dict(self, state: Any) -> None:
        """Restore `state_dict()`. Raises ValueError on anything else; nothing changes then."""
        if not isinstance(state, Mapping):
            raise ValueError(f"state: planner must be a mapping, got {state!r:.80}")
        prices = read_array(state, "prices", (self.count,), minimum=0.0)
        draft_prices = read_array(state, "draft_prices", (self.count,), minimum=0.0)
        self._bucket = read_int(state, "bucket", minimum=-1)
        self._prices, self._draft_prices = prices, draft_prices


class _Blocks:
    """What every arm adds to the next shorter one of its drafter, from values by drafter and position."""

    def __init__(self, drafters: np.ndarray, before: np.ndarray, lengths: np.ndarray) -> None:
        self._drafters, self._before, self._lengths = drafters, before, lengths

    def sums(self, by_position: np.ndarray) -> np.ndarray:
        """[A, R] from [D, K, R]."""
        count, longest, rows = by_position.shape
        if len(self._lengths) == count * longest:
            return by_position.reshape(count * longest, rows)  # every arm is one token longer than the one before
        total = np.zeros((count, longest + 1, rows))
        for place in range(longest):
            np.add(total[:, place], by_position[:, place], out=total[:, place + 1])
        return total[self._drafters, self._lengths] - total[self._drafters, self._before]
