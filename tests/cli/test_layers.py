"""`adaptspec train layers` writes what the drafter 'draft-verify' reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adaptspec.cli import main


def test_layers_are_searched_and_drafted_without(
    chat_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Say a word."}\n{"prompt": "Name a bird."}\n', encoding="utf-8")
    answers, out = tmp_path / "answers", tmp_path / "layers.json"
    model = ["--model", str(chat_folder), "--quiet"]
    arguments = ["--prompts", str(prompts), "--out", str(answers), "--samples", "1", "--max-new-tokens", "8"]
    assert main(["train", "answers", *model, *arguments]) == 0
    search = ["train", "layers", *model, "--answers", str(answers), "--out", str(out), "--tries", "6"]
    assert main(search) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["tried"] == 6 and found["texts"] == 2 and 0.0 <= found["agreement"] <= 1.0
    assert found["command"][:3] == ["adaptspec", "train", "layers"]
    assert "tokens/s expected" in capsys.readouterr().err
    generate = ["generate", "Say a word.", "--model", str(chat_folder), "--max-new-tokens", "8"]
    assert main([*generate, "--pool", f"draft-verify:{out}", "--strategy", "fixed:draft-verify@4"]) == 0
    capsys.readouterr()
    assert main(search) == 2
    assert "already exists" in capsys.readouterr().err
    assert main([*search, "--force", "--most-tokens", "2"]) == 2
    assert "holds no answers with a prompt below 2 tokens" in capsys.readouterr().err
