"""N-gram caches: the token that most often followed the last few tokens, as in llama.cpp's lookup decoding.

Three caches of successor counts are asked in turn: the context (this request's text), the dynamic one (past outputs),
and a static one (a file of counts). Within a cache the longest n-gram with enough evidence decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from heapq import heappop, heappush
from math import log
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from adaptspec.drafters.lookup import LookupDrafter, pack_state, unpack_state, whole_number
from adaptspec.drafters.ngram_counts import EMPTY_HISTORY, NgramCounts, NgramThresholds, Successors
from adaptspec.drafters.registry import register_drafter
from adaptspec.types import DraftTree

if TYPE_CHECKING:
    from adaptspec.target.base import Target

_STATIC_WEIGHT = 100

LAX = NgramThresholds((2, 2, 1, 1), (66, 50, 50, 50))
STRICT = NgramThresholds((4, 3, 2, 2), (75, 66, 66, 66))


@register_drafter("ngram-cache")
class NgramCacheDrafter(LookupDrafter):
    """Drafts the most frequent successor of the last tokens, again and again, until no cache has enough evidence.

    Context and dynamic successors that the static cache knows, too, are preferred. With `branches` > 1 the runners-up
    of every step compete for the budget, best first. A successor's probability is estimated as count / (occurrences +
    distinct successors / length of the context that agreed), see `adaptspec.drafters.suffix_tree`, a path's as their
    product. The context that agreed is the n-gram; while the longest size keeps deciding it grows with every token.

    Args:
        max_ngram, min_ngram: sizes of the n-grams of the context and the dynamic cache.
        lax: thresholds of the context and the static cache, for sizes up to `max_ngram` at least.
        strict: thresholds of the dynamic cache.
        branches: successors drafted of each node at most.
        max_past_tokens: tokens of past outputs in the dynamic cache; whole outputs leave it, oldest first.
        path: file of the static cache (`NgramCounts.save`); it stays when the drafter is reset.

    Raises:
        ValueError: an option is out of range, or the file is not one of n-gram counts.
    """

    summary = "most frequent successors of the last 1 to 4 tokens, in this text, past outputs and a file of counts"

    def __init__(
        self,
        *,
        max_ngram: int = 4,
        min_ngram: int = 1,
        lax: NgramThresholds = LAX,
        strict: NgramThresholds = STRICT,
        branches: int = 2,
        max_past_tokens: int = 20_000,
        path: str | PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        self.max_ngram = whole_number("max_ngram", max_ngram, 1, 16)
        self.min_ngram = whole_number("min_ngram", min_ngram, 1, self.max_ngram)
        for name, thresholds in (("lax", lax), ("strict", strict)):
            if not isinstance(thresholds, NgramThresholds) or len(thresholds.min_counts) < self.max_ngram:
                raise ValueError(f"{name} must be NgramThresholds for sizes up to {self.max_ngram}, got {thresholds!r}")
        self.lax = lax
        self.strict = strict
        self.branches = whole_number("branches", branches, 1)
        self.max_past_tokens = whole_number("max_past_tokens", max_past_tokens, 0)
        self._static = None if path is None else NgramCounts.load(path)
        if self._static is not None and self._static.max_ngram > self.max_ngram:
            raise ValueError(
                f"n-grams of the static cache must be at most {self.max_ngram} tokens long (max_ngram), "
                f"got {self._static.max_ngram}"
            )
        self._largest_static = -1 if self._static is None else self._static.largest_token()
        self._dynamic = NgramCounts(min_ngram=self.min_ngram, max_ngram=self.max_ngram)
        self._past: deque[list[int]] = deque()
        self._past_tokens = 0
        self._context: NgramCounts | None = None
        self._history = EMPTY_HISTORY
        self._output: list[int] = []

    def bind(self, target: Target) -> None:
        """Raises ValueError when the vocabulary is not that of the past outputs or too small for the static cache."""
        if self._largest_static >= target.vocab_size:
            raise ValueError(
                f"the static cache must hold token ids in [0, {target.vocab_size}), got {self._largest_static}"
            )
        super().bind(target)

    def _begin(self, tokens: list[int]) -> None:
        self._context = NgramCounts(min_ngram=self.min_ngram, max_ngram=self.max_ngram)
        self._history = self._context.extend(EMPTY_HISTORY, tokens)
        self._output = tokens[-1:]

    def _extend(self, tokens: list[int]) -> None:
        assert self._context is not None
        self._history = self._context.extend(self._history, tokens)
        self._output += tokens

    def _draft(self, budget: int, max_depth: int) -> DraftTree:
        # Candidates: -log-probability, order of insertion, token, parent, depth, length of the context that agreed,
        # then the evidence: n-gram size, count, parent count, rank.
        heap: list[tuple[float, int, int, int, int, int, int, int, int, int]] = []
        nodes: list[tuple[float, int, int, int, int, int, int, int, int, int]] = []
        histories: list[int] = []
        advance, inserted = self._dynamic.advance, 0
        node, depth, cost, history, agreed = -1, 0, 0.0, self._history, 0
        while True:
            found = self._decide(history) if depth < max_depth else None
            if found is not None:
                size, ranked, total, distinct = found
                context = agreed + 1 if size == self.max_ngram <= agreed else size
                mass = total + distinct / context
                for rank, (token, count) in enumerate(ranked):
                    inserted += 1
                    child_cost = cost - log(count / mass)
                    candidate = (child_cost, inserted, token, node, depth + 1, context, size, count, total, rank)
                    heappush(heap, candidate)
            if not heap or len(nodes) == budget:
                break
            chosen = heappop(heap)
            cost, _, token, parent, depth, agreed = chosen[:6]
            history = advance(histories[parent] if parent >= 0 else self._history, token)
            node = len(nodes)
            nodes.append(chosen)
            histories.append(history)
        if not nodes:
            return DraftTree.empty()
        costs, _, token_ids, parents, _, _, *evidence = zip(*nodes, strict=True)
        names = ("match_length", "count", "parent_count", "rank")
        return DraftTree(
            np.array(token_ids, dtype=np.int64),
            np.array(parents, dtype=np.int64),
            -np.array(costs),
            evidence={name: np.array(column, dtype=np.float64) for name, column in zip(names, evidence, strict=True)},
        )

    def _decide(self, history: int) -> Successors | None:
        """Successors of the first n-gram with enough evidence: context, then dynamic, then static cache."""
        assert self._context is not None
        weights: dict[int, int] = {}
        if self._static is not None:
            for size in range(self._static.max_ngram, self._static.min_ngram - 1, -1):
                known = self._static.counts_of(history, size)
                if known:
                    weights = {token: _STATIC_WEIGHT * times for token, times in known.items()}
                    break
        found = self._context.decide(history, self.lax, limit=self.branches, preferred=weights)
        if found is None and self._past_tokens:
            found = self._dynamic.decide(history, self.strict, limit=self.branches, preferred=weights)
        if found is None and self._static is not None:
            found = self._static.decide(history, self.lax, limit=self.branches)
        return found

    def _end(self) -> None:
        output = self._output[-self.max_past_tokens :] if self.max_past_tokens else []
        if output:
            self._remember(output)
            while self._past_tokens > self.max_past_tokens:
                oldest = self._past.popleft()
                self._dynamic.retract(EMPTY_HISTORY, oldest)
                self._past_tokens -= len(oldest)
        self._close()

    def _remember(self, output: list[int]) -> None:
        self._dynamic.extend(EMPTY_HISTORY, output)
        self._past.append(output)
        self._past_tokens += len(output)

    def _close(self) -> None:
        self._context = None
        self._output = []

    def _forget(self) -> None:
        self._close()
        self._dynamic.clear()
        self._past.clear()
        self._past_tokens = 0

    def _knows_tokens(self) -> bool:
        return self._past_tokens > 0

    def state_dict(self) -> dict[str, Any]:
        return pack_state(self.name, self._vocab_size, {"max_past_tokens": self.max_past_tokens}, self._past)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the dynamic cache; an open request ends without being remembered."""
        vocab_size, _, outputs = unpack_state(
            state,
            name=self.name,
            vocab_size=self._vocab_size,
            settings={"max_past_tokens": self.max_past_tokens},
        )
        if (total := sum(map(len, outputs))) > self.max_past_tokens:
            raise ValueError(f"outputs of the state must be at most {self.max_past_tokens} tokens, got {total}")
        self._forget()
        for output in outputs:
            self._remember(output)
        self._vocab_size = self._vocab_size or vocab_size
        self._length = 0
