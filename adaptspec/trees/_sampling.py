"""Drawing draft tokens: checked q rows, and an urn that draws siblings from one of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

ExpandRows = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""`expand(token_ids int64 [F], parents int64 [F]) -> q [F, V]`, the distribution after each of the given nodes.

The rows ever passed to the callable form a tree of their own, parents first, in the order in which they are passed:
row 0 is the root, alone in the first call, with parent -1; `parents` point into these rows. q must be the distribution
that verification should divide by: after temperature, top-k, top-p, and zero outside a reduced vocabulary.
"""

EXHAUSTED = 1e-9
"""Below this share of q left undrawn a node gets no further sibling: what is left is rounding noise, or nothing."""

_BLOCK = 256


def checked_rows(q: np.ndarray, count: int) -> np.ndarray:
    """`q` as float32 or float64 [count, V] whose rows sum to 1.

    Raises:
        ValueError: another shape, a negative or NaN entry, or a row that is further from 1 than rounding explains.
    """
    rows = np.asarray(q)
    if rows.ndim != 2 or len(rows) != count:
        raise ValueError(f"expand must return q of shape [{count}, V], got {list(rows.shape)}")
    if rows.dtype != np.float32:
        rows = rows.astype(np.float64, copy=False)
    totals = rows.sum(axis=1)
    if not rows.min(initial=0.0) >= 0.0 or not (abs(totals - 1.0) <= 1e-2).all():
        raise ValueError(f"expand must return probabilities that sum to 1 per row, got the sums {totals.tolist()}")
    return rows / totals[:, None]


class Urn:
    """One q row to draw siblings from.

    A draw picks a block of tokens by its sum and then a token inside, which spares a running sum over the vocabulary
    per draw. Block sums are as exact as the dtype of q.
    """

    __slots__ = ("_remaining", "_sums", "drawn", "left", "probs")

    def __init__(self, probs: np.ndarray) -> None:
        self.probs = probs
        self.drawn: list[int] = []
        self._remaining = probs  # copied before the first change
        whole = len(probs) // _BLOCK * _BLOCK
        sums = probs[:whole].reshape(-1, _BLOCK).sum(axis=1)
        self._sums = np.append(sums, probs[whole:].sum()).astype(np.float64)
        self.left = float(self._sums.sum())
        """Probability of all tokens not drawn yet."""

    def exhausted(self) -> bool:
        """Nothing is left to draw without replacement."""
        return self.left <= EXHAUSTED

    def draw(self, rng: np.random.Generator, *, replace: bool) -> int:
        """The next token: from q, or without `replace` from q renormalised over what is left."""
        token = self._pick(rng)
        self.drawn.append(token)
        if not replace:
            if self._remaining is self.probs:
                self._remaining = self.probs.copy()
            self._remaining[token] = 0.0
            block = token // _BLOCK
            self._sums[block] = self._remaining[block * _BLOCK : (block + 1) * _BLOCK].sum()
            self.left = float(self._sums.sum())
        return token

    def _pick(self, rng: np.random.Generator) -> int:
        block = _pick_index(self._sums, rng)
        inside = self._remaining[block * _BLOCK : (block + 1) * _BLOCK]
        return block * _BLOCK + _pick_index(inside, rng)


def _pick_index(weights: np.ndarray, rng: np.random.Generator) -> int:
    """An index with probability proportional to its weight; never one of weight 0."""
    upper = weights.cumsum(dtype=np.float64)
    assert upper[-1] > 0.0, "nothing left to draw"
    index = len(upper)
    while index == len(upper):  # only if rounding puts the point on the very end
        index = int(upper.searchsorted(rng.random() * upper[-1], side="right"))
    return index
