"""Speed-up and mean accepted length of the strategies, beside published ones: ratios, since machines differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from experiments.analysing import Results, bars, colours, legend_below, live_scores, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {"UCB": "ucb", "EXP3": "exp3", "HedgeSpec": "hedge", "Vanilla": "no speculation"}
"""Methods of the published table, and what they are called here."""

KINDS = {"rest": "REST stores", "eagle3": "EAGLE heads", "rest+eagle3": "REST stores and EAGLE heads"}
"""Kinds of experts. The published strategies choose among heads."""


def score(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per pool and strategy."""
    return live_scores(frame, ["group", "strategy"])


def tables(results: Results) -> dict[str, pd.DataFrame]:
    """The strategies, one kind of expert beside the other, both beside the published rows, and by domain."""
    frame = results.frame
    found = {"Strategies": score(frame), "EAGLE heads beside REST stores": by_kind(frame)}
    found["Published beside measured"] = beside(results)
    found["By domain"] = live_scores(frame, ["group", "domain", "strategy"])
    return found


def by_kind(frame: pd.DataFrame) -> pd.DataFrame:
    """What a strategy gets out of trained heads and out of stores, over the runs whose experts are for the same domains
    with both; empty without any."""
    if frame.empty or not {"expert", "experts_for"} <= set(frame.columns):
        return pd.DataFrame()
    keys = ["experts", "order", "strategy", "seed", "experts_for"]
    frame = frame[frame["expert"].isin(["rest", "eagle3"])]
    frame = frame[frame.groupby(keys)["expert"].transform("nunique") == 2]
    rows = []
    table = live_scores(frame, ["experts", "order", "strategy", "expert"])
    for key, part in [] if table.empty else table.groupby(["experts", "order", "strategy"], sort=False):
        values = part.set_index("expert")
        row: dict[str, object] = dict(zip(("experts", "order", "strategy"), (int(key[0]), *key[1:]), strict=True))
        for measure in ("speed-up", "length", "identical"):
            for kind in ("eagle3", "rest"):
                row[f"{KINDS[kind]}, {measure}"] = values.at[kind, measure]
        row["heads of stores"] = values.at["eagle3", "speed-up"] / values.at["rest", "speed-up"]
        rows.append(row)
    return pd.DataFrame(rows)


def chooses_among(frame: pd.DataFrame) -> dict[str, str]:
    """By group, what its strategies choose among."""
    found = {}
    for group, part in frame.groupby("group", sort=False):
        row = part.iloc[0]
        experts = "experts" in part and row["experts"] == row["experts"]
        kind = row["expert"] if "expert" in part and row["expert"] == row["expert"] else "rest"
        found[group] = KINDS[kind] if experts else "drafters"
    return found


def beside(results: Results) -> pd.DataFrame:
    """Published and measured ratios: to no speculation and to hedge. Groups that choose among heads, as the published
    strategies do, come first."""
    rows = []
    table = results.published
    known = table[table["method"].isin(NAMES) & table["configuration"].str.contains("Strategy=", na=False)]
    for model, part in known.groupby(known["configuration"].str.extract(r"Model=([^,]+)")[0]):
        values = part.pivot_table(index="method", columns="measure", values="value")
        for method in values.index:
            rows.append(
                {
                    "whose": f"published, {model}",
                    "chooses among": KINDS["eagle3"],
                    "strategy": NAMES[method],
                    "speed-up": values.at[method, "tokens/s"] / values.at["Vanilla", "tokens/s"],
                    "of hedge": values.at[method, "tokens/s"] / values.at["HedgeSpec", "tokens/s"],
                    "length": values.at[method, "mean accepted length"],
                }
            )
    measured = score(results.frame)
    among = {} if measured.empty else chooses_among(results.frame)
    for group in sorted(measured["group"].unique() if among else (), key=lambda name: among[name] != KINDS["eagle3"]):
        part = measured[measured["group"] == group]
        hedge = part.loc[part["strategy"] == "hedge", "speed-up"]
        for row in part.to_dict("records"):
            rows.append(
                {
                    "whose": f"measured, {group}",
                    "chooses among": among[group],
                    "strategy": row["strategy"],
                    "speed-up": row["speed-up"],
                    "of hedge": row["speed-up"] / hedge.iloc[0] if len(hedge) else None,
                    "length": row["length"],
                    "identical": row["identical"],
                }
            )
    return pd.DataFrame(rows)


def plots(results: Results) -> dict[str, Figure]:
    """Speed-ups, and which expert was played along the stream."""
    found: dict[str, Figure] = {}
    table = score(results.frame)
    if not table.empty:
        table["name"] = table["group"] + ": " + table["strategy"]
        found["speed-up"] = bars(table, label="name", value="speed-up", title="speed-up, prefill included", line=1.0)
    experts = [(row, kept["arms"]) for row, kept in results.curves() if row.get("experts") and row["seed"] == 0]
    if experts:
        found["experts"] = _experts(experts)
    return found


def _experts(runs: list) -> Figure:
    figure, axes = new_figure(1, len(runs), width=9.0, height=1.7)
    names = [name for _, answers in runs for _, counts in answers for name in counts]
    colour = colours(sorted(set(names)))
    for axis, (row, answers) in zip(axes[:, 0], runs, strict=True):
        for place, (_, counts) in enumerate(answers):
            bottom, total = 0.0, sum(counts.values()) or 1
            for name, count in sorted(counts.items()):
                axis.bar(place, count / total, bottom=bottom, width=1.0, color=colour[name], label=name)
                bottom += count / total
        axis.set_title(f"{row['strategy']}, {row['group']}", loc="left", fontsize=9)
        ticks = [i for i, (domain, _) in enumerate(answers) if i == 0 or domain != answers[i - 1][0]]
        axis.set_xticks(ticks, [answers[i][0] for i in ticks], fontsize=7, rotation=20)
    legend_below(figure, axes)
    figure.suptitle("Share of the steps by expert, answer by answer", fontsize=11)
    return figure
