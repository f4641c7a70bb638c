"""`adaptspec calibrate`, and commands that decide with what it has written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adaptspec.cli import main
from adaptspec.cli.calibrate import cost_table, milliseconds, parse_whole_numbers
from adaptspec.control.cost import CostModel

QUICK = ["--pool", "prompt-lookup,suffix", "--sizes", "0,1,4", "--repeats", "1", "--contexts", "64", "--quiet"]


@pytest.fixture(scope="module")
def profile(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measured costs of the small model here. Copy it before changing it."""
    path = tmp_path_factory.mktemp("profile") / "costs.json"
    assert main(["calibrate", "--model", str(chat_folder), *QUICK, "--out", str(path)]) == 0
    return path


def elsewhere(profile: Path, folder: Path) -> Path:
    """The same profile as another machine would have written it."""
    content = json.loads(profile.read_text(encoding="utf-8"))
    content["fingerprint"] = content["fingerprint"].replace("device=cpu", "device=NVIDIA H200")
    path = folder / "elsewhere.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_a_profile_holds_what_the_table_shows(
    chat_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ticks = iter(range(10**6))
    monkeypatch.setattr("adaptspec.session.perf_counter", lambda: next(ticks) * 1e-3)  # every part takes 1 ms
    path = tmp_path / "costs.json"
    arguments = ["calibrate", "--model", str(chat_folder), *QUICK, "--contexts", "64,600", "--out", str(path)]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == f"wrote {path}\n"
    assert "milliseconds behind 64 tokens" in captured.out and "milliseconds behind 600 tokens" in captured.out
    rows = [line.split() for line in captured.out.splitlines() if line.split()[:1] in (["0"], ["1"], ["4"])]
    assert [row[0] for row in rows] == ["0", "1", "4"] * 2
    assert rows[0][4:] == ["1.00x", "–", "–"]
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["fingerprint"].startswith("device=cpu, ") and "LlamaForCausalLM" in content["fingerprint"]
    costs = CostModel()
    costs.load_profile(path, fingerprint=content["fingerprint"])
    table = costs.to_table()
    assert {(row["nodes"], row["context"]) for row in table if row["part"] == "verify"} == {
        (nodes, context) for nodes in (0, 1, 4) for context in (512, 1024)
    }
    assert {(row["drafter"], row["nodes"]) for row in table if row["part"] == "draft"} == {
        (drafter, nodes) for drafter in ("prompt-lookup", "suffix") for nodes in (1, 4)
    }
    *parts, overhead = table
    assert [row["seconds"] for row in parts] == pytest.approx([1e-3] * 14)
    assert [row[1:4] for row in rows] == [["1", "1", "1"]] * 6
    assert f"every step takes {milliseconds(overhead['seconds'])} ms to commit" in captured.out

    before = path.read_bytes()
    assert main(arguments) == 2
    assert "already exists" in capsys.readouterr().err and path.read_bytes() == before
    path.write_text("something else", encoding="utf-8")
    assert main([*arguments, "--force"]) == 0
    assert json.loads(path.read_text(encoding="utf-8"))["fingerprint"] == content["fingerprint"]


def test_without_a_file_it_goes_to_the_cache_and_replaces_what_is_there(
    chat_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from adaptspec import AdaptiveSpec
    from adaptspec.target.loading import load_target

    monkeypatch.setenv("ADAPTSPEC_CACHE", str(tmp_path))
    arguments = ["calibrate", "--model", str(chat_folder), *QUICK]
    assert main(arguments) == 0
    (path,) = (tmp_path / "costs").iterdir()
    assert capsys.readouterr().err == f"wrote {path}\n"
    path.write_text("damaged", encoding="utf-8")
    assert main(arguments) == 0
    assert [*(tmp_path / "costs").iterdir()] == [path]
    spec = AdaptiveSpec(["suffix"], "hedge", budgets=(4,))
    model, _ = load_target(chat_folder)
    spec.load_costs(model)
    assert spec.engine.controller.cost.to_table()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "0,many"], "sizes must be whole numbers separated by commas, got 'many'"),
        (["--sizes", ","], "sizes must not be empty"),
        (["--contexts", "-5"], "contexts must be whole numbers separated by commas, got '-5'"),
        (["--contexts", "5000"], "contexts must be whole numbers in [8, 2048], got 5000"),
        (["--repeats", "0"], "repeats must be >= 1, got 0"),
        (["--pool", "sufix"], "did you mean 'suffix'"),
        (["--out", "nowhere/costs.json"], "the folder nowhere to write costs.json into does not exist"),
    ],
)
def test_bad_options(chat_folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--model", str(chat_folder), *QUICK, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_generate_decides_with_a_profile(
    chat_folder: Path, profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["generate", "one and one and one", "--model", str(chat_folder), "--max-new-tokens", "8", "--budgets", "4"]
    common += ["--pool", "suffix,prompt-lookup"]
    assert main([*common, "--strategy", "mixture"]) == 0
    plain = capsys.readouterr().out
    assert main([*common, "--strategy", "mixture", "--costs", str(profile)]) == 0
    assert capsys.readouterr().out == plain
    foreign = elsewhere(profile, tmp_path)
    for options, message in (
        (["--costs", str(foreign)], "was measured with device=NVIDIA H200"),
        (["--costs", str(profile), "--strategy", "fixed:suffix@4"], "decides without costs"),
        (["--foreign-costs"], "foreign-costs goes with costs"),
        (["--costs", str(tmp_path / "none.json")], "No such file"),
    ):
        assert main([*common, "--strategy", "mixture", *options]) == 2
        assert message in capsys.readouterr().err
    assert main([*common, "--strategy", "mixture", "--costs", str(foreign), "--foreign-costs"]) == 0
    assert capsys.readouterr().out == plain


def test_bench_begins_strategies_with_a_profile(
    chat_folder: Path,
    prompt_file: Path,
    profile: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from adaptspec import AdaptiveSpec

    begun: list[str] = []
    load = AdaptiveSpec.load_costs

    def record(self: AdaptiveSpec, *arguments: object, **options: object) -> None:
        begun.append(str(self.strategy))
        load(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(AdaptiveSpec, "load_costs", record)
    out = tmp_path / "out.json"
    common = ["bench", "--model", str(chat_folder), "--prompts", str(prompt_file), "--limit", "1", "--quiet"]
    common += ["--max-new-tokens", "8", "--budgets", "4", "--pool", "suffix", "--no-references"]
    common += ["--strategies", "hedge,mixture,fixed:suffix@4"]
    assert main([*common, "--costs", str(profile), "--json", str(out)]) == 0
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["options"]["costs"] == str(profile)
    assert set(begun) == {"hedge", "mixture"}
    assert [run["identical"] for run in report["runs"] if run["kind"] == "strategy"] == [1, 1, 1]
    capsys.readouterr()
    foreign = elsewhere(profile, tmp_path)
    begun.clear()
    assert main([*common, "--costs", str(foreign)]) == 2
    assert "was measured with device=NVIDIA H200" in capsys.readouterr().err and not begun
    assert main([*common, "--foreign-costs"]) == 2
    assert "foreign-costs goes with costs" in capsys.readouterr().err
    assert main([*common, "--costs", str(foreign), "--foreign-costs"]) == 0
    assert set(begun) == {"hedge", "mixture"}


def test_numbers_and_cells() -> None:
    assert parse_whole_numbers("sizes", "0, 8,8,32") == [0, 8, 32]
    assert [milliseconds(value) for value in (None, 0.0, 1.234e-4, 0.01234, 0.1234, 1.2345)] == [
        *("–", "0", "0.123", "12.3", "123"),
        "1234",
    ]
    summary = {
        "verify": [
            {"context": 64, "nodes": 8, "seconds": 0.02, "fastest": 0.01, "slowest": 0.03, "relative": None},
            {"context": 99, "nodes": 9, "seconds": 0.02, "fastest": 0.01, "slowest": 0.03, "relative": 2.0},
        ],
        "draft": [{"context": 99, "drafter": "suffix", "budget": 9, "seconds": 0.001}],
        "overhead_seconds": 0.002,
    }
    tables = [cost_table(summary, context=context, title="t") for context in (64, 99)]
    cells = [[list(column.cells) for column in table.columns] for table in tables]
    assert cells == [[["8"], ["20"], ["10"], ["30"], ["–"]], [["9"], ["20"], ["10"], ["30"], ["2.00x"], ["1"]]]
    assert "2 ms to commit" in str(tables[0].caption)
