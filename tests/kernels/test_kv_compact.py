"""`kv_compact`: the reference; starts the kernel's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from adaptspec.kernels import backend
from adaptspec.kernels.kv_compact import kv_compact
from tests.kernels.addresses import narrow_addresses
from tests.kernels.mutants import mutated


def test_the_kernel_in_the_interpreter(run_interpreted: Callable[..., None]) -> None:
    run_interpreted("test_kv_compact.py", at_least=20)


def test_the_reference_moves_accepted_rows_and_nothing_else() -> None:
    cache = torch.arange(2 * 2 * 1 * 12 * 3.0).view(2, 2, 1, 12, 3)[..., :2]
    before = cache.clone()
    calls = backend.calls["kv_compact", "reference"]
    kv_compact(cache, torch.tensor([[1, 2, 5], [0, 3, -1]]), torch.tensor([4, 7]))
    assert backend.calls["kv_compact", "reference"] == calls + 1
    rows = [[0, 1, 2, 3, 5, 6, 9, 7, 8, 9, 10, 11], [0, 1, 2, 3, 4, 5, 6, 7, 10, 9, 10, 11]]
    for sequence in range(2):
        assert torch.equal(cache[:, sequence], before[:, sequence, :, rows[sequence]])


def test_nothing_accepted() -> None:
    cache = torch.rand(2, 1, 1, 6, 4)
    before = cache.clone()
    kv_compact(cache, torch.empty((1, 0), dtype=torch.int64), torch.tensor([3]))
    kv_compact(cache, torch.tensor([[-1, -1]]), torch.tensor([3]))
    assert torch.equal(cache, before)


def test_what_does_not_fit_is_refused() -> None:
    cache, path, starts = torch.zeros(2, 3, 1, 6, 4), torch.zeros((3, 2), dtype=torch.int64), torch.zeros(3).long()
    for arguments, message in (
        ((cache[0], path, starts), r"cache must have shape \[L, B, H, C, D\], got \[3, 1, 6, 4\]"),
        ((cache.mT, path, starts), "cache must have stride 1 along D, got 4"),
        ((cache, path[:2], starts), r"path must be int64 \[B, A\] with B = 3, got torch.int64 \[2, 2\]"),
        ((cache, path.int(), starts), r"path must be int64 \[B, A\] with B = 3, got torch.int32"),
        ((cache, path, starts[0]), r"starts must be int64 \[B\] with B = 3, got torch.int64 \[\]"),
    ):
        with pytest.raises(ValueError, match=message):
            kv_compact(*arguments)


def test_addresses_are_computed_in_64_bits() -> None:
    """The rows of all layers lie in one tensor, which is larger than 2 ** 31 elements sooner than a layer is."""
    from adaptspec.kernels.kv_compact import triton as kernels

    assert narrow_addresses(kernels.SPECIALISATIONS[0], data="i16") == []
    for old, new in (
        ("layer = (tl.program_id(0) // sequences).to(tl.int64)", "layer = tl.program_id(0) // sequences"),
        ("tl.program_id(1).to(tl.int64) * cache_h", "tl.program_id(1) * cache_h"),
    ):
        with mutated("adaptspec.kernels.kv_compact.triton", old, new) as mutant:
            assert narrow_addresses(mutant.SPECIALISATIONS[0], data="i16")
