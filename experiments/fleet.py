"""Many replicas that serve millions of requests, in lockstep: one array operation moves all of them on.

Each replica serves a batch of requests at a time on one machine. At every step it plays one arm for the whole batch:
each request gains what that arm gains at its own position of its own text, and the step takes one forward pass over all
their rows. Requests come from a recorded trace, drawn at random. Replicas learn alone, or what they learnt is added up
now and then (base + sum of what each learnt since, as `adaptspec.bandits.merge` does), or they share one learner.

The rules are those of the library's `hedge`, `ucb` and `exp3` (same gains in [0, 1] around the running rate, same
bonuses and learning rates, same share of the time for drafters that are asked only to learn from); costs are known,
nothing has noise, proposals are judged at once, and a batch is judged by its mean.
"""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adaptspec.control.cost_worlds import recorded_costs
from adaptspec.control.learning import EVALUATION_SHARE, GAIN_TOKENS
from adaptspec.control.oracles import arm_table
from adaptspec.control.rate import RATE_FADE
from adaptspec.control.trace import Trace
from adaptspec.control.trace_reach import reaches
from adaptspec.types import Arm
from experiments.hardware import Hardware, find_hardware
from experiments.learners import make_learner, merge_interval
from experiments.recording import joined_trace
from experiments.replaying import arms_of
from experiments.tasks import Outcome, Task

FILE = "tables.npz"
CHECKPOINTS = 60


@dataclass(frozen=True, slots=True)
class FleetTable:
    """What every arm does at every position of all texts. P positions, A arms, R texts.

    Attributes:
        arms: no speculation first.
        starts: int64 [R + 1], the first position of each text, and P.
        gains: uint8 [P, A], tokens that a step gains.
        nodes: uint8 [P, A], nodes that it verifies.
        lengths: uint8 [P, A], tokens that its proposal was right about and one more, whatever the text has left.
        draft: float64 [A], seconds of one proposal on one thread of the host.
    """

    arms: tuple[str, ...]
    starts: np.ndarray
    gains: np.ndarray
    nodes: np.ndarray
    lengths: np.ndarray
    draft: np.ndarray

    @classmethod
    def of(cls, trace: Trace, arms: Sequence[Arm]) -> FleetTable:
        """Of a recorded trace, with the drafting times that were measured while recording."""
        tables = [arm_table(request, arms, max_new_tokens=trace.max_new_tokens) for request in trace.requests]
        recorded = recorded_costs(trace.costs)
        lengths = []
        for request in trace.requests:
            columns = np.ones((request.positions, len(arms)), dtype=np.int64)
            reached = {name: reaches(request, name) for name in trace.nodes}
            for index, arm in enumerate(arms[1:], start=1):
                columns[:, index] = reached[arm.drafter].lengths(int(arm.budget))
            lengths.append(columns)
        return cls(
            tuple(map(str, arms)),
            np.cumsum([0, *(request.positions for request in trace.requests)]),
            np.concatenate([table.gains for table in tables]).astype(np.uint8),
            np.concatenate([table.nodes for table in tables]).astype(np.uint8),
            np.concatenate(lengths).astype(np.uint8),
            np.array([recorded.draft_seconds(arm.drafter, int(arm.budget)) for arm in arms]),
        )

    def pack(self) -> bytes:
        """As the content of a file."""
        buffer = io.BytesIO()
        fields = {name: getattr(self, name) for name in ("starts", "gains", "nodes", "lengths", "draft")}
        np.savez_compressed(buffer, arms=np.array(self.arms), **fields)
        return buffer.getvalue()

    @classmethod
    def unpack(cls, data: bytes) -> FleetTable:
        """From the content of a file of `pack`."""
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            names = ("starts", "gains", "nodes", "lengths", "draft")
            return cls(tuple(arrays["arms"].tolist()), *(arrays[name] for name in names))


def make_table(task: Task) -> Outcome:
    """The table of a trace, for many configurations. Parameters: `budgets`."""
    trace = joined_trace(task.inputs)
    table = FleetTable.of(trace, arms_of(trace, task.parameter("budgets")))
    row = {"positions": int(table.starts[-1]), "texts": len(table.starts) - 1, "arms": len(table.arms)}
    return Outcome(rows=[row], files={FILE: table.pack()})


def play_fleet(task: Task) -> Outcome:
    """One policy on one fleet. Parameters: `hardware`, `batch`, `policy`, `sharing`, `requests`, `replicas`."""
    table = FleetTable.unpack(next(files[FILE] for files in task.inputs.values() if FILE in files))
    hardware, batch = find_hardware(task.parameter("hardware")), task.parameter("batch")
    requests = task.parameter("requests")
    replicas = min(task.parameter("replicas"), max(1, requests // batch))
    each = max(1, round(requests / (replicas * batch)))
    stream = Stream.draw(table, replicas=replicas, batch=batch, each=each, seed=task.configuration.seed)
    begun = time.perf_counter()
    run = play(
        table,
        stream,
        hardware,
        policy=task.parameter("policy"),
        sharing=task.parameter("sharing"),
        seed=task.configuration.seed,
    )
    wall = time.perf_counter() - begun
    row = {
        "hardware": hardware.name,
        "batch": batch,
        "policy": task.parameter("policy"),
        "sharing": task.parameter("sharing"),
        "seed": task.configuration.seed,
        "replicas": replicas,
        "requests": replicas * batch * each,
        "tokens": run.tokens,
        "steps": run.steps,
        "machine_seconds": run.seconds,
        "tokens_per_second": run.tokens / run.seconds,
        "mean_accepted_length": run.tokens / run.request_steps,
        "most_played": table.arms[int(run.plays.argmax())],
        "share_most_played": float(run.plays.max() / run.plays.sum()),
        "simulated_in": wall,
    }
    curves = {"tokens": run.curve_tokens.tolist(), "seconds": run.curve_seconds.tolist()}
    return Outcome(rows=[row], curves=curves)


@dataclass(frozen=True, slots=True)
class Stream:
    """Which texts come: int64 [replicas, batch, each]; the same for every policy."""

    texts: np.ndarray

    @classmethod
    def draw(cls, table: FleetTable, *, replicas: int, batch: int, each: int, seed: int) -> Stream:
        """At random, the same number for every place of every batch."""
        rng = np.random.default_rng([seed, 7])
        return cls(rng.integers(len(table.starts) - 1, size=(replicas, batch, each)))


@dataclass(frozen=True, slots=True)
class FleetRun:
    """How it went: sums over all replicas; the curves hold means per replica."""

    tokens: int
    steps: int
    request_steps: int
    seconds: float
    plays: np.ndarray
    curve_tokens: np.ndarray
    curve_seconds: np.ndarray


def play(
    table: FleetTable, stream: Stream, hardware: Hardware, *, policy: str, sharing: str = "isolated", seed: int = 0
) -> FleetRun:
    """Serve a stream.

    Args:
        policy: one of `experiments.learners.POLICIES`, or "fixed:ARM".
        sharing: "isolated", "shared" (one learner for all), or "merged:N" (added up every N steps).

    Raises:
        ValueError: unknown policy, arm, or way of sharing.
    """
    replicas, batch, each = stream.texts.shape
    learner = make_learner(policy, table.arms, replicas=replicas, seed=seed)
    every = merge_interval(sharing)
    slots = replicas * batch
    texts = stream.texts.reshape(slots, each)
    served = np.zeros(slots, dtype=np.int64)
    position, end = table.starts[texts[:, 0]].copy(), table.starts[texts[:, 0] + 1].copy()
    pointers = np.zeros((slots, len(table.arms)), dtype=np.int64) if learner.full_information else None
    active = np.ones(slots, dtype=bool)
    draft = hardware.draft_seconds(table.draft, batch=batch)
    asking = _Asking(table.arms, draft, hardware, batch=batch, seed=seed) if learner.full_information else None
    seconds, tokens = np.zeros(replicas), np.zeros(replicas)
    kept_tokens, kept_seconds = np.zeros(replicas), np.zeros(replicas)
    plays = np.zeros(len(table.arms))
    request_steps = steps = 0
    curve: list[tuple[float, float]] = [(0.0, 0.0)]
    total = float((table.starts[texts + 1] - table.starts[texts]).sum()) / replicas
    mark = total / CHECKPOINTS
    owner = np.repeat(np.arange(replicas), batch)
    while active.any():
        arms = learner.select()
        rows_of = np.where(active, position, 0)
        mine = arms[owner]
        gained = np.where(active, table.gains[rows_of, mine], 0).astype(np.int64)
        running = active.reshape(replicas, batch).sum(axis=1)
        alive = running > 0
        rows = np.where(active, table.nodes[rows_of, mine] + 1, 0).reshape(replicas, batch).sum(axis=1)
        asked = asking.draw(arms) if asking is not None else None
        drafting = draft[arms] if asking is None else (asked * asking.seconds).sum(axis=1)
        took = np.where(alive, hardware.seconds(np.maximum(rows, 1), batch=running) + drafting, 0.0)
        out = gained.reshape(replicas, batch).sum(axis=1).astype(np.float64)
        seconds += took
        tokens += out
        kept_tokens = RATE_FADE * kept_tokens + out
        kept_seconds = RATE_FADE * kept_seconds + took
        rate = kept_tokens / np.maximum(kept_seconds, 1e-12)
        count = np.maximum(running, 1)
        plays += np.bincount(arms[alive], minlength=len(plays))
        request_steps += int(running.sum())
        steps += int(alive.sum())
        if asking is not None:
            assert pointers is not None and asked is not None
            observed = active[:, None] & (rows_of[:, None] >= pointers) & asking.arms_of(asked)[owner]
            lengths = table.lengths[rows_of]
            sums = np.where(observed, lengths, 0).reshape(replicas, batch, -1).sum(axis=1)
            seen = observed.reshape(replicas, batch, -1).sum(axis=1)
            verified = np.where(active[:, None], table.nodes[rows_of] + 1, 0).reshape(replicas, batch, -1).sum(axis=1)
            passes = hardware.seconds(np.maximum(verified, 1), batch=running[:, None]) + asking.of_arm
            values = sums / np.maximum(seen, 1) - rate[:, None] * passes / count[:, None]
            gains = np.clip(0.5 + values / (2.0 * GAIN_TOKENS), 0.0, 1.0)
            learner.learn_all(gains, (seen > 0) & alive[:, None])
            np.copyto(pointers, rows_of[:, None] + lengths, where=observed)
        else:
            whole = active & (position + gained < end)  # what the end of a text cut short teaches nothing
            judged = whole.reshape(replicas, batch).sum(axis=1)
            mean = np.where(whole, gained, 0).reshape(replicas, batch).sum(axis=1) / np.maximum(judged, 1)
            value = mean - rate * took / count
            learner.learn_played(np.clip(0.5 + value / (2.0 * GAIN_TOKENS), 0.0, 1.0), judged > 0)
        if every and (every == 1 or learner.step % every == 0):
            learner.merge(shared=every == 1)
        position += gained
        done = active & (position >= end)
        if done.any():
            which = np.flatnonzero(done)
            served[which] += 1
            over = which[served[which] >= each]
            active[over] = False
            more = which[served[which] < each]
            following = texts[more, served[more]]
            position[more], end[more] = table.starts[following], table.starts[following + 1]
            if pointers is not None:
                pointers[more] = 0
        if tokens.mean() >= mark * len(curve) or not active.any():
            curve.append((float(tokens.mean()), float(seconds.mean())))
    points = np.array(curve)
    return FleetRun(int(tokens.sum()), steps, request_steps, float(seconds.sum()), plays, points[:, 0], points[:, 1])


class _Asking:
    """Which drafters are asked for their widest proposal: the played one, and others by chance, as often as
    `EVALUATION_SHARE` of the time allows.

    Attributes:
        seconds: float64 [D], of a drafter's widest proposal for the batch.
        of_arm: float64 [A], the same of the arm's drafter; 0 for no speculation.
    """

    def __init__(self, arms: Sequence[str], draft: np.ndarray, hardware: Hardware, *, batch: int, seed: int) -> None:
        sources = [arm.rpartition("@")[0] for arm in arms]  # "" for no speculation
        names = list(dict.fromkeys(sources[1:]))
        self._member = np.array([[source == name for source in sources] for name in names])
        self.seconds = np.array([draft[member].max() for member in self._member])
        self.of_arm = np.append(0.0, self.seconds[[names.index(source) for source in sources[1:]]])
        self._played = np.array([names.index(source) if source else -1 for source in sources])
        allowed = EVALUATION_SHARE / len(names) * float(hardware.seconds(np.array(batch), batch=batch))
        self._chance = np.minimum(1.0, allowed / np.maximum(self.seconds, 1e-12))
        self._rng = np.random.default_rng([seed, 13])

    def draw(self, arms: np.ndarray) -> np.ndarray:
        """bool [replicas, D] for the arms [replicas] that are played."""
        asked = self._rng.random((len(arms), len(self.seconds))) <= self._chance
        played = self._played[arms]
        asked[np.flatnonzero(played >= 0), played[played >= 0]] = True
        return asked

    def arms_of(self, asked: np.ndarray) -> np.ndarray:
        """bool [replicas, A], the arms whose proposals are there, no speculation always."""
        known = asked @ self._member
        known[:, 0] = True
        return known
