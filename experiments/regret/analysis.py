"""Speed as a share of the best fixed arm, regret against every comparator, and which drafter was played when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from experiments.analysing import Results, colours, legend_below, new_figure, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPARATORS = ("best-fixed", "best-per-domain", "best-per-prompt", "best-switching", "best-per-step")
KNOWN = ("ar", *COMPARATORS)
HEADLINE = ("mixture", "draft-then-choose", "hedge", "ucb", "exp3")
MOST_COLOURED = 8
"""A picture colours no more policies than this; the others are grey."""
UNITS = {
    "rounds": "rounds: steps more than the comparator",
    "tokens": "tokens: how many the comparator is ahead",
    "seconds": "seconds: time lost to the comparator",
}


def score(frame: pd.DataFrame) -> pd.DataFrame:
    """Speed as a share of the best fixed arm in hindsight, a column per cost profile; mean over seeds and orders."""
    played = _played(frame)
    if played.empty:
        return pd.DataFrame()
    table = played.pivot_table(index="policy", columns="costs", values="of_best-fixed", aggfunc="mean", sort=False)
    known = [name for name in KNOWN if name in table.index]
    table = table.loc[[*known, *(name for name in table.index if name not in known)]]
    if len(table.columns) > 1:
        table.insert(0, "mean", table.mean(axis=1))
    return table.reset_index()


def _played(frame: pd.DataFrame) -> pd.DataFrame:
    if frame.empty or "of_best-fixed" not in frame:
        return pd.DataFrame()
    return frame[frame["policy"].notna() & ~frame["policy"].astype(str).str.startswith("fixed:")]


def tables(results: Results) -> dict[str, pd.DataFrame]:
    """Headline, then one table per cost profile with all comparators, then the best single arms."""
    frame = results.frame
    found = {"Speed as a share of the best fixed arm in hindsight (mean over seeds and orders)": score(frame)}
    played = _played(frame)
    for costs in [] if played.empty else played["costs"].unique():
        rows = []
        for policy, part in played[played["costs"] == costs].groupby("policy", sort=False):
            row: dict[str, Any] = {
                "policy": policy,
                "tokens/s": part["tokens"].sum() / part["seconds"].sum(),
                "over seeds and orders": spread(part["tokens_per_second"]),
                "length": part["tokens"].sum() / part["steps"].sum(),
            }
            for order, some in part.groupby("order"):
                row[f"of best fixed, {order}"] = some["of_best-fixed"].mean()
            for name in COMPARATORS[1:]:
                if f"of_{name}" in part and part[f"of_{name}"].notna().any():
                    row[f"of {name.removeprefix('best-')}"] = part[f"of_{name}"].mean()
            if "regret_seconds_best-fixed" in part:
                for unit in UNITS:
                    row[f"regret ({unit})"] = part[f"regret_{unit}_best-fixed"].mean()
            row["deciding ms/step"] = 1000.0 * part["deciding_seconds_per_step"].mean() or None
            row["most played"] = part["most_played"].mode().iloc[0]
            rows.append(row)
        rows.sort(key=lambda row: KNOWN.index(row["policy"]) if row["policy"] in KNOWN else len(KNOWN))
        found[f"Costs: {costs}"] = pd.DataFrame(rows)
    if not frame.empty and "policy" in frame:
        fixed = frame[frame["policy"].astype(str).str.startswith("fixed:")]
        if not fixed.empty:
            table = fixed.pivot_table(index="policy", columns="costs", values="of_best-fixed", sort=False)
            found["Single arms as a share of the best one"] = table.reset_index()
    return found


def plots(results: Results) -> dict[str, Figure]:
    """Cumulative regret in three units, and shares of drafters over time, per cost profile and order."""
    curves = results.curves()
    places = dict.fromkeys((row["costs"], row["order"]) for row, kept in curves if "regret" in kept)
    colour = colours(pick_out(curves))
    found: dict[str, Figure] = {}
    for costs, order in places:
        name = f"{costs}-{order}".replace(":", "-")
        here = [(row, kept) for row, kept in curves if (row.get("costs"), row.get("order")) == (costs, order)]
        found[f"regret-{name}"] = _regret(here, colour, title=f"costs: {costs}, order: {order}")
        found[f"shares-{name}"] = _shares(here, title=f"costs: {costs}, order: {order}")
    if places:
        found["regret-by-comparator"] = _by_comparator(curves, colour)
    return found


def pick_out(curves: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """The policies that pictures colour: all if they are few, else the headline ones and those that lose least time."""
    lost: dict[str, list[float]] = {}
    for row, kept in curves:
        if "regret" in kept and "best-fixed" in kept["regret"]:
            one = kept["regret"]["best-fixed"]
            # Machines differ in speed by orders of magnitude; what counts is the share of the time.
            lost.setdefault(row["policy"], []).append(one["seconds"][-1] / row["seconds"])
    if len(lost) <= MOST_COLOURED:
        return list(lost)
    headline = [name for name in HEADLINE if name in lost]
    others = sorted(lost.keys() - set(headline), key=lambda name: (np.mean(lost[name]), name))
    return (headline + others)[:MOST_COLOURED]


def _regret(curves: list[tuple[dict[str, Any], dict[str, Any]]], colour: dict[str, str], *, title: str) -> Figure:
    figure, axes = new_figure(3, width=5.0, height=4.8)
    for axis, (unit, label) in zip(axes[0], UNITS.items(), strict=True):
        policies = dict.fromkeys(row["policy"] for row, kept in curves if "regret" in kept)
        grey = [policy for policy in policies if policy not in colour]
        for policy in [*grey, *(policy for policy in colour if policy in policies)]:
            many = [kept["regret"] for row, kept in curves if row["policy"] == policy and "regret" in kept]
            stacked = np.array([one["best-fixed"][unit] for one in many])
            position = many[0]["position"]
            if policy in grey:
                name = f"{len(grey)} others" if policy == grey[0] else None
                axis.plot(position, stacked.mean(axis=0), color="0.8", lw=0.8, label=name)
                continue
            axis.plot(position, stacked.mean(axis=0), color=colour[policy], lw=1.5, label=policy)
            axis.fill_between(
                position, stacked.min(axis=0), stacked.max(axis=0), color=colour[policy], alpha=0.15, lw=0
            )
        for kept in [kept for row, kept in curves if "best-per-step" in kept][:1]:
            for number, name in enumerate(COMPARATORS[1:]):
                style = ((0, (6, 2)), (0, (4, 2, 1, 2)), (0, (2, 2)), (0, (1, 2)))[number]
                one = kept[name]
                axis.plot(one["position"], one["best-fixed"][unit], ls=style, color="0.35", lw=1.0, label=name)
        axis.axhline(0.0, color="black", lw=0.8)
        axis.set_title(label, loc="left", fontsize=10)
        axis.set_xlabel("tokens of the stream", fontsize=9)
    legend_below(figure, axes)
    figure.suptitle(f"Cumulative regret against the best fixed arm (mean and range over seeds)\n{title}", fontsize=11)
    return figure


def _by_comparator(curves: list[tuple[dict[str, Any], dict[str, Any]]], colour: dict[str, str]) -> Figure:
    """Regret in seconds per thousand tokens against each comparator, a panel per cost profile."""
    places = list(dict.fromkeys(row["costs"] for row, kept in curves if "regret" in kept))
    columns = min(5, len(places))
    figure, axes = new_figure(columns, -(-len(places) // columns), width=3.4, height=3.2)
    for axis in axes.flat[len(places) :]:
        axis.set_visible(False)
    for axis, costs in zip(axes.flat, places, strict=False):
        for policy in colour:
            many = [kept["regret"] for row, kept in curves if (row["costs"], row["policy"]) == (costs, policy)]
            many = [one for one in many if "best-fixed" in one]
            if many:
                lost = [
                    np.mean([1000.0 * one[name]["seconds"][-1] / one["position"][-1] for one in many])
                    for name in COMPARATORS
                ]
                axis.plot(range(len(COMPARATORS)), lost, marker="o", ms=3, lw=1.2, color=colour[policy], label=policy)
        axis.axhline(0.0, color="black", lw=0.8)
        labels = [name.removeprefix("best-") for name in COMPARATORS]
        axis.set_xticks(range(len(COMPARATORS)), labels, rotation=30, fontsize=8)
        axis.set_title(costs, loc="left", fontsize=10)
    axes[0, 0].set_ylabel("seconds lost per 1,000 tokens", fontsize=9)
    legend_below(figure, axes)
    figure.suptitle("Regret at the end, by comparator", fontsize=11)
    return figure


def _shares(curves: list[tuple[dict[str, Any], dict[str, Any]]], *, title: str) -> Figure:
    """Share of the steps by drafter along the stream, a panel per policy, mean over seeds."""
    played = [(row, kept["shares"]) for row, kept in curves if "shares" in kept]
    policies = list(dict.fromkeys(row["policy"] for row, _ in played))
    drafters = list(dict.fromkeys(name for _, shares in played for name in sorted(shares["drafters"])))
    colour = colours(drafters)
    columns = 5
    figure, axes = new_figure(columns, max(1, -(-len(policies) // columns)), width=3.0, height=2.2)
    for axis, policy in zip(axes.flat, policies, strict=False):
        many = [shares for row, shares in played if row["policy"] == policy]
        pieces = len(many[0]["shares"][0])
        stack = np.zeros((len(drafters), pieces))
        for shares in many:
            for name, values in zip(shares["drafters"], shares["shares"], strict=True):
                stack[drafters.index(name)] += np.array(values) / len(many)
        axis.stackplot(
            np.linspace(0.0, 1.0, pieces), stack, colors=[colour[name] for name in drafters], labels=drafters
        )
        axis.set_title(policy, loc="left", fontsize=9)
        axis.set_xlim(0.0, 1.0)
        axis.set_ylim(0.0, 1.0)
    for axis in axes.flat[len(policies) :]:
        axis.set_visible(False)
    legend_below(figure, axes)
    figure.suptitle(f"Share of the steps by drafter along the stream\n{title}", fontsize=11)
    return figure
