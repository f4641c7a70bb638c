"""`adaptspec train` on a small random model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from adaptspec.cli import main
from adaptspec.pretrained import load_weights, read_card, save_weights
from adaptspec.training.corpus import read_answers, read_description


@pytest.fixture(scope="module")
def answers(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers to eight prompts of two domains. Do not change it."""
    folder = tmp_path_factory.mktemp("train")
    prompts = folder / "prompts.jsonl"
    lines = [
        {"id": i, "domain": "ab"[i % 2], "turns": [f"Say {i} things about the sea.", "Never read."]} for i in range(8)
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    out = folder / "answers"
    arguments = ["--model", str(chat_folder), "--prompts", str(prompts), "--out", str(out), "--quiet"]
    assert main(["train", "answers", *arguments, "--samples", "2", "--max-new-tokens", "12", "--batch", "4"]) == 0
    return out


def test_answers_are_asked_for_through_the_chat_template(chat_folder: Path, answers: Path) -> None:
    from transformers import AutoTokenizer

    found = read_answers(answers)
    assert {(answer.prompt, answer.sample) for answer in found} == {(i, s) for i in range(8) for s in (0, 1)}
    tokenizer = AutoTokenizer.from_pretrained(chat_folder)
    text = tokenizer.decode(found[2].token_ids[: found[2].prompt_length])
    assert text == "<|im_start|>user\nSay 1 things about the sea.<|im_end|>\n<|im_start|>assistant\n"
    origin = read_description(answers)
    assert origin["chat"] is True and origin["target"]["hidden_size"] == 32 and origin["seed"] == 0
    assert origin["model"] == str(chat_folder) and "torch" in origin["versions"]


def test_an_answered_folder_is_left_as_it_is(chat_folder: Path, answers: Path, capsys: pytest.CaptureFixture) -> None:
    prompts = answers.parent / "prompts.jsonl"
    before = {path: path.read_bytes() for path in answers.glob("shard-*")}
    arguments = ["--model", str(chat_folder), "--prompts", str(prompts), "--out", str(answers)]
    again = ["train", "answers", *arguments, "--samples", "2", "--max-new-tokens", "12"]
    assert main([*again, "--quiet"]) == 0
    assert "16/16 answers" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in answers.glob("shard-*")}
    assert main([*again, "--quiet", "--part", "2/2"]) == 0
    assert "8/8 answers" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in answers.glob("shard-*")}
    for part in ("0/2", "3/2", "1", "a/b", "1/2/3"):
        assert main([*again, "--part", part]) == 2
        assert f"part must be K/N with 1 <= K <= N, got '{part}'" in capsys.readouterr().err
    assert main([*again, "--seed", "1"]) == 2
    assert "holds answers with seed = 0" in capsys.readouterr().err


def test_weights_are_packed_into_fewer_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    matrix = torch.randn((64, 64), generator=torch.Generator().manual_seed(0))
    save_weights(tmp_path / "a", {"w": matrix}, {"kind": "eagle3"})
    assert main(["train", "pack", str(tmp_path / "a"), "--out", str(tmp_path / "b")]) == 0
    state, card = load_weights(tmp_path / "b")
    assert card == {"kind": "eagle3"} and read_card(tmp_path / "b")["bits"] == 4
    assert 0.0 < (state["w"] - matrix).abs().max() < 0.5
    assert main(["train", "pack", str(tmp_path / "a"), "--out", str(tmp_path / "b")]) == 2
    assert "already holds weights" in capsys.readouterr().err
    assert main(["train", "pack", str(tmp_path / "a"), "--out", str(tmp_path / "c"), "--bits", "3"]) == 2
    assert "bits must be one of 4, 8, 16, 32, got 3" in capsys.readouterr().err


def test_counts_are_a_frequency_list(answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from adaptspec.vocab.counts import load_frequencies

    out = tmp_path / "list.safetensors"
    assert main(["train", "counts", "--answers", str(answers), "--out", str(out)]) == 0
    frequencies = load_frequencies(out)
    found = [token for answer in read_answers(answers) for token in answer.token_ids[answer.prompt_length :].tolist()]
    assert found.count(frequencies.token_ids[0]) == max(map(found.count, set(found)))
    assert len(frequencies.token_ids) == frequencies.vocab_size == 400
    assert f"{len(found)} tokens answered" in frequencies.source
    assert main(["train", "counts", "--answers", str(answers), "--out", str(out)]) == 2
    assert "already exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "options", "loss"),
    [
        ("eagle3", ["--loss", "lk-lambda", "--eta", "1", "--unroll", "2", "--taps", "1,2"], "lk-lambda"),
        ("hydra", ["--optimiser", "adamw"], "kl"),
    ],
)
def test_a_drafter_is_trained_and_written(
    chat_folder: Path, answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    kind: str, options: list[str], loss: str,
) -> None:  # fmt: skip
    out = tmp_path / "w"
    arguments = ["--model", str(chat_folder), "--answers", str(answers), "--out", str(out), "--steps", "3"]
    features = ["--features", str(answers.parent / f"features-{kind}"), "--rows", "200"]
    assert main(["train", kind, *arguments, *features, *options]) == 0
    card = read_card(out)
    assert card["loss"]["name"] == loss and card["steps"] == 3 and card["kind"] == kind
    assert card["command"][:3] == ["adaptspec", "train", kind]
    if kind == "eagle3":
        assert card["config"]["taps"] == [1, 2] and card["loss"] == {
            "name": "lk-lambda", "eta": 1.0, "unroll": 2, "decay": 0.8,
        }  # fmt: skip
    errors = capsys.readouterr().err
    assert f"training {kind}" in errors and "held-out chain" in errors and f"wrote {out}" in errors


def test_confu_goes_on_from_eagle3(
    chat_folder: Path, answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from adaptspec import AdaptiveSpec
    from adaptspec.drafters import make_drafter

    common = ["--model", str(chat_folder), "--answers", str(answers), "--rows", "200", "--steps", "2", "--quiet"]
    common += ["--features", str(answers.parent / "features-confu")]
    eagle, out = tmp_path / "eagle3", tmp_path / "confu"
    assert main(["train", "eagle3", *common, "--out", str(eagle), "--taps", "1,2"]) == 0
    assert main(["train", "confu", *common, "--out", str(out), "--start", str(eagle)]) == 0
    card = read_card(out)
    assert card["kind"] == "confu" and card["config"]["taps"] == [1, 2] and card["start"] == str(eagle)
    assert card["loss"]["name"] == "kl" and card["steps"] == 2
    model = AutoModelForCausalLM.from_pretrained(chat_folder).eval()
    ids = torch.tensor([[5, 30, 77, 12, 9, 200]])
    spec = AdaptiveSpec([make_drafter(f"confu:{out}")], "fixed:confu@8")
    result = spec.generate(model, ids, max_new_tokens=12)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    assert torch.equal(result.sequences, expected) and result.stats.set_aside == {}
    frozen = tmp_path / "frozen"
    assert main(["train", "confu", *common, "--out", str(frozen), "--start", str(eagle), "--frozen"]) == 0
    (begun, _), (state, card) = load_weights(eagle), load_weights(frozen)
    assert card["frozen"] and set(begun) < set(state)
    for name, tensor in begun.items():  # both are written with 8 bits
        assert torch.allclose(state[name], tensor, atol=float(tensor.abs().max()) / 100), name
    moved = [name for name in set(state) - set(begun) if name.startswith("future_proj") and state[name].abs().max() > 0]
    assert moved == ["future_proj.weight"]  # it began at 0
    for options, message in (
        (["eagle3", "--start", str(eagle)], "frozen is for 'confu' that starts with an 'eagle3' cell"),
        (["confu", "--start", str(out)], "frozen is for 'confu' that starts with an 'eagle3' cell"),
        (["confu"], "frozen keeps the cell of start as it is; give one"),
    ):
        assert main(["train", options[0], *common, "--out", str(tmp_path / "no"), "--frozen", *options[1:]]) == 2
        assert message in capsys.readouterr().err


def test_a_draft_model_is_trained(chat_folder: Path, answers: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from adaptspec.drafters.small_model import load_small_model
    from adaptspec.target.hf import HFTarget

    out = tmp_path / "small"
    arguments = ["--model", str(chat_folder), "--answers", str(answers), "--out", str(out), "--steps", "2"]
    features = ["--features", str(answers.parent / "features-small"), "--rows", "200", "--quiet"]
    assert main(["train", "draft-model", *arguments, *features]) == 0
    small = load_small_model(out, HFTarget(AutoModelForCausalLM.from_pretrained(chat_folder).eval()))
    assert small.config.vocab_size == 400 and small.config.num_hidden_layers == 2


def test_block_parallel_drafters_share_a_backbone(chat_folder: Path, answers: Path, tmp_path: Path) -> None:
    common = ["--model", str(chat_folder), "--answers", str(answers), "--rows", "200", "--steps", "1"]
    common += ["--features", str(answers.parent / "features-block"), "--quiet"]
    assert main(["train", "dflash", *common, "--out", str(tmp_path / "dflash")]) == 0
    fingerprint = read_card(tmp_path / "dflash")["sha256"]
    for kind in ("treeflash", "taps"):
        backbone = ["--backbone", str(tmp_path / "dflash"), "--out", str(tmp_path / kind)]
        assert main(["train", kind, *common, *backbone]) == 0
        card = read_card(tmp_path / kind)
        assert card["kind"] == kind and card["backbone"] == fingerprint and "fc.weight" not in card["tensors"]


@pytest.mark.parametrize("kind", ["coral", "dynaspec"])
def test_a_router_is_trained(
    chat_folder: Path, answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    from adaptspec.vocab.routers import load_router

    common = ["--model", str(chat_folder), "--answers", str(answers), "--rows", "200", "--steps", "2"]
    common += ["--features", str(answers.parent / "features-router"), "--quiet"]
    if kind == "coral":
        assert main(["train", "mtp1", *common, "--out", str(tmp_path / "cell")]) == 0
        common += ["--drafter", str(tmp_path / "cell")]
    assert main(["train", kind, *common, "--out", str(tmp_path / "w")]) == 0
    assert load_router(tmp_path / "w", kind=kind).row_count == 400
    assert read_card(tmp_path / "w")["coverage"][-1] == 1.0
    assert "in the 1, 2, 3, 4 best groups" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eagle3"], "give --minutes or --steps"),
        (["eagle3", "--steps", "1", "--minutes", "1"], "either minutes or steps"),
        (["eagle3", "--steps", "1", "--loss", "kll"], "unknown loss 'kll'; did you mean 'kl'"),
        (["eagle3", "--steps", "1", "--taps", "1,x"], "taps must be whole numbers"),
        (["eagle3", "--steps", "1", "--taps", "9"], r"taps must be in [1, 2], got 9"),
        (["hydra", "--steps", "1", "--start", "x"], "start is for kinds with a cell, not for 'hydra'"),
        (["medusa", "--steps", "1", "--optimiser", "sgd"], "optimiser must be 'muon' or 'adamw'"),
        (["eagle9", "--steps", "1"], "No such command 'eagle9'"),
    ],
)
def test_bad_options(
    chat_folder: Path, answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    arguments: list[str], message: str,
) -> None:  # fmt: skip
    folders = ["--model", str(chat_folder), "--answers", str(answers), "--out", str(tmp_path / "w")]
    features = ["--features", str(tmp_path / "features"), "--quiet"]
    assert main(["train", arguments[0], *folders, *features, *arguments[1:]]) == 2
    assert message in capsys.readouterr().err


def test_bad_options_of_answers(chat_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["train", "answers", "--model", str(chat_folder), "--out", str(tmp_path / "a"), "--quiet"]
    assert main([*common, "--temperatures", "warm"]) == 2
    assert "temperatures must be numbers separated by commas, got 'warm'" in capsys.readouterr().err
    assert main([*common, "--samples", "0"]) == 2
    assert "samples must be >= 1, got 0" in capsys.readouterr().err
    assert main(["train", "counts", "--answers", str(tmp_path / "no"), "--out", str(tmp_path / "l.npy")]) == 2
    assert "no folder of answers" in capsys.readouterr().err
