"""One tree out of several: shared prefixes are kept once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Literal, get_args

import numpy as np

from adaptspec.trees._checks import check_deterministic
from adaptspec.types import DraftTree

Combine = Literal["max", "noisy-or"]


def merge(
    trees: Sequence[DraftTree], *, names: Sequence[str] | None = None, combine: Combine = "max"
) -> tuple[DraftTree, np.ndarray]:
    """Prefix-shared union of deterministic trees, and which input proposed each of its nodes.

    Two nodes are the same if the token paths that lead to them are. Rows come in order of first appearance: all of
    the first tree in its order, then what the second adds, and so on. Verification by the target walk stays lossless,
    since a union of picked siblings is a set of picked siblings.

    Args:
        trees: M trees; empty ones are fine.
        names: one per tree, for the evidence columns; "0", "1", ... by default.
        combine: score of a node that several inputs propose. "max": the highest. "noisy-or": 1 - prod(1 - exp(score)),
            as if the inputs were independent. Both never exceed the parent's.

    Returns:
        The merged tree; its evidence holds every column of input m as "name/column", NaN where m did not propose the
        node. And int64 [M, N], the row of each merged node in input m, -1 where m did not propose it.

    Raises:
        ValueError: a sampled tree, an unknown `combine`, or names that do not fit.

    >>> tree, origins = merge([DraftTree.chain([3, 4]), DraftTree.chain([3, 5])])
    >>> tree.token_ids.tolist(), tree.parents.tolist(), origins.tolist()
    ([3, 4, 5], [-1, 0, 0], [[0, 1, -1], [0, -1, 1]])
    """
    if combine not in get_args(Combine):
        raise ValueError(f"combine must be one of {', '.join(get_args(Combine))}, got {combine!r}")
    labels = [str(index) for index in range(len(trees))] if names is None else list(names)
    if len(labels) != len(trees) or len(set(labels)) != len(labels):
        raise ValueError(f"names must be {len(trees)} different names, one per tree, got {labels}")
    for tree in trees:
        check_deterministic(tree, "merge")

    token_ids, parents, merged_rows = _union(trees)
    count = len(token_ids)
    evidence: dict[str, np.ndarray] = {}
    scores = np.full(count, -np.inf)
    for index, (tree, places) in enumerate(zip(trees, merged_rows, strict=True)):
        np.maximum.at(scores, places, tree.scores)
        for name, values in tree.evidence.items():
            column = np.full(count, np.nan)
            column[places] = values
            evidence[f"{labels[index]}/{name}"] = column
    if combine == "noisy-or":
        scores = _noisy_or([tree.scores for tree in trees], merged_rows, count)
    return DraftTree(token_ids, parents, scores, evidence=evidence), _origins(merged_rows, count)


def merge_shapes(trees: Sequence[DraftTree]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `merge` gives without scores and evidence: token ids [N], parents [N], and origins [M, N]. Most of `merge`'s
    time goes into these two.

    >>> merge_shapes([DraftTree.chain([3, 4]), DraftTree.chain([3, 5])])[1]
    array([-1,  0,  0])
    """
    for tree in trees:
        check_deterministic(tree, "merge")
    token_ids, parents, merged_rows = _union(trees)
    return token_ids, parents, _origins(merged_rows, len(token_ids))


def _union(trees: Sequence[DraftTree]) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Token ids, parents, and per input the merged row of each of its nodes."""
    row_of: dict[tuple[int, int], int] = {}
    merged_rows: list[np.ndarray] = []
    for tree in trees:
        rows: list[int] = []
        add, find = rows.append, row_of.setdefault
        for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
            add(find((rows[parent] if parent >= 0 else -1, token), len(row_of)))
        merged_rows.append(np.array(rows, dtype=np.int64))
    keys = np.fromiter(chain.from_iterable(row_of), np.int64, 2 * len(row_of))  # in the order of the rows
    return keys[1::2].copy(), keys[::2].copy(), merged_rows


def _origins(merged_rows: Sequence[np.ndarray], count: int) -> np.ndarray:
    origins = np.full((len(merged_rows), count), -1, dtype=np.int64)
    for row, places in zip(origins, merged_rows, strict=True):
        row[places] = np.arange(len(places))
    return origins


def _noisy_or(scores: Sequence[np.ndarray], merged_rows: Sequence[np.ndarray], count: int) -> np.ndarray:
    log_all_fail = np.zeros(count)
    with np.errstate(divide="ignore"):  # a certain node has log(1 - 1) = -inf, which is what it should be
        for values, rows in zip(scores, merged_rows, strict=True):
            np.add.at(log_all_fail, rows, np.log1p(-np.exp(np.minimum(values, 0.0))))
        return np.log(-np.expm1(log_all_fail))
