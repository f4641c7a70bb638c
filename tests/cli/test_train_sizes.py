"""`adaptspec train griffin-gs` and `griffin-ltd` from prompts to a drafter that answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptspec.cli import main
from adaptspec.drafters import make_drafter
from adaptspec.drafters.draft_policies import read_policies
from adaptspec.drafters.griffin_gs import read_static_tree
from adaptspec.tracing.static_grid import search_grid


@pytest.fixture(scope="module")
def model(chat_folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(chat_folder).eval()


@pytest.fixture(scope="module")
def griffin(model: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A GRIFFIN cell for the model, as a drafter's name."""
    from adaptspec.training.recipes import make_trainee

    folder = tmp_path_factory.mktemp("griffin")
    make_trainee("griffin", model).save(folder, {})
    return f"griffin:{folder}"


def answer(model: Any, drafter: str) -> None:
    """The drafter of a file leaves the output as it is."""
    from adaptspec import AdaptiveSpec

    ids = torch.tensor([[5, 30, 77, 12, 9, 200]])
    name = drafter.partition(":")[0]
    result = AdaptiveSpec([make_drafter(drafter)], f"fixed:{name}@16").generate(model, ids, max_new_tokens=16)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16)
    assert torch.equal(result.sequences, expected) and result.stats.set_aside == {}


def test_a_grid_is_searched(
    chat_folder: Path, prompt_file: Path, model: Any, griffin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gs.json"
    common = ["--model", str(chat_folder), "--prompts", str(prompt_file), "--limit", "2", "--drafter", griffin]
    grid = ["--depths", "1,3", "--sizes", "2,6", "--max-new-tokens", "8", "--out", str(out)]
    assert main(["train", "griffin-gs", *common, *grid, "--quiet"]) == 0
    found = read_static_tree(out)
    table = found.card["table"]
    assert {(row["depth"], row["size"]) for row in table} == {(1, 2), (1, 6), (3, 2), (3, 6)}
    assert (found.depth, found.size) == (table[0]["depth"], table[0]["size"]) and found.drafter == griffin
    rates = [row["tokens_per_second"] for row in table]
    assert rates == sorted(rates, reverse=True) and rates[0] > 0
    assert len({row["tokens"] for row in table}) == 1, "all settings must have written the same answers"
    assert "threads" in found.card["machine"] and found.card["target"]["hidden_size"] == 32
    assert found.card["prompts"]["count"] == 2 and json.loads(out.read_text())["depth"] == found.depth
    assert f"wrote {out}: depth {found.depth}, {found.size} nodes" in capsys.readouterr().err
    answer(model, f"griffin-gs:{out}")
    assert main(["train", "griffin-gs", *common, *grid, "--quiet"]) == 2
    assert "already exists" in capsys.readouterr().err


def test_policies_are_trained_from_records(
    chat_folder: Path, prompt_file: Path, model: Any, griffin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, records = tmp_path / "ltd.safetensors", tmp_path / "growth.npz"
    common = ["--model", str(chat_folder), "--prompts", str(prompt_file), "--drafter", griffin, "--steps", "3"]
    common += ["--limit", "2", "--max-new-tokens", "24", "--records", str(records), "--quiet"]
    assert main(["train", "griffin-ltd", *common, "--out", str(out)]) == 0
    policies = read_policies(out)
    assert policies.drafter == griffin and policies.card["target"]["hidden_size"] == 32
    assert policies.card["settings"]["steps"] == 3 and policies.card["positions"] > 0
    assert "the best static tree" in capsys.readouterr().err
    written = records.read_bytes()
    again = tmp_path / "again.safetensors"
    assert main(["train", "griffin-ltd", *common, "--out", str(again)]) == 0
    assert records.read_bytes() == written
    assert all((a == b).all() for a, b in zip(*(read_policies(p).arrays().values() for p in (out, again)), strict=True))
    answer(model, f"griffin-ltd:{out}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["griffin-gs", "--drafter", "suffix"], "drafter must be a feature-recursive one"),
        (["griffin-gs", "--depths", "0,2"], "depths must be >= 1, got 0"),
        (["griffin-gs", "--sizes", "x"], "sizes must be whole numbers"),
        (["griffin-ltd", "--drafter", "grifin"], "unknown drafter 'grifin'; did you mean 'griffin'"),
        (["griffin-ltd", "--steps", "0"], "steps must be >= 1"),
    ],
)
def test_bad_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:  # fmt: skip
    assert main(["train", *arguments, "--out", str(tmp_path / "o"), "--quiet"]) == 2
    assert message in capsys.readouterr().err


def test_settings_take_turns_and_the_fastest_comes_first() -> None:
    asked: list[tuple[int, int, int]] = []

    def run(depth: int, size: int, prompt: int) -> tuple[int, int, float]:
        asked.append((depth, size, prompt))
        return 10, 5, 1.0 + abs(depth - 3) + 0.1 * size

    table = search_grid(run, depths=[1, 3], sizes=[4, 8], prompts=3, repeats=2)
    assert (table[0].depth, table[0].size) == (3, 4) and table[0].tokens == 60 and table[0].steps == 30
    assert table[0].tokens_per_second == pytest.approx(10 / 1.4) and table[0].accepted_length == 2.0
    turns = [asked[i : i + 4] for i in range(0, 24, 4)]
    assert all(len(set(turn)) == 4 and len({prompt for _, _, prompt in turn}) == 1 for turn in turns)
    assert len({turn[0][:2] for turn in turns}) > 1
    with pytest.raises(ValueError, match="depths must be one or more different whole numbers >= 1, got"):
        search_grid(run, depths=[], sizes=[4], prompts=1)
    with pytest.raises(ValueError, match="prompts must be >= 1, got 0"):
        search_grid(run, depths=[1], sizes=[4], prompts=0)
