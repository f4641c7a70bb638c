"""`vocab_head` in Triton's interpreter against the definition in float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from adaptspec.kernels.backend import calls
from adaptspec.kernels.vocab_head import TopTokens, vocab_head
from tests.kernels.mutants import mutated
from tests.kernels.vocab_head_cases import CHECKS, assert_same, expected, normal, some_ids

MODULE = "adaptspec.kernels.vocab_head.triton"

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about the infinities tested here


@pytest.fixture(autouse=True)
def uninitialised_memory_holds_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN, integers with their maximum
    yield
    torch.use_deterministic_algorithms(False)


def triton_head(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor | None, *, k: int, gathered: bool = False
) -> TopTokens:
    return vocab_head(hidden, weight, ids, k=k, gathered=gathered, backend="triton")


@pytest.mark.parametrize("name", CHECKS)
def test_regime(name: str) -> None:
    CHECKS[name](triton_head)


@pytest.mark.parametrize(
    ("mode", "count", "vocab_size", "width", "size", "k", "dtype"),
    [
        pytest.param("full", 1, 64, 64, 32, 8, torch.float32, id="one row, whole blocks"),
        pytest.param("ids", 1, 120, 97, 48, 8, torch.float32, id="one row, ragged end"),
        pytest.param("gathered", 1, 90, 70, 50, 4, torch.float16, id="one row, half precision, size 50"),
        pytest.param("ids", 1, 50, 34, 576, 3, torch.float32, id="one row, size 576"),
        pytest.param("full", 3, 129, 129, 48, 8, torch.float32, id="three rows"),
        pytest.param("ids", 2, 140, 65, 50, 5, torch.float16, id="half precision, size 50"),
        pytest.param("gathered", 5, 70, 66, 576, 3, torch.float32, id="size 576"),
        pytest.param("ids", 17, 80, 65, 16, 1, torch.float32, id="seventeen rows"),
        pytest.param("gathered", 65, 20, 10, 16, 2, torch.float16, id="two blocks of rows"),
        pytest.param("full", 1, 70, 70, 16, 32, torch.float32, id="k is 32"),
        pytest.param("ids", 2, 60, 10, 16, 12, torch.float32, id="k above the width"),
        pytest.param("full", 2, 1, 1, 16, 3, torch.float32, id="one entry"),
    ],
)
def test_values(mode: str, count: int, vocab_size: int, width: int, size: int, k: int, dtype: torch.dtype) -> None:
    hidden, weight = normal(count, size, dtype=dtype), normal(vocab_size, size, seed=1, dtype=dtype)
    ids = None if mode == "full" else some_ids(width, vocab_size)
    before, calls_before = weight.clone(), calls["vocab_head", "triton"]
    if mode == "gathered":
        found = triton_head(hidden, weight[ids.long()], ids, k=k, gathered=True)
    else:
        found = triton_head(hidden, weight, ids, k=k)
    assert_same(found, expected(hidden, before, ids, k=k))
    assert calls["vocab_head", "triton"] == calls_before + 1, "the fast path ran"
    assert torch.equal(weight, before)


def test_strided_hidden_and_ids() -> None:
    hidden, weight = normal(16, 6).T, normal(80, 16, seed=1)
    ids = some_ids(80, 80)[::2]
    assert_same(triton_head(hidden, weight, ids, k=4), expected(hidden, weight, ids, k=4))


def test_nothing_to_do() -> None:
    weight = normal(10, 4)
    assert triton_head(torch.empty(0, 4), weight, None, k=2).ids.shape == (0, 2)
    nothing = triton_head(normal(2, 4), weight, torch.empty(0, dtype=torch.int32), k=2)
    assert nothing.ids.tolist() == [[-1, -1]] * 2 and nothing.log_sum_exp.tolist() == [-np.inf] * 2


@pytest.mark.parametrize("count", [1, 2])
def test_rows_beyond_2_to_the_31_elements(tmp_path: Path, count: int) -> None:
    """Row 2100 of a head with 2^20 elements between rows: the offset does not fit 32 bits. The file is sparse."""
    stride, rows = 1 << 20, 2101
    storage = torch.from_file(str(tmp_path / "head"), shared=True, size=stride * rows, dtype=torch.float16)
    weight = storage.as_strided((rows, 16), (stride, 1))
    ids = torch.tensor([2100, 5, 2099, 2048], dtype=torch.int32)
    weight[ids.long()] = normal(4, 16, seed=1, dtype=torch.float16)
    hidden = normal(count, 16, dtype=torch.float16)
    assert_same(triton_head(hidden, weight, ids, k=4), expected(hidden, weight, ids, k=4))
    (tmp_path / "head").unlink()


MUTANTS = {
    "rows behind the end are read": (
        "used = places < width",
        "used = places < width + 64",
        "memory around is not read",
    ),
    "columns behind the end are read": (
        "            inside = columns < SIZE\n            h = tl.load(only",
        "            inside = columns < SIZE + 64\n            h = tl.load(only",
        "memory around is not read",
    ),
    "columns behind the end are read, matrix": (
        "            inside = columns < SIZE\n            h = tl.load(hidden_starts",
        "            inside = columns < SIZE + 64\n            h = tl.load(hidden_starts",
        "memory around is not read",
    ),
    "rows out of use count as zero": ('tl.where(used[None, :], logits, float("-inf"))', "logits", "entries not in use"),
    "sums of blocks merged without their maxima": (
        "tl.sum(total * tl.exp(largest - shift), axis=0)",
        "tl.sum(total, axis=0)",
        "ordinary",
    ),
    "largest block stands for all": (
        "tl.sum(total * tl.exp(largest - shift), axis=0)",
        "tl.max(total * tl.exp(largest - shift), axis=0)",
        "ordinary",
    ),
    "exponentials without a maximum": (
        "tl.exp(logits - shift[:, None])",
        "tl.exp(logits) * tl.exp(-shift[:, None])",
        "large logits",
    ),
    "-inf minus -inf": (
        'shift = tl.where(largest > float("-inf"), largest, 0.0)',
        "shift = largest",
        "infinite logits",
    ),
    "merged -inf minus -inf": ('shift = tl.where(peak > float("-inf"), peak, 0.0)', "shift = peak", "infinite logits"),
    "-inf is a candidate": (
        'tl.where(logits > float("-inf"), keys, NOTHING)',
        "keys",
        "infinite logits",
    ),
    "ties to the highest position": (
        "return LOW_HALF - place",
        "return place",
        "of equal logits the lowest position comes first",
    ),
    "order of negative logits reversed": (
        "order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)",
        "order = bits.to(tl.int64)",
        "negative logits",
    ),
    "one of each block": (
        "mask=(chosen[:, None] >= 0) & (slot[None, :] < K)",
        "mask=(chosen[:, None] >= 0) & (slot[None, :] < 1)",
        "where the best lie",
    ),
    "best block only": (
        "chosen = tl.where(slot == i, holder, chosen)",
        "chosen = tl.where((slot == i) & (i == 0), holder, chosen)",
        "where the best lie",
    ),
    "positions instead of tokens": (
        "token = tl.load(ids + token, mask=found, other=-1).to(tl.int64)",
        "token = token",
        "ordinary",
    ),
    "not normalised": ("_logit_of(best) - lse", "_logit_of(best)", "ordinary"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name: str) -> None:
    old, new, regime = MUTANTS[name]
    with mutated(MODULE, old, new) as mutant:

        def head(
            hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor | None, *, k: int, gathered: bool = False
        ) -> TopTokens:
            return mutant.vocab_head(hidden, weight, ids, k=k, gathered=gathered)

        with pytest.raises(AssertionError):
            CHECKS[regime](head)
