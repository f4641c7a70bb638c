"""Throughput of fleets as a share of the best fixed arm on the same hardware and batch, by how learners share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from experiments.analysing import Results, colours, legend_below, new_figure
from experiments.hardware import find_hardware, hardware_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLACE = ["hardware", "batch"]


def score(frame: pd.DataFrame) -> pd.DataFrame:
    """Per hardware and batch: the best fixed arm, and as shares of it no speculation and every policy."""
    rated = _rated(frame)
    if rated.empty:
        return pd.DataFrame()
    rows = []
    for (hardware, batch), part in rated.groupby(PLACE, sort=False):
        fixed = part[part["policy"].str.startswith("fixed:")]
        row = {"hardware": hardware, "batch": int(batch)}
        if not fixed.empty:
            best = fixed.loc[fixed["tokens_per_second"].idxmax()]
            row |= {
                "best arm": best["policy"].removeprefix("fixed:"),
                "tokens/s per machine": best["tokens_per_second"],
                "ar": fixed.loc[fixed["policy"] == "fixed:ar", "of best"].mean(),
            }
        for play in part[~part["policy"].str.startswith("fixed:")].to_dict("records"):
            row[f"{play['policy']} {play['sharing']}"] = play["of best"]
        rows.append(row)
    return pd.DataFrame(rows).sort_values(["hardware", "batch"], ignore_index=True)


def _rated(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per play, seeds together, with its speed as a share of the best fixed arm's."""
    if frame.empty or "machine_seconds" not in frame:
        return pd.DataFrame()
    played = frame[frame["machine_seconds"].notna()]
    keys = [*PLACE, "policy", "sharing"]
    sums = played.groupby(keys, sort=False)[["tokens", "machine_seconds", "requests", "simulated_in"]].sum()
    rated = sums.reset_index()
    rated["tokens_per_second"] = rated["tokens"] / rated["machine_seconds"]
    fixed = rated[rated["policy"].str.startswith("fixed:")]
    best = fixed.groupby(PLACE)["tokens_per_second"].max().rename("best")
    rated = rated.join(best, on=PLACE)
    rated["of best"] = rated["tokens_per_second"] / rated["best"]
    return rated


def tables(results: Results) -> dict[str, pd.DataFrame]:
    """Shares, regret, what the simulation took, and where the hardware's numbers are from."""
    rated = _rated(results.frame)
    found = {"Speed as a share of the best fixed arm": score(results.frame)}
    if not rated.empty:
        learnt = rated[~rated["policy"].str.startswith("fixed:")].copy()
        learnt["machine-seconds lost"] = learnt["machine_seconds"] - learnt["tokens"] / learnt["best"]
        learnt["lost per million requests"] = 1e6 * learnt["machine-seconds lost"] / learnt["requests"]
        found["Regret against the best fixed arm, in machine-seconds"] = learnt.pivot_table(
            index=[*PLACE, "policy"], columns="sharing", values="lost per million requests", sort=False
        ).reset_index()
        found["Size of the simulation"] = pd.DataFrame(
            {
                "plays": [len(results.frame[results.frame["machine_seconds"].notna()])],
                "requests": [int(rated["requests"].sum())],
                "tokens": [int(rated["tokens"].sum())],
                "seconds on one core": [float(rated["simulated_in"].sum())],
            }
        )
    sources = [
        {"hardware": hardware.title, "model": hardware.model, "number": name, "value": str(value), "source": source}
        for hardware in map(find_hardware, hardware_names())
        for (name, value), source in zip(hardware.values.items(), hardware.sources.values(), strict=True)
    ]
    found["Where the numbers are from"] = pd.DataFrame(sources)
    return found


def plots(results: Results) -> dict[str, Figure]:
    """Shares over the batch, and how the lag behind the best arm grows with the stream."""
    rated = _rated(results.frame)
    if rated.empty:
        return {}
    learnt = rated[~rated["policy"].str.startswith("fixed:")]
    hardware = list(dict.fromkeys(rated["hardware"]))
    sharing = list(dict.fromkeys(learnt["sharing"]))
    colour = colours(list(dict.fromkeys(learnt["policy"])))
    styles = dict(zip(sharing, ("-", (0, (6, 2)), (0, (3, 1.5)), (0, (1, 1.5))), strict=False))
    figure, axes = new_figure(len(hardware), width=4.0, height=4.2)
    for axis, name in zip(axes[0], hardware, strict=True):
        for (policy, shared), part in learnt[learnt["hardware"] == name].groupby(["policy", "sharing"], sort=False):
            part = part.sort_values("batch")
            label = f"{policy}, {shared}"
            axis.plot(
                part["batch"], part["of best"], color=colour[policy], ls=styles[shared], marker="o", ms=3, label=label
            )
        base = rated[(rated["hardware"] == name) & (rated["policy"] == "fixed:ar")].sort_values("batch")
        axis.plot(base["batch"], base["of best"], color="0.5", lw=1.0, label="no speculation")
        axis.axhline(1.0, color="black", lw=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("batch", fontsize=9)
        axis.set_title(name, loc="left", fontsize=10)
    axes[0, 0].set_ylabel("speed, of the best fixed arm", fontsize=9)
    legend_below(figure, axes)
    return {"of-best": figure, "along-the-stream": _along(results, rated, colour, styles)}


def _along(results: Results, rated: pd.DataFrame, colour: dict, styles: dict) -> Figure:
    best = rated.drop_duplicates(PLACE).set_index(PLACE)["best"]
    places = list(best.index)
    columns = min(4, len(places))
    figure, axes = new_figure(columns, -(-len(places) // columns), width=3.6, height=2.8)
    for axis, place in zip(axes.flat, places, strict=False):
        for row, kept in results.curves():
            if (row.get("hardware"), row.get("batch")) != place or row["policy"] not in colour or row["seed"]:
                continue
            tokens, seconds = np.array(kept["tokens"]), np.array(kept["seconds"])
            label = f"{row['policy']}, {row['sharing']}"
            lost = seconds - tokens / best[place]
            axis.plot(tokens, lost, color=colour[row["policy"]], ls=styles[row["sharing"]], lw=1.1, label=label)
        axis.axhline(0.0, color="black", lw=0.8)
        axis.set_title(f"{place[0]}, batch {place[1]}", loc="left", fontsize=9)
    for axis in list(axes.flat)[len(places) :]:
        axis.set_visible(False)
    legend_below(figure, axes)
    figure.suptitle("Seconds lost per replica to the best fixed arm, over tokens", fontsize=11)
    return figure
