"""What the analyses share: results with their curves, published figures, sums, and plain pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from experiments.store import RunFolder, frame_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Results:
    """A run as analyses see it.

    Attributes:
        results: what every finished configuration left, by id.
        published: figures of others, see `read_published`; empty without any.
    """

    results: list[dict[str, Any]]
    published: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=PUBLISHED))

    @classmethod
    def of(cls, folder: RunFolder, published: Sequence[Path] = ()) -> Results:
        """Of a run's folder, with the published figures that lie in it and others."""
        files = [*sorted((folder.path / "published").glob("*.csv")), *published]
        return cls(folder.results(), read_published(files))

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row per row of every result."""
        return frame_of(self.results)

    def curves(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """(first row, curves) of every result that has both."""
        return [(r["rows"][0], r["curves"]) for r in self.results if r["rows"] and r["curves"]]


PUBLISHED = ("file", "domain", "method", "configuration", "date", "measure", "value")

_MEASURES = {
    "tokens_per_second": "tokens/s",
    "tau": "mean accepted length",
    "speedup": "speed-up",
    "headline": "headline",
    "column_25": "mean accepted length",
    "column_28": "tokens/s",
    "column_29": "mean accepted length",
}
"""Columns of the published tables and what is in them."""


def read_published(paths: Sequence[Path]) -> pd.DataFrame:
    """Published figures, one row per figure, columns `PUBLISHED`.

    Files are CSV with the columns `method` and `configuration`, perhaps `domain` and `date`, and any of `_MEASURES`;
    other columns are left out.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file without these columns.
    """
    rows: list[dict[str, Any]] = []
    for path in paths:
        table = pd.read_csv(path)
        if missing := {"method", "configuration"} - set(table.columns):
            raise ValueError(f"{path} is not a table of published figures: it lacks {', '.join(sorted(missing))}")
        for record in table.to_dict("records"):
            for column, measure in _MEASURES.items():
                value = record.get(column)
                if isinstance(value, int | float) and value == value:
                    known = {"domain": record.get("domain", ""), "date": str(record.get("date", ""))}
                    configuration = record["configuration"] if isinstance(record["configuration"], str) else ""
                    rows.append(
                        {
                            "file": path.stem,
                            "method": record["method"],
                            "configuration": configuration,
                            "measure": measure,
                            "value": float(value),
                            **known,
                        }
                    )
    return pd.DataFrame(rows, columns=list(PUBLISHED))


def live_scores(frame: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Speeds of live runs: sums over domains and seeds, never means of ratios.

    `speed-up` is against no speculation of the same runs, prefill included; `decode speed-up` leaves prefill out;
    `identical` counts prompts with exactly the tokens of no speculation; `length` includes the bonus token; `faults`
    counts steps in which a drafter failed and was set aside.
    """
    if frame.empty or "ar_seconds" not in frame:
        return pd.DataFrame()
    rows = []
    for key, part in frame[frame["ar_seconds"].notna()].groupby(list(by), dropna=False, sort=False):
        values = key if isinstance(key, tuple) else (key,)
        total = part.sum(numeric_only=True)
        speed, base = total["new_tokens"] / total["seconds"], total["ar_new_tokens"] / total["ar_seconds"]
        decode = (total["new_tokens"] - total["answers"]) / (total["seconds"] - total["prefill_seconds"])
        ar_decode = (total["ar_new_tokens"] - total["answers"]) / (total["ar_seconds"] - total["ar_prefill_seconds"])
        seeds = part.groupby("seed").sum(numeric_only=True)
        ratios = (seeds["new_tokens"] / seeds["seconds"]) / (seeds["ar_new_tokens"] / seeds["ar_seconds"])
        compared = total.get("compared", 0.0)
        rows.append(
            {
                **dict(zip(by, values, strict=True)),
                "tokens/s": speed,
                "speed-up": speed / base,
                "over seeds": spread(ratios),
                "decode speed-up": decode / ar_decode,
                "length": total["gained"] / max(total["steps"], 1),
                "identical": f"{total['identical']:.0f}/{compared:.0f}" if compared else "not greedy",
                "draft ms/step": 1000.0 * total["draft_seconds"] / max(total["steps"], 1),
                "prompts": int(total["prompts"]),
                "faults": int(total["faults"]),
            }
        )
    return pd.DataFrame(rows)


def spread(values: Any) -> str:
    """Smallest to largest value.

    >>> spread([1.0, 1.25])
    '1.00 to 1.25'
    """
    found = [float(value) for value in values if value == value]
    return f"{min(found):.2f} to {max(found):.2f}" if len(found) > 1 else ""


def new_figure(columns: int = 1, rows: int = 1, *, width: float = 5.0, height: float = 4.2) -> tuple[Figure, Any]:
    """A figure without a window system, and its axes [rows, columns]."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    return figure, axes


def legend_below(figure: Figure, axes: Any) -> None:
    """One legend for all axes, every label once, in as many columns as the figure is wide."""
    found: dict[str, Any] = {}
    for axis in np.ravel(axes):
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        columns = max(1, int(figure.get_figwidth() / (0.6 + 0.075 * max(map(len, found)))))
        figure.legend(
            found.values(), found.keys(), loc="outside lower center", ncols=columns, fontsize=8, frameon=False
        )


def colours(names: Sequence[str]) -> dict[str, str]:
    """One colour per name, the same whatever else is drawn."""
    from matplotlib import colormaps, colors

    palette = [*colormaps["tab20"].colors[::2], *colormaps["tab20"].colors[1::2]]
    return {name: colors.to_hex(palette[index % len(palette)]) for index, name in enumerate(dict.fromkeys(names))}


def bars(frame: pd.DataFrame, *, label: str, value: str, title: str, line: float | None = None) -> Figure:
    """Horizontal bars, the first row on top."""
    figure, axes = new_figure(width=8.0, height=max(2.0, 0.28 * len(frame) + 1.0))
    axis = axes[0, 0]
    names = frame[label].astype(str).tolist()[::-1]
    axis.barh(range(len(names)), frame[value].tolist()[::-1], color="#4477aa", height=0.7)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    if line is not None:
        axis.axvline(line, color="black", lw=0.8)
    axis.set_title(title, loc="left", fontsize=10)
    return figure
