"""Accepted length and speed by builder, budget and temperature, beside published budgets."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pandas as pd

from experiments.analysing import Results, colours, legend_below, live_scores, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BY = ["drafter", "builder", "temperature", "budget"]


def score(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per drafter, builder, temperature and budget."""
    return live_scores(frame, BY)


def tables(results: Results) -> dict[str, pd.DataFrame]:
    """All of it, lengths and speed-ups over budgets, published beside measured."""
    table = score(results.frame)
    found = {"Builders": table}
    if not table.empty:
        for value in ("length", "speed-up"):
            wide = table.pivot_table(
                index=["drafter", "builder", "temperature"], columns="budget", values=value, sort=False
            )
            found[f"{value} by budget"] = wide.reset_index()
    found["Published beside measured"] = beside(results)
    return found


def beside(results: Results) -> pd.DataFrame:
    """Published trees of a stated budget and temperature, and ours of the nearest kind."""
    rows = []
    table = results.published
    stated = table[table["configuration"].str.contains(r"\(B\)=\d+|Nodes=\d+", na=False)]
    for (method, configuration), part in stated.groupby(["method", "configuration"], sort=False):
        budget = re.search(r"(?:\(B\)|Nodes)=(\d+)", configuration)
        temperature = re.search(r"\(T\)=([\d.]+)", configuration)
        values = part.set_index("measure")["value"]
        rows.append(
            {
                "whose": "published",
                "tree": method,
                "with": configuration.split(",")[0],
                "budget": int(budget[1]),
                "temperature": float(temperature[1]) if temperature else None,
                "length": values.get("mean accepted length"),
                "speed-up": values.get("speed-up", values.get("headline")),
            }
        )
    for row in score(results.frame).to_dict("records"):
        rows.append(
            {
                "whose": "measured",
                "tree": f"{row['drafter']}, {row['builder']}",
                "budget": row["budget"],
                "temperature": row["temperature"],
                "length": row["length"],
                "speed-up": row["speed-up"],
                "identical": row["identical"],
            }
        )
    found = pd.DataFrame(rows)
    return found if found.empty else found.sort_values(["temperature", "budget"], kind="stable", ignore_index=True)


def plots(results: Results) -> dict[str, Figure]:
    """Accepted length over the budget, a panel per temperature."""
    table = score(results.frame)
    if table.empty:
        return {}
    temperatures = sorted(table["temperature"].unique())
    figure, axes = new_figure(len(temperatures), 2, width=4.4, height=3.4)
    names = table["drafter"] + ", " + table["builder"]
    colour = colours(names)
    for column, temperature in enumerate(temperatures):
        for row, value in enumerate(("length", "speed-up")):
            axis = axes[row, column]
            for name in dict.fromkeys(names):
                part = table[(names == name) & (table["temperature"] == temperature)].sort_values("budget")
                axis.plot(part["budget"], part[value], marker="o", ms=3, color=colour[name], label=name)
            axis.set_title(f"{value}, temperature {temperature:g}", loc="left", fontsize=9)
            axis.set_xlabel("nodes", fontsize=8)
    legend_below(figure, axes)
    return {"builders": figure}
