"""SuffixDecoding: draft what followed the longest suffixes of this text, here and in past outputs.

Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications" (arXiv 2411.04975).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adaptspec.drafters.lookup import LookupDrafter, pack_state, real_number, switch, unpack_state, whole_number
from adaptspec.drafters.past_outputs import PastOutputs
from adaptspec.drafters.registry import register_drafter
from adaptspec.drafters.suffix_automaton import ROOT_STATE, SuffixAutomaton
from adaptspec.drafters.suffix_tree import CountedPaths, Match, grow
from adaptspec.types import DraftTree


@register_drafter("suffix")
class SuffixDrafter(LookupDrafter):
    """Counts over the request's own text and over past outputs; each matched suffix proposes a tree, the one with the
    highest expected number of accepted nodes wins.

    Of the matched suffixes, from long to short, only those are tried that occurred at least twice as often as the last
    one tried: in between, the counts hardly differ. A shorter suffix is not tried when even certainty could not make
    its draft, limited to `factor * length + offset` tokens, win.

    Args:
        max_depth: longest matched suffix and deepest draft, in tokens.
        factor, offset: a suffix of m tokens may draft `factor * m + offset` tokens deep.
        min_probability: smallest product of count ratios along a drafted path.
        tree: a best-first tree; otherwise the greedy path.
        max_past_tokens: memory over requests (see `PastOutputs`); 0 for none.

    Raises:
        ValueError: an option is out of range.
    """

    summary = "tree of counted continuations of the longest matching suffixes, in this text and past outputs"

    def __init__(
        self,
        *,
        max_depth: int = 64,
        factor: float = 1.0,
        offset: float = 0.0,
        min_probability: float = 0.1,
        tree: bool = True,
        max_past_tokens: int = 100_000,
    ) -> None:
        super().__init__()
        self.max_depth = whole_number("max_depth", max_depth, 1, 1024)
        self.factor = real_number("factor", factor, 0.0)
        self.offset = real_number("offset", offset, -float(self.max_depth), float(self.max_depth))
        self.min_probability = real_number("min_probability", min_probability, 0.0, 1.0)
        self.tree = switch("tree", tree)
        self.max_past_tokens = whole_number("max_past_tokens", max_past_tokens, 0)
        self._past = PastOutputs(max_tokens=self.max_past_tokens, count_length=2 * self.max_depth)
        self._own: SuffixAutomaton | None = None
        self._prompt_length = 0
        self._past_match = (ROOT_STATE, 0)

    def _begin(self, tokens: list[int]) -> None:
        self._own = SuffixAutomaton(count_length=2 * self.max_depth)
        self._own.extend(tokens)
        self._prompt_length = len(tokens) - 1
        self._past_match = self._past.automaton.follow(ROOT_STATE, 0, tokens[-self.max_depth :])

    def _extend(self, tokens: list[int]) -> None:
        assert self._own is not None
        self._own.extend(tokens)
        self._past_match = self._past.automaton.follow(*self._past_match, tokens)

    def _end(self) -> None:
        assert self._own is not None
        self._past.add(self._own.text[self._prompt_length :])
        self._own = None

    def _forget(self) -> None:
        self._own = None
        self._past.clear()

    def _draft(self, budget: int, max_depth: int) -> DraftTree:
        own, past = self._own, self._past.automaton
        assert own is not None
        sources = (
            (own, own.suffix_states(max_length=self.max_depth), 1),
            (past, past.shorter_suffixes(*self._past_match, max_length=self.max_depth), 0),
        )
        deepest = min(max_depth, self.max_depth)
        best: CountedPaths | None = None
        for automaton, suffixes, open_ends in sources:
            tried, count = 0, automaton.count
            for state, length in suffixes:
                limit = min(deepest, int(self.factor * length + self.offset))
                if limit < 1 or (best is not None and best.total >= min(limit, budget)):
                    break
                occurrences = count[state]
                if occurrences <= open_ends or occurrences < 2 * tried:
                    continue
                tried = occurrences
                paths = grow(
                    Match(automaton, state, length, open_ends),
                    budget=budget,
                    max_depth=limit,
                    min_probability=self.min_probability,
                    greedy=not self.tree,
                )
                if best is None or paths.total > best.total:
                    best = paths
        return DraftTree.empty() if best is None or not best.token_ids else best.to_tree()

    def _knows_tokens(self) -> bool:
        return len(self._past) > 0

    def state_dict(self) -> dict[str, Any]:
        settings = {"max_depth": self.max_depth, "max_past_tokens": self.max_past_tokens, "shared": self._past.shared}
        return pack_state(self.name, self._vocab_size, settings, self._past.outputs())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the past outputs; an open request ends without being remembered."""
        expected = {"max_depth": self.max_depth, "max_past_tokens": self.max_past_tokens, "shared": None}
        vocab_size, settings, outputs = unpack_state(
            state, name=self.name, vocab_size=self._vocab_size, settings=expected
        )
        self._past.restore(outputs, shared=settings["shared"])
        self._vocab_size = self._vocab_size or vocab_size
        self._length = 0
        self._own = None
