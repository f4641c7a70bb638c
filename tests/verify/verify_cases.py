"""Models and draft shapes that the rules are checked on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache

import numpy as np
from verify_enumeration import Branching, Dist, Draft, Model, Prefix

from adaptspec.types import DraftTree
from adaptspec.verify import VERIFIERS


def normalise(weights: list[int]) -> Dist:
    return tuple(Fraction(w, sum(weights)) for w in weights)


def _rows(seed: str, size: int, make: Callable[[random.Random], list[int]]) -> Callable[[Prefix], Dist]:
    """A distribution per prefix, the same at every call."""

    @cache
    def row(prefix: Prefix) -> Dist:
        return normalise(make(random.Random(f"{seed}{prefix}")))

    return row


def _some(size: int, allowed: tuple[int, ...] | None = None, top: int = 9) -> Callable[[random.Random], list[int]]:
    allowed = tuple(range(size)) if allowed is None else allowed
    return lambda rng: [rng.randint(1, top) if x in allowed else 0 for x in range(size)]


def _with_zeros(size: int) -> Callable[[random.Random], list[int]]:
    """As after top-p: a few tokens left."""

    def make(rng: random.Random) -> list[int]:
        kept = rng.sample(range(size), rng.randint(1, size - 1))
        return [rng.randint(1, 9) if x in kept else 0 for x in range(size)]

    return make


def _one_hot(size: int) -> Callable[[random.Random], list[int]]:
    def make(rng: random.Random) -> list[int]:
        hot = rng.randrange(size)
        return [int(x == hot) for x in range(size)]

    return make


def models(size: int, seed: int = 0) -> list[Model]:
    """One model per regime that has its own way to go wrong."""
    even, odd = tuple(range(0, size, 2)), tuple(range(1, size, 2))
    makers = {
        "generic": (_some(size), _some(size)),
        "peaked": (_some(size, top=90), _some(size, top=90)),
        "top-p zeros": (_with_zeros(size), _with_zeros(size)),
        "target zeros": (_with_zeros(size), _some(size)),
        "disjoint": (_some(size, even), _some(size, odd)),
        "reduced vocabulary": (_some(size), _some(size, tuple(range(size - 1)))),
        "one-hot target": (_one_hot(size), _some(size)),
        "one-hot draft": (_some(size), _one_hot(size)),
    }
    built = [
        Model(name, size, _rows(f"p{seed}{name}", size, p), _rows(f"q{seed}{name}", size, q))
        for name, (p, q) in makers.items()
    ]
    same = _rows(f"same{seed}", size, _some(size))
    return [*built, Model("p = q", size, same, same)]


def by_depth(*counts: int) -> Branching:
    """`counts[d]` children after every prefix of d tokens."""
    return lambda prefix: counts[len(prefix)] if len(prefix) < len(counts) else 0


def uneven(prefix: Prefix) -> int:
    """Shape decided by the tokens on the path: two children at first, then paths stop, go on or fork."""
    return 2 if not prefix else prefix[0] % 3 if len(prefix) == 1 else 0


def stopping(prefix: Prefix) -> int:
    """A chain that stops at a token of its own."""
    return int(len(prefix) < 3 and (not prefix or prefix[-1] != 1))


def picked(*counts: int, size: int) -> Branching:
    """Deterministic trees: `counts[d]` different tokens after every prefix, which ones depends on the prefix."""

    def choose(prefix: Prefix) -> tuple[int, ...]:
        if len(prefix) >= len(counts):
            return ()
        return tuple(random.Random(f"picked{prefix}").sample(range(size), counts[len(prefix)]))

    return choose


CHAINS: dict[str, tuple[int, Branching]] = {
    "1": (4, by_depth(1)),
    "1-1-1": (3, by_depth(1, 1, 1)),
    "1-1-1-1": (2, by_depth(1, 1, 1, 1)),
    "stopping": (3, stopping),
}
TREES: dict[str, tuple[int, Branching]] = {
    "2": (4, by_depth(2)),
    "3": (3, by_depth(3)),
    "2-1-1": (2, by_depth(2, 1, 1)),
    "2-1": (3, by_depth(2, 1)),
    "1-2": (3, by_depth(1, 2)),
    "2-2": (2, by_depth(2, 2)),
    "uneven": (3, uneven),
}


def cases(name: str) -> Iterator[tuple[str, int, Branching, str]]:
    """(label, vocabulary size, branching, siblings) for every shape and kind of siblings the rule is right for."""
    info = VERIFIERS[name]
    shapes = CHAINS if info.shape == "chain" else CHAINS | TREES
    for siblings in info.siblings:
        if siblings == "deterministic":
            yield "picked 1-1-1", 3, picked(1, 1, 1, size=3), siblings
            if info.shape == "tree":
                yield "picked 3", 4, picked(3, size=4), siblings
                yield "picked 2-2-1", 3, picked(2, 2, 1, size=3), siblings
            continue
        for label, (size, branching) in shapes.items():
            yield label, size, branching, siblings


def as_tree(draft: Draft, model: Model) -> DraftTree:
    """The shipped form of a draft. Rows of q that are never used hold NaN."""
    n = len(draft.tokens)
    fields = {}
    if draft.siblings != "deterministic":
        with_children = sorted(set(draft.parents))
        rows = np.full((len(with_children) + 1, model.size), np.nan)
        draft_rows = np.full(n + 1, -1)
        for row, node in enumerate(with_children):
            rows[row] = [float(x) for x in model.q(draft.prefix(node))]
            draft_rows[node + 1] = row
        fields = {"draft_probs": rows, "draft_rows": draft_rows}
    tree = DraftTree(np.array(draft.tokens, int), np.array(draft.parents, int), np.zeros(n), draft.siblings, **fields)
    tree.validate(vocab_size=model.size)
    return tree


def as_rows(draft: Draft, model: Model) -> np.ndarray:
    """The target's probabilities per verified row, float64 [N + 1, V]."""
    nodes = range(-1, len(draft.tokens))
    return np.array([[float(x) for x in model.p(draft.prefix(node))] for node in nodes])
