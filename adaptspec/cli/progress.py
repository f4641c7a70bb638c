"""Progress on stderr: a live bar on a terminal, plain lines into a pipe, or nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from adaptspec.cli.common import console

SECONDS_BETWEEN_LINES = 15.0


class Reporter(Protocol):
    """What a long command tells while it works."""

    def total(self, steps: int) -> None:
        """How many steps there will be."""

    def step(self, text: str) -> None:
        """The next step begins; the one before is done."""

    def note(self, text: str) -> None:
        """A line that stays."""


class Silent:
    """Says nothing."""

    def total(self, steps: int) -> None:
        """Nothing."""

    def step(self, text: str) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""


class Lines:
    """Plain lines without control codes, at most one for every 15 seconds of steps."""

    def __init__(self) -> None:
        self._console = console(error=True)
        self._total = 0
        self._done = -1
        self._started = self._last = time.monotonic()

    def total(self, steps: int) -> None:
        self._total, self._done = steps, -1
        self._started = time.monotonic()

    def step(self, text: str) -> None:
        self._done += 1
        now = time.monotonic()
        if self._done and now - self._last < SECONDS_BETWEEN_LINES:
            return
        self._last = now
        left = ""
        if self._done:
            left = f", about {(now - self._started) / self._done * (self._total - self._done):.0f} s left"
        self.note(f"[{self._done}/{self._total}] {text}{left}")

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


class Bar:
    """A rich progress bar."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=None)
        self._begun = False

    def total(self, steps: int) -> None:
        self._progress.reset(self._task, total=steps)
        self._begun = False

    def step(self, text: str) -> None:
        self._progress.update(self._task, advance=1 if self._begun else 0, description=text)
        self._begun = True

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)


@contextmanager
def reporter(*, quiet: bool) -> Iterator[Reporter]:
    """The reporter that suits stderr."""
    if quiet:
        yield Silent()
        return
    errors = console(error=True)
    if not errors.is_terminal:
        yield Lines()
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=errors, transient=True) as progress:
        yield Bar(progress)
