from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from adaptspec import __version__
from adaptspec.cli import main
from adaptspec.drafters import DRAFTERS

ROOT = Path(__file__).parents[2]


def python(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], input=stdin, capture_output=True, text=True, cwd=ROOT, timeout=60
    )


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr of a command that must end with status 2 and print nothing else."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("adaptspec: error: ") and captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("pol", "No such command 'pol'. Did you mean 'pool'?"),
        ("pool --jso", "No such option: --jso"),
        ("generate", "Missing argument 'TEXT'"),
        ("generate hi --max-new-tokens many", "Invalid value for '--max-new-tokens'"),
        ("generate hi --max-new-tokens 0", "max_new_tokens must be >= 1, got 0"),
        ("generate hi --temperature -1", "temperature must be >= 0 and finite, got -1.0"),
        ("generate hi --top-p 0", "top_p must be in (0, 1], got 0.0"),
        ("generate hi --strategy no-such", "unknown strategy 'no-such'"),
        ("generate hi --strategy fixed:bogus", "arm must look like drafter@budget"),
        ("generate hi --pool suffix --strategy fixed:prompt-lookup@4", "which is not in the pool"),
        ("generate hi --pool prompt-lokup", "did you mean 'prompt-lookup'?"),
        ("generate hi --vocab tiny", "vocab 'tiny'"),
        ("generate hi --seed -1", "seed must be a whole number >= 0, got -1"),
        ("generate hi --dtype float33", "dtype must be one of"),
        ("generate hi --model no/such/folder", "no/such/folder"),
        ("bench --order random", "order must be one of shuffle, blocks, got 'random'"),
        ("bench --limit 0", "limit must be >= 1, got 0"),
        ("bench --max-prompts 0", "limit must be >= 1, got 0"),
        ("bench --per-category 0", "per_category must be >= 1, got 0"),
        ("bench --repeats 0", "repeats must be >= 1, got 0"),
        ("bench --threads 0", "threads must be >= 1, got 0"),
        ("bench --budgets eight", "budgets must be whole numbers >= 0 or 'auto', separated by commas, got 'eight'"),
        ("bench --pool sufix", "unknown drafter 'sufix'; did you mean 'suffix'?"),
        ("bench --prompts no-such-file.jsonl", "no-such-file.jsonl: No such file or directory"),
        ("bench --json no-such-folder/out.json", "the folder no-such-folder to write out.json into does not exist"),
        ("demo --minutes 0", "minutes must be > 0, got 0.0"),
        ("demo --plot no-such-folder/a.png", "the folder no-such-folder to write a.png into does not exist"),
        ("datastore no-such.txt --out store.bin", "there is no text file no-such.txt"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    assert message in error_of(capsys, *arguments.split())


def test_a_wrong_prompt_file_is_named_with_its_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    assert f"{path}, line 2: needs the field 'turns' or 'prompt'" in error_of(capsys, "bench", "--prompts", str(path))


@pytest.mark.parametrize("option", ["--json", "--answers"])
def test_existing_results_are_refused_before_any_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str
) -> None:
    path = tmp_path / "out"
    path.write_text("precious")
    message = error_of(capsys, "bench", "--model", "no/such/model", option, str(path))
    assert "already exists; use --force" in message
    assert path.read_text() == "precious"


def test_an_empty_prompt_on_stdin_is_refused() -> None:
    done = python("-m", "adaptspec", "generate", "-", stdin="  \n")
    assert done.returncode == 2
    assert done.stderr == "adaptspec: error: the prompt must not be empty\n"


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"adaptspec {__version__}\n"
    for arguments in ([], ["--help"], ["bench", "--help"]):
        assert main(arguments) == 0
        assert "Usage: adaptspec" in capsys.readouterr().out


def test_help_and_version_do_not_load_torch() -> None:
    code = "import sys; from adaptspec.cli import main; main({}); print('torch' in sys.modules)"
    assert python("-c", code.format(["--version"])).stdout.splitlines()[-1] == "False"
    assert python("-c", code.format(["bench", "--help"])).stdout.splitlines()[-1] == "False"


def test_without_typer_the_missing_extra_is_named() -> None:
    code = "import sys; sys.modules['typer'] = None; from adaptspec.cli import main; sys.exit(main(['pool']))"
    done = python("-c", code)
    assert done.returncode == 2
    assert "pip install 'adaptspec[cli]'" in done.stderr and "Traceback" not in done.stderr


def test_pool_lists_every_drafter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pool", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [drafter["name"] for drafter in listed["drafters"]] == sorted(DRAFTERS)
    assert all(drafter["summary"] for drafter in listed["drafters"])
    shipped = {name: drafter["weights_for"] for drafter in listed["drafters"] if (name := drafter["weights"])}
    assert shipped.keys() == {cls.weights for cls in DRAFTERS.values()} - {""}
    assert main(["pool"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in DRAFTERS)
    assert "\x1b" not in text


def test_interruption_is_status_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("adaptspec.cli.prompts.read_prompts", interrupted)
    assert main(["bench", "--prompts", "x.jsonl"]) == 130
    assert capsys.readouterr().err == "adaptspec: interrupted\n"


def test_a_closed_pipe_is_quiet() -> None:
    code = (
        "import os, sys; from adaptspec.cli import main\n"
        "read, write = os.pipe(); os.close(read); os.dup2(write, 1)\n"
        "sys.exit(main(['pool', '--json']))"
    )
    done = python("-c", code)
    assert done.returncode == 141
    assert done.stderr == ""


def test_a_traceback_is_there_for_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAPTSPEC_TRACEBACK", "1")
    with pytest.raises(ValueError, match="limit must be >= 1"):
        main(["bench", "--limit", "0"])
