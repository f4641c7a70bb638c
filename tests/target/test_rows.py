"""Argmax, top tokens and probabilities of verified rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from adaptspec.target.rows import TargetRows, TokenBuffer, top_ids
from adaptspec.types import DraftTree


def rows_of(logits: torch.Tensor) -> TargetRows:
    tree = DraftTree.chain(range(len(logits) - 1))
    return TargetRows(logits, tree=tree, tokens=TokenBuffer(torch.tensor([1])), processors=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [5, 128, 1024, 4096, 4099])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_top_ids_are_the_largest_in_order(dtype: torch.dtype, width: int, count: int) -> None:
    generator = torch.Generator().manual_seed(width + count)
    logits = torch.randn((7, width), generator=generator).to(dtype)
    got = torch.from_numpy(top_ids(logits, count))
    assert got.shape == (7, min(count, width))
    assert torch.equal(logits.gather(1, got), logits.topk(min(count, width), dim=-1).values)  # ids may differ at ties
    assert all(len(set(row)) == len(row) for row in got.tolist())


def test_top_ids_in_one_block_and_with_infinities() -> None:
    logits = torch.full((2, 8192), -torch.inf)
    logits[0, 256:264] = torch.arange(8.0)  # all of the best in one block
    logits[1, ::1024] = torch.arange(8.0)
    assert top_ids(logits, 8)[0].tolist() == list(range(263, 255, -1))
    assert top_ids(logits, 8)[1].tolist() == list(range(7168, -1, -1024))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_agrees_with_torch(dtype: torch.dtype) -> None:
    logits = torch.randn((9, 513), generator=torch.Generator().manual_seed(0)).to(dtype)
    assert np.array_equal(rows_of(logits).argmax(), logits.float().argmax(-1).numpy())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_argmax_names_the_bad_row(value: float) -> None:
    logits = torch.randn((4, 16), generator=torch.Generator().manual_seed(0))
    logits[2, 5] = value
    with pytest.raises(ValueError, match="at draft node 1"):
        rows_of(logits).argmax()


def test_a_row_without_any_finite_entry_is_bad() -> None:
    with pytest.raises(ValueError, match="after the last committed token"):
        rows_of(torch.full((1, 8), -torch.inf)).argmax()


def test_all_rows_at_once_are_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn((4, 64), generator=torch.Generator().manual_seed(0))
    row_wise = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(5)])
    by_tokens = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)])
    for processors, at_once in ((None, True), (row_wise, True), (by_tokens, False)):
        tree, tokens = DraftTree.chain([1, 2, 3]), TokenBuffer(torch.tensor([1]))
        rows = TargetRows(logits, tree=tree, tokens=tokens, processors=processors)
        assert rows.tensor() is None, "row by row on a CPU"
        with monkeypatch.context() as patch:
            patch.setattr("adaptspec.target.rows._on_gpu", lambda tensor: True)
            together = rows.tensor()
        assert (together is not None) == at_once
        if together is not None:
            torch.testing.assert_close(together, torch.stack([rows[row] for row in range(4)]))


def test_token_buffer_grows_and_stages_without_committing() -> None:
    buffer = TokenBuffer(torch.arange(5))
    for token in range(5, 3000):
        assert buffer.stage([9, 9])[0, -3:].tolist() == [buffer.numpy()[-1], 9, 9]
        buffer.append([token])
    assert buffer.numpy().tolist() == list(range(3000))
    assert buffer.tensor().shape == (1, 3000)
