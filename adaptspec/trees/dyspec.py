"""A sampled tree that grows where acceptance is likely: DySpec (arXiv 2410.11744).

DySpec takes q(x) for the probability that x is accepted. A slot (the next child to draw below a node) has the value v,
the estimated probability that verification gets there. The heap gives the slot with the largest v; a token x is drawn
from what is left of q there; then two slots become available: below x with v * q(x), and the next sibling with
v * (1 - q(x)), q meaning the distribution x was drawn from (renormalised over what was left).

Is it lossless, although the shape depends on drawn tokens? Yes, in this order of doing things, and for this reason.
Recursive rejection needs one thing: that, given whatever decided that the j-th child of a node exists, and given the
acceptance coins so far, this child is distributed as q without the j-1 tokens drawn before it. Let F_t be all tokens
drawn in the first t steps. Which slot is served in step t + 1, and whether there is a step t + 1 at all, is a function
of F_t: of values of *earlier* draws. The token of that step is drawn from the slot's q afterwards, so given F_t it has
exactly this law, and the coins are independent of all draws. A missing child is decided by F_t in the same way and
makes verification sample from the current residual, which is right for every reason of that kind. By induction along
the walk of verification the emitted tokens have the target's joint law. The same argument covers stopping at any time
that looks at earlier draws only, such as a budget or an empty residual. Leaf-to-root (traversal) verification keeps the
law too, although it tests a node after its descendants: the chance that something below a node is accepted is that
node's weight P whether or not one more freshly drawn child exists. Both were checked by exact enumeration.

What breaks it, and is easy to write by accident: drawing x first and keeping it only if its own value v * q(x) wins in
the heap, or pruning the finished tree by score. Then small q(x) are under-represented among the kept children and the
ratio test divides by the wrong q. The published form does neither, so this is the published form; `truncate` refuses
sampled trees for this reason.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf, log

import numpy as np

from adaptspec.trees._checks import check_whole
from adaptspec.trees._sampling import ExpandRows, Urn, checked_rows
from adaptspec.types import DraftTree


def dyspec(
    expand: ExpandRows, *, root: int, budget: int, max_depth: int, rng: np.random.Generator, min_value: float = 0.0
) -> DraftTree:
    """Draw `budget` nodes one by one, always in the slot with the largest estimated chance to be reached.

    Siblings are drawn without replacement; rows are stored in the order of drawing, so `keep_first` gives the tree of
    a smaller budget. score = log(v * q(x)), the estimated log-probability that the path is accepted.

    Args:
        expand: the drafter, asked for one row per call, and only for nodes that get a child (see `ExpandRows`).
        root: the last committed token.
        budget: nodes, the root not counted.
        max_depth: no slots below it.
        rng: the source of randomness.
        min_value: stop when no slot has at least this value.

    Raises:
        ValueError: negative sizes, or an `expand` that does not return distributions.
    """
    check_whole("budget", budget, 0)
    check_whole("max_depth", max_depth, 0)
    if not min_value >= 0.0:
        raise ValueError(f"min_value must be >= 0, got {min_value}")
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    levels: list[int] = []
    draft_rows: list[int] = [-1]
    urns: list[Urn] = []
    heap = [(-1.0, 0, -1)] if max_depth > 0 else []  # (-value, serial, node below which to draw)
    serial = 0
    while heap and len(tokens) < budget:
        negative, _, node = heappop(heap)
        if -negative < min_value:
            break
        row = draft_rows[node + 1]
        if row < 0:
            above = draft_rows[parents[node] + 1] if node >= 0 else -1
            token = tokens[node] if node >= 0 else root
            q = checked_rows(expand(np.array([token], dtype=np.int64), np.array([above], dtype=np.int64)), 1)[0]
            row = draft_rows[node + 1] = len(urns)
            urns.append(Urn(q))
        urn = urns[row]
        before = urn.left
        token = urn.draw(rng, replace=False)
        share = min(float(urn.probs[token]) / before, 1.0)
        value = -negative * share
        child = len(tokens)
        level = levels[node] + 1 if node >= 0 else 1
        tokens.append(token)
        parents.append(node)
        levels.append(level)
        scores.append(log(value) if value > 0.0 else -inf)
        draft_rows.append(-1)
        if level < max_depth:
            serial += 1
            heappush(heap, (-value, serial, child))
        if not urn.exhausted():
            serial += 1
            heappush(heap, (negative * (1.0 - share), serial, node))
    if not tokens:
        return DraftTree.empty()
    return DraftTree(
        np.array(tokens, dtype=np.int64),
        np.array(parents, dtype=np.int64),
        np.array(scores),
        "without-replacement",
        np.stack([urn.probs for urn in urns]),
        np.array(draft_rows, dtype=np.int64),
    )
