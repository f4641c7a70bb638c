"""Published figures and ours side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from adaptspec.control.strategies import strategy_names
from adaptspec.drafters import DRAFTERS
from adaptspec.vocab import VOCAB_HEADS
from experiments.analysing import read_published
from experiments.leaderboard import Bench, app, markdown
from experiments.systems import SYSTEMS, plain, unknown

BOARD = """method,configuration,date,tau,speedup
EAGLE-3,"Target=A, Temperature=0",2026.01,2.5,1.5
Eagle3,"Target=B",2026.02,3.0,
EAGLE3,"Target=A, Temperature (T)=1",2026.02,9.0,9.0
MTP Lλ LK,"Target=A, Temperature=1",2026.02,1.5,
"""
HEADLINES = """method,configuration,date,headline,column_25
FR-Spec,Model=M,2026.01,300,2.5
GLM-5,GPU=8,2026.01,1.8,3
DeepSeek-V3,GPU=8,2026.01,1.2,2.7
AR,Model=M,2026.01,200,1
FR-Spec,Model=N,2026.01,90,
AR,Model=N,2026.01,100,1
CATS,"Decoding Structure=chain base",2026.01,2.5,2.4
CATS,"Decoding Strategy=Relaxed (temperature = 0.7), Decoding Structure=chain base",2026.01,7.5,7.4
"""


def run(name: str, **columns: Any) -> dict[str, Any]:
    return {"name": name, "speedup": 1.25, "mean_accepted_length": 1.5, "identical": 3, "compared": 3, **columns}


def part(length: float, speed: float, tokens: int = 100) -> dict[str, float]:
    return {"mean_accepted_length": length, "tokens_per_second": speed, "new_tokens": tokens}


def bench_file(path: Path, **changes: Any) -> Path:
    runs = [
        run("ar", speedup=1.0, mean_accepted_length=1.0),
        run("eagle3@16", speedup_interval=[1.1, 1.4]),
        run("eagle3@30/fr:16384", identical=1, divergences=[{"margin": 0.125}], max_margin=0.125),
        run("cats-chain@6", speedup=0.5),
        run("hedge"),
    ]
    by_category = {
        "writing": {"ar": part(1.0, 10.0), "eagle3@16": part(2.0, 20.0)},
        "math": {"ar": part(1.0, 10.0), "eagle3@16": part(1.0, 5.0)},
        "rag": {"ar": part(1.0, 10.0), "eagle3@16": part(9.0, 90.0)},
    }
    path.write_text(json.dumps({"runs": runs, "by_category": by_category} | changes))
    return path


def table(tmp_path: Path, content: str, **options: Any) -> dict[str, list[str]]:
    (tmp_path / "board.csv").write_text(content)
    bench = Bench.read(bench_file(tmp_path / "bench.json"))
    lines = markdown(read_published([tmp_path / "board.csv"]), [bench], **options).splitlines()[2:]
    return {cells[0]: cells[1:] for cells in ([c.strip() for c in line.split("|")[1:-1]] for line in lines)}


def test_a_row_holds_both(tmp_path: Path) -> None:
    found = table(tmp_path, BOARD)
    assert found == {
        "EAGLE-3": [
            *("1.50", "2.50 to 3.00", "2", "`eagle3@16`", "1.25 (1.10 to 1.40)", "1.50", "3/3", "`--pool eagle3@16`"),
        ],
        "MTP, LK loss": ["", "1.50", "1 (sampling)", "not measured", "", "", "", "`--pool mtp1-lk@4`"],
    }


def test_tokens_per_second_are_put_beside_no_speculation_of_the_same_model(tmp_path: Path) -> None:
    found = table(tmp_path, HEADLINES)
    assert found["MTP, one layer (DeepSeek, GLM, Qwen3.5, JoyAI)"][2] == "2"
    assert found["FR-Spec"][:3] == ["0.90 to 1.50", "2.50", "2"]
    assert found["FR-Spec"][3:] == [
        *("`eagle3@30/fr:16384`", "1.25", "1.50", "1/3 (0.12)", "`--pool eagle3 --budgets 30 --vocab fr:16384`"),
    ]
    assert found["CATS, chain"][:5] == ["2.50", "2.40", "1", "`cats-chain@6`", "0.50"]  # relaxed figures are not greedy


def test_mt_bench_is_eight_categories_of_spec_bench(tmp_path: Path) -> None:
    found = table(tmp_path, BOARD, categories=("writing", "math"))
    assert found["EAGLE-3"][4:6] == ["0.80", "1.33"]  # 200 tokens in 25 s against 20 s; 200 tokens in 150 steps


def test_every_system_is_one_of_ours() -> None:
    for system in SYSTEMS:
        assert (system.strategy in strategy_names()) if system.strategy else (system.drafter in DRAFTERS)
        assert system.vocab in VOCAB_HEADS and all(plain(name) == name for name in system.published)
        assert system.settings() and all(budget >= 1 for budget in system.budgets)
    assert len({system.name for system in SYSTEMS}) == len(SYSTEMS)
    assert unknown(["EAGLE-3", "Vanilla", "Griffin+GS", "Nobody's"]) == ["Nobody's"]


@pytest.mark.parametrize(
    ("board", "bench", "said"),
    [
        ("method,configuration,tau\nFooSpec,x,1\n", "{}", "systems that are not known here: FooSpec"),
        ("a,b\n1,2\n", "{}", "lacks configuration, method"),
        (BOARD, "[]", "is no result of adaptspec bench --json"),
        (BOARD, "{", "is no result of adaptspec bench --json"),
    ],
)
def test_foreign_files_are_refused(tmp_path: Path, board: str, bench: str, said: str) -> None:
    (tmp_path / "board.csv").write_text(board)
    path = bench_file(tmp_path / "bench.json")
    if bench != "{}":
        path.write_text(bench)
    result = CliRunner().invoke(app, [str(path), "--published", str(tmp_path / "board.csv")])
    assert isinstance(result.exception, ValueError) and said in str(result.exception)


def test_the_command_prints_or_writes(tmp_path: Path) -> None:
    (tmp_path / "board.csv").write_text(BOARD)
    bench = bench_file(tmp_path / "bench.json")
    asked = [str(bench), "--published", str(tmp_path / "board.csv"), "--mt-bench"]
    printed = CliRunner().invoke(app, asked)
    assert printed.exit_code == 0 and printed.stdout.startswith("| system | published speed-up |")
    written = CliRunner().invoke(app, [*asked, "--out", str(tmp_path / "table.md")])
    assert written.exit_code == 0 and (tmp_path / "table.md").read_text() == printed.stdout
    again = CliRunner().invoke(app, [*asked, "--out", str(tmp_path / "table.md")])
    assert isinstance(again.exception, FileExistsError)
