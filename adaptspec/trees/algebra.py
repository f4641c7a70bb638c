"""Trees made from trees: reorder, prune, truncate to a budget, limit the depth, take a subtree.

Every function keeps `evidence`, `draft_probs` and `draft_rows` in step with the nodes. `draft_probs` itself is never
copied: rows that no node refers to any more stay in it.

Which cuts keep a *sampled* tree lossless: verification treats the j-th child of a node as a fresh draw from q (what is
left of q) given everything before it. So a node may be dropped for reasons known before its token was drawn (depth,
position in the order of drawing), and never because of the token itself. Score is a function of the token, therefore
`prune` and `truncate` refuse sampled trees, while `limit_depth`, `keep_first` and `subtree` take them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from adaptspec.trees._checks import check_deterministic, check_whole
from adaptspec.trees.structure import depths, parents_first_order, path_to
from adaptspec.types import ROOT, DraftTree


def select_rows(tree: DraftTree, rows: np.ndarray) -> DraftTree:
    """The tree made of `rows`, in this order; they must be closed under ancestors and parents first."""
    position = np.full(len(tree) + 1, -1, dtype=np.int64)  # the extra last entry maps ROOT = -1 to itself
    position[rows] = np.arange(len(rows))
    parents = position[tree.parents[rows]]
    draft_rows = None
    if tree.draft_rows is not None:
        has_children = np.zeros(len(rows) + 1, dtype=bool)
        has_children[parents + 1] = True
        kept = np.concatenate((tree.draft_rows[:1], tree.draft_rows[rows + 1]))
        draft_rows = np.where(has_children, kept, -1)
    return DraftTree(
        tree.token_ids[rows],
        parents,
        tree.scores[rows],
        tree.siblings,
        tree.draft_probs,
        draft_rows,
        {name: column[rows] for name, column in tree.evidence.items()},
    )


def sort_parents_first(tree: DraftTree) -> DraftTree:
    """The same tree with every parent before its children; rows that already are in such an order stay as they are.

    Raises:
        ValueError: the parent pointers are out of range or run in a circle.
    """
    order = parents_first_order(tree.parents)
    if (order == np.arange(len(order))).all():
        return tree
    return select_rows(tree, order)


def budget_order(tree: DraftTree) -> np.ndarray:
    """int64 [N]: the rows in the order in which a growing budget takes them in.

    Deterministic trees: by falling path score, ties in row order. A score above the parent's counts as the parent's,
    so parents always come first and the first B rows are a tree for every B. Sampled trees: the order of drawing,
    which is row order.
    """
    count = len(tree)
    if tree.siblings != "deterministic":
        return np.arange(count, dtype=np.int64)
    scores = tree.scores
    if (scores[1:] <= scores[:-1]).all():  # as many drafters store them
        return np.arange(count, dtype=np.int64)
    parents = tree.parents
    above = np.full(count + 1, np.inf)  # the last entry is the root's: ROOT = -1
    above[:-1] = scores
    if (scores > above[parents]).any():
        capped = scores.tolist()
        for node, parent in enumerate(parents.tolist()):
            if parent >= 0 and capped[node] > capped[parent]:
                capped[node] = capped[parent]
        scores = np.array(capped)
    return np.argsort(-scores, kind="stable")


def prune(tree: DraftTree, keep: np.ndarray | Sequence[bool]) -> DraftTree:
    """Cut branches: a node stays if `keep` (bool [N]) holds for it and for all its ancestors.

    Raises:
        ValueError: `keep` has another shape or dtype, or it would cut a sampled tree.
    """
    mask = np.asarray(keep)
    if mask.shape != (len(tree),) or (mask.size and mask.dtype != np.bool_):
        raise ValueError(f"keep must be bool of shape [{len(tree)}], got {mask.dtype} of shape {list(mask.shape)}")
    if mask.all():
        return tree
    check_deterministic(tree, "prune")
    alive = mask.tolist()
    for node, parent in enumerate(tree.parents.tolist()):
        if parent >= 0 and not alive[parent]:
            alive[node] = False
    return select_rows(tree, np.flatnonzero(np.array(alive)))


def truncate(tree: DraftTree, budget: int) -> DraftTree:
    """The best `budget` nodes by path score, closed under ancestors, in their old row order.

    Nested: the nodes kept for B are among those kept for any larger budget (`budget_order`).

    Raises:
        ValueError: negative `budget`, or it would cut a sampled tree.

    >>> truncate(DraftTree(np.array([5, 6, 7]), np.array([-1, -1, 0]), np.array([-0.1, -2.0, -0.3])), 2).token_ids
    array([5, 7])
    """
    check_whole("budget", budget, 0)
    if budget >= len(tree):
        return tree
    check_deterministic(tree, "truncate by score")
    rows = budget_order(tree)[:budget]
    rows.sort()
    return select_rows(tree, rows)


def keep_first(tree: DraftTree, count: int) -> DraftTree:
    """The first `count` rows, which are a tree because parents come first.

    Safe for sampled trees as all builders of this package store them, in the order of drawing, as long as `count` is
    chosen without looking at the drawn tokens.

    Raises:
        ValueError: negative `count`.
    """
    check_whole("count", count, 0)
    return tree if count >= len(tree) else select_rows(tree, np.arange(count))


def limit_depth(tree: DraftTree, max_depth: int) -> DraftTree:
    """The nodes at depth `max_depth` or less (1: children of the root). Safe for sampled trees.

    Raises:
        ValueError: negative `max_depth`.
    """
    check_whole("max_depth", max_depth, 0)
    if max_depth >= len(tree):
        return tree
    keep = depths(tree.parents) <= max_depth
    return tree if keep.all() else select_rows(tree, np.flatnonzero(keep))


def subtree(tree: DraftTree, node: int) -> DraftTree:
    """What lies below `node`, as the tree of a step whose last committed token is `node`.

    Scores become relative to `node`. Safe for sampled trees.

    Raises:
        ValueError: `node` is not a row of the tree.
    """
    if node == ROOT:
        return tree
    path_to(tree.parents, node)  # refuses rows that do not exist
    inside = [False] * len(tree)
    inside[node] = True
    for row, parent in enumerate(tree.parents.tolist()):
        if parent >= 0 and inside[parent]:
            inside[row] = True
    selected = select_rows(tree, np.flatnonzero(np.array(inside)))
    base = selected.scores[0]
    return DraftTree(
        selected.token_ids[1:],
        selected.parents[1:] - 1,
        np.minimum(selected.scores[1:] - base, 0.0) if base > -np.inf else np.zeros(len(selected) - 1),
        selected.siblings,
        selected.draft_probs,
        None if selected.draft_rows is None else selected.draft_rows[1:],
        {name: column[1:] for name, column in selected.evidence.items()},
    )


def nested_lengths(tree: DraftTree, path: np.ndarray | Sequence[int]) -> np.ndarray:
    """int64 [N + 1]: accepted length, bonus included, that every budget 0..N would have had in this step.

    With nested budgets the tree for B holds the first B rows of `budget_order`, and the same target randomness accepts
    the part of the path that lies in it: length(B) = 1 + number of path nodes among these rows. Exact for the
    target-walk rule on deterministic trees, and for sampled trees in the order of drawing with the same coins.

    Args:
        path: the accepted rows from the root down (`Verdict.path`).

    Raises:
        ValueError: `path` is not a path from the root.
    """
    rows = np.asarray(path, dtype=np.int64)
    if rows.size and (rows.min() < 0 or rows.max() >= len(tree)):
        raise ValueError(f"path must hold rows in [0, {len(tree)}), got {rows.tolist()}")
    if (tree.parents[rows] != np.concatenate(([ROOT], rows))[: rows.size]).any():
        raise ValueError(f"path must lead from the root down, each node a child of the one before, got {rows.tolist()}")
    taken = np.zeros(len(tree) + 1, dtype=np.int64)
    taken[0] = 1
    rank = np.empty(len(tree), dtype=np.int64)
    rank[budget_order(tree)] = np.arange(len(tree))
    taken[rank[rows] + 1] = 1
    return np.cumsum(taken)


def expected_length(tree: DraftTree) -> float:
    """1 + sum over nodes of exp(score): the accepted length, bonus included, if scores were calibrated."""
    return 1.0 + float(np.exp(tree.scores).sum())
