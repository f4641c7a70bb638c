"""Lookahead decoding: grow n-grams by Jacobi iteration in spare rows of the verify pass, then draft them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from adaptspec.drafters.acceptance import AcceptanceTable
from adaptspec.drafters.base import Needs
from adaptspec.drafters.lookup import LookupDrafter, pack_state, unpack_state, whole_number
from adaptspec.drafters.registry import register_drafter
from adaptspec.types import ROOT, DraftContext, DraftTree, ExtraRows, Observation

FIRST_SIBLING = (0.37, 0.60, 0.70, 0.80)
"""How often the most recent pooled continuation is right at depth 1, 2, 3 and beyond, given that its parent was:
measured on n-grams of the committed text, 9 prompts, 1,000 greedy tokens of a 135M-parameter model."""


@lru_cache(maxsize=64)
def window_layout(levels: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Depths int64 [E] and visibility bool [E, E] of the rows of a window, E = levels * columns - 1.

    The root itself stands at level 0, column 0, so that place is no row; the others come level by level. The row at
    level l, column w sees the root, level 0 up to its column, and its own column from level 1 up to itself: tokens at
    depths 0 .. w, then w + 1 .. w + l. That is one gapless sequence, at whose end the row stands, at depth w + l.
    """
    level, column = np.divmod(np.arange(1, levels * columns), columns)
    first_level = (level == 0)[None, :] & (column[None, :] <= column[:, None])
    own_column = (column[None, :] == column[:, None]) & (level[None, :] <= level[:, None])
    depths, visible = level + column, first_level | own_column
    depths.setflags(write=False)
    visible.setflags(write=False)
    return depths, visible


class NgramPool:
    """Continuations of single tokens, the most recently seen ones.

    Args:
        guesses: G, continuations kept per first token.
        max_keys: first tokens kept; the one that was longest without a new continuation goes first.
    """

    def __init__(self, *, guesses: int, max_keys: int) -> None:
        self.guesses = guesses
        self.max_keys = max_keys
        self._tails: dict[int, list[tuple[int, ...]]] = {}

    def __len__(self) -> int:
        """First tokens known."""
        return len(self._tails)

    def add(self, key: int, tail: tuple[int, ...]) -> None:
        """`tail` was seen after `key`. Of two continuations where one begins with the other, the longer is kept."""
        tails = self._tails.pop(key, [])
        for place in range(len(tails) - 1, -1, -1):
            known = tails[place]
            if known[0] != tail[0]:
                continue
            shared = min(len(known), len(tail))
            if known[:shared] == tail[:shared]:
                del tails[place]
                tail = max(known, tail, key=len)
                break
        tails.append(tail)
        if len(tails) > self.guesses:
            del tails[0]
        self._tails[key] = tails  # dictionaries keep insertion order: the last key is the most recent
        if len(self._tails) > self.max_keys:
            del self._tails[next(iter(self._tails))]

    def get(self, key: int) -> list[tuple[int, ...]]:
        """Continuations of `key`, the most recent first."""
        return self._tails.get(key, [])[::-1]

    def ngrams(self) -> list[tuple[int, ...]]:
        """All n-grams in an order in which adding them again rebuilds this pool."""
        return [(key, *tail) for key, tails in self._tails.items() for tail in tails]

    def clear(self) -> None:
        """Forget everything."""
        self._tails.clear()


def spread_tokens(tokens: Sequence[int], count: int) -> list[int]:
    """`count` tokens from all over a text, the same ones each time: multiples of the golden ratio visit it evenly."""
    return [tokens[int(len(tokens) * ((i + 1) * 0.6180339887498949 % 1.0))] for i in range(count)]


@register_drafter("lookahead")
class LookaheadDrafter(LookupDrafter):
    """N-grams that the target writes itself in extra rows of every verify pass.

    Fu et al. 2024, arXiv 2402.02057, section 3. A window of N - 1 levels and W columns holds guesses for the tokens
    after the root, one level per past Jacobi iteration; `window_layout` says what each row sees. The target's argmax at
    the last level gives each column one more token, which makes it an n-gram. N-grams are pooled by their first token,
    and up to G of those that start with the root are the draft, a trie of depth N - 1. Then the window moves on by one
    token: level 0 is dropped, every level steps down, the new tokens become the last level. Level 0 starts with tokens
    of the prompt, and N - 2 passes build the levels one by one.

    Column 0 belongs to the root. When the root is not the token that column 0 had guessed, its n-gram starts one token
    later. The window does not depend on what was accepted, and steps without extra rows leave it as it is.

    W (N - 1) - 1 extra rows are computed in every step, 27 by default. That pays where a pass is bound by reading
    weights (one sequence on a GPU); on a CPU a row costs about as much as a draft node, so try a smaller window there.

    Scores add log P(i-th most recent sibling is right | depth) along the path, from a table that is corrected by every
    committed step, as if the pool's guesses had been verified. Evidence: "rank" among siblings, most recent first,
    "count" and "parent_count" in guesses.

    Args:
        window: W, at least 2.
        ngram: N, at least 2.
        guesses: G, continuations kept per first token, at least 1.
        pool_from_prompt: also pool the n-grams of the committed text ("prompt as reference").
        keep_pool: keep the pool for later requests.
        max_keys: first tokens in the pool; each takes up to about 150 * G bytes.
    """

    summary = "n-grams from Jacobi rows inside the verify pass (2402.02057)"
    needs = Needs(extra_rows=True)

    def __init__(
        self,
        *,
        window: int = 7,
        ngram: int = 5,
        guesses: int = 7,
        pool_from_prompt: bool = True,
        keep_pool: bool = False,
        max_keys: int = 8192,
    ) -> None:
        super().__init__()
        self.window = whole_number("window", window, 2)
        self.ngram = whole_number("ngram", ngram, 2)
        self.guesses = whole_number("guesses", guesses, 1)
        for name, value in (("pool_from_prompt", pool_from_prompt), ("keep_pool", keep_pool)):
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        self.pool_from_prompt = pool_from_prompt
        self.keep_pool = keep_pool
        self.pool = NgramPool(guesses=self.guesses, max_keys=whole_number("max_keys", max_keys, 1))
        self._acceptance = AcceptanceTable(_prior(self.ngram - 1, self.guesses))
        self._levels: list[list[int]] = []
        self._recent: list[int] = []
        self._rows_given = False

    def _begin(self, tokens: list[int]) -> None:
        if not self.keep_pool:
            self.pool.clear()
        self._levels = [[tokens[-1], *spread_tokens(tokens, self.window + self.ngram - 3)]]
        self._recent = tokens[-self.ngram :]
        self._rows_given = False
        if self.pool_from_prompt:
            for start in range(len(tokens) - self.ngram + 1):
                self.pool.add(tokens[start], tuple(tokens[start + 1 : start + self.ngram]))

    def _draft(self, budget: int, max_depth: int) -> DraftTree:
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        ranks: list[int] = []
        counts: list[int] = []
        children: list[dict[int, int]] = [{}]  # of the root, then of every node
        tails = self.pool.get(self._recent[-1])
        if not tails:
            return DraftTree.empty()
        table = self._acceptance.log_probabilities().tolist()
        for tail in tails:
            parent = ROOT
            for depth, token in enumerate(tail[:max_depth]):
                siblings = children[parent + 1]
                node = siblings.get(token)
                if node is None:
                    node = siblings[token] = len(tokens)
                    rank = len(siblings) - 1
                    tokens.append(token)
                    parents.append(parent)
                    scores.append(table[depth][rank] + (scores[parent] if parent >= 0 else 0.0))
                    ranks.append(rank)
                    counts.append(0)
                    children.append({})
                counts[node] += 1
                parent = node
        # A child never scores above its parent and comes after it, so a stable sort keeps parents first.
        order = np.argsort(-np.asarray(scores), kind="stable")[:budget]
        place = np.full(len(tokens) + 1, ROOT, np.int64)
        place[order] = np.arange(len(order))
        above = np.asarray(parents, np.int64)[order]
        evidence = {
            "rank": np.asarray(ranks, np.float64)[order],
            "count": np.asarray(counts, np.float64)[order],
            "parent_count": np.asarray([*counts, len(tails)], np.float64)[above],
        }
        return DraftTree(
            np.asarray(tokens, np.int64)[order], place[above], np.asarray(scores, np.float64)[order], evidence=evidence
        )

    def extra_rows(self, context: DraftContext, budget: int) -> ExtraRows | None:
        """The window's rows; they do not count against `budget`. None when no later step could use what they give."""
        self._require_request("extra_rows")
        if context.max_depth < 2:
            self._rows_given = False
            return None
        self._rows_given = True
        depths, visible = window_layout(len(self._levels), len(self._levels[0]))
        token_ids = np.asarray([token for level in self._levels for token in level][1:], np.int64)
        return ExtraRows(token_ids, depths, visible)

    def observe(self, observation: Observation) -> None:
        self._require_request("observe")
        tokens = observation.tokens.tolist()
        if self._rows_given and observation.extra_argmax is not None and tokens:
            self._advance(observation.extra_argmax, following=tokens[0])
        self._rows_given = False
        super().observe(observation)

    def _advance(self, extra_argmax: np.ndarray, *, following: int) -> None:
        """Take the new tokens out of the pass, pool the columns, move the window on.

        Args:
            extra_argmax: int64 [E], the target's argmax at the window's rows.
            following: the token that was committed after the root.
        """
        levels = self._levels
        rows = sum(map(len, levels)) - 1
        if len(extra_argmax) != rows:
            raise ValueError(f"extra_argmax must have {rows} entries, one per extra row, got {len(extra_argmax)}")
        columns = len(levels[0])
        # With one level the row of column 0 is the root, whose successor was just committed.
        newest = [following, *extra_argmax.tolist()][-columns:]
        root = self._recent[-1]
        for column in range(columns):
            ngram = [*(level[column] for level in levels), newest[column]]
            if column == 0 and ngram[0] != root:
                del ngram[0]
            if len(ngram) > 1:
                self.pool.add(ngram[0], tuple(ngram[1:]))
        if len(levels) < self.ngram - 1:
            self._levels = [level[1:] for level in [*levels, newest]]
        else:
            self._levels = [*levels[1:], newest]

    def _extend(self, tokens: list[int]) -> None:
        if not tokens:
            return
        self._calibrate(tokens)
        text = self._recent + tokens
        if self.pool_from_prompt:
            for start in range(max(0, len(self._recent) - self.ngram + 1), len(text) - self.ngram + 1):
                self.pool.add(text[start], tuple(text[start + 1 : start + self.ngram]))
        self._recent = text[-self.ngram :]

    def _calibrate(self, committed: list[int]) -> None:
        """Count which sibling of the pooled guesses each committed token was."""
        tails = self.pool.get(self._recent[-1])
        for depth, token in enumerate(committed[: self.ngram - 1]):
            siblings = list(dict.fromkeys(tail[depth] for tail in tails if len(tail) > depth))
            if not siblings:
                break
            rank = siblings.index(token) if token in siblings else None
            self._acceptance.record(depth, rank)
            if rank is None:
                break
            tails = [tail for tail in tails if len(tail) > depth and tail[depth] == token]

    def _end(self) -> None:
        self._levels = []
        self._recent = []
        if not self.keep_pool:
            self.pool.clear()

    def _forget(self) -> None:
        self._end()
        self.pool.clear()
        self._acceptance.reset()

    def _knows_tokens(self) -> bool:
        return len(self.pool) > 0

    def _settings(self) -> dict[str, int]:
        return {"ngram": self.ngram, "guesses": self.guesses, "keep_pool": int(self.keep_pool)}

    def state_dict(self) -> dict[str, Any]:
        ngrams = self.pool.ngrams() if self.keep_pool else []
        state = pack_state(self.name, self._vocab_size, self._settings(), ngrams)
        return {**state, "acceptance": self._acceptance.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping) or "acceptance" not in state:
            raise ValueError(f"state of drafter {self.name!r} must be a mapping with the key acceptance")
        vocab_size, _, ngrams = unpack_state(
            {key: value for key, value in state.items() if key != "acceptance"},
            name=self.name,
            vocab_size=self._vocab_size,
            settings=self._settings(),
        )
        for ngram in ngrams:
            if not 2 <= len(ngram) <= self.ngram:
                raise ValueError(f"outputs of the state must be n-grams of 2 to {self.ngram} tokens, got {ngram}")
        acceptance = AcceptanceTable(self._acceptance.prior)
        acceptance.load_state_dict(state["acceptance"])
        self.reset()
        self._vocab_size = vocab_size if vocab_size is not None else self._vocab_size
        self._acceptance = acceptance
        for key, *tail in ngrams:
            self.pool.add(key, tuple(tail))


def _prior(depth: int, guesses: int) -> np.ndarray:
    """[depth, guesses]: the next siblings share 0.6 of what the first one misses, each half as often as the last."""
    first = np.asarray([FIRST_SIBLING[min(d, len(FIRST_SIBLING) - 1)] for d in range(depth)])[:, None]
    others = 0.6 * (1 - first) * np.maximum(0.5 ** np.arange(1, guesses), 1e-9)
    return np.concatenate([first, others], axis=1)
