"""The head as two Triton kernels.

The first reads the rows in use, one block of them per program, and leaves the block's k best logits, its maximum and
its sum of exponentials. The second merges the blocks: the k best of all lie in the k blocks with the best maxima.

A logit and its position make one 64-bit key, the logit's order in the high half and the position, counted downwards,
in the low half. Keys are unique, and comparing them breaks ties towards the lower position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from adaptspec.kernels.ahead_of_time import Specialisation
from adaptspec.kernels.vocab_head.reference import TopTokens

NOTHING = tl.constexpr(-(1 << 63))
"""Below the key of every logit above -inf."""
LOW_HALF = tl.constexpr((1 << 32) - 1)


@triton.jit
def _backwards(place):
    """Makes the lower of two positions the larger number, and back."""
    return LOW_HALF - place


@triton.jit
def _keys(logits, places):
    """int64 keys; NOTHING for -inf and NaN."""
    # Equal numbers have equal bits: a sum that begins with 0.0 is never -0.0.
    bits = logits.to(tl.int32, bitcast=True)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    keys = (order << 32) | _backwards(places.to(tl.int64))
    return tl.where(logits > float("-inf"), keys, NOTHING)


@triton.jit
def _logit_of(key):
    order = (key >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["count", "width", "vocab_size"])
def block_top(
    hidden,
    weight,
    ids,
    keys,
    maxima,
    sums,
    count,
    width,
    vocab_size,
    hidden_stride,
    weight_stride,
    SIZE: tl.constexpr,
    K: tl.constexpr,
    HAS_IDS: tl.constexpr,
    GATHERED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One block of `BLOCK_V` rows of the head for `BLOCK_M` rows of hidden states.

    keys [M, blocks, K], maxima and sums [M, blocks]; hidden [count, SIZE], ids [width].
    """
    block = tl.program_id(0)
    places = block * BLOCK_V + tl.arange(0, BLOCK_V)
    used = places < width
    sources = places
    if HAS_IDS:
        tokens = tl.load(ids + places, mask=used, other=-1)
        used = tokens >= 0
        if not GATHERED:
            used = used & (tokens < vocab_size)
            sources = tokens
    # A large head has more than 2^31 elements.
    starts = weight + tl.where(used, sources, 0).to(tl.int64) * weight_stride
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = rows < count
    if BLOCK_M == 1:
        # One row needs no matrix unit: multiply elementwise and add up once at the end.
        only = hidden + tl.program_id(1).to(tl.int64) * hidden_stride
        products = tl.zeros((BLOCK_V, BLOCK_H), tl.float32)
        for start in range(0, SIZE, BLOCK_H):
            columns = start + tl.arange(0, BLOCK_H)
            inside = columns < SIZE
            h = tl.load(only + columns[None, :], mask=inside[None, :], other=0.0)
            w = tl.load(starts[:, None] + columns[None, :], mask=used[:, None] & inside[None, :], other=0.0)
            products += w.to(tl.float32) * h.to(tl.float32)
        logits = tl.sum(products, axis=1)[None, :]
    else:
        hidden_starts = hidden + rows.to(tl.int64) * hidden_stride
        logits = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
        for start in range(0, SIZE, BLOCK_H):
            columns = start + tl.arange(0, BLOCK_H)
            inside = columns < SIZE
            h = tl.load(hidden_starts[:, None] + columns[None, :], mask=real[:, None] & inside[None, :], other=0.0)
            w = tl.load(starts[None, :] + columns[:, None], mask=used[None, :] & inside[:, None], other=0.0)
            logits = tl.dot(h, w, logits, input_precision="ieee")
    logits = tl.where(used[None, :], logits, float("-inf"))

    largest = tl.max(logits, axis=1)
    shift = tl.where(largest > float("-inf"), largest, 0.0)
    total = tl.sum(tl.exp(logits - shift[:, None]), axis=1)
    slots = rows.to(tl.int64) * tl.num_programs(0) + block
    tl.store(maxima + slots, largest, mask=real)
    tl.store(sums + slots, total, mask=real)
    left = _keys(logits, places[None, :])
    for i in range(K):
        best = tl.max(left, axis=1)
        tl.store(keys + slots * K + i, best, mask=real)
        left = tl.where(left == best[:, None], NOTHING, left)


@triton.jit(do_not_specialize=["blocks"])
def merge_blocks(
    keys,
    maxima,
    sums,
    ids,
    token_ids,
    log_probs,
    log_sum_exp,
    blocks,
    K: tl.constexpr,
    HAS_IDS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """The k best of all blocks, for one row of hidden states."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    real = block < blocks
    largest = tl.load(maxima + row * blocks + block, mask=real, other=float("-inf"))
    total = tl.load(sums + row * blocks + block, mask=real, other=0.0)
    peak = tl.max(largest, axis=0)
    shift = tl.where(peak > float("-inf"), peak, 0.0)
    lse = shift + tl.log(tl.sum(total * tl.exp(largest - shift), axis=0))
    tl.store(log_sum_exp + row, lse)

    heads = tl.load(keys + (row * blocks + block) * K, mask=real, other=NOTHING)
    slot = tl.arange(0, SLOTS)
    chosen = tl.full((SLOTS,), -1, tl.int32)
    for i in range(K):
        best = tl.max(heads, axis=0)
        holder = tl.max(tl.where((heads == best) & (best != NOTHING), block, -1), axis=0)
        chosen = tl.where(slot == i, holder, chosen)
        heads = tl.where(block == holder, NOTHING, heads)
    left = tl.load(
        keys + (row * blocks + chosen[:, None]) * K + slot[None, :],
        mask=(chosen[:, None] >= 0) & (slot[None, :] < K),
        other=NOTHING,
    )
    for i in range(K):
        best = tl.max(tl.max(left, axis=1), axis=0)
        found = best != NOTHING
        token = _backwards(best & LOW_HALF)
        if HAS_IDS:
            token = tl.load(ids + token, mask=found, other=-1).to(tl.int64)
        tl.store(token_ids + row * K + i, tl.where(found, token, -1))
        tl.store(log_probs + row * K + i, tl.where(found, _logit_of(best) - lse, float("-inf")))
        left = tl.where(left == best, NOTHING, left)


def vocab_head(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor | None, *, k: int, gathered: bool
) -> TopTokens:
    """See `adaptspec.kernels.vocab_head.vocab_head`."""
    count, size = hidden.shape
    width = len(weight) if ids is None else len(ids)
    token_ids = torch.empty((count, k), dtype=torch.int64, device=hidden.device)
    log_probs = torch.empty((count, k), dtype=torch.float32, device=hidden.device)
    log_sum_exp = torch.empty(count, dtype=torch.float32, device=hidden.device)
    if count == 0:
        return TopTokens(token_ids, log_probs, log_sum_exp)
    if hidden.stride(1) != 1:
        hidden = hidden.contiguous()
    tile = choose_tile(count=count, width=width, size=size, itemsize=weight.element_size())
    blocks = max(1, triton.cdiv(width, tile.block_v))
    keys = torch.empty((count, blocks, k), dtype=torch.int64, device=hidden.device)
    maxima = torch.empty((count, blocks), dtype=torch.float32, device=hidden.device)
    sums = torch.empty_like(maxima)
    has_ids = ids is not None
    ids_or_any = token_ids if ids is None else ids.contiguous()
    with torch.cuda.device_of(hidden):
        block_top[(blocks, triton.cdiv(count, tile.block_m))](
            hidden,
            weight,
            ids_or_any,
            keys,
            maxima,
            sums,
            count,
            width,
            len(weight),
            hidden.stride(0),
            weight.stride(0),
            SIZE=size,
            K=k,
            HAS_IDS=has_ids,
            GATHERED=gathered,
            BLOCK_M=tile.block_m,
            BLOCK_V=tile.block_v,
            BLOCK_H=tile.block_h,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        merge_blocks[(count,)](
            keys,
            maxima,
            sums,
            ids_or_any,
            token_ids,
            log_probs,
            log_sum_exp,
            blocks,
            K=k,
            HAS_IDS=has_ids,
            BLOCKS=triton.next_power_of_2(blocks),
            SLOTS=triton.next_power_of_2(k),
            num_warps=_merge_warps(blocks),
        )
    return TopTokens(token_ids, log_probs, log_sum_exp)


@dataclass(frozen=True, slots=True)
class Tile:
    """One program of `block_top` takes `block_m` hidden states, `block_v` rows of the head and, at a time, `block_h`
    columns."""

    block_m: int
    block_v: int
    block_h: int
    warps: int
    stages: int


def choose_tile(*, count: int, width: int, size: int, itemsize: int) -> Tile:
    """The tile for `count` hidden states of `size` numbers of `itemsize` bytes and `width` rows of the head."""
    block_h = next((block for block in (128, 64, 32) if size % block == 0), 64)  # a masked rest only if it must be
    if count == 1:
        # Many small programs keep more reads in flight; of a very wide head fewer blocks are left to merge.
        return Tile(block_m=1, block_v=32 if width <= 1 << 16 else 64, block_h=block_h, warps=4, stages=4)
    block_m = min(max(16, triton.next_power_of_2(count)), 64)
    return Tile(block_m=block_m, block_v=64, block_h=block_h if itemsize == 2 else 32, warps=4, stages=3)


def _merge_warps(blocks: int) -> int:
    return 8 if blocks > 1024 else 4


def _specialisations(
    *, count: int, width: int, size: int, dtype: str, mode: str, k: int = 8
) -> tuple[Specialisation, Specialisation]:
    """Both kernels as `vocab_head` launches them. `mode` is "full", "ids" or "gathered"."""
    itemsize = {"bf16": 2, "fp32": 4}[dtype]
    tile = choose_tile(count=count, width=width, size=size, itemsize=itemsize)
    blocks = triton.cdiv(width, tile.block_v)
    shape = f"{count} hidden states of {size} {dtype}, {width} rows ({mode}), k = {k}"
    partial_bytes = count * blocks * (8 * k + 8)
    has_ids = mode != "full"
    first = Specialisation(
        name=f"vocab_head/block_top {dtype} {count}x{size} {mode}",
        kernel=block_top,
        signature={
            "hidden": f"*{dtype}",
            "weight": f"*{dtype}",
            "ids": "*i32" if has_ids else "*i64",
            "keys": "*i64",
            "maxima": "*fp32",
            "sums": "*fp32",
            **dict.fromkeys(("count", "width", "vocab_size", "hidden_stride", "weight_stride"), "i32"),
        },
        constexprs={
            "SIZE": size,
            "K": k,
            "HAS_IDS": has_ids,
            "GATHERED": mode == "gathered",
            "BLOCK_M": tile.block_m,
            "BLOCK_V": tile.block_v,
            "BLOCK_H": tile.block_h,
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
        shape=shape,
        bytes_moved=itemsize * size * (width + count) + 4 * width * has_ids + partial_bytes,
        flops=2 * count * width * size,
        aligned=("hidden_stride", "weight_stride"),
    )
    second = Specialisation(
        name=f"vocab_head/merge_blocks {count}x{blocks} {mode}",
        kernel=merge_blocks,
        signature={
            "keys": "*i64",
            "maxima": "*fp32",
            "sums": "*fp32",
            "ids": "*i32" if has_ids else "*i64",
            "token_ids": "*i64",
            "log_probs": "*fp32",
            "log_sum_exp": "*fp32",
            "blocks": "i32",
        },
        constexprs={
            "K": k,
            "HAS_IDS": has_ids,
            "BLOCKS": triton.next_power_of_2(blocks),
            "SLOTS": triton.next_power_of_2(k),
        },
        num_warps=_merge_warps(blocks),
        num_stages=1,
        shape=shape,
        bytes_moved=partial_bytes,
    )
    return first, second


SPECIALISATIONS = (
    *_specialisations(count=1, width=32768, size=4096, dtype="bf16", mode="ids"),
    *_specialisations(count=10, width=16384, size=4096, dtype="bf16", mode="ids", k=10),
    *_specialisations(count=64, width=32768, size=4096, dtype="bf16", mode="gathered", k=32),
    *_specialisations(count=1, width=128256, size=2048, dtype="bf16", mode="full"),
    *_specialisations(count=10, width=49152, size=576, dtype="fp32", mode="full"),
)
