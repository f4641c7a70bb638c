"""`adaptspec explain`: why the latest decisions were taken, from a saved state or a file of step records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

_PARQUET = b"PAR1"


def explain(
    file: Annotated[Path, typer.Argument(help="A state file of `save`, or step records, one JSON object per line.")],
    last: Annotated[int, typer.Option("--last", help="How many of the latest steps to explain.")] = 5,
) -> None:
    """Say in words what was decided in the latest steps, and why."""
    from adaptspec.cli.common import check_at_least

    check_at_least(1, last=last)
    for line in explanation(file, last=last):
        typer.echo(line)


def explanation(file: Path, *, last: int) -> Iterator[str]:
    """The lines that `adaptspec explain` prints.

    Raises:
        FileNotFoundError: no such file.
        ValueError: neither a state file nor step records.
    """
    from adaptspec.serving.records import read_records
    from adaptspec.state_file import FORMAT, load_state

    start = file.read_bytes()[:4096]
    if start.startswith(_PARQUET):
        raise ValueError(
            f"{file} is a trace of what could have been drafted and holds no decisions; `adaptspec replay` takes them"
        )
    if f'"format": "{FORMAT}"'.encode() in start:
        yield from _of_state(load_state(file), last=last)
        return
    records = read_records(file)
    if not records:
        raise ValueError(f"{file} holds no step records")
    for record in records[-last:]:
        yield _of_record(record, file)


def _of_state(state: Mapping[str, Any], *, last: int) -> Iterator[str]:
    from adaptspec.serving.explaining import explain_state
    from adaptspec.serving.policy import STATE_KEY

    if "controller" in state:
        settings = state["settings"]
        strategy = settings["strategy"] or "a Policy object"
        yield f"AdaptiveSpec: strategy {strategy}, drafters {', '.join(state['drafters'])}."
        records = state.get("records", [])[-last:]
        if not records and STATE_KEY not in state:
            yield "No step was taken before it was saved."
        for record in records:
            yield _of_generation(record)
    if STATE_KEY in state:
        yield from explain_state(state[STATE_KEY], last=last)


def _of_record(record: Mapping[str, Any], file: Path) -> str:
    from adaptspec.serving.explaining import explain_step
    from adaptspec.serving.records import PREFIX

    if any(key.startswith(PREFIX) for key in record):
        return explain_step(record)
    if {"step_id", "arm", "reason"} <= record.keys():
        return _of_generation(record)
    raise ValueError(f"{file} holds lines that are no step records: they have {', '.join(sorted(record))[:120]}")


def _of_generation(record: Mapping[str, Any]) -> str:
    from adaptspec.reporting.sentence import why
    from adaptspec.types import StepRecord

    try:
        step = StepRecord(**record)
    except TypeError as error:
        raise ValueError(f"a step record does not fit: {error}") from error
    return why(step, proposed={}, rate=None, guard=None)
