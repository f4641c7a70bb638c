"""Trees whose tokens are drawn from the drafter's distribution, for verification by ratio (p / q).

The shape is fixed before anything is drawn, so nothing about which nodes exist can depend on the drawn tokens in a way
that changes their distribution (with two harmless exceptions described at `sampled_tree`). Rows are stored in the
order of drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log
from typing import Literal, get_args

import numpy as np

from adaptspec.trees._checks import check_whole
from adaptspec.trees._sampling import ExpandRows, Urn, checked_rows
from adaptspec.trees.structure import children_lists
from adaptspec.trees.template import Template
from adaptspec.types import DraftTree

Drawn = Literal["iid", "without-replacement"]


def sampled_chain(
    expand: ExpandRows, *, root: int, length: int, rng: np.random.Generator, min_confidence: float = 0.0
) -> DraftTree:
    """A chain x_1 .. x_D with x_d ~ q(. | x_1 .. x_{d-1}), as in speculative sampling (2211.17192, 2302.01318).

    The chain ends before a draw whose q has no token of at least `min_confidence`. That looks at q before the token is
    drawn, so it stays lossless; stopping on the probability of the drawn token and *dropping* it would not.
    score = sum of log q(x_d). One row of q is asked for per call.

    Args:
        expand: the drafter (see `ExpandRows` for the convention).
        root: the last committed token.
        length: D at most.
        rng: the source of randomness.
        min_confidence: least largest probability of q, in [0, 1].

    Raises:
        ValueError: negative sizes, or an `expand` that does not return distributions.
    """
    check_whole("length", length, 0)
    if not 0.0 <= min_confidence <= 1.0:
        raise ValueError(f"min_confidence must be in [0, 1], got {min_confidence}")
    tokens: list[int] = []
    rows: list[np.ndarray] = []
    scores: list[float] = []
    for depth in range(length):
        last = tokens[-1] if tokens else root
        q = checked_rows(expand(np.array([last], dtype=np.int64), np.array([depth - 1], dtype=np.int64)), 1)[0]
        if q.max() < min_confidence:
            break
        token = Urn(q).draw(rng, replace=True)
        scores.append((scores[-1] if scores else 0.0) + log(q[token]))
        tokens.append(token)
        rows.append(q)
    count = len(tokens)
    if count == 0:
        return DraftTree.empty()
    return DraftTree(
        np.array(tokens, dtype=np.int64),
        np.arange(-1, count - 1, dtype=np.int64),
        np.minimum(np.array(scores), 0.0),
        "iid",
        np.stack(rows),
        np.append(np.arange(count, dtype=np.int64), -1),
    )


def sampled_tree(
    expand: ExpandRows,
    template: Template | Sequence[int],
    *,
    root: int,
    siblings: Drawn,
    rng: np.random.Generator,
    budget: int | None = None,
) -> DraftTree:
    """A tree of fixed shape, level by level: a node with k children in `template` gets k draws from its q.

    "iid" is SpecInfer's (arXiv 2305.09781), "without-replacement" that of Sequoia (2402.12374) and recursive rejection
    sampling. The j-th draw of a node takes the place of its child of rank j. score = sum of log q along the path.

    Two things depend on drawn tokens, both decided before the token they concern is drawn: without replacement a node
    gets no further sibling once q has nothing left; and a repeated i.i.d. sibling, which verification tests but cannot
    accept any more (its residual probability is 0), gets no children.

    Args:
        expand: the drafter, called once per level (see `ExpandRows` for the convention).
        template: the shape, or a branching factor per level.
        root: the last committed token.
        siblings: how the children of one node are drawn.
        rng: the source of randomness.
        budget: stop drawing after so many nodes, counted in the order of drawing.

    Raises:
        ValueError: unknown `siblings`, negative `budget`, or an `expand` that does not return distributions.
    """
    if siblings not in get_args(Drawn):
        raise ValueError(f"siblings must be one of {', '.join(get_args(Drawn))}, got {siblings!r}")
    shape = template if isinstance(template, Template) else Template.from_branching(template)
    limit = len(shape) if budget is None else check_whole("budget", budget, 0)
    children = children_lists(shape.parents)
    ranks = shape.ranks.tolist()
    for below in children:
        below.sort(key=ranks.__getitem__)

    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    draft_rows: list[int] = [-1]
    blocks: list[np.ndarray] = []
    expanded = 0
    # A level holds (node of the tree, node of the shape, row of its parent among the expanded rows).
    level = [(-1, -1, -1)] if children[0] else []
    while level and len(tokens) < limit:
        asked = np.array([tokens[node] if node >= 0 else root for node, _, _ in level], dtype=np.int64)
        q = checked_rows(expand(asked, np.array([row for _, _, row in level], dtype=np.int64)), len(level))
        blocks.append(q)
        next_level: list[tuple[int, int, int]] = []
        for row, (node, place, _) in enumerate(level):
            if len(tokens) == limit:
                break
            urn = Urn(q[row])
            draft_rows[node + 1] = expanded + row
            base = scores[node] if node >= 0 else 0.0
            seen: set[int] = set()
            for child in children[place + 1]:
                if len(tokens) == limit or (siblings != "iid" and urn.exhausted()):
                    break
                token = urn.draw(rng, replace=siblings == "iid")
                if token not in seen and children[child + 1]:
                    next_level.append((len(tokens), child, expanded + row))
                seen.add(token)
                tokens.append(token)
                parents.append(node)
                draft_rows.append(-1)
                scores.append(min(base + _log(float(q[row, token])), base))
        expanded += len(level)
        level = next_level
    if not tokens:
        return DraftTree.empty()
    return DraftTree(
        np.array(tokens, dtype=np.int64),
        np.array(parents, dtype=np.int64),
        np.array(scores),
        siblings,
        np.concatenate(blocks),
        np.array(draft_rows, dtype=np.int64),
    )


def _log(probability: float) -> float:
    return log(probability) if probability > 0.0 else -inf
