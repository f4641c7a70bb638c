"""Tables of results for the terminal, made from the same dictionary that is written as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def results_table(report: Mapping[str, Any], *, title: str | None = None) -> Table:
    """One row per setting. A speed-up stands next to the exactness check of the same run.

    "length" is the mean accepted length, bonus token included; "accepted" is the acceptance rate, bonus excluded.
    """
    runs = report["runs"]
    repeats = max((len(run["tokens_per_second_repeats"]) for run in runs), default=1)
    strategies = any(run["kind"] == "strategy" for run in runs)
    table = _table(title)
    table.add_column("setting", no_wrap=True)
    table.add_column("tokens/s", justify="right", no_wrap=True)
    if repeats > 1:
        table.add_column("over repeats", justify="right", no_wrap=True)
    table.add_column("speed-up", justify="right", no_wrap=True)
    table.add_column("90 % interval", justify="center", no_wrap=True)
    table.add_column("decode", justify="right", no_wrap=True)
    table.add_column("length", justify="right", no_wrap=True)
    table.add_column("accepted", justify="right", no_wrap=True)
    table.add_column("identical", justify="right", no_wrap=True)
    table.add_column("max margin", justify="right", no_wrap=True)
    if strategies:
        table.add_column("vs best arm", justify="right", no_wrap=True)
    kind = None
    for run in runs:
        if kind not in (None, run["kind"]):
            table.add_section()
        kind = run["kind"]
        cells = [run["name"], number(run["tokens_per_second"], 1)]
        if repeats > 1:
            cells.append(spread(run["tokens_per_second_repeats"]))
        cells += [
            ratio(run.get("speedup")),
            interval(run.get("speedup_interval") if run["name"] != "ar" else None),
            ratio(run.get("decode_speedup")),
            number(run.get("mean_accepted_length"), 2),
            percent(run.get("acceptance_rate")),
            identical(run),
            number(run.get("max_margin"), 4),
        ]
        if strategies:
            cells.append(ratio(run.get("vs_best_fixed")))
        table.add_row(*cells, style="bold" if kind == "strategy" else None)
    return table


def category_table(report: Mapping[str, Any]) -> Table:
    """Speed-up against no speculation per domain; the fastest setting of each domain is marked with a star."""
    categories = report["by_category"]
    names = [run["name"] for run in report["runs"] if run["kind"] != "reference" and run["name"] != "ar"]
    table = _table("speed-up by domain (* fastest)")
    table.add_column("setting", no_wrap=True)
    for category in categories:
        table.add_column(category, justify="right", no_wrap=True)
    best = {
        category: max(row, key=lambda name: row[name]["tokens_per_second"])
        for category, row in ((c, {n: categories[c][n] for n in names}) for c in categories)
        if row
    }
    for name in names:
        cells = [
            ratio(row[name]["speedup"]) + ("*" if best[category] == name else " ")
            for category, row in categories.items()
        ]
        table.add_row(name, *cells)
    return table


def _table(title: str | None) -> Table:
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)


def number(value: float | None, digits: int) -> str:
    """Fixed digits; a dash for what was not measured."""
    return "–" if value is None else f"{value:.{digits}f}"


def ratio(value: float | None) -> str:
    """Like "1.27x"."""
    return "–" if value is None else f"{value:.2f}x"


def percent(value: float | None) -> str:
    """A share between 0 and 1 as a percentage."""
    return "–" if value is None else f"{100 * value:.0f} %"


def interval(bounds: Sequence[float] | None) -> str:
    """Like "1.10 to 1.42"."""
    return "–" if bounds is None else f"{bounds[0]:.2f} to {bounds[1]:.2f}"


def spread(values: Sequence[float]) -> str:
    """Smallest and largest value."""
    return f"{min(values):.1f} to {max(values):.1f}" if values else "–"


def identical(run: Mapping[str, Any]) -> str:
    """How many prompts have exactly the target-only output, like "yes (26/26)"."""
    if "identical" not in run:
        return "–"
    word = "yes" if run["identical"] == run["compared"] else "no"
    return f"{word} ({run['identical']}/{run['compared']})"
