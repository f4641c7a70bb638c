"""A report as a picture: arms over time, acceptance by depth, calibration, and costs."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaptspec.reporting.report import ArmLine, Report, SpanLine, regroup
from adaptspec.types import Arm

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".pdf", ".svg")

MOST_ARMS = 12
"""Arms that are named one by one; more are named by drafter."""

MOST_DEPTHS = 16
FEW = 20
"""Points with fewer observations are drawn hollow."""

MOST_WHITE = 0.65
"""Share of white in the lightest shade of a drafter's colour."""

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#333333", "#F0E442")
"""Okabe and Ito's, which everybody can tell apart; the two that are hard to see at the end."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
AR, OTHERS, INK = "#c8c8c8", "#7d7d7d", "#333333"


def save(report: Report, path: Path) -> Path:
    """Write the picture; see `Report.plot`."""
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(f"path must end in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}, got {str(path)!r}")
    if not report.steps:
        raise ValueError("there is nothing to plot: no step was taken yet")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, name a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {path.parent} to write {path.name} into does not exist")
    figure = draw(report)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.lower()[1:], dpi=130)
    path.write_bytes(buffer.getvalue())
    return path


def draw(report: Report) -> Figure:
    """The picture of a report with at least one step."""
    try:
        from matplotlib.figure import Figure  # without pyplot there is no window system to pick
    except ImportError as error:
        raise ImportError("plots need the package matplotlib: pip install 'adaptspec[cli]'") from error

    drafters = {_drafter(line) for line in report.arms}
    rows = len(report.arms) if len(report.arms) <= MOST_ARMS else max(len(drafters), 10)
    heights = (1.4 + 0.2 * rows, 1.9, 4.2)
    figure = Figure(figsize=(13, sum(heights) + 0.4), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08)
    above, below = figure.subfigures(2, 1, height_ratios=(heights[0] + heights[1], heights[2]), hspace=0.04)
    shares, speed = above.subplots(2, 1, sharex=True, height_ratios=heights[:2])
    _draw_shares(shares, report)
    _draw_speed(speed, report)
    depths, calibration, costs = below.subplots(1, 3, width_ratios=(1.0, 1.1, 1.0))
    _draw_depths(depths, report)
    _draw_calibration(calibration, report)
    _draw_costs(costs, report)
    requests = f"{report.requests:,} request{'' if report.requests == 1 else 's'}"
    figure.suptitle(f"{report.strategy}: {requests}, {report.steps:,} steps", fontsize=12)
    return figure


def _draw_shares(axis: Axes, report: Report) -> None:
    from matplotlib.patches import Patch

    lines = sorted(report.arms, key=lambda line: _by_drafter(line.arm))
    drafters = drafter_colours(report)
    colours = arm_colours([line.arm for line in lines], drafters=drafters)
    spans, edges = _spans(report)
    below = [0.0] * len(spans)
    for line in lines:
        above = [low + span.share(line.arm) for low, span in zip(below, spans, strict=True)]
        axis.stairs(above, edges, baseline=below, fill=True, color=colours[line.arm], ec="white", lw=0.3)
        below = above
    legend = [(colours[line.arm], line.arm, line.share) for line in lines]
    if len(legend) > MOST_ARMS:
        legend = [(drafters[name], *_together(arms)) for name, arms in groupby(lines, key=_drafter)]
    axis.set_ylim(0.0, 1.0)
    axis.set_xlim(0, report.steps)
    axis.set_yticks([0.0, 0.5, 1.0], ["0 %", "50 %", "100 %"])
    axis.tick_params(labelbottom=False)
    shades = "; lighter: smaller budgets" if len({_drafter(line) for line in lines}) < len(lines) else ""
    _title(axis, f"Arms played (share of the steps{shades})")
    axis.legend(  # from the top down, as they are stacked
        handles=[Patch(color=colour, label=f"{name}  {100 * share:.0f} %") for colour, name, share in legend[::-1]],
        loc="upper left",
        bbox_to_anchor=(1.005, 1.02),
        fontsize=8,
        frameon=False,
    )


def _spans(report: Report) -> tuple[list[SpanLine], list[int]]:
    """Spans of several steps each, since shares of one or two steps say nothing, and where they begin and end."""
    spans = regroup(report.spans, max(8, report.steps // 8))
    return spans, [span.first_step - 1 for span in spans] + [report.steps]


def _together(lines: Iterable[ArmLine]) -> tuple[str, float]:
    """Label and share of all arms of one drafter, lightest first."""
    lines = list(lines)
    first, last = lines[0].arm, lines[-1].arm
    share = sum(line.share for line in lines)
    return (first if first == last else f"{first} to {last.split('@')[1]} ({len(lines)} arms)"), share


def _draw_speed(axis: Axes, report: Report) -> None:
    spans, edges = _spans(report)
    rates = [span.tokens / span.seconds if span.seconds > 0.0 else 0.0 for span in spans]
    lines = [axis.stairs(rates, edges, baseline=None, color=INK, lw=1.3, label="tokens/s")]
    if report.guard is not None and (baseline := report.guard.baseline_tokens_per_second) is not None:
        lines.append(axis.axhline(baseline, color=INK, lw=1.0, ls="--", label="tokens/s of ar"))
        rates.append(baseline)
    axis.set_ylim(0.0, 1.15 * max(rates) or 1.0)
    axis.set_xlabel("steps since the start", fontsize=9)
    axis.set_ylabel("tokens/s", fontsize=9)
    sizes = axis.twinx()
    verified = [span.verified / span.steps for span in spans]
    lines.insert(0, sizes.stairs(verified, edges, fill=True, color="#f0c8a8", label="verified nodes per step"))
    sizes.set_ylim(0.0, 1.15 * max(verified) or 1.0)
    sizes.set_ylabel("nodes", fontsize=9)
    sizes.tick_params(labelsize=8)
    sizes.spines[["top"]].set_visible(False)
    _in_front(axis, sizes)
    axis.legend(handles=lines, loc="upper left", bbox_to_anchor=(1.05, 1.05), fontsize=8, frameon=False)
    _title(axis, "Speed, and size of the verified trees")


def _draw_depths(axis: Axes, report: Report) -> None:
    _title(axis, "Acceptance by depth, if the parent was accepted")
    colours = drafter_colours(report)
    for number, line in enumerate(report.drafters):
        depths = [depth for depth in line.depths if depth.judged and depth.depth <= MOST_DEPTHS]
        if not depths:
            continue
        x, y = [depth.depth for depth in depths], [depth.hits / depth.judged for depth in depths]
        colour, marker = colours[line.drafter], MARKERS[number % len(MARKERS)]
        axis.plot(x, y, color=colour, lw=1.2, marker=marker, ms=5, label=line.drafter)
        few = [place for place, depth in enumerate(depths) if depth.judged < FEW]
        axis.plot([x[i] for i in few], [y[i] for i in few], marker, ms=5, mfc="white", mec=colour, ls="", zorder=3)
    if not axis.lines:
        return _say(axis, "no drafter has proposed anything yet")
    axis.set_ylim(-0.03, 1.03)
    axis.set_yticks([0.0, 0.25, 0.5, 0.75, 1.0], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel(f"depth of the draft (hollow: fewer than {FEW} cases)", fontsize=9)
    axis.set_ylabel("next token among the candidates", fontsize=9)
    axis.legend(fontsize=8, frameon=True, framealpha=0.8, edgecolor="none")
    return None


def _draw_calibration(axis: Axes, report: Report) -> None:
    _title(axis, "Calibration of the candidates' values")
    lines = report.calibration
    if not lines:
        return _say(axis, "this strategy does not value\nsingle candidates")
    counts = axis.twinx()
    counts.bar(
        [line.low for line in lines],
        [line.candidates for line in lines],
        width=[line.high - line.low for line in lines],
        align="edge",
        color="#e3e9ee",
        edgecolor="white",
    )
    most = max(line.candidates for line in lines)
    counts.set_yscale("log")
    counts.set_ylim(0.7, 2.0 * most)
    counts.set_ylabel("candidates (bars, logarithmic)", fontsize=9, color=OTHERS)
    counts.tick_params(labelsize=8, colors=OTHERS)
    counts.spines[["top"]].set_visible(False)
    _in_front(axis, counts)
    axis.plot([0.0, 1.0], [0.0, 1.0], color=INK, lw=0.8, ls="--")
    x, y = [line.predicted for line in lines], [line.hits / line.candidates for line in lines]
    axis.plot(x, y, color=COLOURS[0], lw=1.2, marker="o", ms=5)
    few = [place for place, line in enumerate(lines) if line.candidates < FEW]
    axis.plot([x[i] for i in few], [y[i] for i in few], "o", ms=5, mfc="white", mec=COLOURS[0], ls="", zorder=3)
    ticks = [0.0, 0.25, 0.5, 0.75, 1.0]
    axis.set_xlim(0.0, 1.0)
    axis.set_ylim(-0.03, 1.03)
    axis.set_xticks(ticks, [f"{100 * tick:.0f} %" for tick in ticks])
    axis.set_yticks(ticks, [f"{100 * tick:.0f} %" for tick in ticks])
    axis.set_xlabel("taken to be accepted, if the parent is", fontsize=9)
    axis.set_ylabel("were right", fontsize=9)
    return None


def _draw_costs(axis: Axes, report: Report) -> None:
    _title(axis, "Learnt costs")
    costs = report.costs
    if costs is None or not costs.verify:
        return _say(axis, "this strategy learns no costs")
    axis.plot(
        [line.size for line in costs.verify],
        [1e3 * line.seconds for line in costs.verify],
        color=INK,
        lw=1.2,
        marker="o",
        ms=4,
        label="verify",
    )
    colours = drafter_colours(report)
    for number, name in enumerate(dict.fromkeys(line.drafter for line in costs.draft)):
        lines = [line for line in costs.draft if line.drafter == name]
        axis.plot(
            [line.size for line in lines],
            [1e3 * line.seconds for line in lines],
            color=colours.get(name, OTHERS),
            lw=1.0,
            marker=MARKERS[number % len(MARKERS)],
            ms=4,
            label=f"draft: {name}",
        )
    axis.set_yscale("log")
    axis.set_xlim(left=-0.5)
    axis.set_xlabel("nodes", fontsize=9)
    axis.set_ylabel("milliseconds (logarithmic)", fontsize=9)
    axis.legend(fontsize=8, frameon=True, framealpha=0.8, edgecolor="none")
    return None


def _title(axis: Axes, text: str) -> None:
    axis.set_title(text, loc="left", fontsize=10)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _in_front(axis: Axes, other: Axes) -> None:
    """Draw one axis over its twin, without hiding it."""
    axis.set_zorder(other.get_zorder() + 1)
    axis.patch.set_visible(False)


def _say(axis: Axes, text: str) -> None:
    """What stands where there is nothing to draw."""
    axis.text(0.5, 0.5, text, ha="center", va="center", fontsize=9, color=OTHERS, transform=axis.transAxes)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.spines[["left", "bottom"]].set_visible(False)


def drafter_colours(report: Report) -> dict[str, str]:
    """One colour per drafter, the same in every panel; what arms name besides ("mixture") gets one as well."""
    names = [line.drafter for line in report.drafters]
    names += [_drafter(line) for line in report.arms]
    drafters = [name for name in dict.fromkeys(names) if name != "ar"]
    return {"ar": AR} | {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(drafters)}


def arm_colours(arms: Sequence[str], *, drafters: Mapping[str, str]) -> dict[str, Any]:
    """The drafter's colour, lighter with smaller budgets where several of its arms are drawn."""
    from matplotlib.colors import to_rgb

    colours: dict[str, Any] = {}
    for name, colour in drafters.items():
        own = sorted((arm for arm in arms if Arm.parse(arm).drafter == name), key=_by_drafter)
        for number, arm in enumerate(own):
            white = MOST_WHITE * (1.0 - (number + 1) / len(own))
            colours[arm] = tuple(white + (1.0 - white) * part for part in to_rgb(colour))
    return colours


def _drafter(line: ArmLine) -> str:
    return Arm.parse(line.arm).drafter


def _by_drafter(arm: str) -> tuple[bool, str, float, str]:
    """Sorts no speculation first, then by drafter, then by budget."""
    parsed = Arm.parse(arm)
    budget = float("inf") if parsed.budget == "auto" else float(parsed.budget)
    return parsed.drafter != "ar", parsed.drafter, budget, parsed.vocab
