"""Replays of a recorded trace: comparators that know the future, and every policy held against them."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from adaptspec.control.arms import make_arms
from adaptspec.control.cost_worlds import PROFILES, Costs, StepCosts, profile_costs, recorded_costs
from adaptspec.control.oracles import ArmTable, Hindsight, arm_table
from adaptspec.control.regret import UNITS, Regret, order_requests, regret
from adaptspec.control.replay import ReplayRun, replay
from adaptspec.control.strategies import make_controller
from adaptspec.control.trace import Trace
from adaptspec.types import Arm
from experiments.hardware import batch_costs, find_hardware, hardware_names
from experiments.plain_replay import plain_policy, replay_plain
from experiments.position_table import PositionTable
from experiments.recording import joined_trace
from experiments.tasks import Outcome, Task

COMPARATORS = ("best-fixed", "best-per-domain", "best-per-prompt", "best-switching", "best-per-step")
"""From the weakest to the strongest, as far as they can be compared."""

FILE = "comparators.npz"
POINTS = 60
"""Places along the stream at which regret and shares of arms are kept."""


def play_comparators(task: Task) -> Outcome:
    """Best plays in hindsight. Parameters: `budgets`, `costs`, `order`, `switches`."""
    trace = joined_trace(task.inputs)
    arms, costs, order = _stream(task, trace)
    hindsight = Hindsight(trace, arms, costs=costs, order=order, tables=_tables(trace, arms))
    runs = {
        "ar": hindsight.fixed(Arm.autoregressive()),
        "best-fixed": hindsight.best_fixed(),
        "best-per-domain": hindsight.best_per_domain(),
        "best-per-prompt": hindsight.best_per_prompt(),
        "best-switching": hindsight.best_switching(task.parameter("switches", 8)),
        "best-per-step": hindsight.best_per_step(),
    }
    best = runs["best-fixed"]
    rows = [{**_about(task), "policy": name, **_numbers(run, best, trace)} for name, run in runs.items()]
    rows += [_fixed_row(task, hindsight, arm, best=best) for arm in arms]
    curves = {name: _against(run, {"best-fixed": best}) for name, run in runs.items() if name != "best-fixed"}
    return Outcome(rows=rows, curves=curves, files={FILE: pack_runs({name: runs[name] for name in COMPARATORS})})


def play_policy(task: Task) -> Outcome:
    """One policy. Parameters: as for the comparators, and `policy`, `guard`, `deciding` (charge the controller's own
    time as measured here)."""
    trace = joined_trace(task.inputs)
    arms, costs, order = _stream(task, trace)
    policy, seed = task.parameter("policy"), task.configuration.seed
    guard = task.parameter("guard", 0.05)
    run = _play(trace, policy, arms=arms, costs=costs, order=order, guard=guard, seed=seed)
    comparators = unpack_runs(next(files[FILE] for files in task.inputs.values() if FILE in files))
    row = {**_about(task), "policy": policy, **_numbers(run, comparators["best-fixed"], trace)}
    for name, best in comparators.items():
        row[f"of_{name}"] = best.total_seconds / run.total_seconds
        row |= {f"regret_{unit}_{name}": value for unit, value in _final(regret(run, best, points=1)).items()}
    curves = {"regret": _against(run, comparators), "shares": shares_over_time(run)}
    return Outcome(rows=[row], curves=curves)


def _play(
    trace: Trace, policy: str, *, arms: Sequence[Arm], costs: Costs, order: np.ndarray, guard: float | None, seed: int
) -> ReplayRun:
    """By the shorter way where it leads to the same steps."""
    plain = plain_policy(policy, costs, n_arms=len(arms), guard=guard, seed=seed)
    if plain is not None:
        assert isinstance(costs, StepCosts)
        table = PositionTable.of(trace, arms, costs=costs, tables=_tables(trace, arms))
        return replay_plain(table, plain, order=order)
    controller = make_controller(policy, arms=arms, drafters=list(trace.nodes), guard=guard, seed=seed)
    return replay(trace, controller, costs=costs, order=order, rng=np.random.default_rng([seed, 1]))


# The stream and its costs --------------------------------------------------------------------------------------------


def _stream(task: Task, trace: Trace) -> tuple[tuple[Arm, ...], Costs, np.ndarray]:
    arms = arms_of(trace, task.parameter("budgets"))
    costs = costs_named(task.parameter("costs"), trace)
    rng = np.random.default_rng([task.configuration.seed, 0])
    return arms, costs, order_requests(trace, task.parameter("order"), rng=rng)


def arms_of(trace: Trace, budgets: Sequence[int]) -> tuple[Arm, ...]:
    """No speculation, and every recorded drafter at every budget that was recorded."""
    most = min(trace.nodes.values())
    return make_arms(list(trace.nodes), budgets=[b for b in budgets if b <= most] or [most], vocab=("full",))


def costs_named(name: str, trace: Trace) -> StepCosts:
    """ "recorded", a profile of `adaptspec.control.cost_worlds`, or "HARDWARE:BATCH" of `experiments.hardware`.

    Raises:
        ValueError: none of these.
    """
    recorded = recorded_costs(trace.costs)
    if name == "recorded":
        return recorded
    if name in PROFILES:
        return profile_costs(name, recorded)
    hardware, _, batch = name.partition(":")
    if hardware not in hardware_names():
        from adaptspec.names import unknown_name

        raise unknown_name("costs", name, ["recorded", *PROFILES, *(f"{n}:1" for n in hardware_names())])
    return batch_costs(find_hardware(hardware), int(batch or 1), recorded)


_TABLES: dict[tuple[int, tuple[Arm, ...]], list[ArmTable]] = {}


def _tables(trace: Trace, arms: tuple[Arm, ...] | Sequence[Arm]) -> list[ArmTable]:
    """Of the trace that this worker is at, kept from one configuration to the next."""
    key = id(trace), tuple(arms)
    if key not in _TABLES:
        _TABLES.clear()
        _TABLES[key] = [arm_table(request, arms, max_new_tokens=trace.max_new_tokens) for request in trace.requests]
    return _TABLES[key]


# What is kept of a run -----------------------------------------------------------------------------------------------


def _about(task: Task) -> dict[str, Any]:
    return {
        "costs": task.parameter("costs"),
        "order": task.parameter("order"),
        "seed": task.configuration.seed,
    }


def _numbers(run: ReplayRun, best: ReplayRun, trace: Trace) -> dict[str, Any]:
    steps = len(run.seconds)
    return {
        "requests": len(run.order),
        "tokens": run.tokens,
        "steps": steps,
        "seconds": run.total_seconds,
        "tokens_per_second": run.tokens_per_second,
        "of_best-fixed": best.total_seconds / run.total_seconds,
        "mean_accepted_length": run.tokens / steps,
        "mean_verified": float(run.verified.mean()),
        "prefill_seconds": run.prefill_seconds,
        "deciding_seconds_per_step": run.deciding_seconds / steps,
        "most_played": next(iter(run.arm_shares())),
    }


def _fixed_row(task: Task, hindsight: Hindsight, arm: Arm, *, best: ReplayRun) -> dict[str, Any]:
    seconds = float(hindsight.totals[:, hindsight.arms.index(arm)].sum())
    return {
        **_about(task),
        "policy": f"fixed:{arm}",
        "tokens": best.tokens,
        "seconds": seconds,
        "tokens_per_second": best.tokens / seconds,
        "of_best-fixed": best.total_seconds / seconds,
    }


def _against(run: ReplayRun, comparators: Mapping[str, ReplayRun]) -> dict[str, Any]:
    """Cumulative regret by comparator and unit."""
    found: dict[str, Any] = {}
    for name, best in comparators.items():
        curve = regret(run, best, points=POINTS)
        found["position"] = _short(curve.position)
        found[name] = {unit: _short(getattr(curve, unit)) for unit in UNITS}
    return found


def _final(curve: Regret) -> dict[str, float]:
    return {unit: float(getattr(curve, unit)[-1]) for unit in UNITS}


def shares_over_time(run: ReplayRun, *, pieces: int = 40) -> dict[str, Any]:
    """Share of the steps by drafter (all budgets together) in equal pieces of the stream."""
    sources = [name.partition("@")[0] for name in run.arms]
    names = list(dict.fromkeys(sources))
    which = np.array([names.index(source) for source in sources], dtype=np.int64)[run.arm]
    out = np.cumsum(run.emitted)
    piece = np.minimum((out - 1) * pieces // max(int(out[-1]), 1), pieces - 1)
    counts = np.zeros((pieces, len(names)))
    np.add.at(counts, (piece, which), 1.0)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
    return {"drafters": names, "shares": [_short(column) for column in shares.T]}


def _short(values: np.ndarray) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]


def pack_runs(runs: Mapping[str, ReplayRun]) -> bytes:
    """Runs as the content of a file."""
    arrays: dict[str, np.ndarray] = {}
    for name, run in runs.items():
        for field in ("order", "starts", "position", "arm", "verified", "emitted", "seconds"):
            arrays[f"{name}/{field}"] = getattr(run, field)
        arrays[f"{name}/arms"] = np.array(run.arms)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def unpack_runs(data: bytes) -> dict[str, ReplayRun]:
    """The runs in the content of a file of `pack_runs`."""
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        names = dict.fromkeys(key.partition("/")[0] for key in arrays)
        fields = ("order", "starts", "position", "arm", "verified", "emitted", "seconds")
        return {
            name: ReplayRun(tuple(arrays[f"{name}/arms"].tolist()), *(arrays[f"{name}/{field}"] for field in fields))
            for name in names
        }
