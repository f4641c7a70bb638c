"""Values of the four ops on the device against their references, in the regimes that differ on a GPU: bf16, matrix
units, real parallelism, and offsets beyond 2^31."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from adaptspec.kernels import verify_tree
from adaptspec.kernels.kv_compact import kv_compact
from adaptspec.kernels.tree_attention import pack_ancestors, tree_attention
from adaptspec.kernels.vocab_head import vocab_head
from benchmarks.gpu_check_setting import Setting, random_parents, visibility

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Largest difference relative to the largest value: the output is rounded to 24, 8 or 11 bits, and for the last two the
weights of attention are too."""

LOGIT_TOLERANCE = 2e-4
"""Of log-probabilities: logits of order 1 in float32 sums over up to 4096 products, in another order."""

Case = tuple[str, str, Callable[[Setting], float]]
"""Op, regime, and what gives the error as a share of what is tolerated."""


def check_values(setting: Setting) -> dict[str, Any]:
    """{"ok", "cases": [{"op", "case", "error", "ok"}]}; `error` is a share of what is tolerated."""
    cases = []
    for op, name, error_of in all_cases(setting):
        error = error_of(setting)
        cases.append({"op": op, "case": name, "error": error, "ok": bool(error <= 1.0)})  # False for NaN
    return {"ok": all(case["ok"] for case in cases), "cases": cases}


def all_cases(setting: Setting) -> Iterator[Case]:
    """Every regime of every op."""
    yield from attention_cases(setting)
    yield from head_cases(setting)
    yield from verify_cases(setting)
    yield from compact_cases(setting)


def attention_cases(setting: Setting) -> Iterator[Case]:
    """Groups, ragged lengths, odd sizes, no prefix; what lies behind the used length is NaN."""
    shapes = [
        # batch, key-value heads, group, nodes, prefix, head size, dtype
        (1, 8, 4, 64, 4096, 128, torch.bfloat16),
        (1, 8, 4, 0, 4096, 128, torch.bfloat16),
        (3, 3, 3, 16, 777, 64, torch.float16),
        (2, 4, 1, 65, 129, 96, torch.bfloat16),
        (1, 2, 8, 5, 0, 64, torch.float32),
        (2, 2, 4, 31, 1000, 128, torch.float32),
        (1, 4, 2, 32, 300, 256, torch.bfloat16),
    ]
    for batch, heads, group, nodes, prefix, size, dtype in shapes:
        prefix = setting.pick(prefix, min(prefix, 20))

        def error(
            setting: Setting, shape: tuple[Any, ...] = (batch, heads, group, nodes, prefix, size, dtype)
        ) -> float:
            return attention_error(setting, *shape)

        name = f"B{batch} Hkv{heads} G{group} N{nodes} P{prefix} D{size} {str(dtype).removeprefix('torch.')}"
        yield "tree_attention", name, error


def attention_error(
    setting: Setting, batch: int, heads: int, group: int, nodes: int, prefix: int, size: int, dtype: torch.dtype
) -> float:
    rng = np.random.default_rng(nodes + prefix)
    rows = nodes + 1
    query = setting.normal(batch, heads * group, rows, size, seed=1, dtype=dtype)
    keys, values = (setting.normal(batch, heads, prefix, size, seed=seed, dtype=dtype) for seed in (2, 3))
    tree_keys, tree_values = (setting.normal(batch, heads, rows, size, seed=seed, dtype=dtype) for seed in (4, 5))
    lengths = rng.integers(0, prefix + 1, batch)
    lengths[0] = prefix
    for b, length in enumerate(lengths):
        keys[b, :, length:], values[b, :, length:] = torch.nan, torch.nan
    visible = np.stack([visibility(random_parents(rng, nodes)) for _ in range(batch)])
    shared = {
        "lengths": setting.to_device(lengths),
        "ancestors": setting.to_device(pack_ancestors(visible)),
        "scale": size**-0.5,
    }
    inputs = (query, keys, values, tree_keys, tree_values)
    found = tree_attention(*inputs, **shared, backend=setting.backend).float()
    wanted = tree_attention(*(tensor.float() for tensor in inputs), **shared, backend="reference")
    return float((found - wanted).abs().max() / wanted.abs().max()) / TOLERANCES[dtype]


def head_cases(setting: Setting) -> Iterator[Case]:
    """One and many hidden states, ragged widths, k above what there is, ties, entries not in use, large offsets."""
    shapes = [
        # hidden states, vocabulary, rows in use, hidden size, k, dtype, mode
        (1, 128256, 128256, 2048, 8, torch.bfloat16, "full"),
        (1, 128256, 16384, 4096, 10, torch.bfloat16, "ids"),
        (10, 128256, 16385, 4096, 10, torch.bfloat16, "ids"),
        (64, 32000, 9999, 2048, 32, torch.bfloat16, "gathered"),
        (8, 49152, 49152, 576, 8, torch.float32, "full"),
        (3, 5000, 777, 576, 32, torch.float16, "ids"),
        (2, 100, 7, 50, 12, torch.float32, "ids"),
    ]
    for shape in shapes:
        count, vocab_size, width, size, k, dtype, mode = shape
        small = (count, min(vocab_size, 200), min(width, 90), min(size, 64), k, dtype, mode)

        def error(setting: Setting, shape: tuple[Any, ...] = setting.pick(shape, small)) -> float:
            return head_error(setting, *shape)

        label = str(dtype).removeprefix("torch.")
        yield "vocab_head", f"M{count} V{vocab_size} rows {width} H{size} k{k} {label} {mode}", error
    yield "vocab_head", "ties", tie_error
    yield "vocab_head", "offsets beyond 2^31", large_offset_error


def head_error(
    setting: Setting, count: int, vocab_size: int, width: int, size: int, k: int, dtype: torch.dtype, mode: str
) -> float:
    hidden = setting.normal(count, size, seed=1, dtype=dtype)
    weight = (setting.normal(vocab_size, size, seed=2) / size**0.5).to(dtype)
    ids = None
    if mode != "full":
        order = np.random.default_rng(3).permutation(vocab_size)[:width].astype(np.int32)
        order[5 :: max(width // 7, 6)] = -1
        ids = setting.to_device(order)
    gathered = mode == "gathered"
    rows = weight[ids.clamp(min=0).long()] if gathered and ids is not None else weight
    found = vocab_head(hidden, rows, ids, k=k, gathered=gathered, backend=setting.backend)
    # In float64, because matrix units may round float32 products.
    used = torch.arange(vocab_size, device=setting.device) if ids is None else ids[ids >= 0].long()
    logits = hidden.double() @ weight[used].double().T
    log_probs = torch.log_softmax(logits, dim=-1)
    best = log_probs.topk(min(k, len(used)), dim=-1).values.float()
    if setting.backend == "reference" and dtype != torch.float32:
        return 0.0  # the reference rounds its logits to 16 bits, which is not what is checked here
    count_found = best.shape[1]
    # The tokens are right if their own log-probabilities are the best ones; equal ones may change places.
    place = torch.full((vocab_size + 1,), -1, dtype=torch.long, device=setting.device)
    place[used] = torch.arange(len(used), device=setting.device)
    places = place[found.ids[:, :count_found].clamp(-1, vocab_size)]  # -1 leads to the spare last entry
    distinct = all(len(set(row)) == count_found for row in places.tolist())
    if bool((places < 0).any()) or bool((found.ids[:, count_found:] != -1).any()) or not distinct:
        return float("inf")
    differences = (
        found.log_probs[:, :count_found] - best,
        log_probs.gather(1, places).float() - best,
        found.log_sum_exp - torch.logsumexp(logits, dim=-1).float(),
    )
    return max(float(difference.abs().max()) for difference in differences) / LOGIT_TOLERANCE


def tie_error(setting: Setting) -> float:
    """Whole numbers make equal logits: the lowest position has to come first."""
    rng = np.random.default_rng(0)
    weight = setting.to_device(rng.integers(-1, 2, (setting.pick(40000, 300), 4)).astype(np.float32))
    wrong = 0
    for count in (1, 5):
        hidden = setting.to_device(rng.integers(-1, 2, (count, 4)).astype(np.float32))
        found = vocab_head(hidden, weight, k=32, backend=setting.backend)
        order = (hidden @ weight.T).sort(dim=-1, descending=True, stable=True).indices[:, :32]
        wrong += int((found.ids != order).sum())
    return 0.0 if wrong == 0 else float("inf")


def large_offset_error(setting: Setting) -> float:
    """The last rows of a head of more than 2^31 elements; 4.3 GB, so only on the device."""
    size = setting.pick(8192, 64)
    vocab_size = setting.pick((1 << 31) // 8192 + 512, 600)
    weight = torch.zeros((vocab_size, size), dtype=torch.bfloat16, device=setting.device)
    weight[-256:] = setting.normal(256, size, seed=4, dtype=torch.bfloat16)
    ids = torch.arange(vocab_size - 256, vocab_size, dtype=torch.int32, device=setting.device)
    hidden = setting.normal(1, size, seed=5, dtype=torch.bfloat16)
    found = vocab_head(hidden, weight, ids, k=4, backend=setting.backend)
    best = (hidden.float() @ weight[-256:].float().T).topk(4).indices + vocab_size - 256
    return 0.0 if found.ids[:, 0].tolist() == best[:, 0].tolist() else float("inf")


def verify_cases(setting: Setting) -> Iterator[Case]:
    """Small and large vocabularies; tokens and used uniforms have to be those of the reference."""
    for vocab_size, nodes, batch in ((5, 12, 64), (32000, 16, 4), (128256, 64, 2)):
        size = setting.pick(vocab_size, min(vocab_size, 40))
        for rule in ("greedy", "target walk", "chain, drawn", "chain, chosen"):

            def error(setting: Setting, shape: tuple[Any, ...] = (rule, size, nodes, setting.pick(batch, 2))) -> float:
                return verify_error(setting, *shape)

            yield "verify_tree", f"{rule} B{batch} N{nodes} V{vocab_size}", error


def verify_error(setting: Setting, rule: str, vocab_size: int, nodes: int, batch: int) -> float:
    """0 if all sequences agree with the reference on the CPU, else infinite."""
    rng = np.random.default_rng(vocab_size)
    # Peaked, as targets are: most of the mass on a few tokens, of which the trees are made.
    likely = rng.permutation(vocab_size)[:4]
    scores = setting.normal(batch, nodes + 1, vocab_size, seed=1)
    scores[..., setting.to_device(likely)] += 12.0
    probs = torch.softmax(scores, dim=-1)
    draft = torch.softmax(scores[:, :nodes].roll(1, dims=0) + setting.normal(batch, nodes, vocab_size, seed=2), dim=-1)
    parents = np.stack([random_parents(rng, nodes) for _ in range(batch)])
    token_ids = setting.to_device(rng.choice(likely, (batch, nodes)))
    uniforms = setting.to_device(rng.random((batch, nodes + 1)))
    rows = torch.arange(batch * nodes, device=setting.device).view(batch, nodes)
    lengths = setting.to_device(rng.integers(0, nodes + 1, batch))
    drawn = rule == "chain, drawn"

    def walk(device: torch.device, backend: Any) -> torch.Tensor:
        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device)

        tree = move(setting.to_device(parents)), move(token_ids)
        if rule == "greedy":
            return verify_tree.greedy_walk(*tree, move(probs.argmax(-1)), backend=backend).buffer.cpu()
        if rule == "target walk":
            return verify_tree.target_walk(*tree, move(probs), move(uniforms), backend=backend).buffer.cpu()
        return verify_tree.chain_rejection(
            move(token_ids),
            move(lengths),
            move(probs),
            move(draft.flatten(0, 1)) if drawn else None,
            move(rows) if drawn else None,
            move(uniforms),
            backend=backend,
        ).buffer.cpu()

    same = torch.equal(walk(setting.device, setting.backend), walk(torch.device("cpu"), "reference"))
    return 0.0 if same else float("inf")


def compact_cases(setting: Setting) -> Iterator[Case]:
    """Many layers at once, ragged paths, overlapping moves."""
    for layers, batch, heads, capacity, size, dtype in (
        (64, 1, 8, 4096, 128, torch.bfloat16),
        (4, 3, 3, 1000, 64, torch.float32),
        (2, 2, 1, 300, 96, torch.float16),
    ):
        shape = setting.pick((layers, batch, heads, capacity, size, dtype), (2, batch, heads, 90, size, dtype))

        def error(setting: Setting, shape: tuple[Any, ...] = shape) -> float:
            return compact_error(setting, *shape)

        yield "kv_compact", f"L{layers} B{batch} H{heads} C{capacity} D{size} {dtype}".replace("torch.", ""), error


def compact_error(
    setting: Setting, layers: int, batch: int, heads: int, capacity: int, size: int, dtype: torch.dtype
) -> float:
    rng = np.random.default_rng(capacity)
    cache = setting.normal(layers, batch, heads, capacity, size, seed=1, dtype=dtype)
    paths = np.full((batch, 24), -1)
    for b in range(batch):
        rows = np.sort(rng.permutation(64)[: rng.integers(0, 25)])
        paths[b, : len(rows)] = rows
    starts = rng.integers(0, capacity - 64, batch)
    arguments = setting.to_device(paths), setting.to_device(starts)
    wanted = cache.clone()
    kv_compact(wanted, *arguments, backend="reference")
    kv_compact(cache, *arguments, backend=setting.backend)
    return 0.0 if torch.equal(cache, wanted) else float("inf")
