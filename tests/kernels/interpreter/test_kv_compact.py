"""`kv_compact` in Triton against moving one row after the other in Python lists, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from adaptspec.kernels import backend
from adaptspec.kernels.kv_compact import kv_compact
from adaptspec.kernels.kv_compact import triton as kernels
from tests.kernels.mutants import mutated


@dataclass(frozen=True)
class Case:
    """`paths` and `starts` per sequence; `gap` leaves room between heads, so that the cache is not contiguous."""

    paths: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    layers: int = 2
    heads: int = 2
    size: int = 16
    gap: int = 0
    dtype: torch.dtype = torch.float32

    def inputs(self) -> dict[str, Any]:
        """The arguments of `kv_compact`; every number of the cache is another one."""
        sequences, capacity = len(self.paths), max(self.starts) + 40
        shape = (self.layers, sequences, self.heads, capacity + self.gap, self.size)
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[self.dtype.itemsize]
        numbers = torch.randperm(torch.Size(shape).numel(), generator=torch.Generator().manual_seed(3))
        cache = numbers.to(bits).view(self.dtype).view(shape)[:, :, :, :capacity]
        depth = max(len(path) for path in self.paths)
        path = torch.tensor([[*path, *[-1] * (depth - len(path))] for path in self.paths], dtype=torch.int64)
        return {"cache": cache, "path": path.view(sequences, depth), "starts": torch.tensor(self.starts)}


CASES = {
    # A path that skips rows, and one that starts in place: rows with source and target equal stay.
    "two sequences": Case(paths=((1, 3, 5), (0, 1, 4)), starts=(4, 9)),
    # Several blocks of rows whose targets are sources of earlier blocks: the order of blocks decides.
    "deep path": Case(paths=(tuple(range(3, 23)),), starts=(2,), layers=1, heads=1),
    # Every source is the next row: within one block a row is read before it is written.
    "shift by one": Case(paths=(tuple(range(1, 9)),), starts=(0,)),
    # Sequences of different accepted lengths, one of none: the filling is no row.
    "ragged": Case(paths=((2, 6), (), (1,)), starts=(0, 5, 3)),
    # Nothing accepted at all.
    "nothing": Case(paths=((), ()), starts=(3, 4)),
    # Padding of the head size is neither read nor written.
    "head size 80": Case(paths=((1, 4),), starts=(2,), size=80),
    "head size 96": Case(paths=((1, 4),), starts=(2,), size=96, heads=1),
    # Strides come from the tensor, not from its shape.
    "not contiguous": Case(paths=((1, 4), (2, 3)), starts=(2, 3), gap=7),
    # Two-byte numbers, of which many are NaN as bfloat16: bits are moved, not values.
    "bfloat16": Case(paths=((1, 2, 7),), starts=(1,), dtype=torch.bfloat16),
    "float16": Case(paths=((1, 2, 7),), starts=(1,), dtype=torch.float16),
}


def expected(cache: torch.Tensor, path: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """The cache afterwards, as integers."""
    bits = integers(cache).clone()
    for sequence, start in enumerate(starts.tolist()):
        for row, source in enumerate(path[sequence].tolist()):
            if source >= 0:
                bits[:, sequence, :, start + row] = bits[:, sequence, :, start + source]
    return bits


def integers(cache: torch.Tensor) -> torch.Tensor:
    return cache.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[cache.element_size()])


@pytest.mark.parametrize("name", CASES)
def test_rows_are_moved_and_nothing_else(name: str) -> None:
    inputs = CASES[name].inputs()
    wanted = expected(**inputs)
    kernels.kv_compact(**inputs)
    assert torch.equal(integers(inputs["cache"]), wanted)


def test_offsets_beyond_two_to_the_31_elements() -> None:
    """Layer times stride leaves 32 bits although both fit. Only the rows in use are touched, so the memory is free."""
    inputs = Case(paths=((1, 3),), starts=(2,), layers=3, heads=1, size=16, dtype=torch.float16).inputs()
    cache = inputs["cache"]
    stride = 2**30 + 8
    storage = torch.Tensor(torch.UntypedStorage(2 * (2 * stride + cache[0].numel()))).view(torch.float16)
    far = storage.as_strided(cache.shape, (stride, *cache.stride()[1:]))
    far.copy_(cache)
    wanted = expected(**inputs)
    kernels.kv_compact(far, inputs["path"], inputs["starts"])
    assert 2 * far.stride(0) > 2**31 > far.stride(0)
    assert torch.equal(integers(far), wanted)


def test_the_op_takes_the_kernel_when_asked_to() -> None:
    inputs = CASES["two sequences"].inputs()
    wanted = expected(**inputs)
    before = backend.calls["kv_compact", "triton"]
    kv_compact(**inputs, backend="triton")
    assert backend.calls["kv_compact", "triton"] == before + 1
    assert torch.equal(integers(inputs["cache"]), wanted)


FAULTS: dict[str, tuple[str, str, str]] = {
    # What is wrong: the code, what it becomes, and the case that has to notice.
    "last rows first": (
        "for first in range(0, depth, BLOCK_ROWS):",
        "for first in range((depth - 1) // BLOCK_ROWS * BLOCK_ROWS, -1, -BLOCK_ROWS):",
        "deep path",
    ),
    "the next row is taken for one in place": (
        "(source > row)[:, None]",
        "(source > row + 1)[:, None]",
        "shift by one",
    ),
    "only the first block": ("range(0, depth, BLOCK_ROWS)", "range(0, 1, BLOCK_ROWS)", "deep path"),
    "the filling is a row": ("row < depth, -1)", "row < depth, 9)", "two sequences"),
    "one row too far": ("((start + row) * cache_c)", "((start + row + 1) * cache_c)", "two sequences"),
    "every sequence has the first one's path": ("path + sequence * path_b + row", "path + row", "two sequences"),
    "every sequence starts with the first": ("tl.load(starts + sequence)", "tl.load(starts)", "two sequences"),
    "padding is moved": ("(features < SIZE)[None, :]", "(features >= 0)[None, :]", "head size 80"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str) -> None:
    old, new, name = FAULTS[fault]
    inputs = CASES[name].inputs()
    wanted = expected(**inputs)
    with mutated("adaptspec.kernels.kv_compact.triton", old, new) as mutant:
        mutant.kv_compact(**inputs)
    assert not torch.equal(integers(inputs["cache"]), wanted)
