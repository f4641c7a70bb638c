"""In-context rows: what feeds them, and what goes out."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptspec.kernels.dense_rows import DenseRows
from adaptspec.types import DraftTree, Observation, Verdict
from adaptspec.vocab import VocabHeads
from adaptspec.vocab.microspec import WAITING
from adaptspec.vocab.rows_in_use import RowsInUse

HEAD = torch.arange(40.0)[:, None]


def bound(name: str = "microspec", *, keep: tuple[int, ...] = (0,), size: int = 40) -> VocabHeads:
    heads = VocabHeads((name,))
    heads.bind(torch.arange(float(size))[:, None], vocab_size=size, keep=keep)
    return heads


def in_use(heads: VocabHeads) -> set[int]:
    (head,) = heads
    ids, logits = head.logits(torch.ones(1, 1), depth=1)
    assert len(ids.unique()) == len(ids) == head.rows and logits[0].tolist() == ids.tolist()
    return set(ids.tolist())


def verified(tree: list[int], tokens: list[int], top: list[list[int]]) -> Observation:
    verdict = Verdict(np.arange(len(tokens) - 1), np.array(tokens))
    return Observation(DraftTree.chain(tree), verdict, verdict.token_ids, np.array(top))


def test_feeds() -> None:
    heads = bound()
    heads.prefill(np.array([3, 4, 5]), np.array([[4, 10, 11, 30], [5, 12, 13, 31]]))  # the root is 5
    assert in_use(heads) == {0, 3, 4, 5, 10, 11, 12, 13}  # of each position's tokens the fourth is not taken
    heads.observe(verified([20, 21], [20, 22], [[20, 14, 15, 32], [22, 16, 17, 33], [18, 19, 3, 34]]))
    assert in_use(heads) == {0, 3, 4, 5, *range(10, 20), 20, 21, 22}
    heads.finish()
    heads.prefill(np.array([9]), np.zeros((0, 3), np.int64))
    assert in_use(heads) == {0, 9}  # cleared with every request


def test_the_longest_unseen_go_out_and_specials_stay() -> None:
    heads = bound("microspec:5", keep=(0, 1))
    heads.prefill(np.array([10, 11, 12]), np.array([[11, 11, 11], [12, 12, 12]]))
    assert in_use(heads) == {0, 1, 10, 11, 12}
    heads.observe(verified([], [13], [[10, 10, 10]]))  # 10 is seen again, so 11 is the oldest
    assert in_use(heads) == {0, 1, 10, 12, 13}
    heads.observe(verified([], [14, 15, 16, 17], [[18, 18, 18]]))
    assert in_use(heads) == {0, 1, 15, 16, 17}


def test_a_long_prompt_keeps_its_end() -> None:
    heads = bound("microspec:8", keep=())
    tokens = np.arange(30)
    heads.prefill(tokens, np.repeat(tokens[1:, None], 3, axis=1))
    assert in_use(heads) == set(range(22, 30))


def test_waiting_steps_are_bounded_and_taken_in() -> None:
    heads = bound()
    heads.prefill(np.array([1]), np.zeros((0, 3), np.int64))
    many = [[token % 40] * 3 for token in range(201)]
    for _ in range(WAITING // 600):
        heads.observe(verified([2] * 200, [3], many))
    (head,) = heads
    assert sum(map(len, head._waiting)) <= WAITING
    assert in_use(heads) == set(range(40))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=9), max_size=6),
    st.integers(1, 6),
    st.integers(0, 2),
)
def test_rows_in_use_are_those_of_a_plain_lru(batches: list[list[int]], capacity: int, pinned: int) -> None:
    pinned = min(pinned, capacity)
    dense = DenseRows(HEAD[:12], np.arange(pinned), capacity)
    rows = RowsInUse(dense)
    plain: OrderedDict[int, None] = OrderedDict()
    for batch in batches:
        for row in batch:
            if row >= pinned:
                plain[row] = None
                plain.move_to_end(row)
        while len(plain) > capacity - pinned:
            plain.popitem(last=False)
        rows.use(np.array(batch))
        assert set(dense.token_ids().tolist()) == set(plain) | set(range(pinned))
        assert dense.buffer[: len(dense), 0].tolist() == dense.token_ids().tolist()
    rows.clear()
    assert dense.token_ids().tolist() == list(range(pinned))
