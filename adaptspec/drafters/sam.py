"""SAM-decoding: copy what followed the longest match, found by suffix automata.

Hu et al., "SAM Decoding: Speculative Decoding via Suffix Automaton" (arXiv 2411.10666). A dynamic automaton holds the
request's own text, static ones hold past outputs and, if wanted, a given text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from adaptspec.drafters.lookup import (
    LookupDrafter,
    copied_chain,
    pack_state,
    switch,
    token_list,
    unpack_state,
    whole_number,
)
from adaptspec.drafters.past_outputs import PastOutputs
from adaptspec.drafters.registry import register_drafter
from adaptspec.drafters.suffix_automaton import ROOT_STATE, SuffixAutomaton
from adaptspec.types import DraftTree

if TYPE_CHECKING:
    from adaptspec.target.base import Target

PREFILL_MATCH = 256
"""Tokens before the root that are matched with the static automata when a request starts."""


@register_drafter("sam")
class SamDrafter(LookupDrafter):
    """A chain copied from behind the first occurrence of the longest suffix of the text that occurred before.

    The longer match of the automata wins; at equal length the request's own text goes before past outputs, and these
    before the given text. Below `min_match` tokens it declines: which drafter to ask instead is not its business.
    A copy from the own text that reaches its end goes on with itself, so repetition continues.

    Scores are those of `survival_scores`.

    Args:
        min_match: shortest match to copy from.
        max_copy: longest draft.
        remember: keep past outputs.
        max_past_tokens: memory over requests (see `PastOutputs`).
        text: token ids of a given text that is searched, too; it stays when the drafter is reset.

    Raises:
        ValueError: an option is out of range, or the text does not fit the target's vocabulary (when bound).
    """

    summary = "copies what followed the longest match, from suffix automata over this text and past outputs"

    def __init__(
        self,
        *,
        min_match: int = 5,
        max_copy: int = 40,
        remember: bool = True,
        max_past_tokens: int = 100_000,
        text: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        super().__init__()
        self.min_match = whole_number("min_match", min_match, 1)
        self.max_copy = whole_number("max_copy", max_copy, 1)
        self.remember = switch("remember", remember)
        self.max_past_tokens = whole_number("max_past_tokens", max_past_tokens, 0)
        self._past = PastOutputs(max_tokens=self.max_past_tokens if self.remember else 0)
        given = [] if text is None else token_list("text", text, None)
        self._largest_given = max(given, default=-1)
        self._given = SuffixAutomaton()
        self._given.extend(given)
        self._own: SuffixAutomaton | None = None
        self._prompt_length = 0
        self._past_match = self._given_match = (ROOT_STATE, 0)

    def bind(self, target: Target) -> None:
        """Raises ValueError when the vocabulary is not the one of the past outputs or too small for the given text."""
        if self._largest_given >= target.vocab_size:
            raise ValueError(f"text must be token ids in [0, {target.vocab_size}), got {self._largest_given}")
        super().bind(target)

    def _begin(self, tokens: list[int]) -> None:
        self._own = SuffixAutomaton()
        self._own.extend(tokens)
        self._prompt_length = len(tokens) - 1
        self._past_match = self._given_match = (ROOT_STATE, 0)
        self._follow(tokens[-PREFILL_MATCH:])

    def _extend(self, tokens: list[int]) -> None:
        assert self._own is not None
        self._own.extend(tokens)
        self._follow(tokens)

    def _follow(self, tokens: list[int]) -> None:
        self._past_match = self._past.automaton.follow(*self._past_match, tokens)
        self._given_match = self._given.follow(*self._given_match, tokens)

    def _draft(self, budget: int, max_depth: int) -> DraftTree:
        own = self._own
        assert own is not None
        length, start = own.longest_repeat()
        source = own
        for automaton, (state, matched) in (
            (self._past.automaton, self._past_match),
            (self._given, self._given_match),
        ):
            if matched > length:
                length, start, source = matched, automaton.first_end[state], automaton
        if length < self.min_match:
            return DraftTree.empty()
        limit = min(budget, max_depth, self.max_copy)
        return copied_chain(source.text, start, limit, match_length=length, periodic=source is own)

    def _end(self) -> None:
        assert self._own is not None
        self._past.add(self._own.text[self._prompt_length :])
        self._own = None

    def _forget(self) -> None:
        self._own = None
        self._past.clear()

    def _knows_tokens(self) -> bool:
        return len(self._past) > 0

    def state_dict(self) -> dict[str, Any]:
        settings = {"max_past_tokens": self._past.max_tokens, "shared": self._past.shared}
        return pack_state(self.name, self._vocab_size, settings, self._past.outputs())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the past outputs; an open request ends without being remembered."""
        vocab_size, settings, outputs = unpack_state(
            state,
            name=self.name,
            vocab_size=self._vocab_size,
            settings={"max_past_tokens": self._past.max_tokens, "shared": None},
        )
        self._past.restore(outputs, shared=settings["shared"])
        self._vocab_size = self._vocab_size or vocab_size
        self._length = 0
        self._own = None
