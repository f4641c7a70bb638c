"""A picture of cumulative regret along the stream, in rounds, tokens and seconds."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from adaptspec.control.regret import UNITS

LABELS = {
    "rounds": "rounds: steps more than the comparator",
    "tokens": "tokens: how many the comparator is ahead",
    "seconds": "seconds: time lost to the comparator",
}

DASHES = ((0, (6, 2)), (0, (4, 2, 1, 2)), (0, (2, 2)), (0, (1, 2)))


def draw(report: Mapping[str, Any], *, title: str, comparator: str = "best-fixed") -> bytes:
    """The picture as PNG: a panel per unit; a line per strategy is its mean over seeds, its band all of them.

    Dashed lines are what others gain on the comparator that know more than it: below zero is better.
    """
    from matplotlib.figure import Figure  # without pyplot there is no window system to pick

    figure = Figure(figsize=(15, 5.2), layout="constrained")
    axes = figure.subplots(1, len(UNITS))
    others = [run for run in report["comparators"] if run["name"] not in ("ar", comparator)]
    for axis, unit in zip(axes, UNITS, strict=True):
        for number, run in enumerate(report["runs"]):
            found = run["regret"][comparator]
            colour = f"C{number % 10}"
            axis.plot(found["position"], found[unit]["mean"], color=colour, lw=1.6, label=run["name"])
            axis.fill_between(found["position"], found[unit]["low"], found[unit]["high"], color=colour, alpha=0.2, lw=0)
        for number, run in enumerate(others):
            found = run["regret"][comparator]
            style = DASHES[number % len(DASHES)]
            axis.plot(found["position"], found[unit]["mean"], ls=style, color="0.35", lw=1.0, label=run["name"])
        axis.axhline(0.0, color="black", lw=0.8)
        axis.set_title(LABELS[unit], loc="left", fontsize=10)
        axis.set_xlabel("tokens of the stream", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 8), fontsize=8, frameon=False)
    figure.suptitle(f"Cumulative regret against {comparator.replace('-', ' ')} arm\n{title}", fontsize=11)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
