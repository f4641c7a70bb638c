"""The commands, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from adaptspec.cli.bench import bench
from adaptspec.cli.calibrate import calibrate
from adaptspec.cli.datastore import datastore
from adaptspec.cli.demo import demo
from adaptspec.cli.explain import explain
from adaptspec.cli.generate import generate
from adaptspec.cli.pool import pool
from adaptspec.cli.replay import replay
from adaptspec.cli.trace import trace
from adaptspec.cli.train import train
from adaptspec.cli.train_sizes import griffin_gs, griffin_ltd

app = typer.Typer(
    name="adaptspec",
    help="Speculative decoding that chooses, at every step, how to draft. It never changes what the model says.",
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        from adaptspec import __version__

        typer.echo(f"adaptspec {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the program itself; all the work is done by its commands."""


for command in (demo, generate, bench, calibrate, pool, datastore, trace, replay, explain):
    app.command()(command)
train.command("griffin-gs")(griffin_gs)
train.command("griffin-ltd")(griffin_ltd)
app.add_typer(train)
