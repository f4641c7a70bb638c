"""What `vocab_head` must give, from its definition, and regimes that each catch a bug of their own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from adaptspec.kernels.vocab_head import TopTokens

TOLERANCE = 2e-5
"""Of log-probabilities and log-sum-exps around 20: float32 rounding of sums of up to 576 products of order 1."""

Head = Callable[..., TopTokens]
"""`(hidden, weight, ids, *, k, gathered=False) -> TopTokens`."""


def expected(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor | None, *, k: int) -> TopTokens:
    """From the definition: a stable sort, so that of equal logits the lowest position comes first."""
    width = len(weight) if ids is None else len(ids)
    tokens = np.arange(width) if ids is None else ids.numpy()
    rows = weight if ids is None else weight[ids.clamp(min=0).long()]
    logits = (hidden.double() @ rows.double().T).numpy()
    logits[:, tokens < 0] = -np.inf
    shape = (len(hidden), k)
    top, log_probs = np.full(shape, -1), np.full(shape, -np.inf)
    log_sum_exp = np.array([np.logaddexp.reduce(row) if width else -np.inf for row in logits])
    for row, scores in enumerate(logits):
        order = [place for place in np.argsort(-scores, kind="stable")[:k] if scores[place] > -np.inf]
        top[row, : len(order)] = tokens[order]
        log_probs[row, : len(order)] = scores[order] - log_sum_exp[row]
    return TopTokens(torch.from_numpy(top), torch.from_numpy(log_probs), torch.from_numpy(log_sum_exp))


def assert_same(found: TopTokens, wanted: TopTokens) -> None:
    assert found.ids.dtype == torch.int64
    assert found.log_probs.dtype == found.log_sum_exp.dtype == torch.float32
    assert found.ids.tolist() == wanted.ids.tolist()
    torch.testing.assert_close(found.log_probs, wanted.log_probs.float(), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(found.log_sum_exp, wanted.log_sum_exp.float(), atol=TOLERANCE, rtol=0)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal, scaled so that products of rows are of order 1."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 3 / shape[-1] ** 0.25).to(dtype)


def some_ids(width: int, vocab_size: int, seed: int = 1) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).permutation(vocab_size)[:width].astype(np.int32))


def check_ordinary(head: Head) -> None:
    hidden, weight, ids = normal(3, 48), normal(200, 48, seed=1), some_ids(150, 200)
    assert_same(head(hidden, weight, ids, k=5), expected(hidden, weight, ids, k=5))


def check_memory_around(head: Head) -> None:
    """Rows of the head and entries of `ids` behind the end would win if they were read."""
    hidden = normal(2, 20).abs()
    for count in (1, 2):
        around = torch.full((100, 24), 1e4)
        around[:70, :20] = normal(70, 20, seed=1)
        weight = around[:70, :20]
        all_ids = torch.full((96,), 69, dtype=torch.int32)
        all_ids[:40] = some_ids(40, 69)
        wide = torch.full((2, 40), 1e4)
        wide[:, :20] = hidden
        some_hidden = wide[:count, :20]
        for ids in (None, all_ids[:40]):
            assert_same(head(some_hidden, weight, ids, k=6), expected(some_hidden, weight, ids, k=6))


def check_ties(head: Head) -> None:
    """Small whole numbers make exact and equal logits, zeros among them, within blocks and across."""
    generator = np.random.default_rng(3)
    weight = torch.from_numpy(generator.integers(-1, 2, (90, 2)).astype(np.float32))
    ids = some_ids(70, 90, seed=4)
    for hidden in (torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, -1.0], [-0.0, 0.0], [0.0, -2.0], [2.0, 2.0]])):
        assert_same(head(hidden, weight, ids, k=12), expected(hidden, weight, ids, k=12))
    zeros = torch.tensor([0.0, -0.0] * 5)[:, None] * torch.ones(1, 2)
    for count in (1, 2):
        assert head(torch.ones(count, 2), zeros, None, k=4).ids.tolist() == [[0, 1, 2, 3]] * count


def check_infinite(head: Head) -> None:
    """Logits of -inf are never returned, whatever k is; a whole block of them leaves the others right."""
    weight = normal(150, 4, seed=1).abs()
    weight[:70] = -torch.inf
    weight[73:149] = -torch.inf
    for count in (1, 3):
        hidden = normal(count, 4).abs()
        assert_same(head(hidden, weight, None, k=6), expected(hidden, weight, None, k=6))
        nothing = head(hidden, weight[:64], None, k=3)
        assert nothing.ids.tolist() == [[-1] * 3] * count
        assert nothing.log_probs.tolist() == [[-np.inf] * 3] * count
        assert nothing.log_sum_exp.tolist() == [-np.inf] * count


def check_negative(head: Head) -> None:
    weight = -torch.arange(1.0, 71.0)[some_ids(70, 70).long()][:, None]
    assert_same(head(torch.ones(1, 1), weight, None, k=4), expected(torch.ones(1, 1), weight, None, k=4))


def check_unused(head: Head) -> None:
    hidden, weight = normal(2, 16), normal(120, 16, seed=1)
    ids = some_ids(100, 120)
    ids[::3] = -1
    ids[64:] = -1
    assert_same(head(hidden, weight, ids, k=8), expected(hidden, weight, ids, k=8))
    dense = weight[ids.clamp(min=0).long()]
    dense[ids < 0] = 1e4
    assert_same(head(hidden, dense, ids, k=8, gathered=True), expected(hidden, weight, ids, k=8))
    empty = head(hidden, weight, torch.full((5,), -1, dtype=torch.int32), k=2)
    assert empty.ids.tolist() == [[-1, -1]] * 2 and empty.log_sum_exp.tolist() == [-np.inf] * 2


def check_best_in_one_block(head: Head) -> None:
    """All of the best lie in one block, and another time one in each of several."""
    hidden = torch.ones(1, 1)
    for step in (1, 32):
        weight = torch.zeros(200, 1)
        weight[torch.arange(6) * step + 3, 0] = torch.arange(1.0, 7.0)
        assert_same(head(hidden, weight, None, k=6), expected(hidden, weight, None, k=6))


def check_large_logits(head: Head) -> None:
    """exp would overflow without the maximum taken off, and the maxima of blocks differ by much."""
    hidden = torch.ones(1, 1)
    weight = torch.cat([torch.linspace(-300.0, 200.0, 100), torch.linspace(150.0, 203.0, 50)])[:, None]
    assert_same(head(hidden, weight, None, k=4), expected(hidden, weight, None, k=4))


CHECKS: dict[str, Callable[[Head], None]] = {
    "ordinary": check_ordinary,
    "memory around is not read": check_memory_around,
    "of equal logits the lowest position comes first": check_ties,
    "infinite logits": check_infinite,
    "negative logits": check_negative,
    "entries not in use": check_unused,
    "where the best lie": check_best_in_one_block,
    "large logits": check_large_logits,
}
