"""Traces for tests, made up by hypothesis, and what it means that two of them are equal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from adaptspec.control.cost import CostModel
from adaptspec.control.trace import Proposals, Trace, TracedRequest
from adaptspec.types import DraftTree

NAMES = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=6)
TOKENS = st.integers(0, 3) | st.sampled_from([2**31 - 1])
STEPS = st.floats(0.0, 3.0) | st.sampled_from([0.0, 1e-300, float("inf")])


@st.composite
def trees(draw: st.DrawFn, *, nodes: int, evidence: tuple[str, ...] = (), ordered: bool = True) -> DraftTree:
    """A tree of at most `nodes` nodes over few tokens. Scores of a tree that is not `ordered` may rise along a path."""
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    taken: set[tuple[int, int]] = set()
    for _ in range(draw(st.integers(0, nodes))):
        parent, token = draw(st.integers(-1, len(parents) - 1)), draw(TOKENS)
        if (parent, token) in taken:
            continue
        taken.add((parent, token))
        above = scores[parent] if parent >= 0 and ordered else 0.0
        tokens.append(token)
        parents.append(parent)
        scores.append(above - draw(STEPS))
    count = len(tokens)
    columns = {name: np.array(draw(st.lists(st.floats(), min_size=count, max_size=count)), float) for name in evidence}
    return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64), np.array(scores, float), evidence=columns)


@st.composite
def requests(draw: st.DrawFn, *, nodes: dict[str, int], name: str = "7", ordered: bool = True) -> TracedRequest:
    """An output of 1 to 6 tokens with a tree per drafter and position."""
    tokens = np.array(draw(st.lists(TOKENS, min_size=1, max_size=6)), np.int64)
    proposals = {}
    for drafter, budget in nodes.items():
        evidence = tuple(draw(st.lists(st.sampled_from(["rank", "count", "log prob"]), unique=True, max_size=2)))
        some = [draw(trees(nodes=budget, evidence=evidence, ordered=ordered)) for _ in range(len(tokens) - 1)]
        proposals[drafter] = Proposals.of(some)
    return TracedRequest(name, draw(NAMES), draw(st.integers(1, 2**31 - 1)), tokens, proposals)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Up to 3 requests and 3 drafters."""
    nodes = {name: draw(st.integers(1, 5)) for name in draw(st.lists(NAMES, unique=True, min_size=1, max_size=3))}
    found = [draw(requests(nodes=nodes, name=name)) for name in draw(st.lists(NAMES, unique=True, max_size=3))]
    return Trace(
        tuple(found),
        nodes,
        draw(st.integers(6, 10_000)),
        draw(st.floats(0.0, 10.0)),
        CostModel().state_dict(),
        draw(NAMES),
        {"seed": draw(st.integers()), "values": [draw(st.floats(allow_nan=False, allow_infinity=False)), None, True]},
    )


def example() -> Trace:
    """Two drafters with different evidence, one of which always declines; a long, a short, and a one-token output."""
    rng = np.random.default_rng(5)

    def chain(start: int, length: int) -> DraftTree:
        scores = -np.cumsum(rng.random(length))
        evidence = {"match_length": np.full(length, 3.0), "count": rng.random(length)}
        return DraftTree.chain((start + 1 + np.arange(length)) % 7, scores, evidence=evidence)

    found = []
    for name, domain, length in (("81", "writing", 9), ("82/1", "math", 1), ("82/2", "math", 2)):
        tokens = np.arange(length, dtype=np.int64) % 7
        copies = Proposals.of([chain(int(token), int(rng.integers(0, 5))) for token in tokens[:-1]])
        found.append(
            TracedRequest(
                name, domain, 12, tokens, {"copy": copies, "mute": Proposals.of([DraftTree.empty()] * (length - 1))}
            )
        )
    return Trace(tuple(found), {"copy": 8, "mute": 4}, 16, 0.0, CostModel().state_dict(), "device=cpu", {"seed": 3})


def with_proposals(trace: Trace, drafter: str, **changes: Any) -> Trace:
    """The trace with other arrays in the first request's proposals of one drafter."""
    first, *others = trace.requests
    proposals = {**first.proposals, drafter: replace(first.proposals[drafter], **changes)}
    return replace(trace, requests=(replace(first, proposals=proposals), *others))


def same(one: Trace, other: Trace) -> bool:
    """Equal to the last bit, NaN included."""
    plain = ("nodes", "max_new_tokens", "temperature", "costs", "fingerprint", "provenance")
    if any(getattr(one, name) != getattr(other, name) for name in plain) or list(one.nodes) != list(other.nodes):
        return False
    return list(map(_bits, one.requests)) == list(map(_bits, other.requests))


def _bits(request: TracedRequest) -> tuple[Any, ...]:
    arrays = {
        name: [(array.dtype, array.tobytes()) for array in (p.offsets, p.token_ids, p.parents, p.scores)]
        + sorted((key, column.dtype.str, column.tobytes()) for key, column in p.evidence.items())
        for name, p in request.proposals.items()
    }
    tokens = request.tokens.dtype, request.tokens.tobytes()
    return request.name, request.domain, request.prompt_length, tokens, arrays
