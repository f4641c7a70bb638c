"""The tokens that the request itself has made likely."""

from __future__ import annotations

import numpy as np
import torch

from adaptspec.kernels.dense_rows import DenseRows
from adaptspec.kernels.vocab_head import TopTokens
from adaptspec.types import Observation
from adaptspec.vocab.base import HeadData, VocabHead
from adaptspec.vocab.frequency import read_count
from adaptspec.vocab.registry import register_vocab_head
from adaptspec.vocab.rows_in_use import RowsInUse

CAPACITY = 3072
TOP = 3
"""Of the target's most likely tokens at every position so many are taken."""

WAITING = 1 << 14
"""Tokens that may wait to be taken in until the head is used again."""


@register_vocab_head("microspec")
class MicroSpecHead(VocabHead):
    """MicroSpec (2605.26444, also NanoSpec), free of training: the tokens in use begin as those of the prompt and the
    target's top 3 after each of its tokens; every verified step adds the tokens of the whole draft tree, rejected ones
    too, the committed ones, and the target's top 3 after the root and after every node. Cleared with every request.

    At most `capacity` rows; beyond that the token goes out that was not seen for longest (special tokens stay).

    "microspec" has 3072 rows at most, "microspec:1024" fewer.
    """

    summary = "tokens that the prompt, the drafts and the target's top 3 have named: microspec or microspec:ROWS"
    needs_prompt_top_k = TOP
    needs_top_k = TOP

    def __init__(self, name: str, capacity: int = CAPACITY) -> None:
        super().__init__(name)
        self.capacity = capacity
        self._in_use: RowsInUse | None = None
        self._waiting: list[np.ndarray] = []
        self._count_waiting = 0

    @classmethod
    def parse(cls, name: str, argument: str) -> MicroSpecHead:
        return cls(name, read_count(name, argument) if argument else CAPACITY)

    def _bound(self, data: HeadData) -> None:
        capacity = min(self.capacity, len(self.weight))
        if len(self.keep) > capacity:
            raise ValueError(
                f"vocab {self.name!r} must hold {len(self.keep)} special tokens, more than {capacity} rows"
            )
        rows = DenseRows(self.weight, self._row_of[self.keep], capacity)
        self._in_use = RowsInUse(rows)
        self._tokens = torch.from_numpy(self._token_of).to(self.weight.device)
        self._forget_waiting()

    @property
    def rows(self) -> int:
        self._take_in()
        return 0 if self._in_use is None else len(self._in_use.dense)

    def prefill(self, token_ids: np.ndarray, top_ids: np.ndarray | None = None) -> None:
        self._forget_waiting()
        self._bound_rows().clear()
        if top_ids is None:
            raise ValueError(f"vocab {self.name!r} needs the target's top {TOP} tokens after every token of the prompt")
        seen = np.concatenate([token_ids[: len(top_ids), None], top_ids[:, :TOP]], axis=1)
        self._wait(seen.ravel())
        self._wait(token_ids[len(top_ids) :])
        self._take_in()

    def observe(self, observation: Observation) -> None:
        """Only noted here: a step in which the head is not used costs next to nothing."""
        self._wait(observation.tree.token_ids)
        if observation.target_top_ids is not None:
            self._wait(observation.target_top_ids[:, :TOP].ravel())
        self._wait(observation.tokens)

    def finish(self) -> None:
        self._forget_waiting()
        if self._in_use is not None:
            self._in_use.clear()

    def reset(self) -> None:
        self.finish()

    def logits(self, hidden: torch.Tensor, *, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._take_in()
        dense = self._bound_rows().dense
        return self._tokens[dense.ids[: len(dense)].to(torch.int64)], dense.logits(hidden)

    def top(self, hidden: torch.Tensor, *, k: int, depth: int) -> TopTokens:
        self._take_in()
        found = self._bound_rows().dense.top(hidden, k=k)
        return named(found, self._tokens)

    def _wait(self, token_ids: np.ndarray) -> None:
        self._waiting.append(token_ids)
        self._count_waiting += len(token_ids)
        if self._count_waiting > WAITING:
            self._take_in()

    def _take_in(self) -> None:
        if self._waiting:
            seen = np.concatenate(self._waiting)
            self._forget_waiting()
            self._bound_rows().use(self._rows_of(seen))

    def _forget_waiting(self) -> None:
        self._waiting, self._count_waiting = [], 0

    def _bound_rows(self) -> RowsInUse:
        if self._in_use is None:
            raise RuntimeError(f"vocab {self.name!r} has no head yet; call bind first")
        return self._in_use


def named(found: TopTokens, tokens: torch.Tensor) -> TopTokens:
    """The same with target tokens [R] in place of rows; -1 stays."""
    ids = torch.where(found.ids >= 0, tokens[found.ids.clamp(min=0)], found.ids)
    return TopTokens(ids, found.log_probs, found.log_sum_exp)
