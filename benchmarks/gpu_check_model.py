"""A random Llama of 1B shape: graphs of all tiers beside plain forwards, and generations beside no speculation."""

from __future__ import annotations

import gc
from time import perf_counter
from typing import Any

import numpy as np
import torch

from adaptspec import AdaptiveSpec
from adaptspec.kernels.backend import calls
from adaptspec.target.graphs import Capture, GraphTiers, Outputs, TreeRows
from adaptspec.target.hf import HFTarget, tree_rows
from adaptspec.target.static_forward import FixedCache, StaticForward
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
    """Per tier: seconds to capture, microseconds to replay, of a plain forward of as many rows, and the difference of
    their logits; and what changing the graph at every pass costs on top."""
    dtype = setting.pick(torch.bfloat16, torch.float32)
    model = make_model(setting, dtype)
    target = HFTarget(model)
    length = setting.pick(1024, 20)
    prompt = torch.arange(length, device=setting.device) * 37 % target.vocab_size
    target.prefill(prompt)
    cache = FixedCache(len(target.layout.layers), setting.pick(2048, 200))
    assert target.cache is not None
    cache.start(target.cache, length)
    tiers = GraphTiers(lambda tier: StaticForward(model, target.layout, cache, rows=tier.nodes + 1), capture=capture)
    vocab_size = target.vocab_size
    lines, most = [], 0.0
    for nodes in tiers.node_tiers:
        tree = some_tree(max(nodes - 1, 0), vocab_size, seed=nodes)  # one row of padding, where there is room
        rows = TreeRows(*tree_rows(1, tree), length)

        def graph(rows: TreeRows = rows) -> Outputs:
            return tiers.run(rows, vocab_size=vocab_size, plain=lambda: {})

        def plain(tree: DraftTree = tree) -> torch.Tensor:
            target.rollback(length)
            return target.score(1, tree).logits

        started = perf_counter()
        found = graph()["logits"].float().clone()
        setting.synchronize()
        seconds = perf_counter() - started
        wanted = plain().float()
        difference = float((found - wanted).abs().max() / wanted.std())
        most = max(most, difference)
        lines.append(
            {
                "nodes": nodes,
                "capture_seconds": seconds,
                "graph_us": setting.wall_microseconds(graph),
                "plain_us": setting.wall_microseconds(plain),
                "difference": difference,
            }
        )
    captured = tiers.counts.captured
    switch = _switch_cost(setting, tiers, vocab_size, length)
    return {
        "ok": most < GRAPH_TOLERANCE[dtype] and tiers.counts.captured == captured == len(tiers.node_tiers),
        "tiers": lines,
        **switch,
        "captured": tiers.counts.captured,
    }


def _switch_cost(setting: Setting, tiers: GraphTiers, vocab_size: int, length: int) -> dict[str, float]:
    """Two tiers ten times each, in blocks and in turns."""
    small, large = (
        TreeRows(*tree_rows(1, some_tree(nodes, vocab_size, seed=1)), length) for nodes in (4, tiers.node_tiers[-1])
    )

    def passes(order: list[TreeRows]) -> None:
        for rows in order:
            tiers.run(rows, vocab_size=vocab_size, plain=lambda: {})

    blocks = setting.wall_microseconds(lambda: passes([small] * 10 + [large] * 10)) / 20
    turns = setting.wall_microseconds(lambda: passes([small, large] * 10)) / 20
    return {"pass_in_blocks_us": blocks, "pass_in_turns_us": turns, "switch_us": turns - blocks}


def check_generation(setting: Setting) -> dict[str, Any]:
    """AdaptiveSpec beside no speculation: in float32 tokens have to be identical; in bf16 a forward of several rows
    rounds otherwise than one of a single row, so there the first difference is reported."""
    result: dict[str, Any] = {"ok": True}
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model(setting, dtype)
        line = _generate(setting, model)
        if dtype == torch.float32:
            result["ok"] = line["identical"]
        result[str(dtype).removeprefix("torch.")] = line
        del model
        gc.collect()
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()
    return result


def _generate(setting: Setting, model: Any) -> dict[str, Any]:
    tokens = setting.pick(192, 24)
    vocab_size = model.config.vocab_size
    prompt = (torch.arange(setting.pick(256, 16), device=setting.device) * 37 % vocab_size)[None]
    before = dict(calls)
    sequences, speeds, line = {}, {}, {}
    for name, strategy in (("ar", "fixed:ar"), ("adaptive", "hedge")):
        spec = AdaptiveSpec(["suffix", "token-recycling"], strategy, budgets=(8, 32), seed=0)
        spec.generate(model, prompt, max_new_tokens=8)  # compiles kernels
        result = spec.generate(model, prompt, max_new_tokens=tokens)
        sequences[name] = result.sequences[0, prompt.shape[1] :].tolist()
        speeds[name] = result.stats.tokens_per_second
        line[f"{name}_tokens_per_second"] = speeds[name]
        line[f"{name}_mean_accepted_length"] = result.stats.mean_accepted_length
    differ = [i for i, (a, b) in enumerate(zip(sequences["ar"], sequences["adaptive"], strict=False)) if a != b]
    line["identical"] = sequences["ar"] == sequences["adaptive"]
    line["first_difference"] = differ[0] if differ else None
    line["speedup"] = speeds["adaptive"] / speeds["ar"]
    line["kernel_calls"] = {
        f"{op} {backend}": count - before.get((op, backend), 0) for (op, backend), count in calls.items()
    }
    return line
