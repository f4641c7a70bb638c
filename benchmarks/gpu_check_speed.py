"""Speed of the four ops beside what plain torch takes for the same, and their share of the memory's bandwidth."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from adaptspec.kernels import verify_tree
from adaptspec.kernels.backend import VARIABLE
from adaptspec.kernels.dense_rows import DenseRows
from adaptspec.kernels.kv_compact import kv_compact
from adaptspec.kernels.tree_attention import pack_ancestors, tree_attention
from adaptspec.kernels.vocab_head import vocab_head
from adaptspec.types import DraftTree
from adaptspec.verify import verify_deterministic, verify_token_wise
from benchmarks.gpu_check_setting import Setting, random_parents, visibility

Line = dict[str, Any]


def check_speed(setting: Setting) -> dict[str, Any]:
    """{"ok", "lines": [...]}, one line per op and shape; all times in microseconds.

    `cold_us`: emptied caches; `graph_us`: warm caches, in a CUDA graph; `torch_us`: plain torch, emptied caches;
    `share_of_peak`: bytes that have to move, over `cold_us`, over the peak bandwidth.
    """
    lines = [line for part in (attention_lines, head_lines, verify_lines, compact_lines) for line in part(setting)]
    return {"ok": True, "lines": lines}


def _line(
    setting: Setting,
    op: str,
    shape: str,
    *,
    call: Callable[[], Any],
    baseline: Callable[[], Any] | None,
    bytes_moved: int | None,
) -> Line:
    line: Line = {"op": op, "shape": shape, "cold_us": setting.cold_microseconds(call)}
    line["graph_us"] = setting.graph_microseconds(call)
    if baseline is not None:
        line["torch_us"] = setting.cold_microseconds(baseline)
        line["times_torch"] = line["torch_us"] / line["cold_us"]
    if bytes_moved is not None:
        line["gigabytes_per_second"] = 1e-9 * bytes_moved / (1e-6 * line["cold_us"])
        line["share_of_peak"] = 1e9 * line["gigabytes_per_second"] / setting.peak
    return line


def attention_lines(setting: Setting) -> Iterator[Line]:
    """One sequence, 8 key-value heads of 4 query heads; beside `scaled_dot_product_attention` with a mask."""
    heads, group, size, dtype = 8, 4, 128, torch.bfloat16
    for nodes, prefix in setting.pick([(0, 4096), (16, 4096), (63, 4096), (63, 16384)], [(0, 8), (3, 8)]):
        rows = nodes + 1
        visible = visibility(random_parents(np.random.default_rng(0), nodes))
        query = setting.normal(1, heads * group, rows, size, seed=1, dtype=dtype)
        keys, values = (setting.normal(1, heads, prefix + rows, size, seed=seed, dtype=dtype) for seed in (2, 3))
        lengths = torch.full((1,), prefix, device=setting.device)
        ancestors = setting.to_device(pack_ancestors(visible[None]))
        mask = torch.zeros((rows, prefix + rows), dtype=dtype, device=setting.device)
        mask[:, prefix:].masked_fill_(~setting.to_device(visible), torch.finfo(dtype).min)
        mask = mask.repeat(group, 1)[None, None]
        packed = query.view(1, heads, group, rows, size).flatten(2, 3)

        def call(arguments: tuple[Any, ...] = (query, keys, values, lengths, ancestors, prefix)) -> torch.Tensor:
            query, keys, values, lengths, ancestors, prefix = arguments
            return tree_attention(
                query,
                keys[:, :, :prefix],
                values[:, :, :prefix],
                keys[:, :, prefix:],
                values[:, :, prefix:],
                lengths=lengths,
                ancestors=ancestors,
                scale=size**-0.5,
                backend=setting.backend,
            )

        def baseline(arguments: tuple[Any, ...] = (packed, keys, values, mask)) -> torch.Tensor:
            packed, keys, values, mask = arguments
            return torch.nn.functional.scaled_dot_product_attention(packed, keys, values, attn_mask=mask)

        yield _line(
            setting,
            "tree_attention",
            f"{rows} rows, {prefix} tokens of prefix, {heads}x{group} heads of {size}, bf16",
            call=call,
            baseline=baseline,
            bytes_moved=2 * size * (2 * heads * (prefix + rows) + 2 * heads * group * rows),
        )


def head_lines(setting: Setting) -> Iterator[Line]:
    """A head of 128,256 rows of 4,096, whole, by indices and gathered; beside (gather,) product, topk and logsumexp."""
    vocab_size, size, k = setting.pick(128256, 300), setting.pick(4096, 32), 8
    weight = setting.normal(vocab_size, size, seed=1, dtype=torch.bfloat16)
    order = np.random.default_rng(2).permutation(vocab_size).astype(np.int32)
    width = setting.pick(16384, 100)
    ids = setting.to_device(order[:width])
    rows = weight[ids.long()]
    for count in setting.pick((1, 8, 64), (1, 2)):
        hidden = setting.normal(count, size, seed=3, dtype=torch.bfloat16)
        modes = {"ids": (weight, ids, False), "gathered": (rows, ids, True), "full": (weight, None, False)}
        for mode, (matrix, some, gathered) in modes.items():
            used = vocab_size if some is None else width

            def call(arguments: tuple[Any, ...] = (hidden, matrix, some, gathered)) -> Any:
                hidden, matrix, some, gathered = arguments
                return vocab_head(hidden, matrix, some, k=k, gathered=gathered, backend=setting.backend)

            def baseline(arguments: tuple[Any, ...] = (hidden, matrix, some, gathered)) -> Any:
                hidden, matrix, some, gathered = arguments
                logits = (hidden @ (matrix if some is None or gathered else matrix[some]).T).float()
                return logits.topk(k), logits.logsumexp(-1)

            yield _line(
                setting,
                "vocab_head",
                f"{count} hidden states of {size} bf16, {used} rows ({mode})",
                call=call,
                baseline=baseline,
                bytes_moved=2 * size * (used + count) + (4 * used if some is not None else 0),
            )
    dense = DenseRows(weight, order[:width], capacity=width)
    sets = [order[:width].copy(), order[:width].copy()]
    changed = setting.pick(64, 8)
    sets[1][:changed] = order[width : width + changed]

    def update() -> None:
        sets.reverse()
        assert dense.update(sets[0]) == changed

    yield {"op": "vocab_head", "shape": f"update of {changed} rows", "wall_us": setting.wall_microseconds(update)}


def verify_lines(setting: Setting) -> Iterator[Line]:
    """A tree of 64 nodes and a drawn chain of 8 at 128,256 tokens: the kernels alone, and the whole verifier with its
    transfers beside the ordinary one, which asks the device row by row."""
    vocab_size = setting.pick(128256, 50)
    rng = np.random.default_rng(0)
    for rule, nodes in (("target walk", setting.pick(64, 5)), ("chain", setting.pick(8, 3))):
        likely = rng.permutation(vocab_size)[:3]
        scores = setting.normal(nodes + 1, vocab_size, seed=1)
        scores[:, setting.to_device(likely)] += 14.0
        probs = torch.softmax(scores, dim=-1)
        draft = torch.softmax(scores[:nodes] + 0.3 * setting.normal(nodes, vocab_size, seed=2), dim=-1)
        token_ids = rng.choice(likely, nodes)
        uniforms = setting.to_device(rng.random((1, nodes + 1)))
        tokens = setting.to_device(token_ids[None])
        if rule == "target walk":
            tree = DraftTree(token_ids, random_parents(rng, nodes), np.zeros(nodes))
            parents = setting.to_device(tree.parents[None])

            def call(arguments: tuple[Any, ...] = (parents, tokens, probs[None], uniforms)) -> Any:
                return verify_tree.target_walk(*arguments, backend=setting.backend)
        else:
            rows = np.arange(nodes)
            tree = DraftTree.chain(token_ids, siblings="iid", draft_probs=draft, draft_rows=np.append(rows, -1))
            lengths = setting.to_device(np.array([nodes]))
            arguments = (tokens, lengths, probs[None], draft, setting.to_device(rows[None]), uniforms)

            def call(arguments: tuple[Any, ...] = arguments) -> Any:
                return verify_tree.chain_rejection(*arguments, backend=setting.backend)

        passes = (nodes + 1) * vocab_size * 4 * (2 if rule == "chain" else 1)
        line = _line(
            setting,
            "verify_tree",
            f"{rule}, {nodes} nodes, {vocab_size} tokens",
            call=call,
            baseline=None,
            bytes_moved=passes,
        )
        verify = verify_deterministic if rule == "target walk" else verify_token_wise

        def whole(verify: Any = verify, tree: DraftTree = tree, probs: torch.Tensor = probs) -> Any:
            return verify(tree, probs, np.random.default_rng(1))

        with asking_for(setting.backend):
            line["verifier_us"] = setting.wall_microseconds(whole)
        with asking_for("reference"):
            line["ordinary_verifier_us"] = setting.wall_microseconds(whole)
        yield line


@contextmanager
def asking_for(backend: str) -> Iterator[None]:
    """`ADAPTSPEC_KERNELS` inside the block."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = backend
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def compact_lines(setting: Setting) -> Iterator[Line]:
    """Six accepted rows of 64 in 32 layers; beside a copy through an index."""
    layers, heads, size = setting.pick(64, 2), 8, 128
    cache = setting.normal(layers, 1, heads, setting.pick(4096, 100), size, seed=1, dtype=torch.bfloat16)
    path = torch.tensor([[1, 4, 9, 20, 41, 60]], device=setting.device)
    starts = torch.tensor([cache.shape[3] - 70], device=setting.device)
    start = int(starts)

    def baseline() -> None:
        cache[:, 0, :, start : start + 6] = cache[:, 0].index_select(2, path[0] + start)

    yield _line(
        setting,
        "kv_compact",
        f"{layers // 2} layers of {heads} heads of {size} bf16, 6 rows",
        call=lambda: kv_compact(cache, path, starts, backend=setting.backend),
        baseline=baseline,
        bytes_moved=2 * 2 * layers * heads * size * 6,
    )
