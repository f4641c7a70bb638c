"""What makes a rare token worth a row: how often it was seen of late, and what has led to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

HALF_LIFE = 400.0
"""Steps after which a score counts half."""

SEEN, TARGET_TOP, PROMPT, NEIGHBOUR, SUCCESSOR = 1.0, 0.5, 0.5, 0.25, 0.5
"""What a token gains by being committed, by being the target's word after some node, by standing in the prompt, by
lying close to such a token, and by having followed the latest token before."""

SUCCESSORS = 4
"""Rare successors kept per token."""

PREDECESSORS = 4096
"""Tokens that successors are kept for; the one that was not seen for longest goes out."""


class LongTail:
    """Scores of the tokens outside a static vocabulary: score = decayed count + retrieval prior, in one sum.

    Args:
        rare: bool [V], the tokens that are scored.
        neighbours: rare token -> rare tokens with similar rows of the head, and their similarity in [0, 1].
    """

    def __init__(self, rare: np.ndarray, *, neighbours: Callable[[int], tuple[np.ndarray, np.ndarray]]) -> None:
        self.rare = rare
        self._neighbours = neighbours
        self._score = np.zeros(len(rare))
        self._scored_at = np.zeros(len(rare), dtype=np.int64)
        self.last_use = np.zeros(len(rare), dtype=np.int64)
        self.steps = 0
        self._successors: dict[int, dict[int, int]] = {}
        self._previous = -1

    def scores(self, token_ids: np.ndarray) -> np.ndarray:
        """float64, as of now."""
        return self._score[token_ids] * 0.5 ** ((self.steps - self._scored_at[token_ids]) / HALF_LIFE)

    def read_prompt(self, token_ids: np.ndarray) -> np.ndarray:
        """A request starts. Returns the rare tokens that gained."""
        self.steps += 1
        self._previous = int(token_ids[-1]) if len(token_ids) else -1
        return self._feed(token_ids, PROMPT, related=True)

    def read_step(self, tokens: np.ndarray, top: np.ndarray) -> np.ndarray:
        """A step was verified: the committed tokens, and the target's most likely token after every verified row.
        Returns the rare tokens that gained."""
        self.steps += 1
        gained = [self._feed(top, TARGET_TOP, related=False), self._feed(tokens, SEEN, related=True)]
        for token in tokens.tolist():
            if self.rare[token] and self._previous >= 0:
                self._learn_successor(self._previous, token)
            self._previous = token
        if followers := self._successors.get(self._previous):
            self._successors[self._previous] = self._successors.pop(self._previous)  # used: to the end of the queue
            total = sum(followers.values())
            for token, count in followers.items():
                gained.append(self._feed(np.array([token]), SUCCESSOR * count / total, related=False, used=False))
        return np.unique(np.concatenate(gained))

    def _feed(self, token_ids: np.ndarray, gain: float, *, related: bool, used: bool = True) -> np.ndarray:
        rare, counts = np.unique(token_ids[self.rare[token_ids]], return_counts=True)
        if not len(rare):
            return rare
        self._gain(rare, gain * counts)
        if used:
            self.last_use[rare] = self.steps
        if not related:
            return rare
        found = [rare]
        for token in rare.tolist():
            close, similarity = self._neighbours(token)
            self._gain(close, NEIGHBOUR * gain * similarity)
            found.append(close)
        return np.concatenate(found)

    def _gain(self, rare: np.ndarray, gain: np.ndarray) -> None:
        self._score[rare] = self.scores(rare) + gain
        self._scored_at[rare] = self.steps

    def _learn_successor(self, previous: int, token: int) -> None:
        followers = self._successors.pop(previous, {})
        followers[token] = followers.get(token, 0) + 1
        if len(followers) > SUCCESSORS:
            others = [other for other in followers if other != token]
            del followers[min(others, key=lambda other: (followers[other], other))]
        self._successors[previous] = followers
        if len(self._successors) > PREDECESSORS:
            del self._successors[next(iter(self._successors))]

    def state_dict(self) -> dict[str, Any]:
        """What was seen of rare tokens."""
        seen = np.flatnonzero((self._score > 0.0) | (self.last_use > 0))
        pairs = [(first, second, n) for first, nexts in self._successors.items() for second, n in nexts.items()]
        return {
            "tokens": seen,
            "scores": self._score[seen].copy(),
            "scored_at": self._scored_at[seen].copy(),
            "last_use": self.last_use[seen].copy(),
            "successors": np.array(pairs, dtype=np.int64).reshape(-1, 3),
            "steps": self.steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`. Raises ValueError on a damaged state, or one of other tokens."""
        size = len(self.rare)
        steps = state.get("steps")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ValueError(f"state: steps must be a whole number >= 0, got {steps!r}")
        tokens = _whole(state, "tokens", below=size)
        if not self.rare[tokens].all() or len(np.unique(tokens)) < len(tokens):
            raise ValueError("state: tokens must be different ones outside the static vocabulary")
        scores = np.asarray(state.get("scores"), dtype=np.float64)
        if scores.shape != tokens.shape or not (np.isfinite(scores) & (scores >= 0.0)).all():
            raise ValueError(f"state: scores must be {len(tokens)} finite numbers >= 0")
        times = {name: _whole(state, name, below=steps + 1, length=len(tokens)) for name in ("scored_at", "last_use")}
        pairs = np.asarray(state.get("successors"))
        if pairs.ndim != 2 or pairs.shape[1] != 3 or pairs.dtype.kind != "i":
            raise ValueError(f"state: successors must be whole numbers of shape [n, 3], got {pairs.shape}")
        if len(pairs) and not (pairs.min() >= 0 and pairs[:, :2].max() < size and pairs[:, 2].min() >= 1):
            raise ValueError(f"state: successors must be tokens in [0, {size}) with counts >= 1")
        self._score[:], self._scored_at[:], self.last_use[:] = 0.0, 0, 0
        self._score[tokens], self._scored_at[tokens], self.last_use[tokens] = scores, *times.values()
        self._successors = {}
        for first, second, count in pairs.tolist():
            self._successors.setdefault(first, {})[second] = count
        self.steps, self._previous = steps, -1


def _whole(state: Mapping[str, Any], name: str, *, below: int, length: int | None = None) -> np.ndarray:
    values: np.ndarray | Sequence[int] = np.asarray(state.get(name))
    if values.ndim != 1 or values.dtype.kind not in "iu" or (length is not None and len(values) != length):
        raise ValueError(f"state: {name} must be a list of whole numbers, got {values.dtype} {list(values.shape)}")
    if len(values) and not (values.min() >= 0 and values.max() < below):
        raise ValueError(f"state: {name} must be in [0, {below}), got {values.min()} to {values.max()}")
    return values.astype(np.int64)
