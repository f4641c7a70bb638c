"""Prompt lookup: copy what followed the same n-gram earlier in the text.

Saxena, "Prompt Lookup Decoding" (2023). The settings of transformers are `max_ngram=2, max_tokens=10,
tie="earliest"`; vLLM also takes the longest n-gram and, of equal ones, the earliest.
"""

from __future__ import annotations

from array import array
from typing import Literal

from adaptspec.drafters.lookup import LookupDrafter, copied_chain, switch, whole_number
from adaptspec.drafters.registry import register_drafter
from adaptspec.types import DraftTree

Tie = Literal["latest", "earliest"]
TIES: tuple[Tie, ...] = ("latest", "earliest")

_LONGEST_MEASURED = 64
"""Tokens up to which the length of a match is measured for scores and evidence."""


class NgramPositions:
    """Where each n-gram of a growing text was followed by something, one position per n-gram.

    An n-gram is entered when the token behind it arrives: the one the text ends with is never found as its own match.

    >>> index = NgramPositions(min_ngram=1, max_ngram=2, tie="latest")
    >>> index.extend([3, 4, 5, 3, 4])
    >>> index.find()                        # [3, 4] was followed by position 2
    2
    """

    def __init__(self, *, min_ngram: int, max_ngram: int, tie: Tie) -> None:
        self.min_ngram = min_ngram
        self.max_ngram = max_ngram
        self.latest = tie == "latest"
        self.text = array("i")
        # An n-gram is one integer, 32 bits a token: the lowest bits of the tail, which is the last tokens of the text.
        sizes = range(min_ngram, max_ngram + 1)
        self._masks = [(1 << 32 * size) - 1 for size in sizes]
        self._positions: list[dict[int, int]] = [{} for _ in sizes]
        self._tail = 0

    def extend(self, tokens: list[int]) -> None:
        """Append tokens to the text."""
        tail, widest = self._tail, self._masks[-1]
        position = len(self.text)
        tables = list(zip(self._masks, self._positions, range(self.min_ngram, self.max_ngram + 1), strict=True))
        for token in tokens:
            for mask, positions, size in tables:
                if size > position:  # the tail is padded with zeros, which are no tokens
                    break
                if self.latest:
                    positions[tail & mask] = position
                else:
                    positions.setdefault(tail & mask, position)
            tail = (tail << 32 | token) & widest
            position += 1
        self._tail = tail
        self.text.extend(tokens)

    def find(self) -> int | None:
        """Position behind the match of the longest n-gram that the text ends with, None without one."""
        for mask, positions in zip(reversed(self._masks), reversed(self._positions), strict=True):
            position = positions.get(self._tail & mask)
            if position is not None:
                return position
        return None


@register_drafter("prompt-lookup")
class PromptLookupDrafter(LookupDrafter):
    """A chain copied from behind an earlier occurrence of the last tokens, the longest n-gram first.

    A copy that reaches the end of the text goes on with itself, so repetition continues. Scores are those of
    `survival_scores` for the full length of the match, which may exceed `max_ngram`.

    Args:
        max_ngram: longest n-gram looked up.
        min_ngram: shortest one.
        tie: which of several occurrences of the longest n-gram to copy from.
        max_tokens: longest draft, None for no limit but the budget.
        periodic: whether a copy may go on beyond the end of the text.

    Raises:
        ValueError: an option is out of range.
    """

    summary = "copies what followed the last few tokens earlier in this text"

    def __init__(
        self,
        *,
        max_ngram: int = 3,
        min_ngram: int = 1,
        tie: Tie = "latest",
        max_tokens: int | None = None,
        periodic: bool = True,
    ) -> None:
        super().__init__()
        self.max_ngram = whole_number("max_ngram", max_ngram, 1, 64)
        self.min_ngram = whole_number("min_ngram", min_ngram, 1, self.max_ngram)
        if tie not in TIES:
            raise ValueError(f"tie must be one of {', '.join(TIES)}, got {tie!r}")
        self.tie: Tie = tie
        self.max_tokens = None if max_tokens is None else whole_number("max_tokens", max_tokens, 1)
        self.periodic = switch("periodic", periodic)
        self._index: NgramPositions | None = None

    def _begin(self, tokens: list[int]) -> None:
        self._index = NgramPositions(min_ngram=self.min_ngram, max_ngram=self.max_ngram, tie=self.tie)
        self._index.extend(tokens)

    def _extend(self, tokens: list[int]) -> None:
        assert self._index is not None
        self._index.extend(tokens)

    def _draft(self, budget: int, max_depth: int) -> DraftTree:
        assert self._index is not None
        start = self._index.find()
        if start is None:
            return DraftTree.empty()
        limit = min(budget, max_depth)
        if self.max_tokens is not None:
            limit = min(limit, self.max_tokens)
        text = self._index.text
        length = common_suffix(text, start, len(text))
        return copied_chain(text, start, limit, match_length=length, periodic=self.periodic)

    def _end(self) -> None:
        self._index = None

    def _forget(self) -> None:
        self._index = None


def common_suffix(text: array[int], first: int, second: int) -> int:
    """How many tokens before two positions agree, counted up to 64."""
    limit = min(first, second, _LONGEST_MEASURED)
    length = 0
    while length < limit and text[first - 1 - length] == text[second - 1 - length]:
        length += 1
    return length
