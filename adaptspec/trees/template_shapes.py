"""Good template shapes, computed from how often each rank is accepted."""

from __future__ import annotations

from functools import cache

import numpy as np

from adaptspec.trees._checks import check_whole
from adaptspec.trees._frontier import grow_best_first
from adaptspec.trees.template import Template, log_acceptance

RECYCLING_ACCEPTANCE = (0.47, 0.062, 0.029, 0.021, 0.015, 0.010, 0.009, 0.008)
"""How often the next token was the r-th recorded successor of the last one: successors of prompt and output tokens,
8 per token, over 2,512 greedily generated tokens of 16 prompts (prose, code, forms) with a 135M-parameter model."""

MEDUSA_ACCEPTANCE = tuple(tuple(0.60 * 0.78**head / (rank + 1) ** 2 for rank in range(10)) for head in range(5))
"""Assumed, not measured: the r-th token of head d is right with 0.60 * 0.78^(d-1) / r^2, for 5 heads and 10 ranks. The
top-10 of the first head then cover 0.93. Measure your own heads and call `greedy_template` for a better shape."""


def greedy_template(rank_acceptance: np.ndarray, *, budget: int, max_depth: int | None = None) -> Template:
    """The shape with the largest expected accepted length if acceptance depends on rank (and depth) only.

    Takes the `budget` nodes with the largest products of acceptance along their path (Medusa, arXiv 2401.10774,
    appendix on tree construction). Rows fall in score, so templates of different budgets are nested. Where acceptance
    does not fall with the rank use `sequoia_dp`.

    Args:
        rank_acceptance: [K] for every depth, or [D, K]; falling in K.
        budget: nodes, the root not counted.
        max_depth: D if `rank_acceptance` has depths, else `budget`, by default.

    Raises:
        ValueError: acceptances that are no probabilities or that rise with the rank, or negative sizes.

    >>> greedy_template(np.array([0.5, 0.3]), budget=3).paths()
    [(0,), (1,), (0, 0)]
    """
    check_whole("budget", budget, 0)
    depth = budget if max_depth is None else check_whole("max_depth", max_depth, 0)
    table = log_acceptance(rank_acceptance, depth)[:depth, : max(budget, 1)]
    if (table[:, 1:] > table[:, :-1]).any():
        raise ValueError(f"rank_acceptance must fall with the rank, got {np.exp(table).round(4).tolist()}")
    if budget == 0 or len(table) == 0:
        return Template(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
    last = len(table) - 1
    width = table.shape[1]
    tree = grow_best_first(
        [list(range(width))] * len(table),
        table.tolist(),
        [[row + 1 if row < last else -1] * width for row in range(len(table))],
        budget=budget,
    )
    return Template(tree.parents, tree.token_ids, tree.scores)


@cache
def token_recycling_template() -> Template:
    """80 nodes over 8 successors per token, from `RECYCLING_ACCEPTANCE`."""
    return greedy_template(np.array(RECYCLING_ACCEPTANCE), budget=80)


@cache
def medusa_template() -> Template:
    """63 nodes for up to 5 heads and their 10 best tokens, from `MEDUSA_ACCEPTANCE`."""
    return greedy_template(np.array(MEDUSA_ACCEPTANCE), budget=63)
