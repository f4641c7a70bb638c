"""Choosing prefixes of a large draft trie by how likely the target is to get there.

TAPS (arXiv 2606.00487): the marginals of a block-parallel drafter span a lattice; a beam through it gives a trie of
some hundred nodes, all of which a small model looks at. With q(n | parent) what it says about edge n,

    q_reach(n) = product of q along the path,    utility(n) = q_reach(n) / (1 + lambda d(n)),

and nodes enter the tree in the order of their utility, each with its ancestors. No node has more utility than its
parent, so these are the ones of largest utility, and every ancestor is there already.
"""

from __future__ import annotations

import numpy as np

from adaptspec.trees._checks import check_deterministic, check_log_probs, check_whole
from adaptspec.trees.structure import path_scores
from adaptspec.types import DraftTree

DEPTH_PENALTY = 0.002
"""lambda, as published."""


def lattice_trie(log_probs: np.ndarray, token_ids: np.ndarray, *, beam: int = 48, most_nodes: int = 768) -> DraftTree:
    """What a beam meets on its way through a lattice: at every depth the `beam` likeliest prefixes, each an extension
    of one of the depth before. Rows come depth by depth, in falling order of their scores within it.

    Score: sum of the marginals' log-probabilities. Evidence: "rank" among the candidates of its position, "log_prob".

    Args:
        log_probs: [D, K] log-probabilities of the candidates of each position, falling along each row.
        token_ids: int [D, K], the candidates, different within a row.
        beam: prefixes per depth.
        most_nodes: nodes in all; deeper ones are left out.

    Raises:
        ValueError: shapes that do not fit, sizes below 1, or values that are no log-probabilities in falling order.

    >>> lattice_trie(np.log([[0.6, 0.4], [0.9, 0.1]]), np.array([[7, 3], [5, 8]]), beam=2).parents.tolist()
    [-1, -1, 0, 1]
    """
    check_whole("beam", beam, 1)
    check_whole("most_nodes", most_nodes, 1)
    ids = np.asarray(token_ids)
    if np.ndim(log_probs) != 2 or ids.shape != np.shape(log_probs):
        raise ValueError(
            f"log_probs and token_ids must have one shape [D, K], got {list(np.shape(log_probs))} and {list(ids.shape)}"
        )
    values = check_log_probs("log_probs", log_probs)
    if (values[:, 1:] > values[:, :-1]).any():
        raise ValueError("log_probs must fall along each row; use top_candidates to sort them")
    count = ids.shape[1]
    levels: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # parents, ranks, scores
    above, nodes, size = np.array([-1], dtype=np.int64), np.zeros(1), 0
    for row in values:
        totals = (nodes[:, None] + row).ravel()
        best = np.argsort(-totals, kind="stable")[: min(beam, most_nodes - size)]
        best = best[totals[best] > -np.inf]
        if not len(best):
            break
        levels.append((above[best // count], best % count, totals[best]))
        above, nodes = size + np.arange(len(best)), totals[best]
        size += len(best)
    if not levels:
        return DraftTree.empty()
    depths = np.repeat(np.arange(len(levels)), [len(level[0]) for level in levels])
    parents, ranks, scores = (np.concatenate(column) for column in zip(*levels, strict=True))
    return DraftTree(
        ids[depths, ranks].astype(np.int64),
        parents,
        scores,
        evidence={"rank": ranks.astype(np.float64), "log_prob": values[depths, ranks]},
    )


def select_prefixes(
    trie: DraftTree, log_probs: np.ndarray, *, budget: int, depth_penalty: float = DEPTH_PENALTY
) -> DraftTree:
    """The `budget` nodes of a trie with the largest utility, which is a tree.

    Rows come in falling order of utility, so the tree for a smaller budget is a prefix of rows. Score: log q_reach.
    Evidence: that of the trie, with "log_prob" replaced by log q.

    Args:
        trie: parents first.
        log_probs: [N], log q of each node given its parent; -inf bars a node and all below it.
        budget: nodes, the root not counted.
        depth_penalty: lambda.

    Raises:
        ValueError: a sampled trie, another number of values than nodes, or values out of range.

    >>> trie = DraftTree(np.array([5, 6, 7]), np.array([-1, -1, 0]), np.zeros(3))
    >>> select_prefixes(trie, np.log([0.6, 0.4, 0.5]), budget=2).token_ids.tolist()
    [5, 6]
    """
    check_deterministic(trie, "select from")
    check_whole("budget", budget, 0)
    if not 0.0 <= depth_penalty < np.inf:
        raise ValueError(f"depth_penalty must be >= 0 and finite, got {depth_penalty}")
    if np.shape(log_probs) != (len(trie),):
        raise ValueError(f"log_probs must have shape [{len(trie)}], got {list(np.shape(log_probs))}")
    steps = check_log_probs("log_probs", log_probs)
    reach = path_scores(trie.parents, steps)
    utility = reach - np.log1p(depth_penalty * trie.depths())
    order = np.argsort(-utility, kind="stable")[:budget]  # ties: the parent has the lower row
    order = order[reach[order] > -np.inf]
    position = np.full(len(trie) + 1, -1, dtype=np.int64)
    position[order] = np.arange(len(order))
    evidence = {**trie.evidence, "log_prob": steps}
    return DraftTree(
        trie.token_ids[order],
        position[trie.parents[order]],
        reach[order],
        evidence={name: column[order] for name, column in evidence.items()},
    )
