"""The commands on a small random model."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from adaptspec.cli import main
from adaptspec.cli.progress import Silent

SMALL = ["--max-new-tokens", "12", "--budgets", "4", "--quiet"]
PAIR = ["--pool", "suffix,prompt-lookup"]
FIELDS = {"name", "kind", "new_tokens", "seconds", "tokens_per_second", "speedup"}
FIXED_FIELDS = FIELDS | {
    "mean_accepted_length",
    "acceptance_rate",
    "identical",
    "compared",
    "controller_seconds",
    "draft_seconds",
    "verify_seconds",
}


def bench(*arguments: str) -> int:
    return main(["bench", *arguments])


def test_bench_writes_the_report_and_the_answers(
    chat_folder: Path, prompt_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, answers = tmp_path / "out.json", tmp_path / "answers.jsonl"
    files = ["--json", str(out), "--answers", str(answers)]
    arguments = ["--model", str(chat_folder), "--prompts", str(prompt_file), *SMALL, *PAIR, "--repeats", "2", *files]
    assert bench(*arguments, "--draft-model", str(chat_folder), "--strategies", "fixed:suffix@4", "--seed", "5") == 0
    report = json.loads(out.read_text(encoding="utf-8"))
    origin = report["provenance"]
    assert {"argv", "git_sha", "versions", "device", "dtype", "threads", "seed", "date"} <= origin.keys()
    assert origin["argv"][:2] == ["adaptspec", "bench"] and origin["seed"] == 5 and origin["dtype"] == "float32"
    assert report["prompts"] == 4 and report["finished"] == 8 and report["interrupted"] is False
    runs = {run["name"]: run for run in report["runs"]}
    assert list(runs) == [
        *("hf-generate", "hf-prompt-lookup", "hf-assisted"),
        *("ar", "suffix@4", "prompt-lookup@4", "fixed:suffix@4"),
    ]
    for run in runs.values():
        assert run.keys() >= (FIELDS if run["kind"] == "reference" else FIXED_FIELDS)
        assert run["seconds"] > 0 and run["new_tokens"] > 0 and len(run["tokens_per_second_repeats"]) == 2
        if run["name"] != "hf-generate":
            assert (run["identical"], run["compared"], run["divergences"]) == (4, 4, []), run["name"]
    assert runs["suffix@4"]["mean_accepted_length"] > 1.0
    assert runs["suffix@4"]["draft_seconds"] > 0.0
    assert runs["ar"]["mean_accepted_length"] == 1.0 and runs["ar"]["acceptance_rate"] is None
    assert runs["fixed:suffix@4"]["best_fixed"] in ("ar", "suffix@4", "prompt-lookup@4")
    assert set(report["by_category"]) == {"writing", "math"}
    lines = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 4 * len(runs)
    two_turns = next(line for line in lines if line["question_id"] == 82)
    assert [len(choice["turns"]) for choice in two_turns["choices"]] == [2, 2]
    assert sum(two_turns["choices"][0]["new_tokens"]) > 0
    output = capsys.readouterr().out
    assert "yes (4/4)" in output and "suffix@4" in output and "\x1b" not in output

    before = out.read_bytes()
    assert bench(*arguments) == 2
    assert "already exists" in capsys.readouterr().err
    assert out.read_bytes() == before


def test_answers_into_a_folder_and_sampling(
    chat_folder: Path, prompt_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "answers"
    folder.mkdir()
    common = ["--model", str(chat_folder), "--prompts", str(prompt_file), *SMALL, *PAIR, "--no-references"]
    assert bench(*common, "--limit", "1", "--temperature", "1", "--answers", str(folder), "--strategies", "none") == 0
    assert sorted(p.name for p in folder.iterdir()) == ["ar.jsonl", "prompt-lookup@4.jsonl", "suffix@4.jsonl"]
    assert "yes" not in capsys.readouterr().out  # sampled outputs are not compared


def test_divergences_of_a_lossy_setting_are_found(
    chat_folder: Path, prompt_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting whose third token is wrong must show as not identical, with the margin the model really has there."""
    from dataclasses import replace

    import torch

    from adaptspec.cli.common import load_model
    from adaptspec.cli.settings import Workbench

    honest = Workbench.arms

    def lossy(self: Workbench, *arguments: Any, **options: Any) -> list[Any]:
        def corrupt(start: Any) -> Any:
            def begin() -> Any:
                generate = start()

                def wrong(input_ids: Any, max_new_tokens: int) -> Any:
                    made = generate(input_ids, max_new_tokens)
                    ids = list(made.token_ids)
                    ids[2] = (ids[2] + 1) % 300
                    return replace(made, token_ids=tuple(ids))

                return wrong

            return begin

        return [replace(s, start=corrupt(s.start)) for s in honest(self, *arguments, **options)]

    monkeypatch.setattr(Workbench, "arms", lossy)
    out = tmp_path / "out.json"
    arguments = ["--model", str(chat_folder), "--prompts", str(prompt_file), *SMALL, "--json", str(out)]
    assert bench(*arguments, "--limit", "1", "--pool", "suffix", "--strategies", "none") == 0
    runs = {run["name"]: run for run in json.loads(out.read_text(encoding="utf-8"))["runs"]}
    wrong = runs["suffix@4"]
    assert (wrong["identical"], wrong["compared"]) == (0, 1)
    (divergence,) = wrong["divergences"]
    assert (divergence["position"], divergence["turn"]) == (2, 0)
    model, tokenizer = load_model(str(chat_folder))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Write about the sea and the sea and the sea."}],
        add_generation_prompt=True,
        tokenize=False,
    )
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        ids = model.generate(ids, max_new_tokens=2, do_sample=False)
        top = model(ids).logits[0, -1].topk(2).values
    assert divergence["margin"] == pytest.approx(float(top[0] - top[1]), rel=1e-3)
    assert wrong["max_margin"] == divergence["margin"]
    assert runs["ar"]["identical"] == 1


def test_interruption_leaves_a_readable_report(
    chat_folder: Path,
    prompt_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C in the middle of the third prompt keeps the two that are finished."""
    begun = []

    def before(text: str) -> None:
        begun.append(text)
        if len(begun) == 2 + 2 * 2 + 2:  # two warm-ups, two prompts by two settings, the third by its second setting
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Silent, "step", lambda self, text: before(text))
    out, answers = tmp_path / "out.json", tmp_path / "answers.jsonl"
    arguments = ["--model", str(chat_folder), "--prompts", str(prompt_file), "--no-references", "--strategies", "none"]
    assert bench(*arguments, *SMALL, "--pool", "suffix@4", "--json", str(out), "--answers", str(answers)) == 130
    captured = capsys.readouterr()
    assert "interrupted after 2 finished prompts" in captured.err and "Traceback" not in captured.err
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["interrupted"] is True and report["finished"] == report["prompts"] == 2
    assert [(run["name"], run.get("compared")) for run in report["runs"]] == [("ar", None), ("suffix@4", 2)]
    assert len(answers.read_text(encoding="utf-8").splitlines()) == 2 * 2
    assert "suffix@4" in captured.out


def test_generate_streams_the_answer_of_plain_generation(
    chat_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--model", str(chat_folder), "--max-new-tokens", "16", "--pool", "suffix"]
    assert main(["generate", "the sea and the sea", *arguments, "--strategy", "fixed:ar"]) == 0
    plain = capsys.readouterr().out
    assert plain.strip()
    assert main(["generate", "the sea and the sea", *arguments, "--strategy", "fixed:suffix@8", "--stats"]) == 0
    captured = capsys.readouterr()
    assert captured.out == plain
    assert "16 tokens in" in captured.err and "mean accepted length" in captured.err
    monkeypatch.setattr("sys.stdin", io.StringIO("the sea and the sea"))
    assert main(["generate", "-", *arguments, "--strategy", "fixed:suffix@8", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["text"].strip() == plain.strip()
    assert answer["stats"]["new_tokens"] == len(answer["token_ids"]) == 16
    assert answer["finish_reason"] == "length"


def test_generate_without_chat_and_sampled_follows_the_seed(
    chat_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def text(*extra: str) -> str:
        arguments = ["--model", str(chat_folder), "--max-new-tokens", "12", "--temperature", "1.5", "--json"]
        assert main(["generate", "the sea", *arguments, *extra]) == 0
        return json.loads(capsys.readouterr().out)

    first = text("--seed", "1")
    assert first["token_ids"] == text("--seed", "1")["token_ids"] != text("--seed", "2")["token_ids"]
    assert text("--no-chat")["prompt_tokens"] < first["prompt_tokens"]


def test_chat_needs_a_template(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "abc", "--model", str(tiny_folder), "--chat"]) == 2
    assert "--chat needs a tokenizer with a chat template" in capsys.readouterr().err


def test_prompts_beyond_the_context_are_refused(
    tiny_folder: Path, prompt_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(tiny_folder), "--prompts", str(prompt_file), "--max-new-tokens", "300", "--quiet"]
    assert bench(*arguments) == 2
    assert "the model's context has 256" in capsys.readouterr().err


def test_demo_ends_with_a_table_and_a_picture(
    chat_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--model", str(chat_folder), "--limit", "2", "--max-new-tokens", "8", "--pool", "suffix"]
    assert main(["demo", *arguments, "--strategies", "none"]) == 0
    captured = capsys.readouterr()
    assert "yes (2/2)" in captured.out and "no (" not in captured.out
    assert "suffix@8" in captured.out and "picture: adaptspec-demo.png" in captured.out
    assert "\x1b" not in captured.out + captured.err
    assert (tmp_path / "adaptspec-demo.png").read_bytes().startswith(b"\x89PNG")
    assert main(["demo", *arguments, "--strategies", "none", "--quiet"]) == 0
    assert "picture: adaptspec-demo-2.png" in capsys.readouterr().out


def test_datastore_from_text_files(chat_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from adaptspec.drafters.datastore import Datastore

    text, out = tmp_path / "a.txt", tmp_path / "store.bin"
    text.write_text("the sea and the sea and the sea")
    arguments = ["datastore", str(text), "--out", str(out), "--model", str(chat_folder)]
    assert main(arguments) == 0
    stored = len(Datastore.open(out).index)
    assert f"{stored} tokens from 1 file" in capsys.readouterr().out and stored > 3
    assert main(arguments) == 2
    assert "already exists" in capsys.readouterr().err
    assert main([*arguments, "--force"]) == 0
