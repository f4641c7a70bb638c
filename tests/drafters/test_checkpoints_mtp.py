"""Prediction layers of published models: loaded, they compute what transformers' own layers compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from adaptspec import AdaptiveSpec
from adaptspec.drafters import make_drafter
from adaptspec.drafters.cells import Cell, CellCache
from adaptspec.drafters.checkpoints import load_checkpoint
from adaptspec.target.hf import HFTarget
from tests import tiny_models
from tests.drafters import published_mtp
from tests.drafters.published_mtp import HIDDEN, PUBLISHED, VOCAB, Published

LENGTH = 9


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return HFTarget(tiny_models.make_llama(vocab_size=VOCAB, layers=4))


def inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    embeddings, hidden = torch.randn((2, 2, LENGTH, HIDDEN), generator=generator)
    return embeddings, hidden, torch.arange(LENGTH).expand(2, -1)


def load(published: Published, folder: Path, target: HFTarget, **options: Any) -> tuple[Cell, Any]:
    cell, extras = load_checkpoint(published.save(folder, **options), kind="mtp", target=target)
    assert isinstance(cell, Cell)
    return cell.eval(), extras


@pytest.mark.parametrize("name", sorted(PUBLISHED))
@torch.no_grad()
def test_layers_compute_what_the_model_computes(name: str, target: HFTarget, tmp_path: Path) -> None:
    published = PUBLISHED[name]()
    cell, extras = load(published, tmp_path, target, shards=1 + len(name) % 2)
    assert cell.config.num_layers == len(published.layers)
    assert cell.config.taps == (4,) and cell.config.final_norm == (name != "step-3.5")
    embeddings, hidden, positions = inputs()
    for step in range(len(published.layers)):
        expected = published.expected(embeddings, hidden, positions, step)
        got = cell(embeddings, hidden, positions=positions, step=step)
        for mine, theirs in zip(got, expected, strict=True):
            assert torch.allclose(mine, theirs, atol=1e-4)
        hidden = expected[1]
    last = cell(embeddings, hidden, positions=positions, step=len(published.layers) - 1)
    assert torch.equal(last[0], cell(embeddings, hidden, positions=positions, step=9)[0])
    assert extras.head is None and extras.embeddings is None
    assert len(extras.heads) == (2 if name == "step-3.5" else 0)


@pytest.mark.parametrize("name", ["deepseek-v3", "mimo-v2-flash", "qwen3.5"])
@torch.no_grad()
def test_rows_behind_a_cache_and_in_a_tree(name: str, target: HFTarget, tmp_path: Path) -> None:
    """The last rows, run as siblings of a tree behind cached ones, are what plain sequences give."""
    published = PUBLISHED[name]()
    cell, _ = load(published, tmp_path, target)
    embeddings, hidden, positions = (x[:1] for x in inputs(3))
    cache = CellCache(cell.config.num_layers)
    cell(embeddings[:, :6], hidden[:, :6], positions=positions[:, :6], cache=cache)
    # Rows 6 and 7 follow row 5 both, row 8 follows row 7.
    depths = torch.tensor([[6, 6, 7]])
    visible = torch.ones((1, 1, 3, 9), dtype=torch.bool)
    visible[0, 0, :, 6:] = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 1, 1]]).bool()
    got, _ = cell(embeddings[:, 6:], hidden[:, 6:], positions=depths, mask=visible, cache=cache)
    additive = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    cache.truncate(6)
    again, _ = cell(embeddings[:, 6:], hidden[:, 6:], positions=depths, mask=additive, cache=cache)
    assert torch.allclose(got, again, atol=1e-5)
    for row, path in enumerate(([6], [7], [7, 8])):
        rows = [*range(6), *path]
        expected, _ = published.expected(embeddings[:, rows], hidden[:, rows], positions[:, : len(rows)], 0)
        assert torch.allclose(got[:, row], expected[:, -1], atol=1e-4)


@pytest.mark.parametrize(("name", "drafter"), [("deepseek-v3", "mtp1"), ("mimo-v2-flash", "mtp3")])
def test_published_layers_draft(name: str, drafter: str, target: HFTarget, tmp_path: Path) -> None:
    PUBLISHED[name]().save(tmp_path)
    ids = torch.tensor([[3, 9, 4, 17, 5, 6, 30, 2, 8]])
    expected = target.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16)
    spec = AdaptiveSpec([make_drafter(f"{drafter}:{tmp_path}")], f"fixed:{drafter}@8")
    result = spec.generate(target.model, ids, max_new_tokens=16)
    assert torch.equal(result.sequences, expected)
    assert result.stats.set_aside == {} and sum(record.drafted for record in result.trace) > 0


def test_eight_bit_tensors_with_block_scales(target: HFTarget, tmp_path: Path) -> None:
    published = published_mtp.deepseek_v3()
    name = "model.layers.61.mlp.experts.3.up_proj.weight"
    scale = torch.tensor([[0.02]])
    packed = (published.tensors[name] / scale).to(torch.float8_e4m3fn)
    published.tensors[name] = packed
    published.tensors[f"{name}_scale_inv"] = scale
    cell, _ = load(published, tmp_path, target)
    rows = cell.layers[0].block.mlp.gate_up_proj[3, 10:]
    assert torch.equal(rows, packed.float() * 0.02)
    del published.tensors[f"{name}_scale_inv"]
    with pytest.raises(ValueError, match=r"up_proj\.weight is torch\.float8_e4m3fn and .*_scale_inv is missing"):
        load(published, tmp_path, target)


def test_dequantising_is_by_blocks() -> None:
    from adaptspec.drafters.checkpoints.reader import _dequantised

    packed = torch.ones(130, 260).to(torch.float8_e4m3fn)
    whole = _dequantised(packed, torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    assert whole[0, 127] == 1.0 and whole[0, 128] == 2.0 and whole[127, 259] == 3.0 and whole[129, 0] == 4.0
    with pytest.raises(ValueError, match=r"scales per 128 by 128 block, \[2, 3\], got \[2, 2\]"):
        _dequantised(packed, torch.ones(2, 2))


def test_mimo_7b_takes_the_hidden_state_first(target: HFTarget, tmp_path: Path) -> None:
    """The same layer under the older names, with the projection's halves exchanged."""
    published = PUBLISHED["mimo-v2-flash"]()
    published.config["model_type"] = "mimo"
    published.config |= {k.removeprefix("swa_"): v for k, v in published.config.items() if k.startswith("swa_")}
    del published.config["sliding_window_size"]
    published.config["sliding_window"] = None
    renamed = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj"}
    tensors = {}
    for name, value in published.tensors.items():
        if not name.startswith("model.mtp.layers.0."):
            continue
        below = name.removeprefix("model.mtp.layers.0.").replace("pre_mlp_layernorm", "post_attention_layernorm")
        first = below.split(".")[0]
        if first == "eh_proj":
            value = torch.cat(value.chunk(2, dim=1)[::-1], dim=1)
        tensors[f"model.mtp_layers.0.{below.replace(first, renamed.get(first, first))}"] = value
    expected = published.expected(*(x[:, :5] for x in inputs()), 0)[0]  # within the window
    published.tensors = tensors
    cell, extras = load(published, tmp_path, target)
    assert extras.layout == "mtp mimo"
    got, _ = cell(*(x[:, :5] for x in inputs()[:2]), positions=inputs()[2][:, :5])
    assert torch.allclose(got, expected, atol=1e-4)


def test_a_head_that_repeats_the_targets_is_not_kept(target: HFTarget, tmp_path: Path) -> None:
    published = published_mtp.glm4_moe()
    weight = target.model.get_output_embeddings().weight.detach()
    for part in ("shared_head.head", "embed_tokens"):
        published.tensors[f"model.layers.92.{part}.weight"] = weight.to(torch.bfloat16)
    _, extras = load(published, tmp_path, target)
    assert extras.head is None and extras.embeddings is None
    published.tensors["model.layers.92.shared_head.head.weight"] = weight + 1.0
    _, extras = load(published, tmp_path, target)
    assert torch.equal(extras.head, weight + 1.0)


def test_checkpoints_that_cannot_be_used_are_refused_with_names(target: HFTarget, tmp_path: Path) -> None:
    def refused(published: Published, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            load(published, tmp_path, target)

    nothing = published_mtp.glm4_moe()
    nothing.tensors = {"model.layers.0.self_attn.q_proj.weight": torch.zeros(2, 2)}
    refused(nothing, r"has no multi-token prediction layers; looked for layers.*eh_proj.*mtp.fc.weight")
    missing = published_mtp.deepseek_v3()
    del (
        missing.tensors["model.layers.61.mlp.experts.5.down_proj.weight"],
        missing.tensors["model.layers.61.hnorm.weight"],
    )
    refused(missing, r"lacks the tensors model\.layers\.61\.hnorm\.weight")
    missing.tensors["model.layers.61.hnorm.weight"] = torch.ones(HIDDEN)
    refused(missing, r"lacks the tensors model\.layers\.61\.mlp\.experts\.5\.down_proj\.weight")
    shaped = published_mtp.glm4_moe()
    shaped.tensors["model.layers.92.eh_proj.weight"] = torch.zeros(HIDDEN, HIDDEN)
    refused(shaped, r"eh_proj\.weight \[32, 32\] instead of \[32, 64\]")
    more = published_mtp.glm4_moe()
    more.tensors["model.layers.92.self_attn.k_bias_proj.weight"] = torch.zeros(2)
    refused(more, r"tensors that the nextn layout does not know: .*k_bias_proj")
    packed = published_mtp.mimo_v2_flash(1)
    packed.tensors["model.mtp.layers.0.self_attn.qkv_proj.weight"] = torch.zeros(2)
    refused(packed, "packs queries, keys and values")
    wide = published_mtp.glm4_moe()
    wide.config["hidden_size"] = 64
    refused(wide, "was made for hidden size 64, the target has 32: another model")
    other = published_mtp.step_3_5()
    other.tensors["model.layers.1.shared_head.head.weight"] = torch.zeros(VOCAB + 1, HIDDEN)
    refused(other, "has 65 rows, the target's vocabulary 64: another model")
    linear = published_mtp.glm4_moe()
    linear.tensors = {name: v for name, v in linear.tensors.items() if "self_attn" not in name}
    refused(linear, "supported are grouped and latent attention")
    acted = published_mtp.glm4_moe()
    acted.config["hidden_act"] = "gelu"
    refused(acted, "hidden_act must be silu, got 'gelu'")
