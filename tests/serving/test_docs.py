"""The examples in the documentation run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("serving.md", "transformers.md", "choosing.md")


def blocks(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_serving_example_runs_without_torch(tmp_path: Path) -> None:
    (code,) = blocks("serving.md")
    check = "\nimport sys\nassert 'torch' not in sys.modules\n"
    command = [sys.executable, "-c", code + check]
    result = subprocess.run(command, cwd=tmp_path, env=_environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout.split()[0]) > 1.5
    assert (tmp_path / "policy.json").is_file()


def test_the_transformers_examples_run(tiny_llama: Any, tiny_folder: Path) -> None:
    from transformers import AutoTokenizer

    page = ModuleType("page").__dict__
    page |= {"model": tiny_llama, "tokenizer": AutoTokenizer.from_pretrained(tiny_folder)}
    for code in blocks("transformers.md"):
        exec(compile(code, "transformers.md", "exec"), page)
    expected = tiny_llama.generate(**page["inputs"], max_new_tokens=32, do_sample=False)
    assert page["result"].sequences.tolist() == expected.tolist()


@pytest.mark.parametrize("page", PAGES)
def test_examples_are_formatted_and_links_lead_somewhere(page: str) -> None:
    for code in blocks(page):
        command = [sys.executable, "-m", "ruff", "format", "--check", "--stdin-filename", "example.py", "-"]
        result = subprocess.run(command, input=code, cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / "docs" / target).is_file(), target


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}
