from __future__ import annotations

import json
from pathlib import Path

import pytest

from adaptspec.cli.answers import check_answers, spec_bench_answers, write_answers
from adaptspec.cli.prompts import Prompt
from tests.cli.fakes import echo, measurement, step

PROMPT = Prompt(81, "writing", ("a",))


def files() -> dict[str, list[dict]]:
    steps = [step("x@4/fr:8", verified=4, accepted=2), step("x@4/fr:8", verified=4, accepted=0)]
    settings = [echo("ar", []), echo("x@4/fr:8", [])]
    units = [
        [
            measurement("ar", PROMPT, range(5), seconds=2.0, repeat=repeat),
            measurement("x@4/fr:8", PROMPT, range(5), seconds=1.0, repeat=repeat, steps=steps),
        ]
        for repeat in range(2)
    ]
    return spec_bench_answers(units, settings, model="tiny", timestamp=12.5)


def test_lines_have_the_names_of_spec_bench() -> None:
    (line,) = files()["x@4/fr:8"]
    assert line == {
        "question_id": 81,
        "category": "writing",
        "answer_id": "x@4/fr:8-81",
        "model_id": "tiny/x@4/fr:8",
        "tstamp": 12.5,
        "choices": [
            {
                "index": repeat,
                "turns": ["text"],
                "decoding_steps": [2],
                "new_tokens": [5],
                "wall_time": [1.0],
                "accept_lengths": [3, 1],
            }
            for repeat in range(2)
        ],
    }


def test_one_file_for_all_settings(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    assert write_answers(path, files(), force=False) == [path]
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["model_id"] for line in lines] == ["tiny/ar", "tiny/x@4/fr:8"]


def test_a_folder_gets_one_file_per_setting(tmp_path: Path) -> None:
    write_answers(tmp_path, files(), force=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ar.jsonl", "x@4_fr_8.jsonl"]
    with pytest.raises(FileExistsError, match=r"x@4_fr_8\.jsonl already exists"):
        check_answers(tmp_path, ["new", "x@4/fr:8"], force=False)
    check_answers(tmp_path, ["new"], force=False)
