"""Speed-up and mean accepted length per category, beside the published headline of each method."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from experiments.analysing import Results, bars, live_scores, new_figure
from experiments.systems import SYSTEMS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def score(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per drafter or strategy over all categories, fastest first."""
    table = live_scores(frame, ["method"])
    return table if table.empty else table.sort_values("speed-up", ascending=False, ignore_index=True)


def tables(results: Results) -> dict[str, pd.DataFrame]:
    """Overall, speed-ups and lengths per category, published beside measured."""
    frame = results.frame
    found = {"All categories": score(frame)}
    by_domain = live_scores(frame, ["method", "domain"])
    if not by_domain.empty:
        for value in ("speed-up", "length"):
            wide = by_domain.pivot_table(index="method", columns="domain", values=value, sort=False)
            found[f"{value} by category"] = wide.reset_index()
    found["Published beside measured"] = beside(results)
    return found


def beside(results: Results) -> pd.DataFrame:
    """Per measured method, published speed-ups ("headline") of the same systems, with their models and machines."""
    rows = []
    measured = score(results.frame)
    headlines = results.published[results.published["measure"] == "headline"]
    for row in [] if measured.empty else measured.to_dict("records"):
        rows.append(
            {
                "whose": "measured",
                "method": row["method"],
                "speed-up": row["speed-up"],
                "length": row["length"],
                "identical": row["identical"],
                "with": "",
            }
        )
        same = [system.rows(headlines) for system in SYSTEMS if system.measures(row["method"])]
        for other in pd.concat(same).to_dict("records") if same else []:
            rows.append(
                {
                    "whose": "published",
                    "method": other["method"],
                    "speed-up": other["value"] if other["value"] < 50.0 else None,
                    "tokens/s": other["value"] if other["value"] >= 50.0 else None,
                    "with": other["configuration"],
                }
            )
    return pd.DataFrame(rows)


def plots(results: Results) -> dict[str, Figure]:
    """Overall bars, and a map of speed-ups by category."""
    table = score(results.frame)
    if table.empty:
        return {}
    found = {"speed-up": bars(table, label="method", value="speed-up", title="speed-up over all categories", line=1.0)}
    wide = live_scores(results.frame, ["method", "domain"]).pivot_table(
        index="method", columns="domain", values="speed-up", sort=False
    )
    figure, axes = new_figure(width=2.5 + 0.8 * len(wide.columns), height=1.2 + 0.28 * len(wide))
    axis = axes[0, 0]
    image = axis.imshow(wide.to_numpy(), aspect="auto", cmap="RdBu", vmin=0.5, vmax=1.5)
    axis.set_xticks(range(len(wide.columns)), wide.columns, rotation=40, fontsize=8, ha="right")
    axis.set_yticks(range(len(wide)), wide.index, fontsize=8)
    for (row, column), value in pd.DataFrame(wide.to_numpy()).stack().items():
        axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7)
    axis.set_title("speed-up by category", loc="left", fontsize=10)
    figure.colorbar(image, ax=axis, shrink=0.6)
    found["by-category"] = figure
    return found
