"""The tree forward of every supported family equals plain forwards of its paths, before and after commits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from adaptspec.target.hf import HFTarget, feature_rows
from adaptspec.types import DraftTree, ExtraRows
from tests.target.families import EAGER_ONLY, FAMILIES, VOCAB

TOLERANCE = 2e-4
"""Largest difference of two float32 forwards of different shapes, relative to the largest logit."""

TREE = DraftTree(np.array([5, 6, 7, 8, 9, 10, 11]), np.array([-1, -1, 0, 1, 1, 3, 2]), np.zeros(7))
PATHS = {0: [5], 1: [6], 2: [5, 7], 3: [6, 8], 4: [6, 9], 5: [6, 8, 10], 6: [5, 7, 11]}

CASES = [
    (family, attention)
    for family in FAMILIES
    for attention in ("sdpa", "eager")
    if not (family in EAGER_ONLY and attention == "sdpa")
]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(case), scope="module")
def model(request: pytest.FixtureRequest) -> Any:
    family, attention = request.param
    return FAMILIES[family](attention)


def prompt(length: int) -> torch.Tensor:
    return (torch.arange(length) * 29 + 7) % VOCAB


def plain_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def assert_close(left: torch.Tensor, right: torch.Tensor) -> None:
    assert float((left - right).abs().max()) <= TOLERANCE * float(right.abs().max().clamp_min(1.0))


@pytest.mark.parametrize("length", [3, 21])
def test_tree_equals_paths_before_and_after_commit(model: Any, length: int) -> None:
    target = HFTarget(model)
    tokens = prompt(length).tolist()
    assert_close(target.prefill(prompt(length)).logits[-1], plain_logits(model, tokens)[-1])
    root = 17
    logits = target.score(root, TREE).logits
    assert logits.shape == (8, VOCAB)
    assert_close(logits[0], plain_logits(model, [*tokens, root])[-1])
    for node, path in PATHS.items():
        assert_close(logits[node + 1], plain_logits(model, [*tokens, root, *path])[-1])
    target.commit(np.array([1, 3, 5]))  # rows that do not lie next to each other
    tokens += [root, 6, 8, 10]
    assert target.length == len(tokens)
    logits = target.score(40, TREE).logits
    for node, path in PATHS.items():
        assert_close(logits[node + 1], plain_logits(model, [*tokens, 40, *path])[-1])
    target.commit(np.array([0, 2]))  # the first child of the first child: row 1 is skipped
    tokens += [40, 5, 7]
    assert_close(target.score(50, DraftTree.empty()).logits[0], plain_logits(model, [*tokens, 50])[-1])
    target.commit(np.zeros(0, np.int64))
    assert_close(target.score(51, DraftTree.empty()).logits[0], plain_logits(model, [*tokens, 50, 51])[-1])


def test_long_decoding_crosses_windows_and_buffer_growth(model: Any) -> None:
    target = HFTarget(model)
    tokens = prompt(5).tolist()
    target.prefill(torch.tensor(tokens))
    target.cache.capacity = 5 + len(TREE) + 1  # tight, so that the next passes must grow it
    for layer in target.cache.layers:
        layer.capacity = target.cache.capacity
        layer.keys, layer.values = layer.keys[:, :, :13].clone(), layer.values[:, :, :13].clone()
    for step in range(12):
        root = (step * 11 + 3) % VOCAB
        logits = target.score(root, TREE).logits
        assert_close(logits[6], plain_logits(model, [*tokens, root, *PATHS[5]])[-1])
        path = [[], [0], [1, 4], [0, 2, 6]][step % 4]
        target.commit(np.array(path, dtype=np.int64))
        tokens += [root, *TREE.token_ids[path].tolist()]
    assert target.cache.capacity >= len(tokens)


def test_chunked_prefill_equals_one_pass(model: Any) -> None:
    whole, chunked = HFTarget(model), HFTarget(model, prefill_chunk=7)
    whole.tap((2, 4))
    chunked.tap((2, 4))
    one, many = whole.prefill(prompt(30)), chunked.prefill(prompt(30))
    assert_close(many.logits, one.logits)
    for layer in (2, 4):
        assert many.features[layer].shape == (30, 32)
        assert_close(many.features[layer], one.features[layer])
    assert_close(chunked.score(3, TREE).logits, whole.score(3, TREE).logits)


def test_taps_are_hidden_states_after_k_layers(model: Any) -> None:
    target = HFTarget(model)
    target.tap((1, 3))
    target.prefill(prompt(6))
    scored = target.score(17, TREE)
    with torch.no_grad():
        hidden = model(torch.tensor([[*prompt(6).tolist(), 17, *PATHS[5]]]), output_hidden_states=True).hidden_states
    rows = feature_rows(scored.features, np.array([1, 3, 5]))
    for layer in (1, 3):
        assert_close(rows[layer], hidden[layer][0, 6:])


def test_rollback_forgets(model: Any) -> None:
    target = HFTarget(model)
    target.prefill(prompt(9))
    before = target.score(4, TREE).logits
    target.commit(np.array([1, 3]))
    target.score(8, TREE)
    target.rollback(9)
    assert torch.equal(target.score(4, TREE).logits, before)


def test_extra_rows_change_no_node(model: Any) -> None:
    target = HFTarget(model)
    target.prefill(prompt(12))
    alone = target.score(4, TREE).logits
    target.rollback(12)
    extra = ExtraRows(
        np.array([20, 21, 22]), np.array([1, 2, 2]), np.array([[1, 0, 0], [1, 1, 0], [0, 0, 1]], dtype=bool)
    )
    scored = target.score(4, TREE, extra)
    assert_close(scored.logits, alone)
    tokens = [*prompt(12).tolist(), 4]
    assert_close(scored.extra_logits[1], plain_logits(model, [*tokens, 20, 21])[-1])
    target.commit(np.array([0, 2]))
    assert_close(target.score(9, DraftTree.empty()).logits[0], plain_logits(model, [*tokens, 5, 7, 9])[-1])


def test_the_model_is_left_as_it_was(model: Any) -> None:
    config = model.config.to_dict()
    implementation = model.config._attn_implementation
    hooks = [len(module._forward_hooks) for module in model.modules()]
    target = HFTarget(model)
    target.tap((2,))
    target.prefill(prompt(9))
    target.score(4, TREE)
    assert model.config._attn_implementation == implementation
    assert model.config.to_dict() == config
    assert [len(module._forward_hooks) for module in model.modules()] == hooks


def test_packed_attention_really_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast path is taken for grouped heads, and keys are not repeated."""
    shapes = []
    original = torch.nn.functional.scaled_dot_product_attention

    def spy(query: torch.Tensor, key: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        shapes.append((query.shape[1], query.shape[2], key.shape[1]))
        return original(query, key, *args, **options)

    target = HFTarget(FAMILIES["llama"]("sdpa"))
    target.prefill(prompt(9))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    target.score(4, TREE)
    assert shapes == [(2, 2 * 8, 2)] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_close_to_float32(dtype: torch.dtype) -> None:
    exact = HFTarget(FAMILIES["llama"]("sdpa"))
    half = HFTarget(FAMILIES["llama"]("sdpa").to(dtype))
    for target in (exact, half):
        target.prefill(prompt(9))
    left, right = exact.score(4, TREE).logits, half.score(4, TREE).logits
    assert right.dtype == dtype
    assert float((left - right.float()).abs().mean()) < 0.15 * float(left.std())


def test_what_does_not_fit_is_refused() -> None:
    from transformers import (
        BloomConfig,
        BloomForCausalLM,
        MambaConfig,
        MambaForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    with pytest.raises(ValueError, match="ALiBi"):
        HFTarget(BloomForCausalLM(BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2)))
    with pytest.raises(ValueError, match="Mamba.*(recurrent state|no key-value cache)"):
        HFTarget(MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4)))
    small = T5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match="encoder-decoder"):
        HFTarget(T5ForConditionalGeneration(small))
    with pytest.raises(TypeError, match="causal language model, got Linear"):
        HFTarget(torch.nn.Linear(2, 2))
    model = FAMILIES["llama"]("sdpa")
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="flash_attention_2.*attn_implementation='sdpa' or 'eager'"):
        HFTarget(model)


def test_linear_attention_layers_are_refused() -> None:
    model = FAMILIES["llama"]("sdpa")
    model.config.layer_types = ["full_attention", "linear_attention", "full_attention", "full_attention"]
    with pytest.raises(ValueError, match="linear_attention"):
        HFTarget(model)


def test_an_unknown_family_is_probed_and_a_wrong_one_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    good = FAMILIES["llama"]("sdpa")
    good.config.model_type = "never-heard-of"
    HFTarget(good)

    bad = FAMILIES["llama"]("sdpa")
    bad.config.model_type = "never-heard-of"
    rotary = bad.model.rotary_emb.forward

    def by_row(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        first = position_ids.min()
        return rotary(x, torch.arange(position_ids.shape[1])[None] + first)  # ignores tree positions

    monkeypatch.setattr(bad.model.rotary_emb, "forward", by_row)
    with pytest.raises(ValueError, match="gives other logits for a tree than for its paths"):
        HFTarget(bad)


def test_misuse_names_the_value() -> None:
    target = HFTarget(FAMILIES["llama"]("sdpa"))
    with pytest.raises(RuntimeError, match="call prefill first"):
        target.score(1, TREE)
    with pytest.raises(ValueError, match="must not be empty"):
        target.prefill(torch.zeros(0, dtype=torch.long))
    with pytest.raises(ValueError, match="has 257 tokens, the model's context holds 256"):
        target.prefill(prompt(257))
    with pytest.raises(ValueError, match=r"tap must be in \[1, 4\], got 5"):
        target.tap((5,))
    target.prefill(prompt(4))
    with pytest.raises(ValueError, match=r"length must be in \[0, 4\], got 9"):
        target.rollback(9)
    with pytest.raises(ValueError, match="prefill_chunk must be >= 1, got 0"):
        HFTarget(target.model, prefill_chunk=0)
