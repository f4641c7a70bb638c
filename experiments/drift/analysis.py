"""How long each policy takes to get over a change, and what it loses meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from experiments.analysing import Results, colours, legend_below, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def score(frame: pd.DataFrame) -> pd.DataFrame:
    """Per world and policy, over all changes and seeds: median tokens to recover, how often at all, speed against the
    arm that is best in each phase."""
    if frame.empty or "world" not in frame:
        return pd.DataFrame()
    rows = []
    changes = frame[frame["world"].notna() & (frame["phase"] > 0)]
    for (world, policy), part in changes.groupby(["world", "policy"], sort=False):
        rows.append(
            {
                "world": world,
                "policy": policy,
                "changes": len(part),
                "recovered": float(part["tokens_to_recover"].notna().mean()),
                # One that never recovered counts as the whole phase.
                "tokens to recover": float(part["tokens_to_recover"].fillna(part["tokens"]).median()),
                "steps to recover": float(part["steps_to_recover"].median()),
                "seconds to recover": float(part["seconds_to_recover"].median()),
                "speed after the change, of best arm": float(part["of_best"].mean()),
                "seconds lost per change": float(part["seconds_lost"].mean()),
            }
        )
    return pd.DataFrame(rows)


def tables(results: Results) -> dict[str, pd.DataFrame]:
    """All worlds, and each phase of each world."""
    frame = results.frame
    found = {"Recovery after a change (90 % of the best arm's speed over 150 tokens)": score(frame)}
    for world in [] if score(frame).empty else frame["world"].dropna().unique():
        part = frame[frame["world"] == world]
        table = part.pivot_table(
            index="policy", columns=["phase", "name"], values="of_best", aggfunc="mean", sort=False
        )
        if table.shape[1] <= 12:
            table.columns = [f"{int(phase)}: {name}" for phase, name in table.columns]
            found[f"Speed of each phase as a share of its best arm's: {world}"] = table.reset_index()
    return found


def plots(results: Results) -> dict[str, Figure]:
    """Speed along the stream, a panel per world; changes are dashed."""
    curves = [(row, kept) for row, kept in results.curves() if "rate" in kept]
    worlds = list(dict.fromkeys(row["world"] for row, _ in curves))
    if not worlds:
        return {}
    colour = colours([row["policy"] for row, _ in curves])
    figure, axes = new_figure(1, len(worlds), width=11.0, height=2.8)
    for axis, world in zip(axes[:, 0], worlds, strict=True):
        here = [(row, kept) for row, kept in curves if row["world"] == world]
        for policy in colour:
            many = [kept for row, kept in here if row["policy"] == policy]
            if many:
                length = min(len(one["rate"]) for one in many)
                rate = np.mean([one["rate"][:length] for one in many], axis=0)
                axis.plot(many[0]["position"][:length], rate, color=colour[policy], lw=1.1, label=policy)
        for start in here[0][1]["starts"][1:]:
            axis.axvline(start, color="black", lw=0.8, ls=(0, (4, 3)))
        axis.set_title(world, loc="left", fontsize=10)
        axis.set_ylabel("tokens/s", fontsize=8)
    axes[-1, 0].set_xlabel("tokens of the stream", fontsize=9)
    legend_below(figure, axes)
    figure.suptitle("Speed over the next 150 tokens, mean over seeds", fontsize=11)
    return {"speed": figure}
