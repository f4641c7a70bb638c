"""`kv_compact` on a GPU: one program per layer, keys or values, head and sequence moves its rows in ascending order.

There is one launch per cache tensor. Layers of one shape lie in one tensor already, so a table of pointers to layers
would be a copy to the device per call, and the compiler would not know how the pointers are aligned.

Numbers are moved as integers of their size: any dtype goes, and bits stay as they are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from adaptspec.kernels.ahead_of_time import Specialisation
from adaptspec.kernels.backend import on_device

_ROWS = 8
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit(do_not_specialize=["sequences", "depth"])
def _compact(
    cache,
    path,
    starts,
    sequences,
    depth,
    cache_l,
    cache_b,
    cache_h,
    cache_c,
    path_b,
    SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Grid (L * B, H). Rows are moved BLOCK_ROWS at a time: all are read before the first is written."""
    layer = (tl.program_id(0) // sequences).to(tl.int64)
    sequence = (tl.program_id(0) % sequences).to(tl.int64)
    features = tl.arange(0, BLOCK_SIZE).to(tl.int64)
    start = tl.load(starts + sequence)
    base = cache + layer * cache_l + sequence * cache_b + tl.program_id(1).to(tl.int64) * cache_h
    for first in range(0, depth, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        source = tl.load(path + sequence * path_b + row, row < depth, -1)
        moves = (source > row)[:, None] & (features < SIZE)[None, :]  # the first rows often lie in place already
        block = tl.load(base + ((start + source) * cache_c)[:, None] + features[None, :], moves, 0)
        tl.debug_barrier()  # one warp's rows may be written where another warp still reads
        tl.store(base + ((start + row) * cache_c)[:, None] + features[None, :], block, moves)
        tl.debug_barrier()


def kv_compact(cache: torch.Tensor, path: torch.Tensor, starts: torch.Tensor) -> None:
    """See `adaptspec.kernels.kv_compact`."""
    layers, sequences, heads, _, size = cache.shape
    if path.shape[1] == 0:
        return
    if path.stride(1) != 1:
        path = path.contiguous()
    with on_device(cache.device):
        _compact[(layers * sequences, heads)](
            cache.view(_INTEGERS[cache.element_size()]),
            path,
            starts.contiguous(),
            sequences,
            path.shape[1],
            *cache.stride()[:4],
            path.stride(0),
            SIZE=size,
            BLOCK_ROWS=_ROWS,
            BLOCK_SIZE=triton.next_power_of_2(size),
            num_warps=4,
        )


def _specialisation(label: str, *, element: int, layers: int, heads: int, size: int, accepted: int) -> Specialisation:
    strides = [name for name in _compact.arg_names if name.startswith("cache_")]
    return Specialisation(
        name=f"kv_compact/compact {label}",
        kernel=_compact,
        signature={
            "cache": f"*i{8 * element}",
            "path": "*i64",
            "starts": "*i64",
            **dict.fromkeys(("sequences", "depth", *strides, "path_b"), "i32"),
        },
        constexprs={"SIZE": size, "BLOCK_ROWS": _ROWS, "BLOCK_SIZE": triton.next_power_of_2(size)},
        num_warps=4,
        num_stages=2,
        shape=f"one sequence, {layers} layers, {heads} key-value heads, head size {size}, {accepted} rows moved",
        bytes_moved=2 * 2 * layers * heads * accepted * size * element,
        aligned=tuple(strides),
    )


SPECIALISATIONS = (
    _specialisation("2 bytes 32x8 d128", element=2, layers=32, heads=8, size=128, accepted=4),
    _specialisation("2 bytes 32x32 d96", element=2, layers=32, heads=32, size=96, accepted=4),
    _specialisation("4 bytes 30x3 d64", element=4, layers=30, heads=3, size=64, accepted=4),
)
