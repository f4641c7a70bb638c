"""From what was counted and what was learnt to a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from adaptspec.bandits import Guard
from adaptspec.control.controller import Controller
from adaptspec.control.cost import CostModel
from adaptspec.control.history import BINS, History, ProposalCounts, ValueCounts
from adaptspec.control.rate import RunningRate
from adaptspec.reporting.report import (
    RECENT,
    ArmLine,
    CalibrationLine,
    CostLine,
    Costs,
    DepthLine,
    DrafterLine,
    Forecast,
    GuardLine,
    Report,
    SpanLine,
)
from adaptspec.reporting.sentence import why
from adaptspec.types import Arm, StepRecord


def make_report(history: History, controller: Controller, *, strategy: str) -> Report:
    """The report of a history and of what the controller has learnt."""
    history.settle()
    arms = history.arms.values()
    emitted = sum(arm.emitted for arm in arms)
    verified = sum(arm.verified for arm in arms)
    accepted = sum(arm.accepted for arm in arms)
    seconds = sum(history.seconds.values())
    recent = list(history.latest)[-RECENT:]
    last = recent[-1] if recent else None
    step_id, proposed = history.proposed
    proposed = dict(proposed) if last is not None and step_id == last.step_id else {}
    own_rate = emitted / seconds if seconds > 0.0 else None
    learnt_rate = getattr(controller, "rate", None)
    rate = learnt_rate.value if isinstance(learnt_rate, RunningRate) and learnt_rate.value > 0.0 else own_rate
    guard = _guard(getattr(controller, "policy", None))
    cost = getattr(controller, "cost", None)
    return Report(
        strategy=strategy,
        requests=history.requests,
        steps=history.steps,
        new_tokens=history.requests + emitted,
        mean_accepted_length=emitted / history.steps if history.steps else None,
        verified=verified,
        accepted=accepted,
        acceptance_rate=accepted / verified if verified else None,
        prefill_seconds=history.prefill_seconds,
        seconds=seconds,
        tokens_per_second=own_rate,
        running_rate=rate,
        parts=dict(history.seconds),
        arms=tuple(_arm_lines(history)),
        spans=tuple(_span_lines(history)),
        drafters=tuple(_drafter_line(name, counts) for name, counts in history.drafters.items()),
        calibration=() if history.values is None else tuple(_calibration_lines(history.values)),
        forecast=_forecast(history.latest),
        costs=_costs(cost) if isinstance(cost, CostModel) else None,
        guard=guard,
        reasons=dict(Counter(record.reason for record in recent).most_common()),
        last=last,
        proposed=proposed,
        faults=history.faults,
        latest_fault=history.latest_fault,
        why=why(last, proposed=proposed, rate=rate, guard=guard),
    )


def _arm_lines(history: History) -> Iterable[ArmLine]:
    for arm, counts in sorted(history.arms.items(), key=lambda item: -item[1].steps):
        yield ArmLine(
            arm,
            counts.steps,
            counts.steps / history.steps,
            counts.emitted / counts.steps,
            counts.accepted / counts.verified if counts.verified else None,
            counts.emitted / counts.seconds if counts.seconds > 0.0 else 0.0,
        )


def _span_lines(history: History) -> Iterable[SpanLine]:
    for number, span in enumerate(history.spans):
        first_step = 1 + number * history.width
        yield SpanLine(first_step, span.steps, dict(span.arms), span.emitted, span.verified, span.seconds)


def _drafter_line(name: str, counts: ProposalCounts) -> DrafterLine:
    judged, hits = counts.judged(), counts.hits()
    depths = tuple(
        DepthLine(depth, judged[depth], hits[depth], counts.candidates[depth - 1], counts.open[depth - 1])
        for depth in range(1, len(judged))
        if judged[depth] or counts.open[depth - 1]
    )
    return DrafterLine(name, counts.asked, counts.declined, counts.unjudged, depths)


def _calibration_lines(counts: ValueCounts) -> Iterable[CalibrationLine]:
    for number, trials in enumerate(counts.trials):
        if trials:
            mean = counts.predicted[number] / trials
            yield CalibrationLine(number / BINS, (number + 1) / BINS, trials, mean, counts.hits[number])


def _forecast(records: Iterable[StepRecord]) -> Forecast | None:
    known = [record for record in records if record.expected_tokens is not None and record.expected_seconds is not None]
    if not known:
        return None
    sums = [
        (record.expected_tokens, record.emitted, record.expected_seconds, record.seconds - record.catch_up_seconds)
        for record in known
    ]
    return Forecast(len(known), *(sum(column) / len(known) for column in zip(*sums, strict=True)))


def _costs(cost: CostModel) -> Costs | None:
    rows = cost.to_table()
    if not rows:
        return None
    parts: dict[str, list[dict[str, Any]]] = {"verify": [], "draft": [], "catch_up": [], "overhead": []}
    for row in rows:
        parts[row["part"]].append(row)
    verify, context = _busiest(parts["verify"])
    draft: list[CostLine] = []
    for row in parts["draft"]:
        row["drafter"] = Arm(row["drafter"], "auto", row["vocab"]).source
    for name in dict.fromkeys(row["drafter"] for row in parts["draft"]):
        draft += _busiest([row for row in parts["draft"] if row["drafter"] == name])[0]
    overhead = parts["overhead"][0]["seconds"] if parts["overhead"] else None
    return Costs(context, tuple(verify), tuple(draft), tuple(_cost_lines(parts["catch_up"])), overhead)


def _busiest(rows: Sequence[Mapping[str, Any]]) -> tuple[list[CostLine], int | None]:
    """The sizes of the vocabulary, batch and context bucket with most measurements, and its context."""
    counts: Counter[tuple[str, int, int]] = Counter()
    for row in rows:
        counts[row["vocab"], row["batch"], row["context"]] += row["count"]
    if not counts:
        return [], None
    where = counts.most_common(1)[0][0]
    return _cost_lines([row for row in rows if (row["vocab"], row["batch"], row["context"]) == where]), where[2]


def _cost_lines(rows: Iterable[Mapping[str, Any]]) -> list[CostLine]:
    lines = [CostLine(row["drafter"], row["nodes"], row["seconds"], row["count"]) for row in rows]
    return sorted(lines, key=lambda line: (line.drafter or "", line.size))


def _guard(policy: Any) -> GuardLine | None:
    while policy is not None and not isinstance(policy, Guard):
        policy = getattr(policy, "policy", None)  # what stands in front of other policies
    if policy is None:
        return None
    learned = policy.state_dict()["learned"]
    return GuardLine(
        policy.options["alpha"],
        policy.balance,
        policy.baseline_rate,
        learned["measured"],
        policy.options["warmup"],
        learned["off_streak"],
        policy.options["probe_every"],
    )
