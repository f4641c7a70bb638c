"""A report as plain text: no colours, no wide characters, fit for a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from adaptspec.control.controller import REASONS
from adaptspec.reporting.report import RECENT, CostLine, Costs, DrafterLine, GuardLine, Report, regroup
from adaptspec.reporting.sentence import listed, nodes, seconds

ARM_ROWS = 12
"""Arms that are listed one by one."""

PERIODS = 5
"""Periods by which shares are told."""

DEPTHS = ((1, 1), (2, 2), (3, 3), (4, 4), (5, 8), (9, 1 << 30))
"""Depths that share a column."""

COST_COLUMNS = 8
"""Sizes of verifications that are told."""


def render(report: Report) -> str:
    """All sections that have something to say."""
    sections = [
        ("", _summary(report)),
        ("Arms (share of the steps)", _arms(report)),
        ("Acceptance by depth (if the parent was accepted, was the next token among the candidates?)", _depths(report)),
        ("Calibration (how likely a candidate was taken to be, and how often it was right)", _calibration(report)),
        ("Time", _time(report)),
        ("Costs (learnt)", _costs(report.costs)),
        ("Guard", _guard(report.guard)),
        ("Why", _why(report)),
    ]
    blocks = []
    for heading, lines in sections:
        if body := [f"  {line}" if heading else line for line in lines]:
            blocks.append("\n".join([heading, *body] if heading else body).rstrip())
    return "\n\n".join(blocks)


def _summary(report: Report) -> Iterator[str]:
    yield f"adaptspec report: strategy {report.strategy}"
    if not report.requests:
        yield "Nothing was seen yet: no request since this object was made or loaded."
        return
    requests = f"{report.requests:,} request{'' if report.requests == 1 else 's'}"
    yield f"{requests}, {report.steps:,} steps, {report.new_tokens:,} new tokens"
    yield f"prefill {seconds(report.prefill_seconds)}, steps {seconds(report.seconds)}" + (
        "" if report.tokens_per_second is None else f" ({report.tokens_per_second:.1f} tokens/s without prefill)"
    )
    if report.mean_accepted_length is not None:
        accepted = "no node was verified"
        if report.acceptance_rate is not None:
            accepted = f"of {report.verified:,} verified nodes {_percent(report.acceptance_rate, 1)} were accepted"
        yield f"{report.mean_accepted_length:.2f} tokens per step (bonus included); {accepted}"
    if report.faults:
        yield f"drafters set aside: {report.faults:,}, at last {report.latest_fault}"


def _arms(report: Report) -> Iterator[str]:
    if not report.arms:
        return
    periods = regroup(report.spans, PERIODS)
    columns = [
        "arm",
        "steps",
        "in all",
        *(f"{span.first_step:,}-{span.first_step + span.steps - 1:,}" for span in periods),
    ]
    columns += ["tokens/step", "accepted", "tokens/s"]
    rows = []
    for line in report.arms[:ARM_ROWS]:
        shares = [_percent(span.share(line.arm)) for span in periods]
        measured = [f"{line.tokens_per_step:.2f}", _percent(line.acceptance_rate), f"{line.tokens_per_second:.1f}"]
        rows.append([line.arm, f"{line.steps:,}", _percent(line.share), *shares, *measured])
    if rest := report.arms[ARM_ROWS:]:
        shares = [_percent(sum(span.share(line.arm) for line in rest)) for span in periods]
        total = [f"{sum(line.steps for line in rest):,}", _percent(sum(line.share for line in rest))]
        rows.append([f"{len(rest)} others", *total, *shares, "", "", ""])
    yield from table([columns, *rows])


def _depths(report: Report) -> Iterator[str]:
    drafters = [line for line in report.drafters if line.asked]
    if not drafters:
        return
    deepest = max((depth.depth for line in drafters for depth in line.depths), default=1)
    used = [(first, min(last, deepest)) for first, last in DEPTHS if first <= deepest]
    heads = [str(first) if first == last else f"{first}-{last}" for first, last in used]
    rows = [["drafter", "asked", "proposed", *heads, "right per candidate"]]
    for line in drafters:
        candidates = sum(depth.candidates for depth in line.depths)
        right = sum(depth.hits for depth in line.depths if depth.judged)
        rows.append(
            [
                line.drafter,
                f"{line.asked:,}",
                f"{line.asked - line.declined:,}",
                *(_percent(_rate(line, first, last)) for first, last in used),
                _percent(right / candidates if candidates else None),
            ]
        )
    yield from table(rows)
    if cut := sum(depth.unknown for line in drafters for depth in line.depths):
        yield f"{cut:,} proposals went on where their step's text ended: what lies deeper there is not counted."
    if unjudged := sum(line.unjudged for line in drafters):
        yield f"{unjudged:,} sampled proposals that were not verified are not counted."


def _rate(line: DrafterLine, first: int, last: int) -> float | None:
    depths = [depth for depth in line.depths if first <= depth.depth <= last]
    judged = sum(depth.judged for depth in depths)
    return sum(depth.hits for depth in depths) / judged if judged else None


def _calibration(report: Report) -> Iterator[str]:
    if report.calibration:
        rows = [["taken to be", "on average", "were right", "candidates"]]
        for line in report.calibration:
            between = f"{line.low:.1f} to {line.high:.1f}"
            rows.append(
                [between, _percent(line.predicted), _percent(line.hits / line.candidates), f"{line.candidates:,}"]
            )
        yield from table(rows)
    elif report.steps:
        yield "This strategy does not value single candidates."
    if (forecast := report.forecast) is not None:
        yield (
            f"Per step, over the latest {forecast.steps:,}: expected {forecast.expected_tokens:.2f} tokens in "
            f"{seconds(forecast.expected_seconds)}, got {forecast.tokens:.2f} in {seconds(forecast.seconds)}."
        )


def _time(report: Report) -> Iterator[str]:
    if report.seconds > 0.0:
        parts = sorted(report.parts.items(), key=lambda item: -item[1])
        yield ", ".join(
            f"{name.replace('_', ' ')} {_percent(value / report.seconds, 1)}" for name, value in parts if value
        )


def _costs(costs: Costs | None) -> Iterator[str]:
    if costs is None:
        yield "This strategy has learnt none."
        return
    if costs.verify:
        chosen = _spread(costs.verify, COST_COLUMNS)
        yield f"verify, context up to {costs.context:,} tokens:"
        sizes, times = ["nodes", *(str(line.size) for line in chosen)], ["ms", *(_ms(line.seconds) for line in chosen)]
        yield from (f"  {line}" for line in table([sizes, times]))
    for name in dict.fromkeys(line.drafter for line in costs.draft):
        most = max((line for line in costs.draft if line.drafter == name), key=lambda line: line.measurements)
        yield f"draft with {name}: {_ms(most.seconds)} ms (asked for {nodes(most.size)})"
    for name in dict.fromkeys(line.drafter for line in costs.catch_up):
        most = max((line for line in costs.catch_up if line.drafter == name), key=lambda line: line.measurements)
        yield f"catch {name} up: {_ms(most.seconds)} ms per token"
    if costs.overhead is not None:
        yield f"deciding, committing, observing: {_ms(costs.overhead)} ms per step"


def _spread(lines: Sequence[CostLine], count: int) -> list[CostLine]:
    """Up to `count` of the lines, the first and the last among them."""
    if len(lines) <= count:
        return list(lines)
    return [lines[round(number * (len(lines) - 1) / (count - 1))] for number in range(count)]


def _guard(guard: GuardLine | None) -> Iterator[str]:
    if guard is None:
        yield "none"
        return
    yield f"Speculation may cost {_percent(guard.allowance)} of the speed without it at most."
    if guard.baseline_tokens_per_second is None:
        yield "The speed without speculation was not measured yet."
    else:
        rate = guard.baseline_tokens_per_second
        yield f"Without speculation: {rate:.1f} tokens/s, measured in {guard.baseline_steps:,} steps."
    if guard.balance >= 0.0:
        yield f"In hand: {guard.balance:.1f} tokens above that floor, which arms may risk."
    else:
        yield f"Behind that floor by {-guard.balance:.1f} tokens: no arm is played until that is made good."
    if guard.off_streak:
        yield f"The latest {guard.off_streak:,} decisions in a row were for no speculation."


def _why(report: Report) -> Iterator[str]:
    yield report.why
    if report.last is not None:
        parts = [f"{count} {reason or 'untold'}" for reason, count in report.reasons.items()]
        total = sum(report.reasons.values())
        yield f"Of the latest {min(total, RECENT)} steps: {listed(parts)}."
        for reason in report.reasons:
            if reason in REASONS:
                yield f"  {reason}: {REASONS[reason]}"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns side by side, the first to the left, the others to the right; the first row is the heading."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _percent(share: float | None, digits: int = 0) -> str:
    return "-" if share is None else f"{100.0 * share:.{digits}f} %"


def _ms(value: float) -> str:
    milliseconds = 1e3 * value
    return f"{milliseconds:.{1 if milliseconds >= 10 else 2 if milliseconds >= 0.1 else 4}f}"
