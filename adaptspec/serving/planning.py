"""From what every draft token is worth to what the whole batch should do.

A plan is a set of drafters with a length for every row. It is judged by the ratio

    (rows + expected accepted tokens) / seconds of the whole step,

not row by row: tokens of all rows share one pass, and a drafter that runs as a batch costs the same for one row as for
all. At a given price of a verified token (Dinkelbach: rate * seconds per token) every row takes draft tokens as long as
the next one is worth its price; acceptance falls along a draft, so that the taken ones are a prefix. The price follows
from the plan, the plan from the price; one round per step suffices, because the price of the step before is a good
start. D drafters, M arms of a drafter at most, R rows that may draft; arms of a drafter are one below the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from adaptspec.bandits.state import read_array, read_int
from adaptspec.serving.acceptance import Prospects
from adaptspec.serving.mixing import Parts, mix
from adaptspec.serving.plans import Load, Plan
from adaptspec.serving.seconds import StepSeconds

ROUNDS = 2
"""How often price and plan follow each other in the first step at a load."""

MIX_MARGIN = 0.01
"""What a mixture must promise, as a share of the tokens, to be looked at."""

_FIRST_PRICE = 0.05


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
        self._each = np.arange(self.count)
        self.starts = np.searchsorted(drafters, self._each)
        self._shortest = lengths[self.starts]
        sizes = np.diff(self.starts, append=len(drafters))
        most = int(sizes.max())
        self._ranks = np.arange(most)[:, None]
        # [M, D]; where a drafter has fewer arms than others its last one is repeated, which then adds nothing.
        grid = self.starts + np.minimum(self._ranks, sizes - 1)
        before = np.concatenate([np.zeros((1, self.count), np.int64), lengths[grid[:-1]]])
        self._upto, self._after = lengths[grid], before
        self._steps = (self._upto - before).astype(np.float64)
        self._every_length = bool((self._steps == 1.0).all()) and most == int(lengths.max())
        self._lengths = np.ascontiguousarray(self._upto.T)  # [D, M]
        self._firsts = self._each * most  # of each drafter, in [D, M]
        # By how many of its arms a row takes, none to all: [D, M + 1].
        self._arm_of_rank = np.concatenate([np.full((1, self.count), -1), grid]).T.copy()
        self._length_of_rank = np.append(np.zeros((self.count, 1), np.int64), self._lengths, axis=1)
        self._rank_starts = (self._each * (most + 1))[:, None]
        self._prices = np.full(self.count, _FIRST_PRICE if timed else 0.0)  # in tokens, of a verified token
        self._draft_prices = np.zeros(self.count)  # of a token that is asked for
        self._bucket = -1
        self._no_weights, self._no_extra = np.zeros((self.count, 3)), np.zeros(self.count)

    def off(self, load: Load) -> Plan:
        """Nobody drafts."""
        return Plan((), None, False, float(load.rows), 0.0, load.off_seconds if self.timed else 1.0)

    def plans(
        self, prospects: Prospects, load: Load, costs: StepSeconds, *, keep: Sequence[int] = ()
    ) -> tuple[list[Plan], list[Plan]]:
        """The best plan with each drafter alone [D], and plans that mix drafters row by row; `keep` are the drafters of
        the plan under way."""
        gains, passes = self._by_arm(prospects.accepted), self._by_arm(prospects.verified)
        (fixed, per_length, per_token), extra = self._drafting(costs).T, self._extra(load)
        by_length = per_length[:, None] * self._lengths + fixed[:, None]
        # Tokens that are certain to be proposed are in the pass as often as they are taken.
        certain = self._every_length and prospects.verified.shape[1] < self.count
        sums = np.empty((2 if certain else 3, self.count, len(gains)), dtype=gains.dtype)
        bucket = load.rows.bit_length()
        rounds, self._bucket = (1 if bucket == self._bucket else ROUNDS), bucket
        for _ in range(rounds):
            worth = passes * -self._prices[:, None].astype(np.float32) + gains
            if np.count_nonzero(self._draft_prices):
                worth -= (self._draft_prices * self._steps)[:, :, None].astype(np.float32)
            taken = (worth > 0.0).astype(np.float32)
            sums[1] = taken.sum(axis=2).T
            np.einsum("mdr,mdr->dm", gains, taken, out=sums[0])
            if not certain:
                sums[2] = sums[1] * self._steps.T
                np.einsum("mdr,mdr->dm", passes, taken, out=sums[1])
            tokens, passed, *_ = upto = _running(sums)
            drafting = np.maximum(by_length + per_token[:, None] * upto[-1], 0.0)
            seconds = self._seconds(load, costs, passed) + drafting + extra[:, None]
            rates = (load.rows + tokens) / seconds
            # The cap of a drafter is the longest length that it plays: what a length costs is paid for the longest row.
            caps = rates.argmax(axis=1)
            best = self._firsts + caps
            rate = rates.take(best)
            if self.timed:
                price = costs.price_each(load.tokens + passed.take(best), context=load.context)
                self._prices = rate * price
                self._draft_prices = rate * np.maximum(per_token, 0.0)
        most = int(caps.max()) + 1  # longer arms are not played by anyone
        gains, passes, worth, taken = gains[:most], passes[:most], worth[:most], taken[:most]
        taken *= (self._ranks[:most] <= caps)[:, :, None].astype(np.float32)
        ranks = taken.sum(axis=0)  # [D, R]
        places = ranks.astype(np.int64) + self._rank_starts
        arms = self._arm_of_rank.take(places)
        values = [array.take(best).tolist() for array in (tokens, passed, seconds)]
        drafts = np.logical_or.reduce(ranks, axis=1).tolist()
        alone = [
            Plan((drafter,), arms[drafter], drafting, load.rows + more, through, took)
            for drafter, (drafting, more, through, took) in enumerate(zip(drafts, *values, strict=True))
        ]
        if np.count_nonzero(load.usable) < 2:
            return alone, []
        rate = np.where(load.usable, rate, 0.0)
        first = int(rate.argmax())
        worth *= taken
        shares = np.empty((3, *ranks.shape), dtype=worth.dtype)  # what each row has of each drafter's plan
        surplus = worth.sum(axis=0, out=shares[0])
        # Where no other drafter's rows are worth what it costs to have it on, there is nothing to mix.
        better = np.maximum(surplus - surplus[first], 0.0).sum(axis=1)
        needed = rate[first] * (fixed + per_length * self._shortest + extra)
        needed += MIX_MARGIN * alone[first].tokens
        if not np.count_nonzero((better > 0.0) & (better >= needed) & load.usable):
            return alone, []
        np.multiply(gains, taken, out=worth).sum(axis=0, out=shares[1])
        if certain:
            shares[2] = ranks
        else:
            np.multiply(passes, taken, out=worth).sum(axis=0, out=shares[2])
        lengths, per_token = self._length_of_rank.take(places), np.maximum(per_token, 0.0)
        seconds = per_token[:, None] * lengths if np.count_nonzero(per_token) else None
        fixed = np.maximum(fixed + per_length * lengths.max(axis=1), 0.0) + extra
        pass_seconds = partial(self._seconds, load, costs)
        parts = Parts(arms, shares, seconds, fixed)
        return alone, mix(alone, parts, first=first, load=load, keep=keep, pass_seconds=pass_seconds)

    def uniform(
        self, prospects: Prospects, load: Load, costs: StepSeconds, *, arms: np.ndarray | None = None
    ) -> list[Plan]:
        """Every arm (or these), played on all rows."""
        arms = np.arange(len(self.drafters)) if arms is None else arms
        rows = prospects.accepted.shape[2]
        drafters, lengths = self.drafters[arms], self.lengths[arms]
        sure = np.broadcast_to(prospects.verified, prospects.accepted.shape)
        tokens, verified = (
            np.cumsum(values.sum(axis=2), axis=0)[lengths - 1, drafters] for values in (prospects.accepted, sure)
        )
        fixed, per_length, per_token = self._drafting(costs)[drafters].T
        drafting = np.maximum(fixed + per_length * lengths + per_token * lengths * rows, 0.0)
        seconds = self._seconds(load, costs, verified) + drafting + self._extra(load)[drafters]
        return [
            Plan((drafter,), np.full(rows, arm), True, load.rows + more, passed, took)
            for arm, drafter, more, passed, took in zip(
                *(part.tolist() for part in (arms, drafters, tokens, verified, seconds)), strict=True
            )
        ]

    def _by_arm(self, by_position: np.ndarray) -> np.ndarray:
        """[M, D, R], what every arm adds to the next shorter one of its drafter, from [K, D, R]. What is the same for
        all drafters or all rows stays so."""
        if self._every_length:
            return by_position
        longest, count, rows = by_position.shape
        total = np.zeros((longest + 1, count, rows))
        for place in range(longest):
            np.add(total[place], by_position[place], out=total[place + 1])
        each = np.minimum(self._each, count - 1)
        return total[self._upto, each] - total[self._after, each]

    def _drafting(self, costs: StepSeconds) -> np.ndarray:
        return costs.drafting.weights if self.timed else self._no_weights

    def _extra(self, load: Load) -> np.ndarray:
        return load.extra if self.timed else self._no_extra

    def _seconds(self, load: Load, costs: StepSeconds, drafts: np.ndarray) -> np.ndarray:
        """Of a step without drafting, with so many draft tokens in the pass."""
        if not self.timed:
            return np.ones_like(drafts)
        return costs.verify_each(load.tokens + drafts, context=load.context) + costs.overhead

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


def _running(by_arm: np.ndarray) -> np.ndarray:
    """[..., D, M], sums up to each arm within its drafter."""
    total = by_arm.reshape(len(by_arm), -1).cumsum(axis=1).reshape(by_arm.shape)
    total -= total[..., :1] - by_arm[..., :1]
    return total
