"""Random trees for property tests, and trees as sets of token paths."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from adaptspec.types import DraftTree

VOCAB = 5

property_test = settings(max_examples=40, deadline=None, derandomize=True)
"""The same examples on every run, and no time limit per example: machines differ."""


@st.composite
def deterministic_trees(draw: st.DrawFn, max_nodes: int = 12) -> DraftTree:
    """Valid deterministic trees over VOCAB tokens, scores never rising, with ties and two evidence columns."""
    count = draw(st.integers(0, max_nodes))
    taken: set[tuple[int, int]] = set()
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    for _ in range(count):
        parent = draw(st.integers(-1, len(tokens) - 1))
        token = draw(st.integers(0, VOCAB - 1))
        if (parent, token) in taken:
            continue
        taken.add((parent, token))
        step = draw(st.sampled_from([0.0, -0.5, -1.0, -2.25]))
        scores.append(step + (scores[parent] if parent >= 0 else 0.0))
        tokens.append(token)
        parents.append(parent)
    return DraftTree(
        np.array(tokens, dtype=np.int64),
        np.array(parents, dtype=np.int64),
        np.array(scores, dtype=np.float64),
        evidence={"row": np.arange(len(tokens), dtype=np.float64), "score": np.array(scores, dtype=np.float64)},
    )


def token_paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """The token path to every node, in row order."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def path_scores_by_path(tree: DraftTree) -> dict[tuple[int, ...], float]:
    return dict(zip(token_paths(tree), tree.scores.tolist(), strict=True))


def check_scores_fall(tree: DraftTree) -> None:
    """Scores are at most 0 and never above the parent's."""
    assert (tree.scores <= 0.0).all()
    inner = tree.parents >= 0
    assert (tree.scores[inner] <= tree.scores[tree.parents[inner]]).all()


def closed_sets(candidates: set[tuple[int, ...]], size: int) -> set[frozenset[tuple[int, ...]]]:
    """Every set of `size` paths out of `candidates` that contains the prefixes of its paths (brute force)."""
    found: set[frozenset[tuple[int, ...]]] = {frozenset()}
    for _ in range(size):
        found = {
            chosen | {path} for chosen in found for path in candidates - chosen if len(path) == 1 or path[:-1] in chosen
        }
    return found
