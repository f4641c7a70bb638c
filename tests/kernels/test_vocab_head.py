"""`vocab_head`: the reference against the definition, what is refused, and its kernels through the interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from adaptspec.kernels.backend import calls
from adaptspec.kernels.vocab_head import vocab_head
from tests.kernels.mutants import mutated
from tests.kernels.strides import has_strides, narrow_strides
from tests.kernels.vocab_head_cases import CHECKS, assert_same, expected, normal, some_ids

MODULE = "adaptspec.kernels.vocab_head.reference"


def test_kernels_in_the_interpreter(run_interpreted: Callable[..., None]) -> None:
    run_interpreted("test_vocab_head.py", at_least=39)


@pytest.mark.parametrize("name", CHECKS)
def test_regime(name: str) -> None:
    before = calls["vocab_head", "reference"]
    CHECKS[name](vocab_head)
    assert calls["vocab_head", "reference"] > before


@pytest.mark.parametrize("count", [1, 8])
def test_a_wide_head(count: int) -> None:
    hidden, weight, ids = normal(count, 64), normal(9000, 64, seed=1), some_ids(5000, 9000)
    assert_same(vocab_head(hidden, weight, ids, k=32), expected(hidden, weight, ids, k=32))
    assert_same(vocab_head(hidden, weight, k=32), expected(hidden, weight, None, k=32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_logits_only(dtype: torch.dtype) -> None:
    hidden, weight = normal(4, 64, dtype=dtype) / 4, normal(500, 64, seed=1, dtype=dtype)
    found, wanted = vocab_head(hidden, weight, k=8), expected(hidden, weight, None, k=500)
    for row in range(4):
        exact = dict(zip(wanted.ids[row].tolist(), wanted.log_probs[row].tolist(), strict=True))
        chosen = torch.tensor([exact[token] for token in found.ids[row].tolist()])
        # Logits are up to about 30, where neighbours in bfloat16 are 1/8 apart.
        torch.testing.assert_close(found.log_probs[row], chosen, atol=0.13, rtol=0)
        torch.testing.assert_close(chosen, wanted.log_probs[row, :8].float(), atol=0.26, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"k": 0}, r"k must be in \[1, 32\], got 0"),
        ({"k": 33}, r"k must be in \[1, 32\], got 33"),
        ({"hidden": torch.zeros(2, 3)}, r"shapes \[M, H\] and \[V, H\], got \[2, 3\] and \[6, 4\]"),
        ({"hidden": torch.zeros(4)}, r"got \[4\] and \[6, 4\]"),
        ({"hidden": torch.zeros(2, 4).half()}, "must be of one type, got torch.float16 and torch.float32"),
        ({"weight": torch.zeros(4, 6).T}, r"rows of weight must be contiguous, got strides \[1, 6\]"),
        ({"weight": torch.zeros(6, 4, device="meta")}, "must be on one device, got cpu and meta"),
        ({"ids": torch.zeros(2, dtype=torch.int64)}, r"ids must be int32 \[V'\] on cpu, got torch.int64 \[2\] on cpu"),
        ({"ids": torch.zeros(1, 2, dtype=torch.int32)}, r"got torch.int32 \[1, 2\] on cpu"),
        ({"ids": torch.zeros(2, dtype=torch.int32), "gathered": True}, "one row per id, got 6 rows and 2 ids"),
    ],
)
def test_what_is_refused(arguments: dict[str, object], problem: str) -> None:
    usual = {"hidden": torch.zeros(2, 4), "weight": torch.zeros(6, 4), "ids": None, "k": 2}
    with pytest.raises(ValueError, match=problem):
        vocab_head(**{**usual, **arguments})


def test_triton_is_not_there_on_a_cpu() -> None:
    with pytest.raises(RuntimeError, match="triton was asked for vocab_head on cpu"):
        vocab_head(torch.zeros(1, 4), torch.zeros(6, 4), k=2, backend="triton")


@pytest.mark.parametrize(
    ("old", "new", "regime"),
    [
        (
            "for row in unsure.nonzero()",
            "for row in unsure[:0].nonzero()",
            "of equal logits the lowest position comes first",
        ),
        (
            "places.sort(dim=1)",
            "places.sort(dim=1, descending=True)",
            "of equal logits the lowest position comes first",
        ),
        ("logits.masked_fill_(unused, -torch.inf)", "logits.masked_fill_(unused, 0.0)", "entries not in use"),
        ("found.masked_fill(nothing, -1)", "found", "infinite logits"),
        ("values[:, 0] - log_softmax[:, 0]", "values[:, 0]", "ordinary"),
        ("ids.to(torch.int64)[places]", "places", "ordinary"),
    ],
)
def test_mutants_fail(old: str, new: str, regime: str) -> None:
    with mutated(MODULE, old, new) as mutant:

        def head(
            hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor | None, *, k: int, gathered: bool = False
        ) -> object:
            return mutant.vocab_head(hidden, weight, ids, k=k, gathered=gathered)

        with pytest.raises(AssertionError):
            CHECKS[regime](head)


def test_strides_are_multiplied_in_64_bits() -> None:
    """Heads of more than 2^31 elements exist."""
    from adaptspec.kernels.vocab_head import triton as kernels

    strided = [each for each in kernels.SPECIALISATIONS if has_strides(each)]
    assert len(strided) == 5
    assert [line for each in strided for line in narrow_strides(each)] == []
    old, new = "tl.where(used, sources, 0).to(tl.int64) * weight_stride", "tl.where(used, sources, 0) * weight_stride"
    with mutated("adaptspec.kernels.vocab_head.triton", old, new) as mutant:
        assert narrow_strides(mutant.SPECIALISATIONS[0])
