"""Exact enumeration of sampled drafting followed by verification, in fractions.

Every outcome of the builder's draws is visited with its probability (`draft_outcomes`), every drafted tree is verified
by a rule written straight from its equation, and the emitted tokens are continued from the target to a fixed length, so
that the result is a distribution over token sequences that must equal the target's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from itertools import product

import numpy as np

from adaptspec.types import DraftTree

Path = tuple[int, ...]
Law = tuple[Fraction, ...]
Emitted = dict[Path, Fraction]
ROOT_TOKEN = 1
VOCAB = 4

# Draft distributions are multiples of 1/16, which floats hold exactly.
DRAFT_LAWS = [(2, 10, 3, 1), (0, 8, 6, 2), (7, 2, 1, 6), (1, 1, 12, 2), (5, 5, 0, 6)]
TARGET_LAWS = [(4, 2, 3, 3), (1, 6, 2, 3), (0, 5, 7, 0), (6, 0, 1, 5)]


@cache
def draft_law(path: Path) -> Law:
    weights = DRAFT_LAWS[(3 * len(path) + sum((i + 2) * (token + 1) for i, token in enumerate(path))) % len(DRAFT_LAWS)]
    return tuple(Fraction(weight, 16) for weight in weights)


@cache
def target_law(path: Path) -> Law:
    weights = TARGET_LAWS[(len(path) + sum((2 * i + 1) * token for i, token in enumerate(path))) % len(TARGET_LAWS)]
    return tuple(Fraction(weight, 12) for weight in weights)


class DraftModel:
    """The drafter behind `expand`: rebuilds every path from the rows it was ever passed."""

    def __init__(self) -> None:
        self.paths: list[Path] = []

    def __call__(self, token_ids: np.ndarray, parents: np.ndarray) -> np.ndarray:
        called: list[Path] = []
        for token, parent in zip(token_ids.tolist(), parents.tolist(), strict=True):
            if parent < 0:
                assert not self.paths and token == ROOT_TOKEN
                called.append(())
            else:
                called.append((*self.paths[parent], token))
        self.paths += called
        return np.array([[float(q) for q in draft_law(path)] for path in called])


class Script:
    """Stands in for the random generator: answers the given choices, then always the first possible one."""

    def __init__(self, choices: list[int]) -> None:
        self.choices = choices
        self.options: list[int] = []
        self.probability = Fraction(1)

    def pick(self, weights: np.ndarray) -> int:
        exact = [Fraction(float(weight)) for weight in weights]
        possible = [index for index, weight in enumerate(exact) if weight > 0]
        step = len(self.options)
        choice = self.choices[step] if step < len(self.choices) else 0
        self.options.append(len(possible))
        self.probability *= exact[possible[choice]] / sum(exact)
        return possible[choice]


def draft_outcomes(build: Callable[[DraftModel, Script], DraftTree]) -> Iterator[tuple[DraftTree, Fraction]]:
    """Every tree that `build(expand, rng)` can draw, with its probability. Needs `_pick_index` to ask the script."""
    choices: list[int] = []
    while True:
        script = Script(choices)
        tree = build(DraftModel(), script)
        yield tree, script.probability
        choices = choices + [0] * (len(script.options) - len(choices))
        while choices and choices[-1] + 1 == script.options[len(choices) - 1]:
            choices.pop()
        if not choices:
            return
        choices[-1] += 1


def recursive_rejection(tree: DraftTree, *, keep_q: bool = False) -> Emitted:
    """Per sibling accept with min(1, p/q); on rejection p <- norm((p - q)+), and without replacement q[x] <- 0.

    `keep_q` leaves q as it is, which is right for i.i.d. siblings and a known mistake without replacement.
    """
    emitted: Emitted = defaultdict(Fraction)

    def visit(node: int, path: Path, reached: Fraction) -> None:
        p, q = list(target_law(path)), list(draft_law(path))
        for child in np.flatnonzero(tree.parents == node).tolist():
            token = int(tree.token_ids[child])
            accept = min(Fraction(1), p[token] / q[token])
            if accept > 0:
                visit(child, (*path, token), reached * accept)
            reached *= 1 - accept
            if reached == 0:
                return
            p = normalise([max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)])
            if not keep_q:
                q[token] = Fraction(0)
                q = normalise(q) if sum(q) > 0 else q  # nothing left: this was the last sibling
        for token, probability in enumerate(p):
            emitted[(*path, token)] += reached * probability

    visit(-1, (), Fraction(1))
    return emitted


def multi_round(tree: DraftTree) -> Emitted:
    """The rule for i.i.d. siblings: q stays."""
    return recursive_rejection(tree, keep_q=True)


def traversal(tree: DraftTree) -> Emitted:
    """Leaf to root: a leaf passes with its weight P; else it is deleted and its parent's p, P and q are updated.

    S = sum (P p - q)+; p <- that, normalised; P <- S / (S + 1 - P). A node that passes emits its path and a token of p.
    """
    emitted: Emitted = defaultdict(Fraction)

    def visit(node: int, path: Path, weight: Fraction, reached: Fraction) -> Fraction:
        """Emit what passes in the subtree; returns the probability that all of it is deleted."""
        p, q = list(target_law(path)), list(draft_law(path))
        for child in np.flatnonzero(tree.parents == node).tolist():
            token = int(tree.token_ids[child])
            reached = visit(child, (*path, token), min(Fraction(1), weight * p[token] / q[token]), reached)
            if reached == 0:
                return reached
            excess = [max(weight * a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
            total = sum(excess)
            weight = total / (total + 1 - weight)
            if total > 0:
                p = normalise(excess)
            q[token] = Fraction(0)
            q = normalise(q) if sum(q) > 0 else q
        for token, probability in enumerate(p):
            emitted[(*path, token)] += reached * weight * probability
        return reached * (1 - weight)

    assert visit(-1, (), Fraction(1), Fraction(1)) == 0
    return emitted


def normalise(values: list[Fraction]) -> list[Fraction]:
    total = sum(values)
    return [value / total for value in values]


def target_joint(length: int) -> Emitted:
    """The target's law over sequences of `length` tokens."""
    joint: Emitted = {}
    for path in product(range(VOCAB), repeat=length):
        probability = Fraction(1)
        for i, token in enumerate(path):
            probability *= target_law(path[:i])[token]
        joint[path] = probability
    return joint


def emitted_joint(
    build: Callable[[DraftModel, Script], DraftTree], rule: Callable[[DraftTree], Emitted], length: int
) -> Emitted:
    """Law over sequences of `length` tokens if one step drafts, verifies, and the target continues alone."""
    joint: Emitted = dict.fromkeys(product(range(VOCAB), repeat=length), Fraction(0))
    emitted: Emitted = defaultdict(Fraction)

    def extend(path: Path, probability: Fraction) -> None:
        if probability == 0:
            return
        if len(path) == length:
            joint[path] += probability
            return
        for token, step in enumerate(target_law(path)):
            extend((*path, token), probability * step)

    total = Fraction(0)
    for tree, probability in draft_outcomes(build):
        total += probability
        for path, share in rule(tree).items():
            assert len(path) <= length
            emitted[path] += probability * share
    assert total == 1
    for path, probability in emitted.items():
        extend(path, probability)
    return joint


def total_variation(left: Emitted, right: Emitted) -> Fraction:
    return sum((abs(left[path] - right[path]) for path in left), Fraction(0)) / 2
