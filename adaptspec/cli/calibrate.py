"""`adaptspec calibrate`: what steps cost on this machine, as a table and as a profile to decide with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adaptspec.cli import options

if TYPE_CHECKING:
    from rich.table import Table


def calibrate(
    model: options.Model = "embedded",
    pool: options.Pool = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    sizes: Annotated[
        str, typer.Option("--sizes", metavar="NUMBERS", help="Draft nodes to verify and to draft, like 0,8,32.")
    ] = "0,1,2,4,8,16,32,64",
    contexts: Annotated[
        str, typer.Option("--contexts", metavar="NUMBERS", help="Lengths of text at which to measure, like 256,1024.")
    ] = "256",
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", help="Use every size N times.")] = 5,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="PROFILE", help="Where to write the costs. [default: the user's cache]"),
    ] = None,
    seed: options.Seed = 0,
    force: options.Force = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure what verifying, drafting and the rest of a step take here, and keep it as a profile.

    A strategy that begins with a profile decides well from the first step on. The profile belongs to this device,
    dtype, model, number of threads and these library versions. Without --out it goes to the user's cache, where
    AdaptiveSpec.load_costs finds it; an older one there is replaced.
    """
    from adaptspec.cli.common import check_at_least, choose_pool, console, dtype_name, load_model, show
    from adaptspec.cli.outputs import check_output
    from adaptspec.cli.progress import reporter

    check_at_least(1, repeats=repeats, threads=threads)
    nodes, lengths = parse_whole_numbers("sizes", sizes), parse_whole_numbers("contexts", contexts)
    if out is not None:
        check_output(out, force=force)

    from adaptspec import AdaptiveSpec

    drafters = AdaptiveSpec(choose_pool(pool), "fixed:ar").drafters

    from adaptspec.calibrating import machine_fingerprint, measure_samples, profile_path
    from adaptspec.control.cost import CostModel
    from adaptspec.target.hf import HFTarget

    with reporter(quiet=quiet) as progress:
        progress.note(f"loading the model {model}")
        network, tokenizer = load_model(model, dtype=dtype, device=device, threads=threads)
        target = HFTarget(network, tokenizer=tokenizer)
        progress.note(f"measuring {(repeats + 1) * len(nodes)} steps behind {', '.join(map(str, lengths))} tokens")
        samples = measure_samples(target, drafters, sizes=nodes, contexts=lengths, repeats=repeats, seed=seed)
    fingerprint = machine_fingerprint(target)
    path = profile_path(fingerprint) if out is None else out
    if out is None:
        path.parent.mkdir(parents=True, exist_ok=True)
    if force or out is None:
        path.unlink(missing_ok=True)
    samples.teach(CostModel()).save_profile(path, fingerprint=fingerprint)
    output = console()
    for length in lengths:
        title = f"milliseconds behind {length} tokens, {model} in {dtype_name(network)} on {network.device}"
        show(output, cost_table(samples.summary(), context=length, title=title))
    typer.echo(f"wrote {path}", err=True)


def check_foreign(costs: Path | None, foreign_costs: bool) -> None:
    """Raises ValueError for `--foreign-costs` that says nothing about any costs."""
    if foreign_costs and costs is None:
        raise ValueError("foreign-costs goes with costs, which is not given")


def check_costs(model: Any, costs: Path, *, foreign: bool) -> None:
    """Refuse, before minutes of work, a profile that strategies would refuse.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a damaged profile, or one of another machine while not `foreign`.
    """
    from adaptspec.control.cost import CostModel
    from adaptspec.machine import machine_fingerprint
    from adaptspec.target.hf import HFTarget

    CostModel().load_profile(costs, fingerprint=machine_fingerprint(HFTarget(model)), foreign=foreign)


def cost_table(summary: Mapping[str, Any], *, context: int, title: str) -> Table:
    """One row per size: verification with its spread and against a pass of one row, and what every drafter takes."""
    from rich import box
    from rich.table import Table

    from adaptspec.cli.table import ratio

    drafted = {(row["drafter"], row["budget"]): row["seconds"] for row in summary["draft"] if row["context"] == context}
    names = list(dict.fromkeys(name for name, _ in drafted))
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("nodes", "verify", "fastest", "slowest", "of one row", *names):
        table.add_column(column, justify="right", no_wrap=True)
    for row in summary["verify"]:
        if row["context"] == context:
            table.add_row(
                str(row["nodes"]),
                *(milliseconds(row[key]) for key in ("seconds", "fastest", "slowest")),
                ratio(row["relative"]),
                *(milliseconds(drafted.get((name, row["nodes"]))) for name in names),
            )
    table.caption = f"besides, every step takes {milliseconds(summary['overhead_seconds'])} ms to commit and to observe"
    table.caption_justify = "left"
    return table


def milliseconds(seconds: float | None) -> str:
    """Three significant digits; a dash for what was not measured."""
    if seconds is None:
        return "–"
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 100.0 else f"{value:.3g}"


def parse_whole_numbers(name: str, text: str) -> list[int]:
    """Numbers from "0,8,32", each once.

    Raises:
        ValueError: an entry is not a whole number, or there is none.
    """
    from adaptspec.cli.common import split_names

    parts = split_names([text])
    for part in parts:
        if not part.isdecimal():
            raise ValueError(f"{name} must be whole numbers separated by commas, got {part!r}")
    if not parts:
        raise ValueError(f"{name} must not be empty")
    return list(dict.fromkeys(int(part) for part in parts))
