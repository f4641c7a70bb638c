"""Published DFlash and TreeFlash checkpoints, against a few lines of arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from adaptspec.drafters import make_drafter
from adaptspec.drafters.checkpoints import load_checkpoint
from adaptspec.target.hf import HFTarget
from tests.drafters.cell_cases import Request
from tests.drafters.test_checkpoints import (
    DIM,
    GROUPS,
    HEADS,
    HIDDEN,
    VOCAB,
    Tensors,
    config,
    layer_tensors,
    mlp,
    norm,
    random,
)
from tests.tiny_models import make_llama

BLOCK, LAYERS, MASK = 5, 2, 60
TEXT = [3, 14, 15, 9, 26, 5, 35]


@pytest.fixture(scope="module")
def model() -> Any:
    return make_llama(layers=6)


def published(*, correction: bool) -> tuple[dict[str, Any], Tensors]:
    """Names and entries as uploaded, at a small width."""
    tensors: Tensors = {"fc.weight": random(HIDDEN, 3 * HIDDEN, seed=50)}
    for i, name in enumerate(("hidden_norm", "norm")):
        tensors[f"{name}.weight"] = 1.0 + random(HIDDEN, seed=51 + i)
    for layer in range(LAYERS):
        prefix = f"layers.{layer}."
        tensors |= layer_tensors(prefix, seed=100 * (layer + 1))
        tensors[f"{prefix}input_layernorm.weight"] = 1.0 + random(HIDDEN, seed=60 + layer)
        for i, part in enumerate(("q_norm", "k_norm")):
            tensors[f"{prefix}self_attn.{part}.weight"] = 1.0 + random(DIM, seed=70 + 2 * layer + i)
    settings = config(
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        head_dim=DIM,
        num_hidden_layers=LAYERS,
        num_target_layers=6,
        block_size=BLOCK,
        layer_types=["full_attention"] * LAYERS,
        sliding_window=None,
        dflash_config={"mask_token_id": MASK, "target_layer_ids": [0, 2, 4]},
    )
    if correction:
        tensors = {f"model.{name}": value for name, value in tensors.items()}
        tensors["ar_approximation.ug.weight"] = random(2 * 24, 2 * HIDDEN, seed=80)
        tensors["ar_approximation.ug.bias"] = random(2 * 24, seed=81)
        tensors["ar_approximation.d.weight"] = random(HIDDEN, 24, seed=82)
        tensors["ar_approximation.norm.weight"] = 1.0 + random(HIDDEN, seed=83)
        settings["treeflash_config"] = {"ar_approximation": "swiglu", "candidate_tokens": 16}
    return settings, tensors


def write(folder: Path, settings: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def forward(t: Tensors, model: Any, text: list[int], *, window: tuple[int | None, ...] = (None,) * LAYERS) -> Any:
    """The published forward: un-normed hidden states of a block behind a text, whose last token is the root."""
    states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    target = torch.cat([states[layer + 1][0] for layer in (0, 2, 4)], dim=1)
    context = norm(target @ t["fc.weight"].T, t["hidden_norm.weight"])
    x = model.get_input_embeddings()(torch.tensor([text[-1], *[MASK] * (BLOCK - 1)]))
    places = torch.arange(len(text) - 1 + BLOCK)
    turns = places[:, None] * 500_000.0 ** -(torch.arange(0, DIM, 2) / DIM)

    def turned(v: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        a, b = v.chunk(2, dim=1)
        return torch.cat([a * at.cos() - b * at.sin(), b * at.cos() + a * at.sin()], dim=1)

    for layer in range(LAYERS):
        prefix = f"layers.{layer}."
        normed = norm(x, t[f"{prefix}input_layernorm.weight"])
        both, outputs = torch.cat([context, normed]), []
        q_all, k_all, v_all = (
            rows @ t[f"{prefix}self_attn.{part}_proj.weight"].T
            for part, rows in (("q", normed), ("k", both), ("v", both))
        )
        for head in range(HEADS):
            own, group = slice(head * DIM, (head + 1) * DIM), head // (HEADS // GROUPS)
            shared = slice(group * DIM, (group + 1) * DIM)
            q = turned(norm(q_all[:, own], t[f"{prefix}self_attn.q_norm.weight"]), turns[-BLOCK:])
            k = turned(norm(k_all[:, shared], t[f"{prefix}self_attn.k_norm.weight"]), turns)
            scores = q @ k.T / DIM**0.5
            if window[layer] is not None:
                scores[places[-BLOCK:, None] - places >= window[layer]] = -torch.inf
            outputs.append(scores.softmax(-1) @ v_all[:, shared])
        x = x + torch.cat(outputs, dim=1) @ t[f"{prefix}self_attn.o_proj.weight"].T
        x = x + mlp(norm(x, t[f"{prefix}post_attention_layernorm.weight"]), t, prefix)
    return x[1:]


@pytest.mark.parametrize("window", [None, 3])
@torch.no_grad()
def test_dflash(window: int | None, model: Any, tmp_path: Path) -> None:
    settings, tensors = published(correction=False)
    if window is not None:
        settings |= {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": window}
    drafter = make_drafter(f"dflash:{write(tmp_path, settings, tensors)}", siblings="deterministic")
    request = Request(model, drafter, TEXT)
    assert drafter.needs.taps == (1, 3, 5)
    hidden = forward(tensors, model, TEXT, window=(None, window))
    assert torch.allclose(drafter._block.draft(TEXT[-1]), hidden, atol=1e-4)
    logits = norm(hidden, tensors["norm.weight"]) @ model.get_output_embeddings().weight.T
    assert request.ask(9).token_ids.tolist() == logits.argmax(1).tolist()


@torch.no_grad()
def test_treeflash(model: Any, tmp_path: Path) -> None:
    settings, tensors = published(correction=True)
    drafter = make_drafter(f"treeflash:{write(tmp_path, settings, tensors)}")
    request = Request(model, drafter, TEXT)
    plain = {name.removeprefix("model."): value for name, value in tensors.items()}
    hidden = forward(plain, model, TEXT)
    before = model.get_input_embeddings()(torch.tensor([TEXT[-1], 7, 8, 9]))
    normed = norm(hidden, plain["norm.weight"])
    scaled = before / (before.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * plain["ar_approximation.norm.weight"]
    both = torch.cat([scaled, normed], dim=1)
    u, g = (both @ plain["ar_approximation.ug.weight"].T + plain["ar_approximation.ug.bias"]).chunk(2, dim=1)
    corrected = norm(hidden + (g * g.sigmoid() * u) @ plain["ar_approximation.d.weight"].T, plain["norm.weight"])
    assert torch.allclose(drafter._model.corrected(hidden, before), corrected, atol=1e-4)
    first = torch.log_softmax(corrected[0] @ model.get_output_embeddings().weight.T, -1)
    tree = request.ask(12)
    assert tree.token_ids[0] == int(first.argmax()) and tree.scores[0] == pytest.approx(float(first.max()), abs=1e-4)


def test_layers_that_are_not_named_are_spread(model: Any, tmp_path: Path) -> None:
    settings, tensors = published(correction=False)
    del settings["dflash_config"]["target_layer_ids"]
    tensors["fc.weight"] = random(HIDDEN, 2 * HIDDEN, seed=50)
    module, extras = load_checkpoint(write(tmp_path, settings, tensors), kind="dflash", target=HFTarget(model))
    assert module.config.taps == (2, 4) and extras.layout == "dflash"  # layers 1 and 6 - 3


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("dflash", {"-": ["layers.1.mlp.up_proj.weight", "norm.weight"]}, r"layers.1.mlp.up_proj.weight, norm\."),
        ("dflash", {"-": ["fc.weight"]}, "lacks the tensors fc.weight"),
        ("dflash", {"layers.2.mlp.up_proj.weight": (4, 4)}, "does not know: layers.2.mlp.up_proj.weight"),
        ("dflash", {"fc.weight": (HIDDEN, HIDDEN)}, r"of other shapes: fc.weight \[32, 32\] instead of \[32, 96\]"),
        ("dflash", {"lm_head.weight": (VOCAB, HIDDEN)}, "lm_head.weight must be the target's, and differs from it"),
        ("dflash", {"hidden_size": 64}, "was made for hidden size 64, the target has 32"),
        ("dflash", {"block_size": None}, "config.json lacks block_size"),
        ("dflash", {"dflash_config": {"target_layer_ids": [0, 2, 4]}}, r"mask_token_id .* in \[0, 64\), got None"),
        ("dflash", {"dflash_config": {"mask_token_id": 64}}, r"mask_token_id .* in \[0, 64\), got 64"),
        ("dflash", {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 5]}}, r"must be in \[0, 5\) .* 5\]"),
        ("dflash", {"layer_types": ["linear"] * 2}, "layer_types must be 2 of full_attention and sliding_attention"),
        ("dflash", {"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        ("treeflash", {"-": ["ar_approximation.ug.bias"]}, "lacks the tensors ar_approximation.ug.bias"),
        ("treeflash", {"-": ["ar_approximation.d.weight"]}, "without it, it is a checkpoint of dflash"),
        ("treeflash", {"treeflash_config": {"ar_approximation": "gru"}}, "must be 'swiglu', got 'gru'"),
        ("treeflash", {"treeflash_config": [1]}, r"treeflash_config of config.json must be an object, got \[1\]"),
        ("dflash", {"rms_norm_eps": "x"}, "rms_norm_eps of config.json must be a number > 0, got 'x'"),
        ("dflash", {"rope_scaling": [1]}, r"rope_scaling of config.json must be an object, got \[1\]"),
        ("dflash", {"rope_theta": {"a": 1}}, "rope_theta of config.json must be a number, got {'a': 1}"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(kind: str, change: dict[str, Any], message: str, model: Any, tmp_path: Path) -> None:
    settings, tensors = published(correction=kind == "treeflash")
    for name, value in change.items():
        if name == "-":
            tensors = {key: tensor for key, tensor in tensors.items() if key not in value}
        elif isinstance(value, tuple):
            tensors[name] = random(*value, seed=1)
        else:
            settings[name] = value
    with pytest.raises(ValueError, match=message):
        load_checkpoint(write(tmp_path, settings, tensors), kind=kind, target=HFTarget(model))
