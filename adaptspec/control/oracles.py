"""The best plays in hindsight, by dynamic programming over the positions of a trace.

All of them emit the same tokens, so the best play is the shortest path in seconds: from a position, an arm costs its
step's seconds and leads as many tokens on as it gains there. Each oracle may do more than the next, hence

    per step <= S switches <= S - 1 switches <= ... <= 0 switches = best fixed arm
    per step <= per prompt <= per domain <= best fixed arm

in seconds. All know what is to come, no strategy does. They choose among arms; a mixture, which merges what several
drafters propose, may in principle beat them. Noise is left out: costs are means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from adaptspec.control.cost_worlds import Costs
from adaptspec.control.replay import ReplayRun
from adaptspec.control.trace import Trace, TracedRequest
from adaptspec.control.trace_reach import reaches
from adaptspec.names import unknown_name
from adaptspec.types import Arm


@dataclass(frozen=True, slots=True)
class ArmTable:
    """What every arm does at every position of one request, whatever it costs. P positions, A arms.

    Attributes:
        gains: int64 [P, A], tokens that a step gains, bonus included.
        nodes: int64 [P, A], nodes that it verifies.
        drafting: bool [P], False where nothing is drafted because one token is left.
    """

    gains: np.ndarray
    nodes: np.ndarray
    drafting: np.ndarray


def arm_table(request: TracedRequest, arms: Sequence[Arm], *, max_new_tokens: int) -> ArmTable:
    """Every arm at every position of a request."""
    count = request.positions
    left = count - np.arange(count)
    drafting = max_new_tokens - np.arange(count) - 1 > 1
    gains = np.ones((count, len(arms)), dtype=np.int64)
    nodes = np.zeros((count, len(arms)), dtype=np.int64)
    for drafter in dict.fromkeys(arm.drafter for arm in arms if arm.drafter != "ar"):
        reached = reaches(request, drafter)
        proposed = request.proposals[drafter].sizes()
        for index, arm in enumerate(arms):
            if arm.drafter == drafter:
                gains[:, index] = np.minimum(reached.lengths(arm.budget), left)
                nodes[:, index] = np.minimum(proposed, arm.budget) * drafting
    return ArmTable(gains, nodes, drafting)


class Hindsight:
    """The best plays of arms on the requests of a trace.

    Args:
        arms: no speculation first; budgets are numbers, none larger than recorded.
        costs: what steps take.
        order: which requests, in the order in which they come; as recorded without it.
        tables: `arm_table` of every request of the trace, if they are there already.

    Raises:
        ValueError: arms that cannot be played, a drafter that was not recorded or has no costs.
    """

    def __init__(
        self,
        trace: Trace,
        arms: Sequence[Arm],
        *,
        costs: Costs,
        order: Sequence[int] | np.ndarray | None = None,
        tables: Sequence[ArmTable] | None = None,
    ) -> None:
        check_arms(trace, arms)
        costs.check_drafters(dict.fromkeys(arm.drafter for arm in arms if arm.drafter != "ar"))
        self.arms = tuple(arms)
        self.order = np.arange(len(trace.requests)) if order is None else np.asarray(order, dtype=np.int64)
        self.domains = [trace.requests[index].domain for index in self.order]
        if tables is None:
            tables = [arm_table(request, arms, max_new_tokens=trace.max_new_tokens) for request in trace.requests]
        self._tables = [tables[index] for index in self.order]
        self._seconds: list[np.ndarray] = []
        self._prefill_seconds = 0.0
        token = 0
        for index, table in zip(self.order, self._tables, strict=True):
            request = trace.requests[index]
            self._prefill_seconds += costs.at(token).prefill_per_token * request.prompt_length
            self._seconds.append(_seconds(table, self.arms, costs, token=token, length=request.prompt_length + 1))
            token += len(table.gains)
        self._totals: np.ndarray | None = None

    @property
    def totals(self) -> np.ndarray:
        """float64 [R, A], seconds of every arm played alone, by request."""
        if self._totals is None:
            pairs = zip(self._tables, self._seconds, strict=True)
            self._totals = np.array([_alone(table.gains, seconds) for table, seconds in pairs])
            self._totals = self._totals.reshape(len(self._tables), len(self.arms))
        return self._totals

    def fixed(self, arm: Arm) -> ReplayRun:
        """One arm always."""
        if arm not in self.arms:
            raise unknown_name("arm", str(arm), map(str, self.arms))
        index = self.arms.index(arm)
        return self._play(lambda request, position: index)

    def best_fixed(self) -> ReplayRun:
        """The arm that is best over the whole stream."""
        return self.fixed(self.arms[self.totals.sum(axis=0).argmin()])

    def best_per_domain(self) -> ReplayRun:
        """In each domain the arm that is best there."""
        best = {}
        for domain in dict.fromkeys(self.domains):
            best[domain] = int(self.totals[[d == domain for d in self.domains]].sum(axis=0).argmin())
        return self._play(lambda request, position: best[self.domains[request]])

    def best_per_prompt(self) -> ReplayRun:
        """In each request the arm that is best there."""
        best = self.totals.argmin(axis=1).tolist()
        return self._play(lambda request, position: best[request])

    def best_switching(self, switches: int) -> ReplayRun:
        """The best sequence that changes its arm at most so often, at any step of the stream."""
        if isinstance(switches, bool) or not isinstance(switches, int) or switches < 0:
            raise ValueError(f"switches must be a whole number >= 0, got {switches!r}")
        best = _Switching(len(self.arms), switches)
        for table, seconds in zip(reversed(self._tables), reversed(self._seconds), strict=True):
            best.prepend(table.gains, seconds)
        return self._play(best.chooser())

    def best_per_step(self) -> ReplayRun:
        """At each step the arm that is best from there on; no speculation is one."""
        best = [_shortest(table.gains, seconds) for table, seconds in zip(self._tables, self._seconds, strict=True)]
        return self._play(lambda request, position: best[request][position])

    def _play(self, choose: Callable[[int, int], int]) -> ReplayRun:
        """The run that plays arm `choose(request of the stream, position)`."""
        rows: list[tuple[int, int, int, int]] = []
        charged: list[float] = []
        starts = [0]
        for number, (table, seconds) in enumerate(zip(self._tables, self._seconds, strict=True)):
            position = 0
            while position < len(table.gains):
                arm = choose(number, position)
                gain = table.gains.item(position, arm)
                rows.append((position, arm, table.nodes.item(position, arm), gain))
                charged.append(seconds.item(position, arm))
                position += gain
            starts.append(len(rows))
        columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        names = tuple(map(str, self.arms))
        return ReplayRun(
            names, self.order, np.array(starts), *columns, np.array(charged), prefill_seconds=self._prefill_seconds
        )


def check_arms(trace: Trace, arms: Sequence[Arm]) -> None:
    """Raises ValueError unless the arms can be played on the trace and start with no speculation."""
    if not arms or arms[0] != Arm.autoregressive():
        raise ValueError("arms must start with the arm 'ar'")
    for arm in arms[1:]:
        if arm.drafter == "ar":
            raise ValueError("arms must hold 'ar' once")
        if arm.drafter not in trace.nodes:
            raise unknown_name("drafter in the trace", arm.drafter, trace.nodes)
        if arm.budget == "auto" or arm.budget > trace.nodes[arm.drafter]:
            raise ValueError(f"budget of {arm} must be a number <= {trace.nodes[arm.drafter]}, which was recorded")


def _seconds(table: ArmTable, arms: Sequence[Arm], costs: Costs, *, token: int, length: int) -> np.ndarray:
    """float64 [P, A], a step's seconds, for a request whose first step has `token` tokens of the stream before it."""
    count = len(table.gains)
    seconds = np.empty(table.gains.shape)
    stage = [costs.at(token + position) for position in range(count)]
    for part in dict.fromkeys(map(id, stage)):
        rows = np.array([position for position in range(count) if id(stage[position]) == part])
        now = stage[rows[0]]
        seconds[rows] = now.verify_seconds_of(table.nodes[rows].T, rows + length).T + now.overhead
        drafts = np.array([now.draft_seconds(arm.drafter, int(arm.budget)) for arm in arms])
        seconds[rows] += drafts * table.drafting[rows, None]
    return seconds


def _alone(gains: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """float64 [A], seconds to the end of a request of every arm alone."""
    count, arms = gains.shape
    ahead = np.zeros((count + 1, arms))
    columns = np.arange(arms)
    for position in range(count - 1, -1, -1):
        ahead[position] = seconds[position] + ahead[position + gains[position], columns]
    return ahead[0]


def _shortest(gains: np.ndarray, seconds: np.ndarray) -> list[int]:
    """The best arm at every position of a request."""
    count = len(gains)
    ahead = np.zeros(count + 1)
    best = [0] * count
    for position in range(count - 1, -1, -1):
        options = seconds[position] + ahead[position + gains[position]]
        best[position] = choice = int(options.argmin())
        ahead[position] = options[choice]
    return best


class _Switching:
    """The best play with few switches, built from the last request to the first.

    `ahead[a, k]`: seconds to the end of the stream for whoever played arm a in the step before and has k switches left.
    """

    def __init__(self, arms: int, switches: int) -> None:
        self.switches = switches
        self._ahead = np.zeros((arms, switches + 1))
        self._stay: list[np.ndarray] = []
        self._best: list[np.ndarray] = []

    def prepend(self, gains: np.ndarray, seconds: np.ndarray) -> None:
        """Put a request before those that are there. Arrays [P, A]."""
        count, arms = gains.shape
        ahead = np.empty((count + 1, arms, self.switches + 1))
        ahead[count] = self._ahead
        stay = np.empty((count, arms, self.switches), dtype=np.bool_)
        best = np.empty((count, self.switches + 1), dtype=np.int64)
        columns = np.arange(arms)
        for position in range(count - 1, -1, -1):
            playing = seconds[position, :, None] + ahead[position + gains[position], columns]
            best[position] = playing.argmin(axis=0)
            lowest = playing.min(axis=0)[:-1]
            ahead[position] = playing
            np.less_equal(playing[:, 1:], lowest, out=stay[position])
            np.minimum(playing[:, 1:], lowest, out=ahead[position, :, 1:])
        self._ahead = ahead[0]
        self._stay.append(stay)
        self._best.append(best)

    def chooser(self) -> Callable[[int, int], int]:
        """What to play; to be asked at every step from the beginning."""
        stays, bests = self._stay[::-1], self._best[::-1]
        arm, left = -1, self.switches

        def choose(request: int, position: int) -> int:
            nonlocal arm, left
            if arm < 0:
                arm = bests[request].item(position, left)
            elif left and not stays[request].item(position, arm, left - 1):
                left -= 1
                arm = bests[request].item(position, left)
            return arm

        return choose
