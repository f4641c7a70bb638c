"""Facts about a tree that follow from its parent pointers alone.

Nodes are rows 0..N-1, parents first; the root is not a row and is written `ROOT` (-1).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from adaptspec.types import ROOT

Parents = np.ndarray | Sequence[int]


def _parent_list(parents: Parents) -> list[int]:
    return parents.tolist() if isinstance(parents, np.ndarray) else list(parents)


def ancestor_mask(parents: Parents) -> np.ndarray:
    """bool [N, N]: entry (i, j) says that node i attends to node j, that is, j is i or one of its ancestors.

    This is the tree-attention mask of SpecInfer (arXiv 2305.09781) without the prefix and the root, which every node
    attends to. Rows are built as whole-number bit sets, one OR per node.

    >>> ancestor_mask([-1, 0, 0]).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    rows: list[int] = []
    bit = 1
    for parent in _parent_list(parents):
        rows.append(rows[parent] | bit if parent >= 0 else bit)
        bit <<= 1
    count = len(rows)
    if count <= 64:
        packed = np.array(rows, dtype="<u8").view(np.uint8).reshape(count, 8)
    else:
        width = (count + 7) // 8
        packed = np.frombuffer(b"".join([row.to_bytes(width, "little") for row in rows]), np.uint8)
        packed = packed.reshape(count, width)
    return np.unpackbits(packed, axis=1, count=count, bitorder="little").view(np.bool_)


def depths(parents: Parents) -> np.ndarray:
    """int64 [N], 1 for children of the root."""
    found: list[int] = []
    for parent in _parent_list(parents):
        found.append(1 if parent < 0 else found[parent] + 1)
    return np.array(found, dtype=np.int64)


def children_lists(parents: Parents) -> list[list[int]]:
    """Children in row order: entry 0 for the root, entry i + 1 for node i."""
    parent_list = _parent_list(parents)
    children: list[list[int]] = [[] for _ in range(len(parent_list) + 1)]
    for node, parent in enumerate(parent_list):
        children[parent + 1].append(node)
    return children


def path_to(parents: Parents, node: int) -> list[int]:
    """Rows from the root's child down to `node`, inclusive; empty for `ROOT`.

    Raises:
        ValueError: `node` is not a row of the tree.
    """
    if not ROOT <= node < len(parents):
        raise ValueError(f"node must be in [-1, {len(parents)}), got {node}")
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = int(parents[node])
    path.reverse()
    return path


def leaf_paths(parents: Parents) -> np.ndarray:
    """int64 [L, D], one root-to-leaf path of rows per leaf in row order, padded with -1."""
    parent_list = _parent_list(parents)
    inner = set(parent_list)
    paths = [path_to(parent_list, node) for node in range(len(parent_list)) if node not in inner]
    padded = np.full((len(paths), max(map(len, paths), default=0)), -1, dtype=np.int64)
    for row, path in enumerate(paths):
        padded[row, : len(path)] = path
    return padded


def path_scores(parents: Parents, log_probs: np.ndarray | Sequence[float]) -> np.ndarray:
    """float64 [N]: the sum of `log_probs` [N] (each node given its parent, at most 0) along the path to each node."""
    values = log_probs.tolist() if isinstance(log_probs, np.ndarray) else list(log_probs)
    for node, parent in enumerate(_parent_list(parents)):
        if parent >= 0:
            values[node] += values[parent]
    return np.array(values, dtype=np.float64)


def parents_first_order(parents: Parents) -> np.ndarray:
    """int64 [N]: a row order in which every parent precedes its children and otherwise the given order is kept.

    `parents` may point forward. Always the lowest row whose parent is already placed comes next, so rows that are
    parents first already stay where they are, and siblings keep their order.

    Raises:
        ValueError: a parent is out of range, or the pointers run in a circle.
    """
    parent_list = _parent_list(parents)
    count = len(parent_list)
    for node, parent in enumerate(parent_list):
        if not ROOT <= parent < count:
            raise ValueError(f"parents must be in [-1, {count}), got {parent} at node {node}")
    if all(parent < node for node, parent in enumerate(parent_list)):
        return np.arange(count, dtype=np.int64)
    children = children_lists(parent_list)
    ready = list(children[0])
    order: list[int] = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for child in children[node + 1]:
            heapq.heappush(ready, child)
    if len(order) < count:
        raise ValueError(f"parents must form a tree, got a circle through node {min(set(range(count)) - set(order))}")
    return np.array(order, dtype=np.int64)
