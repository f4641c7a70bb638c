"""Trees of a fixed shape, filled with tokens by rank.

Medusa (arXiv 2401.10774): a node of depth d and rank r takes the r-th most likely token of head d. Token Recycling
(arXiv 2408.08696): it takes the r-th recorded successor of its parent's token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adaptspec.trees._checks import check_log_probs, check_whole
from adaptspec.trees.structure import depths, path_to
from adaptspec.types import DraftTree


@dataclass(frozen=True, slots=True)
class Template:
    """A tree shape: which ranks to try below which node.

    Attributes:
        parents: int64 [N], parents first, -1 for children of the root.
        ranks: int64 [N], 0 for the most likely candidate of the parent; different among siblings.
        scores: float64 [N], estimated log-probability that the path to the node is accepted. Rows of a template made
            by `greedy_template` fall in score, so that its first B rows are the template for budget B.
    """

    parents: np.ndarray
    ranks: np.ndarray
    scores: np.ndarray

    def __post_init__(self) -> None:
        count = len(self.parents)
        for name in ("parents", "ranks", "scores"):
            if np.shape(getattr(self, name)) != (count,):
                raise ValueError(f"{name} must have shape [{count}], got {list(np.shape(getattr(self, name)))}")
        if ((self.parents < -1) | (self.parents >= np.arange(count))).any():
            raise ValueError(f"parents must satisfy -1 <= parents[i] < i, got {self.parents.tolist()}")
        if (self.ranks < 0).any():
            raise ValueError(f"ranks must be >= 0, got {self.ranks.tolist()}")
        if len(set(zip(self.parents.tolist(), self.ranks.tolist(), strict=True))) != count:
            raise ValueError("ranks must differ among siblings, got a repeated one")

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node, 0 without nodes."""
        return int(depths(self.parents).max(initial=0))

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]], rank_acceptance: np.ndarray) -> Template:
        """From rank paths as Medusa writes them: (0,), (0, 0), (1,), ...

        Rows keep the given order within a depth and come by depth.

        Args:
            paths: non-empty, all different; every prefix of a path must be listed too.
            rank_acceptance: as in `greedy_template`; gives the scores.

        Raises:
            ValueError: an empty, repeated or orphaned path, or a rank beyond `rank_acceptance`.
        """
        ordered = sorted((tuple(map(int, path)) for path in paths), key=len)
        if ordered and not ordered[0]:
            raise ValueError("paths must not be empty: the root is not a node")
        row_of: dict[tuple[int, ...], int] = {(): -1}
        table = log_acceptance(rank_acceptance, len(ordered[-1]) if ordered else 1)
        parents: list[int] = []
        scores: list[float] = []
        for path in ordered:
            if path in row_of:
                raise ValueError(f"paths must be different, got {path} twice")
            if path[:-1] not in row_of:
                raise ValueError(f"paths must contain every prefix: {path} needs {path[:-1]}")
            if len(path) > len(table) or not 0 <= path[-1] < table.shape[1]:
                raise ValueError(f"rank_acceptance of shape {list(table.shape)} has no entry for the path {path}")
            parent = row_of[path[:-1]]
            row_of[path] = len(parents)
            scores.append(float(table[len(path) - 1, path[-1]]) + (scores[parent] if parent >= 0 else 0.0))
            parents.append(parent)
        ranks = [path[-1] for path in ordered]
        return cls(np.array(parents, np.int64), np.array(ranks, np.int64), np.array(scores, np.float64))

    @classmethod
    def from_branching(cls, branching: Sequence[int]) -> Template:
        """Every node of depth d - 1 has `branching[d - 1]` children, each taken to be accepted equally often.

        >>> Template.from_branching([2, 1]).parents.tolist()
        [-1, -1, 0, 1]
        """
        parents: list[int] = []
        ranks: list[int] = []
        scores: list[float] = []
        level: list[tuple[int, float]] = [(-1, 0.0)]
        for width in branching:
            check_whole("branching", width, 1)
            below: list[tuple[int, float]] = []
            for node, score in level:
                for rank in range(width):
                    below.append((len(parents), score - float(np.log(width))))
                    parents.append(node)
                    ranks.append(rank)
                    scores.append(below[-1][1])
            level = below
        return cls(np.array(parents, np.int64), np.array(ranks, np.int64), np.array(scores, np.float64))

    def paths(self) -> list[tuple[int, ...]]:
        """The rank path to every node, in row order; the inverse of `from_paths`."""
        return [tuple(self.ranks[path_to(self.parents, node)].tolist()) for node in range(len(self))]

    def truncate(self, budget: int) -> Template:
        """The first `budget` rows."""
        keep = check_whole("budget", budget, 0)
        return Template(self.parents[:keep], self.ranks[:keep], self.scores[:keep])


def log_acceptance(rank_acceptance: np.ndarray, max_depth: int) -> np.ndarray:
    """log of [D, K] acceptance probabilities; a vector [K] holds for every depth."""
    table = np.asarray(rank_acceptance, dtype=np.float64)
    if table.ndim == 1:
        table = np.broadcast_to(table, (max_depth, len(table)))
    if table.ndim != 2 or not ((table >= 0.0) & (table <= 1.0)).all():
        raise ValueError(f"rank_acceptance must be probabilities of shape [K] or [D, K], got {rank_acceptance!r}")
    with np.errstate(divide="ignore"):
        return np.log(table)


def fill_by_rank(
    template: Template,
    token_ids: np.ndarray,
    log_probs: np.ndarray | None = None,
    *,
    budget: int | None = None,
    max_depth: int | None = None,
) -> DraftTree:
    """Medusa's fill: the node of depth d and rank r takes `token_ids[d - 1, r]`.

    Nodes without a token (missing, too deep, too high a rank, or a sibling already has it) are left out with all that
    lies below. Evidence: "rank"; with `log_probs` also "log_prob".

    Args:
        token_ids: int [D, K], candidates per position, most likely first; negative where there is none.
        log_probs: [D, K]; the path sum becomes the score. Without them scores are the template's.
        budget: keep the first so many filled nodes in template order.
        max_depth: fill no deeper.

    Raises:
        ValueError: shapes that do not fit, or values that are no log-probabilities.
    """
    ids = np.asarray(token_ids)
    if ids.ndim != 2 or (log_probs is not None and np.shape(log_probs) != ids.shape):
        raise ValueError(
            f"token_ids and log_probs must have one shape [D, K], got {ids.shape} and {np.shape(log_probs)}"
        )
    steps = None if log_probs is None else check_log_probs("log_probs", log_probs).tolist()
    return _fill(template, ids.tolist(), steps, None, budget, max_depth)


def fill_by_successor(
    template: Template,
    root: int,
    successors: np.ndarray,
    log_probs: np.ndarray | None = None,
    *,
    budget: int | None = None,
    max_depth: int | None = None,
) -> DraftTree:
    """Token Recycling's fill: the node of rank r below token t takes `successors[t, r]`.

    Nodes without a token are left out as in `fill_by_rank`. Evidence: "rank"; with `log_probs` also "log_prob".

    Args:
        root: the last committed token.
        successors: int [V, K], most likely first; negative where none was recorded.
        log_probs: [K], by rank; the path sum becomes the score. Without them scores are the template's.
        budget, max_depth: as in `fill_by_rank`.

    Raises:
        ValueError: shapes that do not fit, or values that are no log-probabilities.
    """
    if np.ndim(successors) != 2 or not 0 <= root < len(successors):
        raise ValueError(f"root must be a row of successors [V, K], got {root} and shape {list(np.shape(successors))}")
    steps = None
    if log_probs is not None:
        if np.shape(log_probs) != successors.shape[1:]:
            raise ValueError(f"log_probs must have shape {list(successors.shape[1:])}, got {list(np.shape(log_probs))}")
        steps = [check_log_probs("log_probs", log_probs).tolist()]
    return _fill(template, [successors[root].tolist()], steps, successors, budget, max_depth)


def _fill(
    template: Template,
    candidates: list[list[int]],
    log_probs: list[list[float]] | None,
    successors: np.ndarray | None,
    budget: int | None,
    max_depth: int | None,
) -> DraftTree:
    """Candidates come by depth; with `successors` from the row of the parent's token, `candidates` is the root's."""
    limit = len(template) if budget is None else check_whole("budget", budget, 0)
    deepest = len(template) if max_depth is None else check_whole("max_depth", max_depth, 0)
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    levels: list[int] = []
    rows: list[int] = []
    steps: list[float] = []
    place = [-2] * len(template)  # row of each template node in the result, -2 where it was left out
    seen: set[tuple[int, int]] = set()
    lists: dict[int, list[int]] = {}
    for node, (above, rank) in enumerate(zip(template.parents.tolist(), template.ranks.tolist(), strict=True)):
        parent = -1 if above < 0 else place[above]
        if parent == -2 or len(tokens) == limit:
            continue
        level = 1 if parent < 0 else levels[parent] + 1
        if level > deepest:
            continue
        if successors is None or parent < 0:
            options = candidates[level - 1] if level <= len(candidates) else []
        else:
            token = tokens[parent]
            options = lists.get(token)
            if options is None:
                options = lists[token] = successors[token].tolist()
        if rank >= len(options) or (token := options[rank]) < 0 or (parent, token) in seen:
            continue
        seen.add((parent, token))
        place[node] = len(tokens)
        tokens.append(token)
        parents.append(parent)
        levels.append(level)
        rows.append(node)
        if log_probs is not None:
            steps.append(log_probs[0 if successors is not None else level - 1][rank])
            scores.append(steps[-1] + (scores[parent] if parent >= 0 else 0.0))
    evidence = {"rank": template.ranks[rows].astype(np.float64)}
    if log_probs is not None:
        evidence["log_prob"] = np.array(steps, dtype=np.float64)
    path_scores = template.scores[rows] if log_probs is None else np.array(scores, dtype=np.float64)
    return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64), path_scores, evidence=evidence)
