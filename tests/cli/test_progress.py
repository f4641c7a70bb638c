from __future__ import annotations

import pytest

from adaptspec.cli import progress


def test_lines_in_a_pipe_are_few_and_plain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.reporter(quiet=False) as reporter:
        reporter.note("loading [bold]x[/bold]")
        reporter.total(8)
        for number in range(8):
            reporter.step(f"step {number}")
            now[0] += 5.0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "loading [bold]x[/bold]",
        "[0/8] step 0",
        "[3/8] step 3, about 25 s left",
        "[6/8] step 6, about 10 s left",
    ]


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.reporter(quiet=True) as reporter:
        reporter.total(1)
        reporter.step("a")
        reporter.note("b")
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar() -> None:
    import io

    from rich.console import Console
    from rich.progress import Progress

    stream = io.StringIO()
    with Progress(console=Console(file=stream, force_terminal=True, width=100), auto_refresh=False) as bar:
        reporter = progress.Bar(bar)
        reporter.total(3)
        reporter.step("one")
        reporter.step("two")
        assert [task.completed for task in bar.tasks] == [1]
        reporter.total(2)
        assert [(task.completed, task.total) for task in bar.tasks] == [(0, 2)]
        reporter.note("[a note]")
    assert "[a note]" in stream.getvalue()
