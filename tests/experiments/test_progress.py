"""What a run shows while it works."""

from __future__ import annotations

import io

import pandas as pd
import pytest

from experiments import progress
from experiments.progress import Lines, Live, cell, rich_table, seconds_left


def partial() -> pd.DataFrame:
    return pd.DataFrame({"policy": ["hedge", "ucb"], "share": [0.98765, float("nan")], "n": [7, 1200]})


def test_lines_tell_what_is_left_and_the_table_so_far(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    lines = Lines(partial)
    lines.begin(12, 2)
    now[0] = 110.0
    lines.update(done=3, problems=0, running=["x"])
    assert "[3/12]" not in capsys.readouterr().err
    now[0] = 170.0
    lines.update(done=4, problems=1, running=["a", "b", "c", "d"])
    shown = capsys.readouterr().err
    assert "[5/12], about 245 s left; running a, b, c" in shown and "d" not in shown.split("running")[1].split("\n")[0]
    assert "so far" in shown and "0.988" in shown and "1200" in shown


def test_the_bar_and_the_table_are_drawn_in_place() -> None:
    from rich.console import Console
    from rich.live import Live as View
    from rich.progress import Progress

    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    bar = Progress(console=console)
    with View(bar, console=console, transient=True, auto_refresh=False) as view:
        live = Live(partial, view, bar)
        live.begin(4, 1)
        live.update(done=2, problems=1, running=["hedge-s0"])
        view.refresh()
        live.note("hedge-s1: its worker died")
        assert bar.tasks[0].completed == 3 and bar.tasks[0].total == 4
    shown = console.file.getvalue()
    assert "hedge-s0" in shown and "so far" in shown and "its worker died" in shown


def test_cells() -> None:
    assert [cell(v) for v in (0.98765, 1234.5, float("nan"), None, 7, 0.01234, "x")] == [
        *("0.988", "1234", "", "", "7", "0.0123", "x")
    ]
    assert seconds_left(30, 10, 60.0) == ", about 180 s left" and seconds_left(3, 0, 9.0) == ""
    assert rich_table(partial(), title="t", most=1).caption == "and 1 more"
