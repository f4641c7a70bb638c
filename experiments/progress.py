"""What a run shows while it works: a bar with the time that is left, and the table as far as it is known."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from adaptspec.cli.common import console

if TYPE_CHECKING:
    import pandas
    from rich.table import Table

SECONDS_BETWEEN_LINES = 15.0
LINES_LOOKED_BACK = 8
"""What is left is estimated from the speed since so many lines ago."""

SECONDS_BETWEEN_TABLES = 60.0
SECONDS_BETWEEN_LIVE_TABLES = 5.0

Partial = Callable[[], "pandas.DataFrame"]
"""The table of what is finished so far; empty while there is nothing to tell."""


class Lines:
    """Plain lines without control codes, for pipes and logs."""

    def __init__(self, partial: Partial, *, seconds_between_tables: float = SECONDS_BETWEEN_TABLES) -> None:
        self._partial = partial
        self._console = console(error=True)
        self._between = seconds_between_tables
        self._line = self._table = time.monotonic()
        self._total = self._shown = 0
        self._recent: deque[tuple[float, int]] = deque(maxlen=LINES_LOOKED_BACK)

    def begin(self, total: int, done: int) -> None:
        self._total = total
        self._line = self._table = time.monotonic()
        self._recent.append((self._line, done))
        self.note(f"{total} configurations, {done} finished before")

    def update(self, *, done: int, problems: int, running: Sequence[str]) -> None:
        now = time.monotonic()
        if now - self._line < SECONDS_BETWEEN_LINES:
            return
        self._line = now
        then, before = self._recent[0]  # what comes first, such as recording, says little about the rest
        self._recent.append((now, done))
        left = seconds_left(self._total - done - problems, done - before, now - then)
        self.note(f"[{done + problems}/{self._total}]{left}; running {', '.join(running[:3])}")
        if now - self._table >= self._between and done > self._shown:
            self._table, self._shown = now, done
            self._console.print(rich_table(self._partial(), title="so far"))

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


class Live:
    """A bar and the table so far, redrawn in place."""

    def __init__(self, partial: Partial, live: Any, bar: Any) -> None:
        self._partial, self._live, self._bar = partial, live, bar
        self._task = bar.add_task("starting", total=None)
        self._drawn = 0.0
        self._shown = -1

    def begin(self, total: int, done: int) -> None:
        self._bar.reset(self._task, total=total, completed=done)

    def update(self, *, done: int, problems: int, running: Sequence[str]) -> None:
        from rich.console import Group

        self._bar.update(self._task, completed=done + problems, description=", ".join(running[:2]) or "waiting")
        now = time.monotonic()
        if now - self._drawn >= SECONDS_BETWEEN_LIVE_TABLES and done > self._shown:
            self._drawn, self._shown = now, done
            self._live.update(Group(rich_table(self._partial(), title="so far", most=20), self._bar))

    def note(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)


class Quiet:
    """Says nothing."""

    def begin(self, total: int, done: int) -> None:
        """Nothing."""

    def update(self, *, done: int, problems: int, running: Sequence[str]) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""


@contextmanager
def watcher(partial: Partial, *, quiet: bool) -> Iterator[Lines | Live | Quiet]:
    """The one that suits stderr."""
    if quiet:
        yield Quiet()
        return
    errors = console(error=True)
    if not errors.is_terminal:
        yield Lines(partial)
        return
    from rich import live, progress

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(elapsed_when_finished=False),
    )
    bar = progress.Progress(*columns, console=errors)
    with live.Live(bar, console=errors, transient=True, refresh_per_second=2) as view:
        yield Live(partial, view, bar)


def seconds_left(left: int, done: int, elapsed: float) -> str:
    """As text; empty before anything is finished.

    >>> seconds_left(30, 10, 60.0)
    ', about 180 s left'
    """
    return f", about {elapsed / done * left:.0f} s left" if done > 0 and left > 0 else ""


def rich_table(frame: pandas.DataFrame, *, title: str, most: int = 60) -> Table:
    """A frame as a table for the terminal, numbers to three significant places."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    shown = frame.head(most)
    for column in shown.columns:
        numeric = shown[column].map(lambda value: isinstance(value, int | float)).all()
        table.add_column(str(column), justify="right" if numeric else "left", no_wrap=True)
    for row in shown.itertuples(index=False):
        table.add_row(*(cell(value) for value in row))
    if len(frame) > most:
        table.caption = f"and {len(frame) - most} more"
    return table


def cell(value: Any) -> str:
    """One value of a table as text; nothing for what is not known.

    >>> cell(0.98765), cell(1234.5), cell(float("nan")), cell(7)
    ('0.988', '1234', '', '7')
    """
    if value is None or (isinstance(value, float) and value != value):
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 0.1 else f"{value:#.3g}"
    return str(value)
