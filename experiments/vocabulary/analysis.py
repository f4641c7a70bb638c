"""Accepted length, head time and speed of vocabulary heads, beside published ones: ratios to the full head."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pandas as pd

from experiments.analysing import Results, bars, live_scores, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FULL = {"coupled": "Vanilla SD", "decoupled": "Standard SD"}
"""What the full head is called in the published table."""


def score(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per kind of drafter, domain and head, with its speed as a share of the full head's."""
    if frame.empty:
        return pd.DataFrame()
    table = live_scores(frame, ["draft", "domain", "head"])
    heads = head_times(frame)
    if table.empty:
        return heads
    base = table[table["head"] == "full"].set_index(["draft", "domain"])["speed-up"]
    keys = pd.MultiIndex.from_frame(table[["draft", "domain"]])
    table.insert(3, "of full head", table["speed-up"].to_numpy() / base.reindex(keys).to_numpy())
    if not heads.empty:
        one = heads[heads["hidden states"] == 1].set_index("head")
        table["head ms"] = table["head"].map(one["head ms"])
    return table


def head_times(frame: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds of the head alone."""
    if frame.empty or "head_milliseconds" not in frame:
        return pd.DataFrame()
    found = frame[frame["head_milliseconds"].notna()]
    return pd.DataFrame(
        {
            "head": found["head"],
            "hidden states": found["hidden_states"].astype(int),
            "rows": found["head_rows"].astype(int),
            "head ms": found["head_milliseconds"],
            "of full head": found["head_milliseconds"] / found["full_milliseconds"],
        }
    ).reset_index(drop=True)


def tables(results: Results) -> dict[str, pd.DataFrame]:
    """Live runs, heads alone, published beside measured."""
    return {
        "Heads in use": score(results.frame),
        "Heads alone": head_times(results.frame),
        "Published beside measured": beside(results),
    }


def beside(results: Results) -> pd.DataFrame:
    """Speed as a share of the full head's, published and measured, by domain and kind of drafter."""
    rows = []
    table = results.published
    table = table[(table["measure"] == "tokens/s") & table["domain"].isin(["law", "code"])]
    for domain, part in table.groupby("domain"):
        kinds = part["configuration"].str.contains("Decoupled").map({True: "decoupled", False: "coupled"})
        for kind, some in part.groupby(kinds):
            full = some.loc[some["method"] == FULL[kind], "value"]
            for row in some.to_dict("records") if len(full) else []:
                rows.append(
                    {
                        "domain": domain,
                        "draft": kind,
                        "head": published_head(row["method"], row["configuration"]),
                        "published, of full head": row["value"] / full.iloc[0],
                    }
                )
    found = pd.DataFrame(rows, columns=["domain", "draft", "head", "published, of full head"])
    measured = score(results.frame)
    if not measured.empty and "draft" in measured:
        mine = measured[["domain", "draft", "head", "of full head"]]
        found = found.merge(mine, how="outer", on=["domain", "draft", "head"])
    return found.rename(columns={"of full head": "measured, of full head"})


def published_head(method: str, configuration: str) -> str:
    """The name here of a published method.

    >>> published_head("EvoSpec", "Static Vocabulary Size=32k, Dynamic Buffer Size (Dyna)=256")
    'evospec:32768+256'
    """
    size = re.search(r"Static Vocabulary Size=(\d+)k", configuration)
    buffer = re.search(r"Dynamic (?:Buffer|Vocabulary) Size(?: \(Dyna\))?=(\d+)", configuration)
    if method in FULL.values():
        return "full"
    if method == "FR-Spec" and size:
        return f"fr:{1024 * int(size[1])}"
    if method == "EvoSpec" and size and buffer:
        return f"evospec:{1024 * int(size[1])}+{buffer[1]}"
    return method


def plots(results: Results) -> dict[str, Figure]:
    """Head times, and speed against rows."""
    found: dict[str, Figure] = {}
    heads = head_times(results.frame)
    if not heads.empty:
        one = heads[heads["hidden states"] == heads["hidden states"].min()].sort_values("head ms")
        found["head-ms"] = bars(one, label="head", value="head ms", title="milliseconds of the head, one hidden state")
    table = beside(results)
    both = table[table.notna().all(axis=1)] if "measured, of full head" in table else pd.DataFrame()
    if not both.empty:
        figure, axes = new_figure(width=5.0, height=4.6)
        axis = axes[0, 0]
        axis.scatter(both["published, of full head"], both["measured, of full head"])
        for row in both.to_dict("records"):
            axis.annotate(row["head"], (row["published, of full head"], row["measured, of full head"]), fontsize=7)
        axis.set_xlabel("published, of the full head's speed")
        axis.set_ylabel("measured, of the full head's speed")
        found["published-measured"] = figure
    return found
