"""A tree of fixed shape filled by a model that drafts level by level."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from adaptspec.trees import Expand, Template, children_lists, depths, greedy_template
from adaptspec.types import DraftTree

RANK_ACCEPTANCE = (0.38, 0.11, 0.07, 0.035, 0.03, 0.02, 0.015, 0.012, 0.01, 0.008)
"""How often the token of each rank is the target's, measured with a small EAGLE-like cell; a geometric tail follows."""


@lru_cache(maxsize=64)
def rank_template(branching: int, budget: int, max_depth: int) -> Template:
    """The shape that `RANK_ACCEPTANCE` suggests; smaller budgets are part of larger ones."""
    tail = [RANK_ACCEPTANCE[-1] * 0.8**rank for rank in range(1, branching - len(RANK_ACCEPTANCE) + 1)]
    acceptance = np.array([*RANK_ACCEPTANCE, *tail][:branching])
    return greedy_template(acceptance, budget=budget, max_depth=max_depth)


def limit_depth(template: Template, max_depth: int) -> Template:
    """The nodes of a template down to a depth."""
    kept = np.flatnonzero(depths(template.parents) <= max_depth)
    position = np.full(len(template) + 1, -1, np.int64)
    position[kept] = np.arange(len(kept))
    return Template(position[template.parents[kept]], template.ranks[kept], template.scores[kept])


def static_tree(expand: Expand, template: Template, *, root: int, max_depth: int) -> DraftTree:
    """The node of rank r takes the r-th token that the drafter lists below its parent (EAGLE, arXiv 2401.15077).

    Nodes that are too deep or find no token are left out with all that lies below. Score: sum of log-probabilities.
    Evidence: "rank", "log_prob". Only nodes with children are run.

    Args:
        expand: the drafter, called once per depth, see `Expand`.
        template: the shape, parents first.
        root: the last committed token.
        max_depth: depths drafted.
    """
    count = len(template)
    level_of = depths(template.parents)
    has_children = np.array([bool(below) for below in children_lists(template.parents)[1:]], dtype=bool)
    tokens = np.zeros(count, np.int64)
    steps = np.full(count, -np.inf)
    scores = np.full(count, -np.inf)
    asked = np.array([-1], dtype=np.int64)  # nodes of the template that are expanded in this call, -1 for the root
    row_of = np.zeros(count + 1, np.int64)  # their numbers among all expanded rows; the root's is 0, stored last
    expanded = 0
    for level in range(1, min(max_depth, int(level_of.max(initial=0))) + 1):
        above = template.parents[asked] if level > 1 else asked
        parents = np.array([-1], dtype=np.int64) if level == 1 else row_of[above]
        ids, log_probs = expand(np.array([root]) if level == 1 else tokens[asked], parents)
        row_of[asked] = expanded + np.arange(len(asked))
        place = np.full(count + 1, -1, np.int64)
        place[asked] = np.arange(len(asked))
        expanded += len(asked)
        nodes = np.flatnonzero(level_of == level)
        nodes = nodes[(place[template.parents[nodes]] >= 0) & (template.ranks[nodes] < ids.shape[1])]
        rows, ranks = place[template.parents[nodes]], template.ranks[nodes]
        tokens[nodes], steps[nodes] = ids[rows, ranks], log_probs[rows, ranks]
        scores[nodes] = steps[nodes] + (scores[template.parents[nodes]] if level > 1 else 0.0)
        asked = nodes[has_children[nodes] & (steps[nodes] > -np.inf)]
        if not len(asked):
            break
    kept = np.flatnonzero(scores > -np.inf)
    position = np.full(count + 1, -1, np.int64)
    position[kept] = np.arange(len(kept))
    return DraftTree(
        tokens[kept],
        position[template.parents[kept]],
        scores[kept],
        evidence={"rank": template.ranks[kept].astype(np.float64), "log_prob": steps[kept]},
    )
