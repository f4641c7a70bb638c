"""The walks as Triton kernels.

Vocabulary-wide work is spread over blocks of every row at once; the walk itself is one small program per sequence that
only compares numbers that lie ready:

    target_walk      sums of blocks  ->  one token per row, by inversion with the uniform of its depth  ->  walk
    chain_rejection  sums of blocks  ->  all tests at once, the first that fails  ->  sums of blocks of (p - q)+ at that
                     row only  ->  the last token, by inversion

Sums are in float64: the tokens are those of the reference unless a uniform falls within its rounding of a border.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from adaptspec.kernels.ahead_of_time import Specialisation
from adaptspec.kernels.verify_tree.reference import GREATEST_SUM, LEAST_SUM, Walk

_BLOCK = 2048
_LEAST_SUM = tl.constexpr(LEAST_SUM)
_GREATEST_SUM = tl.constexpr(GREATEST_SUM)


@triton.jit(do_not_specialize=["vocab_size"])
def block_sums(probs, stride, sums, minima, vocab_size, BLOCK: tl.constexpr):
    """Grid (rows, blocks): sum and least entry, float64, of one block of one row of probs [rows, V]."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    values = tl.load(probs + row * stride + token, mask=inside, other=0.0).to(tl.float64)
    cell = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(sums + cell, tl.sum(values, axis=0))
    tl.store(minima + cell, tl.min(tl.where(inside, values, float("inf")), axis=0))


@triton.jit
def _is_distribution(minimum, total):
    """1 or 0; 0 for NaN."""
    return tl.where((minimum >= 0.0) & (total >= _LEAST_SUM) & (total <= _GREATEST_SUM), 1, 0)


@triton.jit
def _first_above(weights, threshold, index, SIZE: tl.constexpr):
    """Where the running sum of `weights` first exceeds `threshold`; if rounding leaves nowhere, the last weight."""
    running = tl.cumsum(weights, axis=0)
    # A parallel running sum may step at a weight of zero.
    above = (running > threshold) & (weights > 0.0)
    first = tl.min(tl.where(above, index, SIZE), axis=0)
    last = tl.max(tl.where(weights > 0.0, index, 0), axis=0)
    return tl.where(first < SIZE, first, last)


@triton.jit
def _choose_block(sums, u, block, BLOCKS: tl.constexpr):
    """The block in which the running sum exceeds `u` times the whole, and the threshold that is left inside it."""
    threshold = u * tl.sum(sums, axis=0)
    chosen = _first_above(sums, threshold, block, BLOCKS)
    return chosen, threshold - tl.sum(tl.where(block < chosen, sums, 0.0), axis=0)


@triton.jit(do_not_specialize=["nodes", "uniform_count", "vocab_size", "blocks"])
def sample_rows(
    probs,
    stride,
    sums,
    minima,
    parents,
    uniforms,
    wanted,
    totals,
    lowest,
    nodes,
    uniform_count,
    vocab_size,
    blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Grid (N + 1, B): the token of one row with the uniform of its depth; wanted int64, totals, lowest float64."""
    sequence = tl.program_id(1).to(tl.int64)
    row = sequence * (nodes + 1) + tl.program_id(0)
    depth = 0
    node = tl.program_id(0).to(tl.int64) - 1
    while node >= 0:
        node = tl.load(parents + sequence * nodes + node)
        depth += 1
    # Rows of padding have any depth and any token.
    u = tl.load(uniforms + sequence * uniform_count + tl.minimum(depth, uniform_count - 1))
    block = tl.arange(0, BLOCKS)
    real = block < blocks
    block_sum = tl.load(sums + row * blocks + block, mask=real, other=0.0)
    tl.store(totals + row, tl.sum(block_sum, axis=0))
    tl.store(lowest + row, tl.min(tl.load(minima + row * blocks + block, mask=real, other=float("inf")), axis=0))
    chosen, threshold = _choose_block(block_sum, u, block, BLOCKS)
    index = tl.arange(0, BLOCK)
    token = chosen * BLOCK + index
    values = tl.load(probs + row * stride + token, mask=token < vocab_size, other=0.0).to(tl.float64)
    tl.store(wanted + row, (chosen * BLOCK + _first_above(values, threshold, index, BLOCK)).to(tl.int64))


@triton.jit
def _report(fields, accepted, used, bad_target, bad_draft, minimum, total):
    """The first six numbers of a sequence's line in the result."""
    tl.store(fields, accepted.to(tl.int64))
    tl.store(fields + 1, used.to(tl.int64))
    tl.store(fields + 2, bad_target.to(tl.int64))
    tl.store(fields + 3, bad_draft.to(tl.int64))
    tl.store(fields + 4, minimum.to(tl.int64, bitcast=True))
    tl.store(fields + 5, total.to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=["nodes"])
def follow(parents, token_ids, wanted, totals, lowest, result, nodes, SAMPLED: tl.constexpr, SLOTS: tl.constexpr):
    """Grid (B): from the root to the child that carries the wanted token, as long as there is one.

    With `SAMPLED` each visited row must be a distribution, and each emitted token has used a uniform.
    """
    sequence = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    real = slot < nodes
    parent = tl.load(parents + sequence * nodes + slot, mask=real, other=-2)
    token = tl.load(token_ids + sequence * nodes + slot, mask=real, other=-1)
    row = sequence * (nodes + 1)
    # Kept in registers and stored once: two stores to one place have no order.
    path = tl.full((SLOTS,), -1, tl.int64)
    tokens = tl.full((SLOTS,), -1, tl.int64)
    node = -1
    depth = 0
    bad = -1
    minimum = tl.full((), 0.0, tl.float64)
    total = tl.full((), 0.0, tl.float64)
    going = 1
    while going > 0:
        good = 1
        if SAMPLED:
            minimum = tl.load(lowest + row + node + 1)
            total = tl.load(totals + row + node + 1)
            good = _is_distribution(minimum, total)
        want = tl.load(wanted + row + node + 1)
        child = tl.min(tl.where((parent == node) & (token == want), slot, SLOTS), axis=0)
        going = tl.where(child < SLOTS, good, 0)
        tokens = tl.where((slot == depth) & (good > 0), want, tokens)
        path = tl.where((slot == depth) & (going > 0), child.to(tl.int64), path)
        bad = tl.where(good > 0, bad, node + 1)
        node = tl.where(going > 0, child, node)
        depth += going
    fields = result + sequence * (2 * nodes + 7)
    used = depth + 1 if SAMPLED else depth * 0
    none = bad * 0 - 1
    _report(fields, depth, used, bad, none, tl.where(bad >= 0, minimum, 0.0), tl.where(bad >= 0, total, 0.0))
    tl.store(fields + 6 + slot, path, mask=real)
    tl.store(fields + 6 + nodes + slot, tokens, mask=slot <= nodes)


@triton.jit(do_not_specialize=["nodes", "blocks"])
def chain_tests(
    token_ids,
    lengths,
    probs,
    probs_stride,
    sums,
    minima,
    draft,
    draft_stride,
    draft_sums,
    draft_minima,
    draft_rows,
    uniforms,
    result,
    stops,
    scales,
    nodes,
    blocks,
    HAS_DRAFT: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (B): the tests of all nodes at once, and the first that fails.

    Leaves in stops int64 [B, 4] the row that gives the last token, whether a node was rejected there, which token that
    was and its draft row; in scales float64 [B, 3] the sums of that row of p and of q, and the uniform to use.
    """
    sequence = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + sequence)
    slot = tl.arange(0, SLOTS)
    chunk = tl.arange(0, CHUNK)
    node = slot < length
    row = sequence * (nodes + 1) + slot
    token = tl.load(token_ids + sequence * nodes + slot, mask=node, other=0)
    u = tl.load(uniforms + row, mask=slot <= length, other=0.0)
    p_total = tl.zeros((SLOTS,), tl.float64)
    p_least = tl.full((SLOTS,), float("inf"), tl.float64)
    q_total = tl.full((SLOTS,), 0.0 if HAS_DRAFT else 1.0, tl.float64)
    q_least = tl.full((SLOTS,), float("inf"), tl.float64)
    draft_row = tl.full((SLOTS,), -1, tl.int64)
    if HAS_DRAFT:
        draft_row = tl.load(draft_rows + sequence * nodes + slot, mask=node, other=0)
    for start in range(0, blocks, CHUNK):
        block = start + chunk
        cell = row[:, None] * blocks + block[None, :]
        inside = (slot[:, None] <= length) & (block[None, :] < blocks)
        p_total += tl.sum(tl.load(sums + cell, mask=inside, other=0.0), axis=1)
        p_least = tl.minimum(p_least, tl.min(tl.load(minima + cell, mask=inside, other=float("inf")), axis=1))
        if HAS_DRAFT:
            cell = draft_row[:, None] * blocks + block[None, :]
            inside = node[:, None] & (block[None, :] < blocks)
            q_total += tl.sum(tl.load(draft_sums + cell, mask=inside, other=0.0), axis=1)
            least = tl.min(tl.load(draft_minima + cell, mask=inside, other=float("inf")), axis=1)
            q_least = tl.minimum(q_least, least)
    p_token = tl.load(probs + row * probs_stride + token, mask=node, other=0.0).to(tl.float64) / p_total
    q_token = tl.full((SLOTS,), 1.0, tl.float64)
    if HAS_DRAFT:
        q_token = tl.load(draft + draft_row * draft_stride + token, mask=node, other=0.0).to(tl.float64) / q_total
    bad_p = (slot <= length) & (_is_distribution(p_least, p_total) == 0)
    bad_q = node & (_is_distribution(q_least, q_total) == 0)
    accepted = node & (q_token > 0.0) & (u * q_token < p_token)  # a token with q of 0 was never drawn: the chain ends
    stop = tl.min(tl.where(accepted, SLOTS, slot), axis=0)
    first_bad = tl.min(tl.where(bad_p | bad_q, slot, SLOTS), axis=0)
    is_bad = first_bad <= stop
    at_bad = slot == first_bad
    target_is_bad = tl.max((at_bad & bad_p).to(tl.int32), axis=0) > 0
    minimum = tl.sum(tl.where(at_bad, tl.where(target_is_bad, p_least, q_least), 0.0), axis=0)
    total = tl.sum(tl.where(at_bad, tl.where(target_is_bad, p_total, q_total), 0.0), axis=0)
    at_stop = slot == stop
    rejected = tl.max((at_stop & node & (q_token > 0.0)).to(tl.int32), axis=0)
    fields = result + sequence * (2 * nodes + 7)
    _report(
        fields,
        stop,
        stop + 1 + rejected,
        tl.where(is_bad & target_is_bad, first_bad, -1),
        tl.where(is_bad & (target_is_bad == 0), tl.sum(tl.where(at_bad, draft_row, 0), axis=0), -1),
        tl.where(is_bad, minimum, 0.0),
        tl.where(is_bad, total, 0.0),
    )
    kept = slot < stop
    tl.store(fields + 6 + slot, tl.where(kept, slot, -1).to(tl.int64), mask=slot < nodes)
    tl.store(fields + 6 + nodes + slot, tl.where(kept, token, -1), mask=slot <= nodes)
    tl.store(stops + sequence * 4, stop.to(tl.int64))
    tl.store(stops + sequence * 4 + 1, rejected.to(tl.int64))
    tl.store(stops + sequence * 4 + 2, tl.sum(tl.where(at_stop, token, 0), axis=0))
    tl.store(stops + sequence * 4 + 3, tl.sum(tl.where(at_stop, draft_row, 0), axis=0))
    tl.store(scales + sequence * 3, tl.sum(tl.where(at_stop, p_total, 0.0), axis=0))
    tl.store(scales + sequence * 3 + 1, tl.sum(tl.where(at_stop, tl.where(node, q_total, 1.0), 0.0), axis=0))
    tl.store(scales + sequence * 3 + 2, tl.sum(tl.where(slot == stop + rejected, u, 0.0), axis=0))


@triton.jit
def _left_over(probs, draft, token, inside, rejected, drafted, p_total, q_total, HAS_DRAFT: tl.constexpr):
    """What the last token is drawn from, up to a factor: (p - q)+ after a rejection, else p."""
    p = tl.load(probs + token, mask=inside, other=0.0).to(tl.float64) / p_total
    if HAS_DRAFT:
        q = tl.load(draft + token, mask=inside & rejected, other=0.0).to(tl.float64) / q_total
        return tl.maximum(p - q, 0.0)
    else:
        return tl.where(rejected & (token == drafted), 0.0, p)


@triton.jit(do_not_specialize=["nodes", "vocab_size"])
def left_over_sums(
    probs,
    probs_stride,
    draft,
    draft_stride,
    stops,
    scales,
    left_sums,
    nodes,
    vocab_size,
    HAS_DRAFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (B, blocks): sums of blocks of what the last token is drawn from; float64 [B, blocks]."""
    sequence = tl.program_id(0).to(tl.int64)
    stop = tl.load(stops + sequence * 4)
    rejected = tl.load(stops + sequence * 4 + 1) > 0
    drafted = tl.load(stops + sequence * 4 + 2)
    draft_row = tl.load(stops + sequence * 4 + 3)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = _left_over(
        probs + (sequence * (nodes + 1) + stop) * probs_stride,
        draft + draft_row * draft_stride,
        token,
        token < vocab_size,
        rejected,
        drafted,
        tl.load(scales + sequence * 3),
        tl.load(scales + sequence * 3 + 1),
        HAS_DRAFT,
    )
    tl.store(left_sums + sequence * tl.num_programs(1) + tl.program_id(1), tl.sum(values, axis=0))


@triton.jit(do_not_specialize=["nodes", "vocab_size", "blocks"])
def last_token(
    probs,
    probs_stride,
    draft,
    draft_stride,
    stops,
    scales,
    sums,
    left_sums,
    result,
    nodes,
    vocab_size,
    blocks,
    HAS_DRAFT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Grid (B): the last token into its place in the result."""
    sequence = tl.program_id(0).to(tl.int64)
    stop = tl.load(stops + sequence * 4)
    rejected = tl.load(stops + sequence * 4 + 1) > 0
    drafted = tl.load(stops + sequence * 4 + 2)
    draft_row = tl.load(stops + sequence * 4 + 3)
    p_total = tl.load(scales + sequence * 3)
    row = sequence * (nodes + 1) + stop
    block = tl.arange(0, BLOCKS)
    real = block < blocks
    left = tl.load(left_sums + sequence * blocks + block, mask=real, other=0.0)
    if tl.sum(left, axis=0) <= 0.0:  # p equals q up to rounding, and the rejection had no probability: p itself
        rejected = stop < 0
        left = tl.load(sums + row * blocks + block, mask=real, other=0.0) / p_total
    chosen, threshold = _choose_block(left, tl.load(scales + sequence * 3 + 2), block, BLOCKS)
    index = tl.arange(0, BLOCK)
    token = chosen * BLOCK + index
    values = _left_over(
        probs + row * probs_stride,
        draft + draft_row * draft_stride,
        token,
        token < vocab_size,
        rejected,
        drafted,
        p_total,
        tl.load(scales + sequence * 3 + 1),
        HAS_DRAFT,
    )
    found = chosen * BLOCK + _first_above(values, threshold, index, BLOCK)
    tl.store(result + sequence * (2 * nodes + 7) + 6 + nodes + stop, found.to(tl.int64))


def greedy_walk(parents: torch.Tensor, token_ids: torch.Tensor, target_argmax: torch.Tensor) -> Walk:
    """See `adaptspec.kernels.verify_tree.greedy_walk`."""
    batch, nodes = token_ids.shape
    walk = Walk.empty(batch, nodes, token_ids.device)
    if batch:
        with torch.cuda.device_of(token_ids):
            _follow(parents, token_ids, target_argmax.contiguous(), None, None, walk)
    return walk


def target_walk(
    parents: torch.Tensor, token_ids: torch.Tensor, target_probs: torch.Tensor, uniforms: torch.Tensor
) -> Walk:
    """See `adaptspec.kernels.verify_tree.target_walk`."""
    batch, nodes = token_ids.shape
    walk = Walk.empty(batch, nodes, token_ids.device)
    if batch == 0:
        return walk
    rows = _as_rows(target_probs)
    parents = parents.contiguous()
    wanted = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    totals = torch.empty(len(rows), dtype=torch.float64, device=rows.device)
    lowest = torch.empty_like(totals)
    with torch.cuda.device_of(rows):
        sums, minima = _block_sums(rows)
        sample_rows[(nodes + 1, batch)](
            rows,
            rows.stride(0),
            sums,
            minima,
            parents,
            uniforms.contiguous(),
            wanted,
            totals,
            lowest,
            nodes,
            uniforms.shape[1],
            rows.shape[1],
            sums.shape[1],
            BLOCK=_BLOCK,
            BLOCKS=triton.next_power_of_2(sums.shape[1]),
            num_warps=4,
        )
        _follow(parents, token_ids, wanted, totals, lowest, walk)
    return walk


def chain_rejection(
    token_ids: torch.Tensor,
    lengths: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    draft_rows: torch.Tensor | None,
    uniforms: torch.Tensor,
) -> Walk:
    """See `adaptspec.kernels.verify_tree.chain_rejection`."""
    batch, nodes = token_ids.shape
    walk = Walk.empty(batch, nodes, token_ids.device)
    if batch == 0:
        return walk
    rows = _as_rows(target_probs)
    has_draft = draft_probs is not None and draft_rows is not None and nodes > 0
    draft = _as_rows(draft_probs) if has_draft else rows
    stops = torch.empty((batch, 4), dtype=torch.int64, device=rows.device)
    scales = torch.empty((batch, 3), dtype=torch.float64, device=rows.device)
    with torch.cuda.device_of(rows):
        sums, minima = _block_sums(rows)
        draft_sums, draft_minima = _block_sums(draft) if has_draft else (sums, minima)
        blocks = sums.shape[1]
        chain_tests[(batch,)](
            token_ids.contiguous(),
            lengths.contiguous(),
            rows,
            rows.stride(0),
            sums,
            minima,
            draft,
            draft.stride(0),
            draft_sums,
            draft_minima,
            draft_rows.contiguous() if has_draft else lengths,
            uniforms.contiguous(),
            walk.buffer,
            stops,
            scales,
            nodes,
            blocks,
            HAS_DRAFT=has_draft,
            SLOTS=triton.next_power_of_2(nodes + 1),
            CHUNK=_chunk(nodes),
            num_warps=4,
        )
        left_sums = torch.empty((batch, blocks), dtype=torch.float64, device=rows.device)
        shared = (rows, rows.stride(0), draft, draft.stride(0), stops, scales)
        left_over_sums[(batch, blocks)](
            *shared, left_sums, nodes, rows.shape[1], HAS_DRAFT=has_draft, BLOCK=_BLOCK, num_warps=4
        )
        last_token[(batch,)](
            *shared,
            sums,
            left_sums,
            walk.buffer,
            nodes,
            rows.shape[1],
            blocks,
            HAS_DRAFT=has_draft,
            BLOCK=_BLOCK,
            BLOCKS=triton.next_power_of_2(blocks),
            num_warps=4,
        )
    return walk


def _as_rows(probs: torch.Tensor) -> torch.Tensor:
    """[rows, V] with contiguous rows; a view where that can be."""
    rows = probs.reshape(-1, probs.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _block_sums(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    count, vocab_size = rows.shape
    sums = torch.empty((count, triton.cdiv(vocab_size, _BLOCK)), dtype=torch.float64, device=rows.device)
    minima = torch.empty_like(sums)
    block_sums[tuple(sums.shape)](rows, rows.stride(0), sums, minima, vocab_size, BLOCK=_BLOCK, num_warps=4)
    return sums, minima


def _follow(
    parents: torch.Tensor,
    token_ids: torch.Tensor,
    wanted: torch.Tensor,
    totals: torch.Tensor | None,
    lowest: torch.Tensor | None,
    walk: Walk,
) -> None:
    sampled = totals is not None
    follow[(len(token_ids),)](
        parents.contiguous(),
        token_ids.contiguous(),
        wanted,
        totals if sampled else wanted,
        lowest if sampled else wanted,
        walk.buffer,
        walk.nodes,
        SAMPLED=sampled,
        SLOTS=triton.next_power_of_2(walk.nodes + 1),
        num_warps=1 if walk.nodes < 128 else 4,
    )


def _chunk(nodes: int) -> int:
    """How many sums of blocks `chain_tests` takes at a time, so that registers hold those of all nodes."""
    return max(1, min(16, 1024 // triton.next_power_of_2(nodes + 1)))


def _specialisation(
    kernel: Any, *, nodes: int, vocab_size: int, bytes_moved: int, warps: int = 4, **constexprs: Any
) -> Specialisation:
    """One kernel for one sequence of `nodes` nodes and float32 probabilities."""
    blocks = triton.cdiv(vocab_size, _BLOCK)
    sizes = {
        "BLOCK": _BLOCK,
        "BLOCKS": triton.next_power_of_2(blocks),
        "SLOTS": triton.next_power_of_2(nodes + 1),
        "CHUNK": _chunk(nodes),
        **constexprs,
    }
    types = {
        **dict.fromkeys(("probs", "draft"), "*fp32"),
        **dict.fromkeys(
            ("parents", "token_ids", "wanted", "lengths", "draft_rows", "stops", "result"),
            "*i64",
        ),
        **dict.fromkeys(
            (
                "sums",
                "minima",
                "totals",
                "lowest",
                "uniforms",
                "draft_sums",
                "draft_minima",
                "scales",
                "left_sums",
            ),
            "*fp64",
        ),
    }
    what = "".join(f" {name.lower()}" for name, value in constexprs.items() if value is True)
    return Specialisation(
        name=f"verify_tree/{kernel.fn.__name__}{what}",
        kernel=kernel,
        signature={name: types.get(name, "i32") for name in kernel.arg_names if name not in sizes},
        constexprs={name: sizes[name] for name in kernel.arg_names if name in sizes},
        num_warps=warps,
        num_stages=3,
        shape=f"one sequence, {nodes} nodes, {vocab_size} tokens",
        bytes_moved=bytes_moved,
        aligned=("stride", "probs_stride", "draft_stride"),
    )


def _specialisations(*, nodes: int, chain: int, vocab_size: int) -> tuple[Specialisation, ...]:
    """A tree of `nodes` nodes, and a chain of `chain` drawn ones."""
    blocks = triton.cdiv(vocab_size, _BLOCK)
    row = 4 * vocab_size
    tree, line = {"nodes": nodes, "vocab_size": vocab_size}, {"nodes": chain, "vocab_size": vocab_size}
    return (
        _specialisation(block_sums, **tree, bytes_moved=(nodes + 1) * (row + 16 * blocks)),
        _specialisation(sample_rows, **tree, bytes_moved=(nodes + 1) * (16 * blocks + 4 * _BLOCK + 24)),
        _specialisation(follow, **tree, SAMPLED=True, warps=1, bytes_moved=8 * (4 * nodes + 7)),
        _specialisation(follow, **tree, SAMPLED=False, warps=1, bytes_moved=8 * (4 * nodes + 7)),
        _specialisation(chain_tests, **line, HAS_DRAFT=True, bytes_moved=32 * blocks * (chain + 1)),
        _specialisation(left_over_sums, **line, HAS_DRAFT=True, bytes_moved=2 * row + 8 * blocks),
        _specialisation(last_token, **line, HAS_DRAFT=True, bytes_moved=8 * blocks + 8 * _BLOCK),
    )


SPECIALISATIONS = _specialisations(nodes=64, chain=16, vocab_size=128256)
