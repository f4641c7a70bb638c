"""`adaptspec trace` on a small random model."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from adaptspec.cli import main
from adaptspec.cli.progress import Silent
from adaptspec.cli.prompts import Prompt
from adaptspec.cli.trace import check_names, contexts_of, request_names, summary_table
from adaptspec.control.cost import CostModel
from adaptspec.control.trace_file import read_trace
from tests.cli.test_main import error_of
from tests.control.trace_cases import example

SMALL = ["--max-new-tokens", "12", "--nodes", "8", "--quiet", "--pool", "suffix,token-recycling"]


def trace(*arguments: str) -> int:
    return main(["trace", *arguments])


def test_records_the_answers_of_plain_generation(
    chat_folder: Path, prompt_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, bench, answers = tmp_path / "out.parquet", tmp_path / "bench.json", tmp_path / "answers.jsonl"
    arguments = ["--model", str(chat_folder), "--prompts", str(prompt_file), *SMALL, "--out", str(out)]
    assert trace(*arguments, "--seed", "5") == 0
    captured = capsys.readouterr()
    assert f"wrote {out}" in captured.err and "\x1b" not in captured.out + captured.err
    for head in ("drafter", "proposes", "length @4", "length @8", "draft ms", "bytes/position", "5 answers"):
        assert head in captured.out
    assert "length @16" not in captured.out

    found = read_trace(out)
    assert {r.name: r.domain for r in found.requests} == {
        **dict.fromkeys(["81", "82/1", "82/2"], "writing"),
        **dict.fromkeys(["83", "84"], "math"),
    }
    names = [request.name for request in found.requests]
    assert names.index("82/2") == names.index("82/1") + 1
    assert found.nodes == {"suffix": 8, "token-recycling": 8}
    assert found.max_new_tokens == 12 and found.temperature == 0.0
    assert found.provenance["argv"][:2] == ["adaptspec", "trace"] and found.provenance["seed"] == 5
    assert found.provenance["prompts"] == str(prompt_file) and found.provenance["interrupted"] is False
    assert "dtype=float32" in found.fingerprint
    parts = {(row["part"], row["drafter"]) for row in restored(found.costs).to_table()}
    assert parts == {("verify", None), ("overhead", None), ("draft", "suffix"), ("draft", "token-recycling")}

    common = ["--model", str(chat_folder), "--prompts", str(prompt_file), "--max-new-tokens", "12", "--quiet"]
    options = ["--pool", "suffix@4", "--strategies", "none", "--json", str(bench), "--answers", str(answers)]
    assert main(["bench", *common, *options]) == 0
    lines = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    texts = {line["question_id"]: line["choices"][0] for line in lines if line["model_id"].endswith("hf-generate")}
    for request in found.requests:
        identity, _, turn = request.name.partition("/")
        assert len(request.tokens) == texts[int(identity)]["new_tokens"][int(turn or 1) - 1]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(chat_folder)
    second = next(request for request in found.requests if request.name == "82/2")
    decoded = tokenizer.decode(second.tokens.tolist(), skip_special_tokens=True).strip()
    assert decoded == texts[82]["turns"][1]

    before = out.read_bytes()
    assert trace(*arguments) == 2
    assert "already exists; use --force" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert trace(*arguments, "--force", "--limit", "1") == 0
    assert len(read_trace(out).requests) == 1


def restored(state: Any) -> CostModel:
    costs = CostModel()
    costs.load_state_dict(state)
    return costs


def test_sampling_follows_the_seed(chat_folder: Path, prompt_file: Path, tmp_path: Path) -> None:
    def tokens(name: str, seed: str) -> list[int]:
        out = tmp_path / name
        arguments = ["--model", str(chat_folder), "--prompts", str(prompt_file), *SMALL, "--limit", "1"]
        assert trace(*arguments, "--temperature", "1.5", "--seed", seed, "--out", str(out)) == 0
        return read_trace(out).requests[0].tokens.tolist()

    # The seed also shuffles the prompts; one prompt is chosen whatever the seed.
    first = tokens("a", "1")
    assert first == tokens("b", "1") != tokens("c", "2")


@pytest.mark.parametrize("finished", [0, 2])
def test_interruption_keeps_the_finished_answers(
    chat_folder: Path,
    prompt_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    finished: int,
) -> None:
    begun: list[str] = []

    def step(self: Silent, text: str) -> None:
        begun.append(text)
        if len(begun) == finished + 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Silent, "step", step)
    out = tmp_path / "out.parquet"
    arguments = ["--model", str(chat_folder), "--prompts", str(prompt_file), *SMALL]
    assert trace(*arguments, "--out", str(out)) == 130
    captured = capsys.readouterr()
    assert f"interrupted after {finished} finished answers" in captured.err and "Traceback" not in captured.err
    assert out.exists() == (finished > 0)
    if finished:
        found = read_trace(out)
        assert [request.name for request in found.requests] == begun[:finished]
        assert found.provenance["interrupted"] is True
        assert "suffix" in captured.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "Missing option '--out'"),
        ("--out no-such-folder/a.parquet", "the folder no-such-folder to write a.parquet into does not exist"),
        ("--out a.parquet --nodes 0", "nodes must be >= 1, got 0"),
        ("--out a.parquet --nodes 2000", "nodes must be <= 1024, got 2000"),
        ("--out a.parquet --max-new-tokens 0", "max_new_tokens must be >= 1, got 0"),
        ("--out a.parquet --seed -1", "seed must be >= 0, got -1"),
        ("--out a.parquet --temperature -1", "temperature must be >= 0 and finite, got -1.0"),
        ("--out a.parquet --pool sufix", "unknown drafter 'sufix'; did you mean 'suffix'?"),
        ("--out a.parquet --pool suffix@8", "pool must hold drafters, their budget is --nodes; got the arm 'suffix@8'"),
        ("--out a.parquet --pool ar", "got the arm 'ar'"),
        ("--out a.parquet --pool lookahead", "drafter 'lookahead' cannot be traced: it adds rows of its own"),
        ("--out a.parquet --order random", "order must be one of shuffle, blocks"),
        ("--out a.parquet --prompts no-such-file.jsonl", "no-such-file.jsonl: No such file or directory"),
        ("--out a.parquet --model no/such/folder", "no/such/folder"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in error_of(capsys, "trace", "--quiet", *arguments.split())
    assert list(tmp_path.iterdir()) == []


def test_prompts_beyond_the_context_are_refused(
    tiny_folder: Path, prompt_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(tiny_folder), "--prompts", str(prompt_file), "--max-new-tokens", "300", "--quiet"]
    assert trace(*arguments, "--out", str(tmp_path / "a")) == 2
    assert "the model's context has 256" in capsys.readouterr().err


def test_names_of_answers() -> None:
    assert request_names(Prompt(7, "any", ("a",))) == ["7"]
    assert request_names(Prompt("x", "any", ("a", "b"))) == ["x/1", "x/2"]
    check_names([Prompt(7, "any", ("a",)), Prompt("8", "any", ("a",))])
    for other in (Prompt("7", "any", ("a",)), Prompt(7, "any", ("b",))):
        with pytest.raises(ValueError, match="ids of prompts must differ as text, got '7' 2 times"):
            check_names([Prompt(7, "any", ("a",)), other])


def test_contexts_are_the_medians_of_the_buckets_in_use() -> None:
    assert contexts_of([60, 90, 500]) == [90]
    assert contexts_of([3000, 40, 513, 1024, 700, 2500]) == [40, 700, 3000]


def test_the_table_counts_steps_on_an_arms_own_way(capsys: pytest.CaptureFixture[str]) -> None:
    """One drafter is sometimes right, the other never speaks: 9 positions of which 8 + 0 + 1 lie in three answers."""
    from adaptspec.cli.common import console, show
    from adaptspec.control.trace_reach import reaches, stops

    found = example()
    costs = CostModel()
    costs.observe_draft("copy", 8, 0.002)
    show(console(), summary_table(found, costs, sizes={"copy": 900, "mute": 90}))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    copy, mute = (line for line in lines if line[:1] in (["copy"], ["mute"]))
    assert mute == ["mute", "0", "%", "1.00", "1.00", "0.00", "10"]
    speaks = sum(int((r.proposals["copy"].sizes() > 0).sum()) for r in found.requests)
    expected = [9 / sum(len(stops(reaches(r, "copy").lengths(b))) for r in found.requests) for b in (4, 8)]
    assert copy == ["copy", f"{100 * speaks / 9:.0f}", "%", *(f"{n:.2f}" for n in expected), "2.00", "100"]
    assert expected[0] > 1.5
