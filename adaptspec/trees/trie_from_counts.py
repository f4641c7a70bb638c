"""A trie of retrieved continuations, the most frequent prefixes first.

REST (arXiv 2311.08252) and suffix drafting: among the continuations found for the current context, a prefix is as
likely as the share of continuations that start with it: score = log(count / total). A prefix is never more frequent
than its own prefixes, so the B most frequent ones are a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from adaptspec.trees._checks import check_whole
from adaptspec.types import DraftTree


def trie_from_counts(
    continuations: np.ndarray | Sequence[Sequence[int]],
    *,
    budget: int,
    max_depth: int | None = None,
    weights: np.ndarray | Sequence[float] | None = None,
) -> DraftTree:
    """The `budget` most frequent prefixes of `continuations` as a tree.

    Rows come in falling score order; ties go to the shallower prefix, then to the one seen first, so put the
    continuations you trust most in front. Evidence: "count" and "parent_count" (of the root: the total), in units of
    `weights`.

    Args:
        continuations: int [R, D], each row ends at its first negative entry; or a list of token sequences.
        budget: nodes, the root not counted.
        max_depth: ignore tokens beyond this depth.
        weights: [R], positive; how much each continuation counts. 1 by default.

    Raises:
        ValueError: shapes that do not fit, or weights that are not positive.

    >>> tree = trie_from_counts([[4, 5], [4, 6], [7]], budget=2)
    >>> tree.token_ids.tolist(), np.exp(tree.scores).round(2).tolist()
    ([4, 7], [0.67, 0.33])
    """
    check_whole("budget", budget, 0)
    table = _as_table(continuations)
    if max_depth is not None:
        table = table[:, : check_whole("max_depth", max_depth, 0)]
    if weights is not None:
        weights = np.asarray(weights, dtype=np.float64)
        if weights.shape != (len(table),) or not (weights > 0.0).all():
            raise ValueError(f"weights must be {len(table)} positive numbers, got {weights!r}")
    if budget == 0 or table.size == 0:
        return DraftTree.empty()

    # Depth by depth: rows are grouped by (group of their prefix, next token). A row is followed further only while its
    # prefix is more frequent than the worst of the `budget` best so far, since deeper prefixes are no more frequent and
    # lose ties.
    table = table.astype(np.int64, copy=False)
    rows = np.flatnonzero(table[:, 0] >= 0)
    total = float(len(rows) if weights is None else weights[rows].sum())
    groups = np.zeros(len(rows), dtype=np.int64)  # of each row: the node of its prefix, counted from 1; 0 is the root
    counts = np.array([total])  # of the root and of all nodes found so far
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # per depth: tokens, parent groups, first rows
    for depth in range(table.shape[1]):
        tokens = table[rows, depth]
        if depth and tokens.size and tokens.min() < 0:
            going_on = tokens >= 0
            rows, groups, tokens = rows[going_on], groups[going_on], tokens[going_on]
        if not rows.size:
            break
        keys = (groups << 32) | tokens
        order = keys.argsort(kind="stable")
        keys = keys[order]
        is_first = np.empty(len(keys), dtype=bool)
        is_first[0] = True
        np.not_equal(keys[1:], keys[:-1], out=is_first[1:])
        begins = is_first.nonzero()[0]
        firsts = order[begins]
        above = groups[firsts]
        if weights is None:
            count = np.diff(begins, append=len(keys)).astype(np.float64)
        else:
            # Sums in another order round differently; a prefix must never outweigh its own prefix.
            count = np.minimum(np.add.reduceat(weights[rows[order]], begins), counts[above])
        found.append((tokens[firsts], above, rows[firsts]))
        node = np.empty(len(rows), dtype=np.int64)
        node[order] = is_first.cumsum() + (len(counts) - 1)
        counts = np.concatenate((counts, count))
        groups = node
        if len(counts) > budget:
            bar = np.partition(counts[1:], len(counts) - 1 - budget)[len(counts) - 1 - budget]
            alive = counts[groups] > bar
            rows, groups = rows[alive], groups[alive]
    if not found:
        return DraftTree.empty()
    node_tokens, above, first_rows = (np.concatenate(columns) for columns in zip(*found, strict=True))
    depths = np.repeat(np.arange(len(found)), [len(columns[0]) for columns in found])
    best = np.lexsort((first_rows, depths, -counts[1:]))[:budget]
    position = np.full(len(counts), -1, dtype=np.int64)
    position[best + 1] = np.arange(len(best))
    kept_counts = counts[best + 1]
    return DraftTree(
        node_tokens[best],
        position[above[best]],
        np.minimum(np.log(kept_counts / total), 0.0),
        evidence={"count": kept_counts, "parent_count": counts[above[best]]},
    )


def _as_table(continuations: np.ndarray | Sequence[Sequence[int]]) -> np.ndarray:
    """int [R, D], rows padded with -1."""
    if isinstance(continuations, np.ndarray):
        if continuations.ndim != 2 or continuations.dtype.kind != "i":
            raise ValueError(
                "continuations must be signed integers of shape [R, D] or a list of sequences, "
                f"got {continuations.dtype} of shape {list(continuations.shape)}"
            )
        return continuations
    lengths = np.array([len(tokens) for tokens in continuations], dtype=np.int64)
    table = np.full((len(lengths), lengths.max(initial=0)), -1, dtype=np.int64)
    table[np.arange(table.shape[1]) < lengths[:, None]] = np.fromiter(chain.from_iterable(continuations), np.int64)
    return table
