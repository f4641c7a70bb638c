"""Replays of plain policies without a controller: tables by position, then one short loop.

`adaptspec.control.replay` plays the very controllers of a live run, in 0.3 to 1.3 ms per step. The rules of
`PolicyController` for policies that look at no context are few enough to be written down here once more, over arrays
that hold what every arm does at every position. Steps, seconds and all that the policy is told are the same, to the
last bit (tests compare them):

- bandit policies ("ucb", "exp3", ...), guarded or not, are told of the played arm and its seconds: always the same;
- full-information policies ("hedge", ...) are told what the cost model expects of every arm; here costs are known, so
  it is what a controller would do whose cost model knows them from the start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adaptspec.bandits import POLICIES, Feedback, Guard, Policy, make_policy
from adaptspec.bandits.base import PolicyDecision
from adaptspec.control.cost_worlds import Costs, StepCosts
from adaptspec.control.learning import EVALUATION_SHARE, GAIN_TOKENS
from adaptspec.control.rate import RATE_FADE
from adaptspec.control.replay import ReplayRun
from adaptspec.control.strategies import GUARD_CREDIT
from experiments.position_table import PositionTable

CONTEXT_FREE = frozenset(
    {
        *("ucb", "ucb-tuned", "kl-ucb", "ucbspec", "sw-ucb", "d-ucb"),
        *("exp3", "exp3-ix", "exp3-s", "exp3spec", "tsallis-inf"),
        *("hedge", "adahedge", "fixed-share", "normal-hedge", "ada-normal-hedge"),
        *("follow-the-leader", "ema", "thompson"),
    }
)
"""Policies that read nothing of the context they choose in."""


def plain_policy(name: str, costs: Costs, *, n_arms: int, guard: float | None, seed: int) -> Policy | None:
    """The policy of a strategy that `replay_plain` plays exactly as its controller would; None for other strategies."""
    if name not in CONTEXT_FREE or POLICIES[name].full_information or not isinstance(costs, StepCosts):
        return None
    if costs.noise or costs.catch_up_per_token:
        return None
    policy = make_policy(name, n_arms=n_arms, seed=seed)
    return policy if guard is None else Guard(policy, alpha=guard, initial_credit=GUARD_CREDIT)


def replay_plain(
    table: PositionTable, policy: Policy, *, order: Sequence[int] | np.ndarray | None = None, seed: int = 0
) -> ReplayRun:
    """Play a policy that reads no context.

    Args:
        policy: over the table's arms; it learns.
        order: which requests, in the order in which they come; as recorded without it.
        seed: of the chances with which drafters are asked only to learn from (full information).

    Raises:
        ValueError: a policy over another number of arms, or a request that is not there.
    """
    if policy.n_arms != len(table.arms):
        raise ValueError(f"the policy must have {len(table.arms)} arms, got {policy.n_arms}")
    requests = range(len(table.starts) - 1) if order is None else np.asarray(order, dtype=np.int64).tolist()
    for index in requests:
        if not 0 <= index < len(table.starts) - 1:
            raise ValueError(f"order must hold requests in [0, {len(table.starts) - 1}), got {index}")
    player = _Experts(table, policy, seed) if policy.full_information else _Bandit(table, policy)
    starts = [0]
    for index in requests:
        player.play(int(table.starts[index]), int(table.starts[index + 1]))
        starts.append(len(player.rows))
    first = np.repeat(table.starts[:-1][list(requests)], np.diff(starts)) if player.rows else np.zeros(0, np.int64)
    positions, played, emitted = np.array(player.rows, dtype=np.int64).reshape(-1, 3).T
    return ReplayRun(
        tuple(map(str, table.arms)),
        np.array(list(requests), dtype=np.int64),
        np.array(starts, dtype=np.int64),
        positions - first,
        played,
        table.nodes[positions, played],
        emitted,
        np.array(player.seconds, dtype=np.float64),
        float(sum(table.prefill[index] for index in requests)),
    )


class _Player:
    """What both kinds share."""

    def __init__(self, table: PositionTable, policy: Policy) -> None:
        self.table, self.policy = table, policy
        self.rows: list[tuple[int, int, int]] = []
        self.seconds: list[float] = []
        self.tokens_kept = self.seconds_kept = 0.0

    def _rate(self, tokens: float, seconds: float) -> float:
        """`RunningRate`, the step added."""
        self.tokens_kept = RATE_FADE * self.tokens_kept + tokens
        self.seconds_kept = RATE_FADE * self.seconds_kept + seconds
        return self.tokens_kept / self.seconds_kept if self.seconds_kept > 0.0 else 0.0


class _Bandit(_Player):
    """Told of the played arm alone."""

    def play(self, begin: int, end: int) -> None:
        """One request."""
        table, policy = self.table, self.policy
        count = len(table.arms)
        select, update = policy.select, policy.update
        gains_of, verify_of, nodes_of = table.gains.item, table.verify.item, table.nodes.item
        draft, drafting, overhead = table.draft.tolist(), table.drafting, table.overhead
        position = begin
        while position < end:
            chosen = select(None)
            arm = chosen.index
            tokens = gains_of(position, arm)
            seconds = (draft[arm] if drafting[position] else 0.0) + verify_of(position, arm) + overhead
            self.rows.append((position, arm, tokens))
            self.seconds.append(seconds)
            verified = nodes_of(position, arm)
            position += tokens
            rate = self._rate(float(tokens), seconds)
            if position < end:  # what the end of the text cut short teaches nothing
                gains, observed = np.zeros(count), np.zeros(count, dtype=np.bool_)
                value = tokens - rate * seconds
                gains[arm] = min(1.0, max(0.0, 0.5 + value / (2.0 * GAIN_TOKENS)))
                observed[arm] = True
                accepted = tokens - 1  # in the middle of a text the bonus is always out
                update(chosen, Feedback(gains, observed, float(tokens), seconds, verified, accepted))


class _Experts(_Player):
    """Told of every drafter that was asked, once the text has judged what it proposed."""

    def __init__(self, table: PositionTable, policy: Policy, seed: int) -> None:
        super().__init__(table, policy)
        self._rng = np.random.default_rng(seed)
        self._chances: list[list[float]] = []
        self._pointers = np.zeros(len(table.arms), dtype=np.int64)
        self._masks: dict[tuple[int, ...], np.ndarray] = {}
        self._rate_now = 0.0
        # Dividing by a power of two loses nothing, so what is told stays the same to the last bit.
        self._expected = table.expected / (2.0 * GAIN_TOKENS)
        self._lengths = table.lengths / (2.0 * GAIN_TOKENS)
        self._ends = table.lengths + np.arange(len(table.lengths))[:, None]

    def play(self, begin: int, end: int) -> None:
        """One request."""
        table, policy = self.table, self.policy
        drafter, widest = table.drafter.tolist(), table.widest.tolist()
        allowed = (EVALUATION_SHARE / len(widest) * table.no_speculation[begin:end]).tolist()
        judged_at, drafting = table.judged_at[begin:end].tolist(), table.drafting[begin:end].tolist()
        waiting: deque[_Open] = deque()
        self._pointers[:] = 0
        position = begin
        while position < end:
            chosen = policy.select(None)
            arm, here = chosen.index, position - begin
            mine, chances = drafter[arm], self._next_chances(len(widest))
            asked, evaluated = [], 0.0
            if drafting[here]:
                asked = [d for d, seconds in enumerate(widest) if d == mine or chances[d] * seconds <= allowed[here]]
                evaluated = sum([widest[d] for d in asked if d != mine])
            # Summed up as a record's times are: drafting, evaluating, verifying, everything else.
            played = widest[mine] if asked and mine >= 0 else 0.0
            seconds = played + evaluated + table.verify.item(position, arm) + table.overhead
            tokens = table.gains.item(position, arm)
            self.rows.append((position, arm, tokens))
            self.seconds.append(seconds)
            known = [(judged_at[here][d], d) for d in asked]
            at = max(known, default=(0, 0))[0]
            waiting.append(_Open(position, chosen, known, at, tokens, seconds, table.nodes.item(position, arm)))
            position += tokens
            self._rate_now = self._rate(float(tokens), seconds)
            while waiting and (position >= end or waiting[0].known <= position):
                self._teach(waiting.popleft(), now=position)

    def _next_chances(self, count: int) -> list[float]:
        """Uniform numbers [D], drawn for many steps at once, which gives the same ones."""
        if not self._chances:
            self._chances = self._rng.random((1024, count)).tolist()[::-1]
        return self._chances.pop()

    def _teach(self, step: _Open, *, now: int) -> None:
        position = step.position
        gains = self._expected[position] * -self._rate_now
        gains += self._lengths[position]
        gains += 0.5
        np.maximum(gains, 0.0, out=gains)
        np.minimum(gains, 1.0, out=gains)
        asleep = self._pointers > position
        if now < step.known:  # the text ended before it had judged all of them
            asleep |= self._others(tuple([d for at, d in step.judged if at <= now]))
        elif len(step.judged) < len(self.table.widest):
            asleep |= self._others(tuple([d for _, d in step.judged]))
        gains[asleep] = 0.0
        observed = ~asleep
        np.copyto(self._pointers, self._ends[position], where=observed)
        self._pointers[0] = 0  # no speculation is judged at every step
        feedback = Feedback(gains, observed, float(step.tokens), step.seconds, step.verified, step.tokens - 1)
        self.policy.update(step.chosen, feedback)

    def _others(self, drafters: tuple[int, ...]) -> np.ndarray:
        """bool [A], the arms of all other drafters."""
        if drafters not in self._masks:
            self._masks[drafters] = ~np.isin(self.table.drafter, (-1, *drafters))
        return self._masks[drafters]


@dataclass(frozen=True, slots=True)
class _Open:
    """A step whose proposals the text has not judged yet: `judged` says at which position it will have, by drafter, and
    `known` at which it will have all of them."""

    position: int
    chosen: PolicyDecision
    judged: list[tuple[int, int]]
    known: int
    tokens: int
    seconds: float
    verified: int
