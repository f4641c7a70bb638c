"""The best tree shape for measured rank acceptance and measured costs: the dynamic programme of Sequoia.

Sequoia (arXiv 2402.12374), with p_b the probability that the b-th child of a node is the one accepted, given that the
node is. T[n, l, b] is the largest expected accepted length (the subtree's root counts 1) of a tree with n nodes below
its root, at most l levels of them, and b children of the root:

    T[0, l, 0] = 1,    T[n, l, b] = max over y < n of  T[y, l, b - 1] + p_b * max over b' of T[n - 1 - y, l - 1, b'].

Among all sizes and depths the plan with the least time per token is taken: (l * t_draft + t_verify(n)) / T[n, l].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from adaptspec.trees._checks import check_whole
from adaptspec.trees.template import Template


@dataclass(frozen=True, slots=True)
class SequoiaPlan:
    """The chosen shape and the table it was chosen from.

    Attributes:
        template: the shape; rows fall in path score. Without nodes if no speculation is best.
        expected_length: accepted length it promises, bonus included.
        seconds: of one step with it; NaN if no costs were given.
        lengths: float64 [budget + 1, max_depth + 1], expected accepted length of the best tree with exactly n nodes in
            at most l levels; -inf where no such tree exists.
    """

    template: Template
    expected_length: float
    seconds: float
    lengths: np.ndarray


def sequoia_dp(
    rank_acceptance: np.ndarray | Sequence[float],
    *,
    budget: int,
    max_depth: int,
    verify_seconds: Callable[[int], float] | Sequence[float] | np.ndarray | None = None,
    draft_seconds: float = 0.0,
) -> SequoiaPlan:
    """Shape, size and depth with the least expected time per token.

    The acceptance need not fall with the rank; a child of rank r still needs its siblings of lower rank. Runs in
    O(budget^2 * max_depth * K) vectorised steps: offline work (tens of milliseconds at 64 nodes).

    Args:
        rank_acceptance: [K] p_b, probabilities that sum to at most 1.
        budget: largest number of nodes, the root not counted.
        max_depth: largest number of levels.
        verify_seconds: callable n -> seconds of a verification with n draft nodes, or an array [budget + 1]. None:
            costs do not matter, take the longest expected length (of equal ones the smaller, then the flatter tree).
        draft_seconds: cost of drafting one level.

    Raises:
        ValueError: acceptances that are not probabilities, negative sizes, too few or non-positive costs.
    """
    acceptance = np.asarray(rank_acceptance, dtype=np.float64)
    if acceptance.ndim != 1 or not ((acceptance >= 0.0) & (acceptance <= 1.0)).all() or acceptance.sum() > 1.0 + 1e-9:
        raise ValueError(f"rank_acceptance must be [K] probabilities that sum to at most 1, got {acceptance.tolist()}")
    check_whole("budget", budget, 0)
    check_whole("max_depth", max_depth, 0)
    lengths, branches, splits = _solve(acceptance, budget, max_depth)

    if verify_seconds is None:
        # Rounding must not make a larger tree look better than an equal smaller one.
        best = np.argwhere(lengths >= lengths.max() - 1e-12)[0]
        seconds = np.nan
    else:
        if callable(verify_seconds):
            verify = np.array([verify_seconds(nodes) for nodes in range(budget + 1)], dtype=np.float64)
        else:
            verify = np.asarray(verify_seconds, dtype=np.float64)
        if verify.shape != (budget + 1,) or not (verify > 0.0).all() or not draft_seconds >= 0.0:
            raise ValueError(
                f"verify_seconds must be budget + 1 = {budget + 1} positive numbers and draft_seconds >= 0, "
                f"got {verify.tolist()} and {draft_seconds}"
            )
        step_seconds = verify[:, None] + draft_seconds * np.arange(max_depth + 1)
        per_token = np.where(lengths > 0.0, step_seconds / np.maximum(lengths, 1.0), np.inf)
        best = np.unravel_index(per_token.argmin(), per_token.shape)
        seconds = float(step_seconds[tuple(best)])
    nodes, levels = int(best[0]), int(best[1])
    template = _build(acceptance, branches, splits, nodes, levels)
    return SequoiaPlan(template, float(lengths[nodes, levels]), seconds, lengths)


def _solve(acceptance: np.ndarray, budget: int, max_depth: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """max over b of T [n, l], the b that attains it [n, l], and for every T[n, l, b] the y that attains it."""
    sizes = np.arange(budget + 1)
    rest = sizes[:, None] - 1 - sizes[None, :]  # nodes left for the b-th child's subtree: row n, column y
    infeasible = rest < 0
    rest[infeasible] = 0
    lengths = np.full((budget + 1, max_depth + 1), -np.inf)
    lengths[0, :] = 1.0
    branches = np.zeros((budget + 1, max_depth + 1), dtype=np.int64)
    splits = np.zeros((budget + 1, max_depth + 1, len(acceptance) + 1), dtype=np.int64)
    for level in range(1, max_depth + 1):
        child = lengths[:, level - 1][rest]
        child[infeasible] = -np.inf
        table = np.full(budget + 1, -np.inf)
        table[0] = 1.0
        for branch, probability in enumerate(acceptance.tolist(), start=1):
            with np.errstate(invalid="ignore"):
                gain = np.where(child > -np.inf, probability * child, -np.inf)
            options = table[None, :] + gain
            split = options.argmax(axis=1)
            table = options[sizes, split]
            splits[:, level, branch] = split
            better = table > lengths[:, level]
            lengths[better, level] = table[better]
            branches[better, level] = branch
    return lengths, branches, splits


def _build(acceptance: np.ndarray, branches: np.ndarray, splits: np.ndarray, nodes: int, levels: int) -> Template:
    """Walk the choices back into parents and ranks, then order rows by falling path score."""
    parents: list[int] = []
    ranks: list[int] = []
    scores: list[float] = []
    with np.errstate(divide="ignore"):
        log_acceptance = np.log(acceptance).tolist()
    pending = [(-1, 0.0, nodes, levels)]
    while pending:
        parent, score, size, level = pending.pop()
        if size == 0:
            continue
        children: list[tuple[int, int]] = []
        for branch in range(int(branches[size, level]), 0, -1):
            below = int(splits[size, level, branch])
            children.append((branch - 1, size - 1 - below))
            size = below
        for rank, subtree_size in reversed(children):
            parents.append(parent)
            ranks.append(rank)
            scores.append(score + log_acceptance[rank])
            pending.append((len(parents) - 1, scores[-1], subtree_size, level - 1))
    values = np.array(scores, dtype=np.float64)
    order = np.argsort(-values, kind="stable")
    position = np.full(len(order) + 1, -1, dtype=np.int64)
    position[order] = np.arange(len(order))
    return Template(position[np.array(parents, np.int64)[order]], np.array(ranks, np.int64)[order], values[order])
