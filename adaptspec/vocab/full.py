"""All rows of the head."""

from __future__ import annotations

import torch

from adaptspec.kernels.vocab_head import TopTokens, vocab_head
from adaptspec.vocab.base import HeadData, VocabHead
from adaptspec.vocab.registry import register_vocab_head


@register_vocab_head("full")
class FullHead(VocabHead):
    """The head as it is. With an own head of a drafter: all rows of that, each under its target token."""

    summary = "all rows of the head"

    @classmethod
    def parse(cls, name: str, argument: str) -> FullHead:
        if argument:
            raise ValueError(f"vocab 'full' takes no argument, got {argument!r}")
        return cls(name)

    def _bound(self, data: HeadData) -> None:
        self._ids = torch.from_numpy(self._token_of).to(self.weight.device)
        identity = bool((self._token_of[:-1] < self._token_of[1:]).all()) and len(self._ids) == self.vocab_size
        self._labels = None if identity else self._ids.to(torch.int32)

    @property
    def rows(self) -> int:
        return len(self.weight) if self.vocab_size else 0

    def logits(self, hidden: torch.Tensor, *, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._ids, hidden @ self.weight.T

    def top(self, hidden: torch.Tensor, *, k: int, depth: int) -> TopTokens:
        return vocab_head(hidden, self.weight, self._labels, k=k, gathered=self._labels is not None)
