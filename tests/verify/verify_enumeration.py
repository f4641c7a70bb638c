"""Exact enumeration of a verification rule: every draft, every outcome, in fractions.

A rule is `rule(draft, model, choose) -> (path, tokens)`. All of its randomness is asked of `choose`, one question per
uniform, so that the same text can be enumerated over every answer (`outcomes`) or asked with given uniforms (`Given`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

Dist = tuple[Fraction, ...]
Prefix = tuple[int, ...]
ONE, ZERO = Fraction(1), Fraction(0)


@dataclass(frozen=True)
class Model:
    """Target and draft distributions after every prefix."""

    name: str
    size: int
    p: Callable[[Prefix], Dist]
    q: Callable[[Prefix], Dist]


@dataclass(frozen=True)
class Draft:
    """A drafted tree: tokens, parents (-1 is the root), and how siblings were chosen."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    siblings: str

    def children(self, node: int) -> list[int]:
        return [i for i, parent in enumerate(self.parents) if parent == node]

    def prefix(self, node: int) -> Prefix:
        return () if node < 0 else (*self.prefix(self.parents[node]), self.tokens[node])


# Randomness ----------------------------------------------------------------------------------------------------------


class Choose:
    """Answers questions by splitting the uniform's range [0, 1) into intervals, one per answer."""

    def pick(self, edges: list[Fraction]) -> int:
        raise NotImplementedError

    def accept(self, probability: Fraction) -> bool:
        """`u < probability`."""
        return self.pick([min(ONE, probability), ONE]) == 0

    def token(self, dist: Dist) -> int:
        """Inverse of the cumulative distribution at u."""
        assert sum(dist) == 1 and min(dist) >= 0
        edges, total = [], ZERO
        for mass in dist:
            total += mass
            edges.append(total)
        return self.pick(edges)


class Given(Choose):
    """Answers with uniforms from a list."""

    def __init__(self, uniforms: list[float]) -> None:
        self.uniforms = [Fraction(u) for u in uniforms]
        self.used = 0

    def pick(self, edges: list[Fraction]) -> int:
        u = self.uniforms[self.used]
        self.used += 1
        return next(i for i, edge in enumerate(edges) if u < edge)


class Scripted(Choose):
    """Follows a script of answers, then takes the first possible one, and notes the alternatives.

    With `reuse` all questions are answered by the same uniform: the mistake of drawing only one.
    """

    def __init__(self, script: tuple[int, ...], reuse: bool) -> None:
        self.script, self.reuse = script, reuse
        self.answers: list[int] = []
        self.alternatives: list[tuple[int, ...]] = []
        self.intervals: list[tuple[Fraction, Fraction]] = []
        self.probability = ONE
        self.range = (ZERO, ONE)

    def pick(self, edges: list[Fraction]) -> int:
        low, high = self.range if self.reuse else (ZERO, ONE)
        starts = [ZERO, *edges[:-1]]
        cells = [(max(low, a), min(high, b)) for a, b in zip(starts, edges, strict=True)]
        possible = [i for i, (a, b) in enumerate(cells) if a < b]
        at = len(self.answers)
        if at < len(self.script):
            answer = self.script[at]
        else:
            answer, *others = possible
            self.alternatives += [(*self.answers, other) for other in others]
        self.answers.append(answer)
        self.range = cells[answer]
        self.intervals.append(self.range)
        self.probability *= (self.range[1] - self.range[0]) / (high - low)
        return answer


@dataclass(frozen=True)
class Outcome:
    """One way a rule can end: its probability, the interval of each uniform, and the result."""

    probability: Fraction
    intervals: tuple[tuple[Fraction, Fraction], ...]
    path: tuple[int, ...]
    tokens: tuple[int, ...]


def outcomes(rule: Callable, draft: Draft, model: Model, *, reuse: bool = False) -> Iterator[Outcome]:
    """Every way the rule can end on this draft, with its probability."""
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        choose = Scripted(scripts.pop(), reuse)
        path, tokens = rule(draft, model, choose)
        scripts += choose.alternatives
        yield Outcome(choose.probability, tuple(choose.intervals), tuple(path), tuple(tokens))


# Drafting ------------------------------------------------------------------------------------------------------------


def remaining(q: Dist, drawn: tuple[int, ...]) -> Dist | None:
    """q renormalised over the tokens not yet drawn; None if nothing is left."""
    left = tuple(ZERO if x in drawn else mass for x, mass in enumerate(q))
    total = sum(left)
    return tuple(mass / total for mass in left) if total else None


def sibling_law(q: Dist, k: int, siblings: str) -> list[tuple[Fraction, tuple[int, ...]]]:
    """Every way to draw k siblings from q, in order. Without replacement fewer come when q runs out."""
    ways: list[tuple[Fraction, tuple[int, ...]]] = [(ONE, ())]
    for _ in range(k):
        longer = []
        for probability, drawn in ways:
            law = q if siblings == "iid" else remaining(q, drawn)
            if law is None:
                longer.append((probability, drawn))
            else:
                longer += [(probability * mass, (*drawn, x)) for x, mass in enumerate(law) if mass]
        ways = longer
    return ways


Branching = Callable[[Prefix], "int | tuple[int, ...]"]
"""Children after a prefix: how many to draw, or, for deterministic trees, which."""


def draft_law(branching: Branching, model: Model, siblings: str) -> Iterator[tuple[Fraction, Draft]]:
    """Every tree that can be drafted, with its probability. Nodes are stored level by level."""

    def grow(probability: Fraction, tokens: Prefix, parents: Prefix, at: int) -> Iterator[tuple[Fraction, Draft]]:
        if at == len(tokens):
            yield probability, Draft(tokens, parents, siblings)
            return
        prefix = Draft(tokens, parents, siblings).prefix(at)
        wanted = branching(prefix)
        ways = [(ONE, wanted)] if isinstance(wanted, tuple) else sibling_law(model.q(prefix), wanted, siblings)
        for chance, drawn in ways:
            yield from grow(probability * chance, tokens + drawn, parents + (at,) * len(drawn), at + 1)

    yield from grow(ONE, (), (), -1)


# Laws ----------------------------------------------------------------------------------------------------------------

Law = dict[Prefix, Fraction]


def target_law(model: Model, length: int, start: Prefix = (), mass: Fraction = ONE) -> Law:
    """The target's joint law of the next tokens up to `length`, continuing `start`."""
    law = {start: mass}
    for _ in range(length - len(start)):
        law = {(*s, x): m * mass_x for s, m in law.items() for x, mass_x in enumerate(model.p(s)) if mass_x}
    return law


def emitted_law(rule: Callable, branching: Branching, model: Model, siblings: str, *, reuse: bool = False) -> Law:
    """Joint law of the tokens that one verification emits, over all drafts and all outcomes."""
    law: Law = {}
    for chance, draft in draft_law(branching, model, siblings):
        for outcome in outcomes(rule, draft, model, reuse=reuse):
            law[outcome.tokens] = law.get(outcome.tokens, ZERO) + chance * outcome.probability
    return law


def total_variation(law: Law, model: Model) -> Fraction:
    """Distance between emitted tokens continued by the target, and the target, on the joint of all tokens."""
    length = max(map(len, law))
    emitted: Law = {}
    for tokens, mass in law.items():
        for sequence, m in target_law(model, length, tokens, mass).items():
            emitted[sequence] = emitted.get(sequence, ZERO) + m
    wanted = target_law(model, length)
    assert sum(emitted.values()) == 1
    return sum(abs(emitted.get(s, ZERO) - wanted.get(s, ZERO)) for s in emitted.keys() | wanted.keys()) / 2


def expected_length(law: Law) -> Fraction:
    """Expected number of emitted tokens, bonus included."""
    return sum((mass * len(tokens) for tokens, mass in law.items()), ZERO)
