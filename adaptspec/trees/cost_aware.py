"""How many nodes pay: trees sized by what verifying them costs.

CaDDTree's rule on top of the best-first tree of DDTree (arXiv 2604.12989): with Phi the expected accepted draft tokens
of the n best nodes and delta the path probability of the next one, add it as long as

    (1 + Phi + delta) / (C_draft + C_verify(n + 1))  >=  (1 + Phi) / (C_draft + C_verify(n)).

Zero nodes is a possible answer. Scores must be calibrated for the rule to mean anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np

from adaptspec.trees._checks import check_deterministic, check_whole
from adaptspec.trees._frontier import grow_best_first
from adaptspec.trees.algebra import budget_order, truncate
from adaptspec.trees.best_first import _factorised_candidates, _next_position
from adaptspec.types import DraftTree

Search = Literal["first-fall", "global"]
VerifySeconds = Callable[[int], float] | Sequence[float] | np.ndarray


def step_seconds(verify_seconds: VerifySeconds, draft_seconds: float, budget: int) -> np.ndarray:
    """float64 [budget + 1], seconds of a step that verifies n draft nodes."""
    if callable(verify_seconds):
        seconds = np.array([verify_seconds(nodes) for nodes in range(budget + 1)], dtype=np.float64)
    else:
        seconds = np.asarray(verify_seconds, dtype=np.float64)[: budget + 1]
        if seconds.shape != (budget + 1,):
            raise ValueError(f"verify_seconds must have at least {budget + 1} entries, got {len(verify_seconds)}")
    if not draft_seconds >= 0.0:
        raise ValueError(f"draft_seconds must be >= 0, got {draft_seconds}")
    if draft_seconds:
        seconds = seconds + draft_seconds
    if not seconds.min() > 0.0:
        raise ValueError(f"verify_seconds must be positive, got {seconds.tolist()}")
    return seconds


def _check_search(search: str) -> None:
    if search not in get_args(Search):
        raise ValueError(f"search must be one of {', '.join(get_args(Search))}, got {search!r}")


def paying_budget(
    tree: DraftTree,
    verify_seconds: VerifySeconds,
    *,
    draft_seconds: float = 0.0,
    search: Search = "global",
    tokens_per_second: float | None = None,
) -> int:
    """How many of the best nodes of a finished tree to verify.

    Maximises tokens per second, (1 + Phi(n)) / seconds(n), or with `tokens_per_second` = rho the surplus
    1 + Phi(n) - rho * seconds(n) (Dinkelbach's form: right when rho is the long-run rate of the whole run). Ties go
    to the smaller tree.

    Args:
        verify_seconds: callable n -> seconds of a verification with n draft nodes, or an array [N + 1] or longer.
        draft_seconds: cost of the drafting, which does not depend on n.
        search: "global" looks at every n; "first-fall" stops at the first node that lowers the objective, which is the
            same where `verify_seconds` is convex and blind behind a step of the cost otherwise.

    Raises:
        ValueError: a sampled tree (the answer would depend on drawn tokens), too few or non-positive costs.
    """
    check_deterministic(tree, "size by score")
    _check_search(search)
    seconds = step_seconds(verify_seconds, draft_seconds, len(tree))
    tokens = np.concatenate(([1.0], np.exp(tree.scores[budget_order(tree)]))).cumsum()
    objective = tokens / seconds if tokens_per_second is None else tokens - tokens_per_second * seconds
    if search == "first-fall":
        falls = objective[1:] < objective[:-1]
        return int(falls.argmax()) if falls.any() else len(tree)
    return int(objective.argmax())


def cost_aware(
    log_probs: np.ndarray,
    token_ids: np.ndarray | None = None,
    *,
    budget: int,
    verify_seconds: VerifySeconds,
    draft_seconds: float = 0.0,
    max_depth: int | None = None,
    search: Search = "first-fall",
) -> DraftTree:
    """The best-first tree (`best_first`), stopped where another node no longer pays.

    Args:
        log_probs, token_ids, budget, max_depth: as in `best_first`; `budget` is the upper limit.
        verify_seconds: callable n -> seconds of a verification with n draft nodes, or an array [budget + 1] or longer.
        draft_seconds: cost of the drafting, which does not depend on n.
        search: "first-fall" as published; "global" grows to `budget` and takes the best size of all.

    Raises:
        ValueError: as `best_first`; too few or non-positive costs; unknown `search`.

    >>> len(cost_aware(np.log([[0.6, 0.4]] * 4), budget=9, verify_seconds=lambda nodes: 1.0 + 0.3 * nodes))
    2
    """
    check_whole("budget", budget, 0)
    _check_search(search)
    ids, values = _factorised_candidates(log_probs, token_ids, budget, max_depth)
    seconds = step_seconds(verify_seconds, draft_seconds, budget)
    if search == "first-fall":
        return grow_best_first(ids, values, _next_position(ids), budget=budget, seconds=seconds.tolist())
    tree = grow_best_first(ids, values, _next_position(ids), budget=budget)
    return truncate(tree, paying_budget(tree, seconds[: len(tree) + 1]))
