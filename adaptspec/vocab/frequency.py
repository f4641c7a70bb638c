"""The most frequent tokens only."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch

from adaptspec.kernels.vocab_head import TopTokens, vocab_head
from adaptspec.vocab.base import HeadData, VocabHead
from adaptspec.vocab.counts import FrequencyList, ListKind, choose_tokens, load_frequencies, shipped_frequencies
from adaptspec.vocab.registry import register_vocab_head


@register_vocab_head("fr")
class FrequencyHead(VocabHead):
    """FR-Spec (Zhao et al. 2025, 2502.14856): the `count` most frequent tokens of a corpus, special tokens among them.
    Embeddings stay whole; only rows of the head are left out.

    "fr:16384" takes the list that is shipped for the target's vocabulary, "fr:16384:PATH" another one.
    """

    summary = "the most frequent tokens: fr:ROWS or fr:ROWS:LIST (FR-Spec)"
    weights = "frequency list"
    list_kind: ClassVar[ListKind] = "text"

    def __init__(self, name: str, count: int, path: Path | None = None) -> None:
        super().__init__(name)
        self.count = count
        self.path = path
        self._labels = torch.zeros(0, dtype=torch.int32)

    @classmethod
    def parse(cls, name: str, argument: str) -> FrequencyHead:
        count, _, path = argument.partition(":")
        return cls(name, read_count(name, count), Path(path) if path else None)

    def _bound(self, data: HeadData) -> None:
        chosen = choose_tokens(
            self._frequencies(data), self.count, keep=self.keep, available=self._row_of >= 0, name=self.name
        )
        device = self.weight.device
        self._ids = torch.from_numpy(chosen).to(device)
        self._labels = self._ids.to(torch.int32)
        self._rows = self.weight.index_select(0, torch.from_numpy(self._row_of[chosen]).to(device))

    def _frequencies(self, data: HeadData) -> FrequencyList:
        return find_frequencies(self.path, data, kind=self.list_kind, vocab_size=self.vocab_size)

    @property
    def rows(self) -> int:
        return len(self._labels)

    def logits(self, hidden: torch.Tensor, *, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._ids, hidden @ self._rows.T

    def top(self, hidden: torch.Tensor, *, k: int, depth: int) -> TopTokens:
        return vocab_head(hidden, self._rows, self._labels, k=k, gathered=True)


def find_frequencies(path: Path | None, data: HeadData, *, kind: ListKind, vocab_size: int) -> FrequencyList:
    """The list of a path, else the one handed over, else the shipped one.

    Raises:
        FileNotFoundError, ValueError: none, or one for another vocabulary.
    """
    if path is not None:
        frequencies = load_frequencies(path)
    elif data.frequencies is not None:
        frequencies = data.frequencies
    else:
        return shipped_frequencies(kind, vocab_size)
    frequencies.check_fits(vocab_size)
    return frequencies


def read_count(name: str, text: str) -> int:
    """A number of rows in the name of a vocabulary. Raises ValueError unless it is a whole number >= 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"vocab {name!r} must give a number of rows >= 1 behind the colon, got {text!r}")
    return int(text)
