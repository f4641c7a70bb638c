"""Targets whose draft rows attend through the kernel score like targets with eager attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from adaptspec.kernels.backend import VARIABLE, calls
from adaptspec.target import graphed
from adaptspec.target.graphs import Outputs
from adaptspec.target.hf import HFTarget
from adaptspec.target.layout import decoder_layers
from adaptspec.target.tree_kernel import TREE_KERNEL, tree_forward, tree_kernel_attention
from adaptspec.types import DraftTree, ExtraRows
from tests.target.families import FAMILIES, VOCAB

TOLERANCE = 2e-5
"""Largest difference of the logits relative to the largest: float32 sums in another order, through two layers."""

TREE = DraftTree(np.array([5, 6, 7, 8, 9]), np.array([-1, -1, 0, 1, 3]), np.zeros(5))
PROMPT = (torch.arange(9) * 29 + 7) % VOCAB
LAYERS = 2


def shorten(model: Any) -> Any:
    """Keep the first layers only: the interpreter is slow."""
    backbone, attribute = decoder_layers(model)
    setattr(backbone, attribute, getattr(backbone, attribute)[:LAYERS])
    model.config.num_hidden_layers = LAYERS
    return model


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[..., HFTarget]:
    """A target of a family with the kernels, or with eager attention and without them."""

    def target(family: str, *, kernels: bool) -> HFTarget:
        monkeypatch.setenv(VARIABLE, "triton" if kernels else "reference")
        return HFTarget(shorten(FAMILIES[family]("sdpa" if kernels else "eager")))

    return target


def run(target: HFTarget) -> list[torch.Tensor]:
    """A prompt, two steps with trees and one without."""
    logits = [target.prefill(PROMPT).logits]
    logits.append(target.score(17, TREE).logits.clone())  # those of a graph are valid until the next pass
    target.commit(np.array([1, 3, 4]))
    logits.append(target.score(40, TREE).logits.clone())
    target.commit(np.array([0]))
    logits.append(target.score(41, DraftTree.empty()).logits)
    return logits


def assert_close(left: torch.Tensor, right: torch.Tensor) -> None:
    assert float((left - right).abs().max()) <= TOLERANCE * float(right.abs().max())


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gpt2"])
def test_scores_equal_eager_attention(
    build: Callable[..., HFTarget], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "adaptspec.target.hf.MOST_ROWS", len(PROMPT) - 1
    )  # the prompt takes the usual way, to save time
    eager = run(build(family, kernels=False))
    calls.clear()
    for left, right in zip(run(build(family, kernels=True)), eager, strict=True):
        assert_close(left, right)
    assert calls == {("tree_attention", "triton"): 3 * LAYERS, ("kv_compact", "triton"): 1}


def test_passes_as_graphs_take_them(build: Callable[..., HFTarget], monkeypatch: pytest.MonkeyPatch) -> None:
    """Static inputs, a cache that does not move, padded rows, the used length read by the kernel."""
    monkeypatch.setattr(graphed, "NODE_TIERS", (0, 7))
    monkeypatch.setattr(graphed, "FIRST_CAPACITY", 40)
    monkeypatch.setattr(graphed, "ROOM", 20)
    monkeypatch.setattr("adaptspec.target.hf.MOST_ROWS", len(PROMPT) - 1)
    eager = run(build("llama", kernels=False))
    model = build("llama", kernels=True).model
    target = HFTarget(model, graphs=Eager())
    calls.clear()
    for left, right in zip(run(target), eager, strict=True):
        assert_close(left, right)
    assert calls == {("tree_attention", "triton"): 5 * LAYERS, ("kv_compact", "triton"): 1}
    assert asdict(target.graph_counts) == {"captured": 2, "evicted": 0, "invalidated": 0, "replayed": 3, "plain": 0}


class Eager:
    """Stands for CUDA graphs: runs again, and the results lie where they lay."""

    available = True

    def capture(self, run: Callable[[], Outputs]) -> Eager:
        graph = Eager()
        graph.run, graph.outputs = run, {name: values.clone() for name, values in run().items()}
        return graph

    def replay(self) -> Outputs:
        for name, values in self.run().items():
            self.outputs[name].copy_(values)
        return self.outputs


def test_rows_run_one_forward_after_the_other(build: Callable[..., HFTarget]) -> None:
    """Drafters run a tree depth by depth: later rows see rows of earlier forwards, which lie behind the prefix."""
    results = []
    for kernels in (False, True):
        target = build("llama", kernels=kernels)
        target.prefill(PROMPT)
        target.run_rows(np.array([3, 4]), np.array([0, 0]), np.eye(2, dtype=bool))
        visible = np.array([[True, False, True, False], [False, True, False, True]])
        results.append(target.run_rows(np.array([5, 6]), np.array([1, 1]), visible))
        target.keep(np.array([1, 3]))
        results.append(target.score(9, DraftTree.empty()).logits)
    assert_close(results[2], results[0])
    assert_close(results[3], results[1])


def test_extra_rows(build: Callable[..., HFTarget]) -> None:
    extra = ExtraRows(np.array([20, 21]), np.array([1, 2]), np.array([[True, False], [True, True]]))
    results = []
    for kernels in (False, True):
        target = build("llama", kernels=kernels)
        target.prefill(PROMPT)
        results.append(target.score(4, TREE, extra))
    assert_close(results[1].logits, results[0].logits)
    assert_close(results[1].extra_logits, results[0].extra_logits)


@pytest.mark.parametrize("family", ["mistral-window", "qwen2-mixed-window", "gemma3"])
def test_sliding_windows_keep_their_masks(build: Callable[..., HFTarget], family: str) -> None:
    eager = run(build(family, kernels=False))
    calls.clear()
    for left, right in zip(run(build(family, kernels=True)), eager, strict=True):
        assert_close(left, right)
    assert calls == {("kv_compact", "triton"): 1}


def test_eager_attention_and_long_chunks_are_left_alone(
    build: Callable[..., HFTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adaptspec.target.hf.MOST_ROWS", 8)
    target = build("llama", kernels=True)
    calls.clear()
    target.prefill(PROMPT)
    HFTarget(FAMILIES["llama"]("eager")).prefill(PROMPT)
    assert not calls


def test_what_the_kernel_does_not_know_is_never_ignored(build: Callable[..., HFTarget]) -> None:
    model = build("llama", kernels=True).model
    attention = model.model.layers[0].self_attn
    rows = {name: torch.zeros(1, 2, 1, 8) for name in ("query", "key", "value")}

    def call(**options: Any) -> None:
        tree_kernel_attention(attention, **rows, **{"attention_mask": None, **options})

    with pytest.raises(RuntimeError, match="outside tree_forward, by LlamaAttention"):
        call()
    with tree_forward(model, length=0, visible=np.ones((1, 1), dtype=bool)):
        call()
        for options in ({"sliding_window": 4}, {"s_aux": torch.zeros(2)}):
            with pytest.raises(RuntimeError, match=f"called with {next(iter(options))}"):
                call(**options)
        for options in ({"dropout": 0.1}, {"attention_mask": torch.zeros(1, 1, 1, 1)}):
            with pytest.raises(RuntimeError, match="a mask or dropout"):
                call(**options)
    with (
        pytest.raises(RuntimeError, match="does not ask the attention interface"),
        tree_forward(model, length=0, visible=np.ones((1, 1), dtype=bool)),
    ):
        assert model.config._attn_implementation == TREE_KERNEL
    assert model.config._attn_implementation == "sdpa"
