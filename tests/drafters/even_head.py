"""A vocabulary head for tests: even tokens only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from adaptspec.vocab.base import HeadData, VocabHead
from adaptspec.vocab.registry import VOCAB_HEADS, register_vocab_head


class EvenHead(VocabHead):
    """Rows of even tokens."""

    @classmethod
    def parse(cls, name: str, argument: str) -> EvenHead:
        return cls(name)

    def _bound(self, data: HeadData) -> None:
        self.ids = torch.arange(0, len(self.weight), 2)

    @property
    def rows(self) -> int:
        return len(self.ids)

    def logits(self, hidden: torch.Tensor, *, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ids, hidden @ self.weight[self.ids].T


@contextmanager
def even_head() -> Iterator[str]:
    """The head under the name that is given, inside the block only."""
    register_vocab_head("even-test")(EvenHead)
    try:
        yield "even-test"
    finally:
        del VOCAB_HEADS["even-test"]
