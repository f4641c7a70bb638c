"""`python -m experiments.leaderboard BENCH.json...`: published figures and ours side by side, in Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adaptspec.cli.outputs import check_output, write_output
from experiments.analysing import read_published
from experiments.run import run_app
from experiments.systems import BASELINES, SYSTEMS, System, plain, unknown

if TYPE_CHECKING:
    import pandas as pd

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Categories of Spec-Bench that are MT-bench's questions."""

_SAMPLED = r"Temperature(?: \(T\))?=(?:1|0\.7)\b|temperature = 0\.7"
_HEADER = (
    *("system", "published speed-up", "published length", "rows", "ours", "speed-up", "length", "identical (margin)"),
    "how to run",
)


@app.command()
def leaderboard(
    measured: Annotated[list[Path], typer.Argument(metavar="BENCH...", help="Files of adaptspec bench --json.")],
    published: Annotated[
        list[Path], typer.Option("--published", metavar="FILE", help="CSV of one leaderboard; may be repeated.")
    ],
    mt_bench: Annotated[
        bool, typer.Option("--mt-bench", help="Of our prompts only those of MT-bench's eight categories.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Instead of printing it.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there already.")] = False,
) -> None:
    """One row per system and setting of ours. Published figures are of greedy decoding, the smallest and the largest of
    all models and machines; figures of sampling are left out where greedy ones are known."""
    if out is not None:
        check_output(out, force=force)
    table = read_published(published)
    benches = [Bench.read(path) for path in measured]
    if missing := unknown(table["method"]):
        raise ValueError(f"published holds systems that are not known here: {', '.join(missing)}")
    text = markdown(table, benches, categories=MT_BENCH if mt_bench else None)
    if out is None:
        typer.echo(text, nl=False)
    else:
        typer.echo(f"wrote {write_output(out, text.encode(), force=force)}", err=True)


@dataclass(frozen=True, slots=True)
class Bench:
    """What `adaptspec bench --json` wrote."""

    runs: Mapping[str, Mapping[str, Any]]
    by_category: Mapping[str, Mapping[str, Mapping[str, float]]]

    @classmethod
    def read(cls, path: Path) -> Bench:
        """Of a file.

        Raises:
            ValueError: something else.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return cls({run["name"]: run for run in found["runs"]}, found["by_category"])
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no result of adaptspec bench --json: {error}") from error

    def numbers(self, setting: str, categories: Sequence[str] | None) -> Measured | None:
        """Speed-up and mean accepted length over some categories, all of them for None."""
        run = self.runs[setting]
        identical = f"{run['identical']}/{run['compared']}" if "compared" in run else ""
        if run.get("divergences"):
            identical += f" ({run['max_margin']:.2f})"
        if categories is None:
            low, high = run.get("speedup_interval") or (None, None)
            spread = "" if low is None else f" ({low:.2f} to {high:.2f})"
            return Measured(setting, f"{run['speedup']:.2f}{spread}", run["mean_accepted_length"], identical)
        asked = [self.by_category[name] for name in categories if setting in self.by_category.get(name, {})]
        if not asked:
            return None
        ours, base = ([category[name] for category in asked] for name in (setting, "ar"))
        steps = sum(part["new_tokens"] / part["mean_accepted_length"] for part in ours)
        length = sum(part["new_tokens"] for part in ours) / steps
        return Measured(setting, f"{_speed(ours) / _speed(base):.2f}", length, identical)


@dataclass(frozen=True, slots=True)
class Measured:
    """One setting of ours: its speed-up as text, its mean accepted length with the bonus token."""

    setting: str
    speedup: str
    length: float
    identical: str


def _speed(parts: Iterable[Mapping[str, float]]) -> float:
    parts = list(parts)
    return sum(p["new_tokens"] for p in parts) / sum(p["new_tokens"] / p["tokens_per_second"] for p in parts)


def markdown(published: pd.DataFrame, benches: Sequence[Bench], *, categories: Sequence[str] | None = None) -> str:
    """The table of all systems that the published figures know.

    Args:
        published: of `read_published`.
        categories: of our prompts, all of them for None.
    """
    lines = [f"| {' | '.join(_HEADER)} |", "|" + "---|" * len(_HEADER)]
    for system in SYSTEMS:
        rows = system.rows(published)
        if rows.empty:
            continue
        ours: dict[str, Measured] = {}  # of the first file that has it
        for bench in benches:
            for setting in filter(system.measures, bench.runs):
                if (found := bench.numbers(setting, categories)) is not None:
                    ours.setdefault(setting, found)
        for first, found in enumerate(list(ours.values()) or [None]):
            cells = [system.name, *_published(rows, published)] if not first else [""] * 4
            lines.append("| " + " | ".join([*cells, *_measured(system, found)]) + " |")
    return "\n".join(lines) + "\n"


def _published(rows: pd.DataFrame, everything: pd.DataFrame) -> list[str]:
    """Speed-up, length and number of configurations; of greedy decoding if there are such, and what else."""
    greedy = rows[~rows["configuration"].str.contains(_SAMPLED, regex=True)]
    chosen, what = (rows, " (sampling)") if greedy.empty else (greedy, "")
    speedups = [*chosen.loc[chosen["measure"] == "speed-up", "value"]]
    for row in chosen[chosen["measure"].isin(["headline", "tokens/s"])].to_dict("records"):
        base = _baseline(row, everything)
        if base is not None:
            speedups.append(row["value"] / base)
        elif row["measure"] == "headline":
            speedups.append(row["value"])
    lengths = [*chosen.loc[chosen["measure"] == "mean accepted length", "value"]]
    return [_range(speedups), _range(lengths), f"{len(chosen[['method', 'configuration']].drop_duplicates())}{what}"]


def _baseline(row: Mapping[str, Any], everything: pd.DataFrame) -> float | None:
    """The same figure of no speculation on the same model."""
    model = row["configuration"].partition(",")[0]
    same = everything[
        everything["method"].map(plain).isin(BASELINES)
        & (everything["measure"] == row["measure"])
        & (everything["configuration"].str.partition(",")[0] == model)
    ]
    return None if same.empty else float(same["value"].iloc[0])


def _range(values: Sequence[float]) -> str:
    """Smallest to largest.

    >>> _range([2.0, 1.5]), _range([1.0]), _range([])
    ('1.50 to 2.00', '1.00', '')
    """
    if not values:
        return ""
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def _measured(system: System, found: Measured | None) -> list[str]:
    option = "--strategies" if system.strategy else "--pool"
    if found is None:
        wanted = ",".join(system.settings())
        return ["not measured", "", "", "", f"`{option} {wanted}`"]
    arm, _, vocab = found.setting.partition("/")
    how = f"`{option} {arm}`"
    if vocab:
        drafter, _, budget = arm.partition("@")
        how = f"`{option} {drafter} --budgets {budget} --vocab {vocab}`"
    note = f"; {system.note}" if system.note else ""
    return [f"`{found.setting}`", found.speedup, f"{found.length:.2f}", found.identical, how + note]


if __name__ == "__main__":
    run_app(app)
