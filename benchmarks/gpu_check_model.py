"""A random Llama of 1B shape: graphs of all tiers beside plain forwards, and generations beside no speculation."""

from __future__ import annotations

import gc
import os
from dataclasses import asdict
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch

from adaptspec import AdaptiveSpec
from adaptspec.kernels.backend import calls
from adaptspec.target.graphed import VARIABLE, release_graphs
from adaptspec.target.graphs import NODE_TIERS, Capture
from adaptspec.target.hf import HFTarget
from adaptspec.types import DraftTree
from benchmarks.gpu_check_setting import Setting, random_parents

GRAPH_TOLERANCE = {torch.bfloat16: 0.1, torch.float32: 1e-3}
"""Largest difference of logits relative to their spread; in bf16 every layer rounds, and rows of another number take
other matrix kernels."""


def make_model(setting: Setting, dtype: torch.dtype) -> Any:
    """Llama 3.2 1B with random weights, or a tiny one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=setting.pick(128256, 128),
        hidden_size=setting.pick(2048, 32),
        intermediate_size=setting.pick(8192, 64),
        num_hidden_layers=setting.pick(16, 2),
        num_attention_heads=setting.pick(32, 4),
        num_key_value_heads=setting.pick(8, 2),
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = LlamaForCausalLM(config).to(dtype).eval()
    return model


def some_tree(nodes: int, vocab_size: int, seed: int) -> DraftTree:
    rng = np.random.default_rng(seed)
    return DraftTree(rng.integers(0, vocab_size, nodes), random_parents(rng, nodes), np.zeros(nodes))


def check_graphs(setting: Setting, *, capture: Capture | None = None) -> dict[str, Any]:
    """Seconds to capture all tiers; per tier microseconds of scoring a tree with graphs and without, and the difference
    of their logits; and what changing the graph at every pass costs on top."""
    dtype = setting.pick(torch.bfloat16, torch.float32)
    model = make_model(setting, dtype)
    target, plain = HFTarget(model, graphs=True if capture is None else capture), HFTarget(model, graphs=False)
    length = setting.pick(1024, 20)
    prompt = torch.arange(length, device=setting.device) * 37 % target.vocab_size
    prefill_seconds = []
    for _ in range(2):  # the first one captures
        started = perf_counter()
        target.prefill(prompt)
        setting.synchronize()
        prefill_seconds.append(perf_counter() - started)
    plain.prefill(prompt)
    lines, most = [], 0.0
    for nodes in NODE_TIERS:
        tree = some_tree(max(nodes - 1, 0), target.vocab_size, seed=nodes)  # one row of padding, where there is room
        found, wanted = (_score(one, tree).float().clone() for one in (target, plain))
        difference = float((found - wanted).abs().max() / wanted.std())
        most = max(most, difference)
        lines.append(
            {
                "nodes": nodes,
                "graph_us": setting.wall_microseconds(partial(_score, target, tree)),
                "plain_us": setting.wall_microseconds(partial(_score, plain, tree)),
                "difference": difference,
            }
        )
    switch = _switch_cost(setting, target)
    counts = target.graph_counts
    assert counts is not None
    return {
        "ok": most < GRAPH_TOLERANCE[dtype] and counts.captured == len(NODE_TIERS) and counts.plain == 0,
        "tiers": lines,
        "capture_seconds": prefill_seconds[0] - prefill_seconds[1],
        **switch,
        **asdict(counts),
    }


def _score(target: HFTarget, tree: DraftTree) -> torch.Tensor:
    """The same pass each time."""
    target.rollback(target.length)
    return target.score(1, tree).logits


def _switch_cost(setting: Setting, target: HFTarget) -> dict[str, float]:
    """Two tiers ten times each, in blocks and in turns."""
    small, large = (some_tree(nodes, target.vocab_size, seed=1) for nodes in (4, NODE_TIERS[-1]))

    def passes(order: list[DraftTree]) -> None:
        for tree in order:
            _score(target, tree)

    blocks = setting.wall_microseconds(lambda: passes([small] * 10 + [large] * 10)) / 20
    turns = setting.wall_microseconds(lambda: passes([small, large] * 10)) / 20
    return {"pass_in_blocks_us": blocks, "pass_in_turns_us": turns, "switch_us": turns - blocks}


def check_generation(setting: Setting) -> dict[str, Any]:
    """AdaptiveSpec beside no speculation, with graphs and without: in float32 tokens have to be identical, and every
    pass must have been replayed; in bf16 a forward of several rows rounds otherwise than one of a single row, so there
    the first difference is reported."""
    result: dict[str, Any] = {"ok": True}
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model(setting, dtype)
        line = _generate(setting, model)
        if dtype == torch.float32:
            result["ok"] = line["identical"] and line["without_graphs"]["identical"]
        replayed = line["graphs"] is not None and line["graphs"]["replayed"] > line["graphs"]["plain"] == 0
        result["ok"] &= replayed or setting.device.type != "cuda"
        result[str(dtype).removeprefix("torch.")] = line
        release_graphs(model)
        del model
        gc.collect()
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()
    return result


def _generate(setting: Setting, model: Any) -> dict[str, Any]:
    """Both ways; "graphs" says what graphs did in the one that uses them, None where they are off."""
    line, tokens = _compare(setting, model, reference=None)
    counts = HFTarget(model).graph_counts
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "off"
    try:
        line["without_graphs"], _ = _compare(setting, model, reference=tokens)
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before
    line["graphs"] = None if counts is None else asdict(counts)
    return line


def _compare(setting: Setting, model: Any, *, reference: list[int] | None) -> tuple[dict[str, Any], list[int]]:
    """One line of results, and the tokens without speculation; both are compared with `reference` if that is given."""
    count = setting.pick(192, 24)
    vocab_size = model.config.vocab_size
    prompt = (torch.arange(setting.pick(256, 16), device=setting.device) * 37 % vocab_size)[None]
    before = dict(calls)
    sequences, line = {}, {}
    for name, strategy in (("ar", "fixed:ar"), ("adaptive", "hedge")):
        spec = AdaptiveSpec(["suffix", "token-recycling"], strategy, budgets=(8, 32), seed=0)
        spec.generate(model, prompt, max_new_tokens=8)  # compiles kernels, captures graphs
        result = spec.generate(model, prompt, max_new_tokens=count)
        sequences[name] = result.sequences[0, prompt.shape[1] :].tolist()
        line[f"{name}_tokens_per_second"] = result.stats.tokens_per_second
        line[f"{name}_mean_accepted_length"] = result.stats.mean_accepted_length
    wanted = sequences["ar"] if reference is None else reference
    differ = [i for found in sequences.values() for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b]
    line["identical"] = all(found == wanted for found in sequences.values())
    line["first_difference"] = min(differ, default=None)
    line["speedup"] = line["adaptive_tokens_per_second"] / line["ar_tokens_per_second"]
    line["kernel_calls"] = {
        f"{op} {backend}": count - before.get((op, backend), 0) for (op, backend), count in calls.items()
    }
    return line, sequences["ar"]
