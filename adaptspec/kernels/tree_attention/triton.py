"""`tree_attention` on a GPU: flash-decoding (arXiv 2311.01282) with query heads of a group packed into rows.

The prefix of one sequence and key-value head is cut into equal splits, one program each; one more program takes the
tree under its mask. Row r of a program is query head r % G of node r // G, so that the G heads of a group share what is
read, and a split gives per row the base-2 log-sum-exp of its scores and the average of its values:

    lse = log2 sum_j 2^(c x_j),   o = sum_j 2^(c x_j - lse) v_j,   c = log2 e, x_j = cap(scale * q k_j)

A second kernel merges: o = sum_s 2^(lse_s - L) o_s with L = log2 sum_s 2^lse_s. The splits' borders come from the used
length on the device, so a captured graph stays right when the sequence grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from adaptspec.kernels.ahead_of_time import Specialisation
from adaptspec.kernels.backend import on_device

_LOG2E = tl.constexpr(1.4426950408889634)
_PROCESSORS_WITHOUT_GPU = 8
_TOKENS_PER_SPLIT = 128
"""A split of fewer tokens costs more in merging than it brings in parallel reading."""


@triton.jit
def _sweep(
    query,
    keys,
    values,
    words,
    begin,
    end,
    stride_keys,
    stride_values,
    row_mask,
    scale,
    softcap,
    SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to rows begin .. end - 1 of keys and values [., D]; `words` [BLOCK_ROWS] points at each row's mask."""
    highest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    accumulator = tl.zeros([BLOCK_ROWS, BLOCK_SIZE], tl.float32)
    features = tl.arange(0, BLOCK_SIZE).to(tl.int64)
    columns = tl.arange(0, BLOCK_COLUMNS)
    for start in tl.range(begin, end, BLOCK_COLUMNS, num_stages=1 if MASKED else None):
        position = start + columns
        inside = position < end
        offset = position.to(tl.int64)
        # What lies behind the used length is never read: it may be NaN, and 0 * NaN is NaN.
        if SIZE == BLOCK_SIZE:
            key = tl.load(keys + (offset * stride_keys)[None, :] + features[:, None], inside[None, :], 0.0)
            value = tl.load(values + (offset * stride_values)[:, None] + features[None, :], inside[:, None], 0.0)
        else:
            real = features < SIZE
            key = tl.load(
                keys + (offset * stride_keys)[None, :] + features[:, None], inside[None, :] & real[:, None], 0.0
            )
            value = tl.load(
                values + (offset * stride_values)[:, None] + features[None, :], inside[:, None] & real[None, :], 0.0
            )
        scores = tl.dot(query, key, input_precision=PRECISION) * scale
        if CAPPED:
            scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores / softcap)))  # softcap * tanh(scores / softcap)
        visible = inside[None, :]
        if MASKED:
            word = tl.load(words + start // 32, row_mask, 0)
            visible = visible & (((word[:, None] >> (start % 32 + columns)[None, :]) & 1) != 0)
        scores = tl.where(visible, scores * _LOG2E, float("-inf"))
        highest_now = tl.maximum(highest, tl.max(scores, 1))
        # A row that has seen nothing yet has highest -inf, and -inf - -inf is NaN.
        pivot = tl.where(highest_now == float("-inf"), 0.0, highest_now)
        weights = tl.exp2(scores - pivot[:, None])
        shrink = tl.exp2(highest - pivot)
        total = total * shrink + tl.sum(weights, 1)
        accumulator = tl.dot(weights.to(value.dtype), value, accumulator * shrink[:, None], input_precision=PRECISION)
        highest = highest_now
    return accumulator, highest, total


@triton.jit(do_not_specialize=["rows", "width", "splits", "ancestors_b", "ancestors_n"])
def _attend(
    query,
    prefix_keys,
    prefix_values,
    tree_keys,
    tree_values,
    lengths,
    ancestors,
    partial,
    partial_lse,
    scale,
    softcap,
    groups,
    rows,
    width,
    splits,
    query_b,
    query_h,
    query_n,
    prefix_keys_b,
    prefix_keys_h,
    prefix_keys_p,
    prefix_values_b,
    prefix_values_h,
    prefix_values_p,
    tree_keys_b,
    tree_keys_h,
    tree_keys_w,
    tree_values_b,
    tree_values_h,
    tree_values_w,
    ancestors_b,
    ancestors_n,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (row blocks, splits + 1, B * Hkv). Writes partial [B, Hq, N, splits + 1, D] and partial_lse without D."""
    split = tl.program_id(1)
    sequence = (tl.program_id(2) // groups).to(tl.int64)
    group = (tl.program_id(2) % groups).to(tl.int64)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = row < rows * GROUP
    node = (row // GROUP).to(tl.int64)
    head = group * GROUP + row % GROUP
    features = tl.arange(0, BLOCK_SIZE).to(tl.int64)
    cell_mask = row_mask[:, None] & (features < SIZE)[None, :]
    queries = tl.load(
        query + (sequence * query_b + head * query_h + node * query_n)[:, None] + features[None, :], cell_mask, 0.0
    )
    words = ancestors + sequence * ancestors_b + node * ancestors_n
    if split == splits:
        accumulator, highest, total = _sweep(
            queries,
            tree_keys + sequence * tree_keys_b + group * tree_keys_h,
            tree_values + sequence * tree_values_b + group * tree_values_h,
            words,
            0,
            width,
            tree_keys_w,
            tree_values_w,
            row_mask,
            scale,
            softcap,
            SIZE,
            BLOCK_ROWS,
            min(BLOCK_COLUMNS, 32),
            BLOCK_SIZE,
            True,
            CAPPED,
            PRECISION,
        )
    else:
        length = tl.load(lengths + sequence).to(tl.int32)
        share = tl.cdiv(tl.cdiv(length, splits), BLOCK_COLUMNS) * BLOCK_COLUMNS
        begin = split * share
        accumulator, highest, total = _sweep(
            queries,
            prefix_keys + sequence * prefix_keys_b + group * prefix_keys_h,
            prefix_values + sequence * prefix_values_b + group * prefix_values_h,
            words,
            begin,
            tl.minimum(begin + share, length),
            prefix_keys_p,
            prefix_values_p,
            row_mask,
            scale,
            softcap,
            SIZE,
            BLOCK_ROWS,
            BLOCK_COLUMNS,
            BLOCK_SIZE,
            False,
            CAPPED,
            PRECISION,
        )
    # A row that saw nothing writes lse -inf only; merging does not read its average.
    seen = total > 0.0
    divisor = tl.where(seen, total, 1.0)
    cell = ((sequence * groups * GROUP + head) * rows + node) * (splits + 1) + split
    tl.store(partial_lse + cell, tl.where(seen, highest + tl.log2(divisor), float("-inf")), row_mask)
    average = accumulator / divisor[:, None]
    tl.store(partial + cell[:, None] * SIZE + features[None, :], average, cell_mask & seen[:, None])


@triton.jit(do_not_specialize=["cells", "heads", "rows", "parts"])
def _merge(
    partial,
    partial_lse,
    output,
    cells,
    heads,
    rows,
    parts,
    SIZE: tl.constexpr,
    BLOCK_CELLS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Grid (cells / BLOCK_CELLS), cells = B * Hq * N: partial [B, Hq, N, parts, D] into output [B, N, Hq, D]."""
    cell = tl.program_id(0).to(tl.int64) * BLOCK_CELLS + tl.arange(0, BLOCK_CELLS)
    real = cell < cells
    part = tl.arange(0, BLOCK_PARTS)
    features = tl.arange(0, BLOCK_SIZE).to(tl.int64)
    place = cell[:, None] * parts + part[None, :]
    lse = tl.load(partial_lse + place, real[:, None] & (part < parts)[None, :], float("-inf"))
    highest = tl.max(lse, 1)
    weights = tl.exp2(lse - tl.where(highest == float("-inf"), 0.0, highest)[:, None])
    read = (lse > float("-inf"))[:, :, None] & (features < SIZE)[None, None, :]
    averages = tl.load(partial + place[:, :, None] * SIZE + features[None, None, :], read, 0.0)
    total = tl.sum(weights, 1)
    merged = tl.sum(averages * weights[:, :, None], 1) / tl.where(total > 0.0, total, 1.0)[:, None]
    node = cell % rows
    head = cell // rows % heads
    row = (cell // rows // heads * rows + node) * heads + head
    mask = real[:, None] & (features < SIZE)[None, :]
    tl.store(output + row[:, None] * SIZE + features[None, :], merged.to(output.dtype.element_ty), mask)


@dataclass(frozen=True, slots=True)
class Launch:
    """How `_attend` is launched: `splits` programs share one prefix, each takes `block_rows` rows (nodes times heads of
    a group) and reads `block_columns` tokens at a time."""

    splits: int
    block_rows: int
    block_columns: int
    warps: int
    stages: int


def choose_launch(
    *, packed_rows: int, pairs: int, prefix: int, head_size: int, element_size: int, processors: int
) -> Launch:
    """Enough programs to fill the GPU, each with as much to read as possible.

    Args:
        packed_rows: N * G.
        pairs: B * Hkv.
        prefix: P.
        element_size: bytes per number.
        processors: multiprocessors of the GPU.
    """
    # The largest blocks that no GPU spills with; float32 is multiplied without matrix units and unrolls far.
    if element_size > 2:
        most_rows, block_columns = 16, 16
    elif head_size > 128:
        most_rows, block_columns = 32, 32
    else:
        most_rows, block_columns = 128, 64
    block_rows = min(max(16, triton.next_power_of_2(packed_rows)), most_rows)
    programs = pairs * triton.cdiv(packed_rows, block_rows)
    # With the tree as the last part the number of parts is a power of two, so that merging has no idle lanes.
    parts = 2
    while parts < 64 and parts * programs < processors and (2 * parts - 1) * _TOKENS_PER_SPLIT <= prefix:
        parts *= 2
    return Launch(
        splits=parts - 1,
        block_rows=block_rows,
        block_columns=block_columns,
        warps=8 if block_rows >= 128 else 4,
        stages=2,
    )


def tree_attention(
    query: torch.Tensor,
    prefix_keys: torch.Tensor,
    prefix_values: torch.Tensor,
    tree_keys: torch.Tensor,
    tree_values: torch.Tensor,
    *,
    lengths: torch.Tensor,
    ancestors: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """See `adaptspec.kernels.tree_attention`. `launch` overrides what `choose_launch` finds."""
    batch, heads, rows, size = query.shape
    groups, width = prefix_keys.shape[1], tree_keys.shape[2]
    group = heads // groups
    if launch is None:
        launch = choose_launch(
            packed_rows=rows * group,
            pairs=batch * groups,
            prefix=prefix_keys.shape[2],
            head_size=size,
            element_size=query.element_size(),
            processors=_processors(query.device),
        )
    parts = launch.splits + 1
    block_size = max(16, triton.next_power_of_2(size))
    masks = ancestors.contiguous().view(torch.int32)  # little-endian: word j // 32 holds bit j % 32
    partial = torch.empty((batch, heads, rows, parts, size), dtype=torch.float32, device=query.device)
    partial_lse = torch.empty((batch, heads, rows, parts), dtype=torch.float32, device=query.device)
    output = torch.empty((batch, rows, heads, size), dtype=query.dtype, device=query.device)
    with on_device(query.device):
        _attend[(triton.cdiv(rows * group, launch.block_rows), parts, batch * groups)](
            query,
            prefix_keys,
            prefix_values,
            tree_keys,
            tree_values,
            lengths.contiguous(),
            masks,
            partial,
            partial_lse,
            scale,
            softcap or 0.0,
            groups,
            rows,
            width,
            launch.splits,
            *query.stride()[:3],
            *prefix_keys.stride()[:3],
            *prefix_values.stride()[:3],
            *tree_keys.stride()[:3],
            *tree_values.stride()[:3],
            *masks.stride()[:2],
            GROUP=group,
            SIZE=size,
            BLOCK_ROWS=launch.block_rows,
            BLOCK_COLUMNS=launch.block_columns,
            BLOCK_SIZE=block_size,
            CAPPED=softcap is not None,
            PRECISION="ieee",
            num_warps=launch.warps,
            num_stages=launch.stages,
        )
        block_parts = triton.next_power_of_2(parts)
        block_cells = _cells_per_program(block_parts, block_size)
        _merge[(triton.cdiv(batch * heads * rows, block_cells),)](
            partial,
            partial_lse,
            output,
            batch * heads * rows,
            heads,
            rows,
            parts,
            SIZE=size,
            BLOCK_CELLS=block_cells,
            BLOCK_PARTS=block_parts,
            BLOCK_SIZE=block_size,
            num_warps=4,
        )
    return output.transpose(1, 2)


def _cells_per_program(block_parts: int, block_size: int) -> int:
    """As many as 32 numbers per thread allow."""
    return max(1, 4096 // (block_parts * block_size))


@lru_cache(maxsize=16)
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROCESSORS_WITHOUT_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count


def _specialisation(
    label: str, *, dtype: str, nodes: int, groups: int, group: int, size: int, prefix: int, capped: bool = False
) -> Specialisation:
    """`_attend` for one sequence at a decode shape."""
    element = {"bf16": 2, "fp32": 4}[dtype]
    launch = choose_launch(
        packed_rows=nodes * group, pairs=groups, prefix=prefix, head_size=size, element_size=element, processors=132
    )
    pointers = ("query", "prefix_keys", "prefix_values", "tree_keys", "tree_values")
    strides = [name for name in _attend.arg_names if name[-2:] in ("_b", "_h", "_n", "_p", "_w")]
    tokens = prefix + nodes
    return Specialisation(
        name=f"tree_attention/attend {label}",
        kernel=_attend,
        signature={
            **dict.fromkeys(pointers, f"*{dtype}"),
            "lengths": "*i64",
            "ancestors": "*i32",
            "partial": "*fp32",
            "partial_lse": "*fp32",
            "scale": "fp32",
            "softcap": "fp32",
            **dict.fromkeys(("groups", "rows", "width", "splits", *strides), "i32"),
        },
        constexprs={
            "GROUP": group,
            "SIZE": size,
            "BLOCK_ROWS": launch.block_rows,
            "BLOCK_COLUMNS": launch.block_columns,
            "BLOCK_SIZE": max(16, triton.next_power_of_2(size)),
            "CAPPED": capped,
            "PRECISION": "ieee",
        },
        num_warps=launch.warps,
        num_stages=launch.stages,
        shape=f"one sequence, {groups} key-value heads of {group} query heads, head size {size}, {nodes} nodes, "
        f"{prefix} tokens of prefix, {launch.splits} splits",
        bytes_moved=2 * groups * tokens * size * element + 2 * groups * group * nodes * size * element,
        flops=4 * groups * group * nodes * tokens * size,
        aligned=tuple(name for name in strides if not name.startswith("ancestors")),
    )


def _merge_specialisation(label: str, *, heads: int, nodes: int, parts: int, size: int) -> Specialisation:
    block_size = triton.next_power_of_2(size)
    return Specialisation(
        name=f"tree_attention/merge {label}",
        kernel=_merge,
        signature={
            "partial": "*fp32",
            "partial_lse": "*fp32",
            "output": "*bf16",
            **dict.fromkeys(("cells", "heads", "rows", "parts"), "i32"),
        },
        constexprs={
            "SIZE": size,
            "BLOCK_CELLS": _cells_per_program(parts, block_size),
            "BLOCK_PARTS": parts,
            "BLOCK_SIZE": block_size,
        },
        num_warps=4,
        num_stages=2,
        shape=f"{heads} query heads, {nodes} nodes, {parts} parts, head size {size}",
        bytes_moved=heads * nodes * (parts * (size + 1) * 4 + size * 2),
    )


SPECIALISATIONS = (
    _specialisation("bf16 64 nodes 8x4 d128", dtype="bf16", nodes=64, groups=8, group=4, size=128, prefix=4096),
    _specialisation("bf16 1 node 8x4 d128", dtype="bf16", nodes=1, groups=8, group=4, size=128, prefix=4096),
    _specialisation("bf16 32 nodes 32x1 d96", dtype="bf16", nodes=32, groups=32, group=1, size=96, prefix=4096),
    _specialisation(
        "bf16 32 nodes 4x2 d256 capped", dtype="bf16", nodes=32, groups=4, group=2, size=256, prefix=4096, capped=True
    ),
    _specialisation("fp32 64 nodes 8x4 d128", dtype="fp32", nodes=64, groups=8, group=4, size=128, prefix=4096),
    _merge_specialisation("16 parts d128", heads=32, nodes=64, parts=16, size=128),
    _merge_specialisation("2 parts d64", heads=9, nodes=16, parts=2, size=64),
    _merge_specialisation("64 parts d256", heads=8, nodes=32, parts=64, size=256),
)
