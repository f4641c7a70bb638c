"""Draft trees from the counts of a suffix automaton: what followed this suffix before, and how often.

Oliaro et al., "SuffixDecoding" (arXiv 2411.04975): after a matched suffix s, the token x has probability
count(s x) / count(s); a path has the product. The paper's ratio decides what is worth drafting (`min_probability`).
As an estimate of acceptance it is far too sure of rare contexts. What orders and scores the nodes is therefore the
ratio with an escape mass (Witten and Bell 1991) that shrinks with the agreeing context, here the match and the path so
far: count(s x) / (continuations of s + distinct successors of s / length of s). For one continuation seen once this is
m / (m + 1), so that a copy of d tokens has m / (m + d): the longer a match has lasted the longer it will last.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import log

import numpy as np

from adaptspec.drafters.suffix_automaton import SuffixAutomaton
from adaptspec.types import DraftTree

LARGEST_FAN_OUT = 256
"""A suffix with more successors than this predicts little and is costly to look through; it is passed over."""


@dataclass(frozen=True, slots=True)
class Match:
    """A suffix of the request's text that occurred before.

    Attributes:
        automaton: where it occurred.
        state: its state there.
        length: tokens matched.
        open_ends: occurrences without a continuation: 1 in the request's own text, which ends with the suffix.
    """

    automaton: SuffixAutomaton
    state: int
    length: int
    open_ends: int


@dataclass(slots=True)
class CountedPaths:
    """Nodes parents first, with the estimated probability of each path and the counts behind it."""

    match_length: int
    token_ids: list[int]
    parents: list[int]
    probabilities: list[float]
    counts: list[int]
    parent_counts: list[int]
    total: float = 0.0
    """Sum of the probabilities: the expected number of accepted nodes."""

    def to_tree(self) -> DraftTree:
        """As a `DraftTree`; "rank" numbers siblings from 0 in the order of their estimates."""
        children: dict[int, int] = {}
        ranks = []
        for parent in self.parents:
            ranks.append(children.get(parent, 0))
            children[parent] = ranks[-1] + 1
        evidence = {
            "match_length": np.full(len(ranks), float(self.match_length)),
            "count": np.asarray(self.counts, dtype=np.float64),
            "parent_count": np.asarray(self.parent_counts, dtype=np.float64),
            "rank": np.asarray(ranks, dtype=np.float64),
        }
        return DraftTree(
            np.asarray(self.token_ids, dtype=np.int64),
            np.asarray(self.parents, dtype=np.int64),
            np.asarray([min(0.0, log(p)) for p in self.probabilities]),
            evidence=evidence,
        )


def grow(match: Match, *, budget: int, max_depth: int, min_probability: float, greedy: bool) -> CountedPaths:
    """Best-first tree below a match, or with `greedy` the path of likeliest tokens.

    Args:
        budget: nodes at most, >= 1.
        max_depth: depth at most, >= 1; match length + depth must not exceed the automaton's `count_length`.
        min_probability: paths with a smaller product of count ratios are left out.
        greedy: keep one child per node.
    """
    automaton = match.automaton
    count = automaton.count
    paths = CountedPaths(match.length, [], [], [], [], [])
    # Heap entries: -estimate, order of insertion (ties: first seen first), token, state, parent node, depth, ratio,
    # count of the parent.
    heap: list[tuple[float, int, int, int, int, int, float, int]] = []
    serial = 0

    def push_children(state: int, node: int, depth: int, estimate: float, ratio: float) -> None:
        nonlocal serial
        fan_out = automaton.branching(state)
        if fan_out > LARGEST_FAN_OUT:
            return
        occurrences = count[state]
        mass = occurrences + fan_out / (match.length + depth - 1)
        if depth == 1:
            mass -= match.open_ends
        best: tuple[float, int, int, int, int, int, float, int] | None = None
        for token, child in automaton.transitions(state):
            child_ratio = ratio * count[child] / occurrences
            if child_ratio < min_probability:
                continue
            child_estimate = estimate * count[child] / mass
            serial += 1
            entry = (-child_estimate, serial, token, child, node, depth, child_ratio, occurrences)
            if not greedy:
                heapq.heappush(heap, entry)
            elif best is None or entry < best:
                best = entry
        if best is not None:
            heap.append(best)

    push_children(match.state, -1, 1, 1.0, 1.0)
    while heap and len(paths.token_ids) < budget:
        negated, _, token, state, parent, depth, ratio, occurrences = heapq.heappop(heap)
        node = len(paths.token_ids)
        paths.token_ids.append(token)
        paths.parents.append(parent)
        paths.probabilities.append(-negated)
        paths.counts.append(count[state])
        paths.parent_counts.append(occurrences)
        paths.total -= negated
        if depth < max_depth:
            push_children(state, node, depth + 1, -negated, ratio)
    return paths
