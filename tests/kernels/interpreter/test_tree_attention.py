"""`tree_attention` in Triton against its definition in float64, in regimes that each catch another bug."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adaptspec.kernels import backend
from adaptspec.kernels.tree_attention import tree_attention
from adaptspec.kernels.tree_attention import triton as kernels
from adaptspec.kernels.tree_attention.triton import Launch, choose_launch
from tests.kernels.attention_cases import Case, attend_in_float64
from tests.kernels.mutants import mutated

TOLERANCE = {torch.float32: 4e-6, torch.float16: 4e-3}
"""Largest absolute difference, values being of size 1: some float32 rounding steps; for float16 the rounding of weights
and of the output, 2 ** -11 each, times values up to 4. Scores `spread` times as large are rounded as much coarser."""

SMALL = Launch(splits=3, block_rows=16, block_columns=16, warps=4, stages=2)

CASES: dict[str, tuple[Case, Launch | None]] = {
    # One node and one head are one row of sixteen: rows that are only padding must not be written.
    "one node": (Case(nodes=1, heads=1), None),
    # 17 rows do not fill two row blocks: the second block's tail is masked by row, not by node.
    "rows behind a full block": (Case(nodes=17, heads=1), SMALL),
    # Group sizes: which query head a packed row belongs to, when the group is no power of two either.
    "groups of 3": (Case(heads=6, groups=2, nodes=6), None),
    "groups of 4": (Case(heads=4, groups=1, nodes=3), None),
    "groups of 8": (Case(heads=16, groups=2, nodes=2), None),
    # No prefix at all: every split is empty, and a pointer to nothing must not be read.
    "no prefix": (Case(prefix=0), SMALL),
    # 50 tokens in 3 splits of 32: the last ones are short and empty, so a split must stop at the length.
    "prefix not a multiple of the split": (Case(prefix=50), SMALL),
    # Borders of splits that fall exactly on the length: an off-by-one shows nowhere else.
    "prefix a multiple of the split": (Case(prefix=48), SMALL),
    # Each sequence has its own length, one of them none: a split may be empty in one and full in another.
    "ragged lengths": (Case(prefix=40, lengths=(40, 0, 17), heads=2, groups=1, nodes=2), SMALL),
    # Head sizes that are no power of two are padded: padding must be neither read nor written.
    "head size 8": (Case(size=8, nodes=2), None),
    "head size 80": (Case(size=80, nodes=2), None),
    "head size 96": (Case(size=96, nodes=2), None),
    # Ordinary head sizes take the path without padding masks.
    "head size 64": (Case(size=64, nodes=3), None),
    "head size 128": (Case(size=128, nodes=3), None),
    # More than 64 tree rows need several words, and bits 31 and 63 are signs.
    "wide tree": (Case(nodes=70, heads=1, prefix=3), SMALL),
    # Queries are the last rows of a tree that was run in several forwards.
    "rows run earlier": (Case(before=37, nodes=4), SMALL),
    # A row that sees nothing is zero, not NaN.
    "blind row": (Case(prefix=0, blind=True), SMALL),
    # Rows that see nothing in the first blocks of columns and something later: -inf minus -inf must not stay.
    "late rows": (Case(prefix=0, before=37, nodes=3, alone=True), SMALL),
    # Scores are capped before they are masked.
    "soft cap": (Case(softcap=2.0, spread=4.0, prefix=20), SMALL),
    # Scores of several hundred overflow unless the running maximum is taken off, and splits then differ widely.
    "large scores": (Case(spread=100.0, prefix=50), SMALL),
    # Weights are rounded to the dtype of the values.
    "float16": (Case(dtype=torch.float16, prefix=50, nodes=9, heads=4, groups=2), None),
    "float16 and head size 96": (Case(dtype=torch.float16, size=96, prefix=20), None),
}


@pytest.fixture(autouse=True)
def uninitialised_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a kernel forgets to write is NaN."""
    empty = torch.empty

    def nan(*args: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*args, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", nan)


def tolerance(case: Case) -> float:
    return TOLERANCE[case.dtype] * max(1.0, case.spread)


def worst_difference(output: torch.Tensor, inputs: dict[str, Any]) -> float:
    """NaN counts as infinite."""
    difference = (output.double() - attend_in_float64(**inputs).nan_to_num(0.0)).abs()
    return float(difference.nan_to_num(torch.inf).max())


@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(name: str) -> None:
    case, launch = CASES[name]
    inputs = case.inputs()
    output = kernels.tree_attention(**inputs, launch=launch)
    assert output.shape == inputs["query"].shape and output.dtype == case.dtype
    assert output.transpose(1, 2).is_contiguous()
    assert worst_difference(output, inputs) <= tolerance(case)


def test_the_result_does_not_depend_on_how_it_is_cut() -> None:
    """Every number of splits that can occur merges to the same: the merge weighs by log-sum-exp, not by count."""
    inputs = Case(prefix=70, nodes=2, heads=1).inputs()
    for splits, columns in ((1, 16), (7, 32), (31, 64)):
        output = kernels.tree_attention(**inputs, launch=Launch(splits, 32, columns, 4, 2))
        assert worst_difference(output, inputs) <= TOLERANCE[torch.float32]


def test_offsets_beyond_two_to_the_31_elements() -> None:
    """Index times stride leaves 32 bits although both fit: the product must be taken in 64. The memory is never touched
    but for the rows in use, so it costs nothing."""
    inputs = Case(lengths=(9, 9, 9), prefix=9, nodes=1, dtype=torch.float16).inputs()
    keys = inputs["prefix_keys"]
    stride = 2**30 + 8
    storage = torch.Tensor(torch.UntypedStorage(2 * (2 * stride + keys[0].numel()))).view(torch.float16)
    far = storage.as_strided(keys.shape, (stride, keys[0].numel(), keys.shape[3], 1))
    far.copy_(keys)
    inputs["prefix_keys"] = far
    assert 2 * far.stride(0) > 2**31 > far.stride(0)
    assert worst_difference(kernels.tree_attention(**inputs), inputs) <= TOLERANCE[torch.float16]


def test_the_op_takes_the_kernel_when_asked_to() -> None:
    inputs = Case(nodes=1, heads=1).inputs()
    before = backend.calls["tree_attention", "triton"]
    output = tree_attention(**inputs, backend="triton")
    assert backend.calls["tree_attention", "triton"] == before + 1
    assert worst_difference(output, inputs) <= TOLERANCE[torch.float32]


FAULTS: dict[str, tuple[str, str, str]] = {
    # What is wrong: the code, what it becomes, and the case that has to notice.
    "a key behind the prefix is seen": ("inside = position < end\n", "inside = position <= end\n", "ragged lengths"),
    "no tail mask": ("visible = inside[None, :]\n", "visible = (position >= 0)[None, :]\n", "ragged lengths"),
    "values behind the length are read": ("inside[:, None], 0.0)", "None)", "ragged lengths"),
    "mask off by one": (">> (start % 32 + columns)", ">> ((start + columns + 1) % 32)", "groups of 4"),
    "mask of the first word only": ("words + start // 32", "words", "wide tree"),
    "every row sees the whole tree": ("True,\n            CAPPED", "False,\n            CAPPED", "groups of 4"),
    "old weights are not scaled down": ("total = total * shrink", "total = total", "large scores"),
    "no guard for rows that saw nothing yet": ("pivot = tl.where(", "pivot = highest_now + 0 * tl.where(", "late rows"),
    "log-sum-exp without the sum": ("highest + tl.log2(divisor)", "highest", "prefix not a multiple of the split"),
    "merge in another base": ("weights = tl.exp2(lse", "weights = tl.exp(lse", "prefix not a multiple of the split"),
    "merge reads what nobody wrote": ('(lse > float("-inf"))[:, :, None]', "(lse < 9.0)[:, :, None]", "no prefix"),
    "splits overlap": ("begin = split * share", "begin = split * (share - 1)", "prefix a multiple of the split"),
    "heads in another order": ("group * GROUP + row % GROUP", "row % GROUP * groups + group", "groups of 3"),
    "cap at half": ("(1.0 - 2.0 / ", "(1.0 - 1.0 / ", "soft cap"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str) -> None:
    old, new, name = FAULTS[fault]
    case, launch = CASES[name]
    inputs = case.inputs()
    with mutated("adaptspec.kernels.tree_attention.triton", old, new) as mutant:
        launch = launch and mutant.Launch(launch.splits, launch.block_rows, launch.block_columns, 4, 2)
        output = mutant.tree_attention(**inputs, launch=launch)
    assert worst_difference(output, inputs) > 10 * tolerance(case)


def test_launches_fill_the_gpu_and_no_more() -> None:
    few = {"pairs": 8, "head_size": 128, "element_size": 2, "processors": 132}
    assert choose_launch(packed_rows=4, prefix=4096, **few) == Launch(31, 16, 64, 4, 2)  # 32 parts of 8 pairs
    assert choose_launch(packed_rows=4, prefix=383, **few).splits == 1  # too short to cut finer
    assert choose_launch(packed_rows=4, prefix=384, **few).splits == 3
    assert choose_launch(packed_rows=4, prefix=0, **few).splits == 1
    assert choose_launch(packed_rows=4, prefix=4096, **{**few, "pairs": 256}).splits == 1  # a batch fills it alone
    assert choose_launch(packed_rows=256, prefix=4096, **few).block_rows == 128
