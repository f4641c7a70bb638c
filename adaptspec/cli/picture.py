"""A picture of which arm was played when, and of what it gained."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from adaptspec.cli.measure import Measurement

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WINDOW = 15
"""Steps in the running mean of the accepted length."""


@dataclass(frozen=True, slots=True)
class Track:
    """The steps of one setting over a stream of prompts, one entry per step.

    Attributes:
        name: of the setting.
        starts: float64 [S], tokens emitted before the step.
        emitted: float64 [S], tokens that the step added, bonus included.
        arms: [S], the arm played.
        domains: [S], the domain of the prompt.
    """

    name: str
    starts: np.ndarray
    emitted: np.ndarray
    arms: tuple[str, ...]
    domains: tuple[str, ...]

    @classmethod
    def of(cls, name: str, measurements: Sequence[Measurement]) -> Track:
        """Put the answers of one setting end to end."""
        steps = [(m.prompt.domain, step) for m in measurements for turn in m.turns for step in turn.generated.steps]
        emitted = np.asarray([step.emitted for _, step in steps], dtype=np.float64)
        return cls(
            name,
            np.cumsum(emitted) - emitted,
            emitted,
            tuple(step.arm for _, step in steps),
            tuple(domain for domain, _ in steps),
        )


def running_mean(values: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Mean over the last `window` values at every place, over fewer at the beginning."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - window, 0)
    return (sums[ends] - sums[begins]) / (ends - begins)


def draw(tracks: Sequence[Track], *, title: str) -> bytes:
    """The picture as PNG.

    One panel per setting that played several arms (all settings that always play one arm share a panel, a row each),
    with a bar per step, as long as the tokens it added and coloured by domain; below, the accepted length over time.
    """
    from matplotlib.figure import Figure  # without pyplot there is no window system to pick

    tracks = [track for track in tracks if len(track.emitted)]
    colours = _colours(tracks)
    switching = [track for track in tracks if len(set(track.arms)) > 1]
    steady = [track for track in tracks if len(set(track.arms)) <= 1]
    panels = [_rows_by_arm(track) for track in switching]
    if steady:
        panels.append(("settings that always play one arm", [(track.name, track) for track in steady]))
    heights = [0.5 + 0.28 * len(rows) for _, rows in panels] + [2.6]
    figure = Figure(figsize=(12, 1.4 + sum(heights) + 0.5 * len(panels)), layout="constrained")
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    for axis, (name, rows) in zip(axes, panels, strict=False):
        _draw_rows(axis, rows, colours=colours)
        axis.set_title(name, loc="left", fontsize=10)
    _draw_lengths(axes[-1], switching or steady, colours=colours)
    _legend(figure, colours)
    figure.suptitle(title, fontsize=12)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _rows_by_arm(track: Track) -> tuple[str, list[tuple[str, Track]]]:
    rows = []
    for arm in sorted(set(track.arms)):
        mask = np.asarray([played == arm for played in track.arms])
        domains = tuple(domain for domain, kept in zip(track.domains, mask, strict=True) if kept)
        part = Track(track.name, track.starts[mask], track.emitted[mask], (arm,) * int(mask.sum()), domains)
        rows.append((f"{arm}  {mask.mean():.0%}", part))
    return f"{track.name}: arm played (share of steps)", rows


def _draw_rows(axis: Axes, rows: Sequence[tuple[str, Track]], *, colours: Mapping[str, Any]) -> None:
    for row, (_, track) in enumerate(rows):
        spans = list(zip(track.starts.tolist(), track.emitted.tolist(), strict=True))
        axis.broken_barh(
            spans, (row - 0.4, 0.8), facecolors=[colours[domain] for domain in track.domains], edgecolor="white", lw=0.3
        )
    axis.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.tick_params(length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _draw_lengths(axis: Axes, tracks: Sequence[Track], *, colours: Mapping[str, Any]) -> None:
    styles = ("-", "--", "-.", ":")
    for number, track in enumerate(tracks):
        axis.scatter(
            track.starts, track.emitted, s=7, alpha=0.35, lw=0, color=[colours[domain] for domain in track.domains]
        )
        shade = 0.15 + 0.55 * number / max(len(tracks), 1)
        axis.plot(
            track.starts,
            running_mean(track.emitted),
            styles[number % len(styles)],
            color=str(shade),
            lw=1.3,
            label=f"{track.name}: mean of {WINDOW} steps",
        )
    axis.set_ylabel("tokens per step\n(bonus included)", fontsize=8)
    axis.set_xlabel("generated tokens, all prompts one after the other", fontsize=9)
    axis.set_ylim(0, 1.25 * max((track.emitted.max() for track in tracks), default=1.0))  # room for the legend
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=7, loc="upper left", ncols=2, framealpha=0.6)


def _colours(tracks: Sequence[Track]) -> dict[str, Any]:
    import matplotlib

    domains = dict.fromkeys(domain for track in tracks for domain in track.domains)
    palette = matplotlib.colormaps["tab10" if len(domains) <= 10 else "tab20"]
    return {domain: palette(number % palette.N) for number, domain in enumerate(domains)}


def _legend(figure: Any, colours: Mapping[str, Any]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=domain) for domain, colour in colours.items()]
    if handles:
        figure.legend(
            handles=handles, loc="outside lower center", ncols=min(len(handles), 9), fontsize=8, frameon=False
        )
