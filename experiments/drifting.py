"""Replays in worlds that change midway, and how long each policy takes to get over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from adaptspec.control.cost import CostPrior
from adaptspec.control.cost_worlds import PROFILES, CostPhases, Costs, StepCosts, profile_costs, recorded_costs
from adaptspec.control.oracles import Hindsight
from adaptspec.control.regret import order_requests
from adaptspec.control.replay import ReplayRun, replay
from adaptspec.control.strategies import make_controller
from adaptspec.control.trace import Proposals, Trace, TracedRequest
from adaptspec.names import unknown_name
from experiments.recording import joined_trace
from experiments.replaying import arms_of
from experiments.tasks import Outcome, Task

WORLDS = ("blocks", "load", "cost", "broken")
WINDOW = 150
"""Tokens over which speeds are compared."""

SHARE = 0.9
"""Recovered is who is at least so fast, over a window, as the arm that is best from the change on."""

BATCH = 16
"""Requests that are served at once while the load is high."""

THROTTLED = CostPrior(0.050, 0.010)
"""Verification once the machine is throttled and every row costs: more nodes do not pay any more."""


@dataclass(frozen=True, slots=True)
class World:
    """A stream in phases.

    Attributes:
        trace: the requests that come.
        order: int64 [S], which of them, in order.
        starts: int64 [K], the place in `order` at which each phase begins; the first is 0.
        names: of the phases.
        costs: of the stream.
    """

    trace: Trace
    order: np.ndarray
    starts: tuple[int, ...]
    names: tuple[str, ...]
    costs: Costs


def play_world(task: Task) -> Outcome:
    """One policy in one world. Parameters: `world`, `policy`, `budgets`, `guard`, `repeats` (passes per phase)."""
    seed = task.configuration.seed
    world = make_world(
        task.parameter("world"), joined_trace(task.inputs), repeats=task.parameter("repeats", 2), seed=seed
    )
    arms = arms_of(world.trace, task.parameter("budgets"))
    hindsight = Hindsight(world.trace, arms, costs=world.costs, order=world.order)
    policy = task.parameter("policy")
    controller = make_controller(
        policy, arms=arms, drafters=list(world.trace.nodes), guard=task.parameter("guard", 0.05), seed=seed
    )
    run = replay(world.trace, controller, costs=world.costs, order=world.order, rng=np.random.default_rng([seed, 1]))
    lengths = np.array([world.trace.requests[index].positions for index in world.order])
    tokens = np.append(0, np.cumsum(lengths))
    ends = [*world.starts[1:], len(world.order)]
    rows, curves = [], {}
    fixed = [hindsight.fixed(arm) for arm in arms]
    for phase, (begin, end) in enumerate(zip(world.starts, ends, strict=True)):
        best = fixed[int(hindsight.totals[begin:end].sum(axis=0).argmin())]
        first, last = int(tokens[begin]), int(tokens[end])
        found = recovery(run, best, first=first, last=last)
        rows.append(
            {
                "world": task.parameter("world"),
                "policy": policy,
                "seed": seed,
                "phase": phase,
                "name": world.names[phase],
                "best_arm": best.arms[best.arm.item(0)] if len(best.arm) else "",
                "tokens": last - first,
                **found,
            }
        )
    position = np.arange(0, int(tokens[-1]) - WINDOW, max(1, WINDOW // 3))
    curves["position"] = position.tolist()
    curves["starts"] = [int(tokens[start]) for start in world.starts]
    curves["rate"] = [float(f"{value:.5g}") for value in windowed_rate(run, position)]
    return Outcome(rows=rows, curves=curves)


def make_world(name: str, trace: Trace, *, repeats: int, seed: int) -> World:
    """A world by name. Every phase holds `repeats` shuffled passes over the trace ("blocks": over one domain).

    "blocks": one domain after the other. "load": one request at a time, then `BATCH`, then one. "cost": throttling, and
    back. "broken": the drafter that is worth most proposes garbage in the middle phase.

    Raises:
        ValueError: unknown name.
    """
    rng = np.random.default_rng([seed, 0])
    recorded = recorded_costs(trace.costs)
    normal = replace(profile_costs("cpu-bf16", recorded), catch_up_per_token={})
    if name == "blocks":
        order = np.repeat(order_requests(trace, "blocks", rng=rng), repeats)
        domains = [trace.requests[index].domain for index in order]
        starts = [place for place, domain in enumerate(domains) if place == 0 or domain != domains[place - 1]]
        return World(trace, order, tuple(starts), tuple(domains[start] for start in starts), normal)
    passes = [np.concatenate([order_requests(trace, "shuffle", rng=rng) for _ in range(repeats)]) for _ in range(3)]
    starts = (0, len(passes[0]), len(passes[0]) + len(passes[1]))
    if name == "broken":
        drafter = _worth_most(trace, normal)
        count = len(trace.requests)
        broken = tuple(_broken(request, drafter) for request in trace.requests)
        both = replace(trace, requests=(*trace.requests, *broken))
        order = np.concatenate([passes[0], passes[1] + count, passes[2]])
        return World(both, order, starts, ("works", f"{drafter} is broken", "works again"), normal)
    if name == "load":
        profile = PROFILES["cpu-bf16"]
        busy = replace(normal, verify=profile.curve(BATCH))
        names = ("1 request", f"{BATCH} requests at once", "1 request")
    elif name == "cost":
        busy = replace(normal, verify=THROTTLED.curve(1))
        names = ("normal", "throttled", "normal again")
    else:
        raise unknown_name("world", name, WORLDS)
    order = np.concatenate(passes)
    tokens = np.append(0, np.cumsum([trace.requests[index].positions for index in order]))
    phases = ((0, normal), (int(tokens[starts[1]]), busy), (int(tokens[starts[2]]), normal))
    return World(trace, order, starts, names, CostPhases(phases))


def _worth_most(trace: Trace, costs: StepCosts) -> str:
    """The drafter of the best fixed arm."""
    arms = arms_of(trace, (8, 16))
    totals = Hindsight(trace, arms, costs=costs).totals.sum(axis=0)
    return arms[1 + int(totals[1:].argmin())].drafter


def _broken(request: TracedRequest, drafter: str) -> TracedRequest:
    """The request with a drafter that proposes wrong tokens, as confidently as before."""
    found = request.proposals[drafter]
    wrong = np.int64(2**30) + found.token_ids  # ids that no text holds; siblings still differ
    proposals = {
        **request.proposals,
        drafter: Proposals(found.offsets, wrong, found.parents, found.scores, found.evidence),
    }
    return replace(request, name=f"{request.name}/broken", proposals=proposals)


def recovery(run: ReplayRun, best: ReplayRun, *, first: int, last: int) -> dict[str, Any]:
    """How a run got over a change at token `first`, until token `last`.

    `tokens_to_recover`, `steps_to_recover` and `seconds_to_recover`: until the next `WINDOW` tokens come at `SHARE` of
    the speed at which `best` says the very same ones; None if that never happened. `of_best`: speed over the phase as a
    share of the best arm's; `seconds_lost` against it.
    """
    mine, other = _clock(run), _clock(best)
    window = min(WINDOW, last - first)
    starts = np.arange(first, last - window + 1)
    took = mine.seconds(starts + window) - mine.seconds(starts)
    need = other.seconds(starts + window) - other.seconds(starts)
    good = np.flatnonzero(took * SHARE <= need)
    total = float(mine.seconds(last) - mine.seconds(first))
    ideal = float(other.seconds(last) - other.seconds(first))
    row: dict[str, Any] = {"of_best": ideal / total, "seconds_lost": total - ideal}
    names = ("tokens_to_recover", "steps_to_recover", "seconds_to_recover")
    if not len(good):
        return {**row, **dict.fromkeys(names)}
    at = int(starts[good[0]])
    values = (
        at - first,
        float(mine.steps(at) - mine.steps(first)),
        float(mine.seconds(at) - mine.seconds(first)),
    )
    return {**row, **dict(zip(names, values, strict=True))}


@dataclass(frozen=True, slots=True)
class _Clock:
    out: np.ndarray
    passed: np.ndarray

    def seconds(self, token: Any) -> Any:
        """When so many tokens are out."""
        return np.interp(token, self.out, self.passed)

    def steps(self, token: Any) -> Any:
        """Steps until so many tokens are out."""
        return np.interp(token, self.out, np.arange(len(self.out)))


def _clock(run: ReplayRun) -> _Clock:
    return _Clock(np.append(0, np.cumsum(run.emitted)), np.append(0.0, np.cumsum(run.seconds)))


def windowed_rate(run: ReplayRun, positions: Sequence[int] | np.ndarray) -> np.ndarray:
    """Tokens per second over the `WINDOW` tokens after each of these."""
    clock, begin = _clock(run), np.asarray(positions)
    return WINDOW / np.maximum(clock.seconds(begin + WINDOW) - clock.seconds(begin), 1e-12)
