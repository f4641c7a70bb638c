"""CATS: Cascaded Adaptive Tree Speculation (arXiv 2605.11186)."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from adaptspec.drafters.early_exit.adapted import Adapted
from adaptspec.drafters.lookup import real_number, whole_number
from adaptspec.drafters.registry import register_drafter
from adaptspec.types import DraftContext, DraftTree

if TYPE_CHECKING:
    import torch

    from adaptspec.drafters.early_exit.adapter import Adapters
    from adaptspec.target.trunk import Trunk
    from adaptspec.vocab import VocabHead

MOST_NODES = 40
"""Of the published tree."""


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A candidate.

    Attributes:
        parent: None for children of the root.
        score: by which it is chosen: of the path, a correction's bonus included.
        log_prob: what its adapter gives the token.
        depth: 1 for children of the root.
    """

    parent: Node | None
    token: int
    score: float
    log_prob: float
    depth: int


class Cats(Adapted):
    """An adapter on the first layers drafts a chain. The chain's rows go on to a later layer, in one pass, where a
    second adapter says what it would have drafted: corrections. Then the first layers run once more, for the last
    token of the chain and for all corrections, to see how these go on. The whole target verifies, going on from where
    each row is.

    As a tree: the chain, the first adapter's next best tokens beside it, the corrections, which count `bonus` more than
    the node that they follow, and the best tokens after them. As a chain: up to the first correction, that one, and one
    more token. Both are deterministic at any temperature, and lossless; the published code accepts by a relaxed rule,
    which here is the verifier "typical".

    Args:
        path: see `Adapted`.
        branching: tokens per row of the first adapter (published: 10; 1 for chains).
        max_depth: tokens of the chain (published: 5).
        bonus: in log-probability.

    Raises:
        ValueError: options out of range; on `bind`, weights that are missing or do not fit the target.
    """

    kind = "cats"
    weights = "cats"
    default_branching: ClassVar[int] = 10
    tree: ClassVar[bool] = True

    def __init__(
        self,
        path: str | os.PathLike[str] | Adapters | None = None,
        *,
        branching: int | None = None,
        max_depth: int = 5,
        bonus: float = 2.0,
    ) -> None:
        super().__init__(path)
        branching = self.default_branching if branching is None else branching
        self.branching = whole_number("branching", branching, 1, 32)
        if not self.tree and self.branching != 1:
            raise ValueError(f"branching of a chain must be 1, got {self.branching}")
        self.max_depth = whole_number("max_depth", max_depth, 1)
        self.bonus = real_number("bonus", bonus, 0.0)

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        target = self._open()
        budget = min(budget, MOST_NODES)
        depth = min(budget, context.max_depth, self.max_depth)
        if depth < 1:
            return DraftTree.empty()
        head, trunk = self._head(context.vocab), target.trunk()
        chain, beside = self._draft(trunk, head, root=context.root, depth=depth)
        if self.tree and budget == depth:
            return _as_tree(chain)
        corrections = self._correct(trunk, head, chain)
        if not self.tree:
            longest = min(budget, context.max_depth)
            path = [*chain[: corrections[0].depth - 1], corrections[0]] if corrections else chain
            follow = self._go_on(trunk, head, path[-1:]) if len(path) < longest else []
            return _as_tree([*path, *follow[:1]])
        ends = [node for node in (chain[-1], *corrections) if node.depth < context.max_depth]
        follow = self._go_on(trunk, head, ends)
        corrected = {(node.depth, node.token) for node in corrections}
        others = [node for node in beside if (node.depth, node.token) not in corrected]
        others = sorted([*others, *corrections, *follow], key=lambda node: -node.score)
        return _as_tree([*chain, *others[: budget - depth]])

    def _draft(self, trunk: Trunk, head: VocabHead, *, root: int, depth: int) -> tuple[list[Node], list[Node]]:
        """The chain of the first adapter's best tokens, and the next best ones beside it."""
        rows, layers = self._rows[0], self._exits[0]
        outputs = rows.begin(trunk.run(np.array([root]), np.array([-1]), layers=layers))
        chain: list[Node] = []
        beside: list[Node] = []
        while True:
            best, *next_best = _children(head, outputs, [chain[-1] if chain else None], count=self.branching)[0]
            chain.append(best)
            beside += next_best
            if len(chain) == depth:
                return chain, beside
            above = np.array([len(chain) - 1])
            outputs = rows.draft(trunk.run(np.array([best.token]), above, layers=layers), above)

    def _correct(self, trunk: Trunk, head: VocabHead, chain: list[Node]) -> list[Node]:
        """Where the second adapter, further up, has another token than the chain."""
        outputs = self._rows[1].begin(trunk.deepen(len(chain), layers=self._exits[1]))
        found = _children(head, outputs, [node.parent for node in chain], count=1)
        corrections = []
        for (best,), node in zip(found, chain, strict=True):
            if best.token != node.token:
                above = 0.0 if node.parent is None else node.parent.score
                corrections.append(replace(best, score=above + self.bonus))
        return corrections

    def _go_on(self, trunk: Trunk, head: VocabHead, ends: list[Node]) -> list[Node]:
        """The first adapter's best tokens after nodes that have not gone through the first layers yet; their parents
        have, which are nodes of the chain."""
        if not ends:
            return []
        above = np.array([node.depth - 1 for node in ends])
        hidden = trunk.run(np.array([node.token for node in ends]), above, layers=self._exits[0])
        outputs = self._rows[0].draft(hidden, above)
        return [node for nodes in _children(head, outputs, ends, count=self.branching) for node in nodes]


def _children(
    head: VocabHead, outputs: torch.Tensor, parents: Sequence[Node | None], *, count: int
) -> list[list[Node]]:
    """The most likely tokens after nodes, the best first; of the head all at once, as for the first of them.

    Args:
        outputs: [R, H], what the head multiplies.
        parents: R nodes.
    """
    depths = [1 if parent is None else parent.depth + 1 for parent in parents]
    top = head.top(outputs, k=min(count, max(1, head.rows)), depth=min(depths))
    found = []
    for parent, depth, ids, log_probs in zip(parents, depths, top.ids.tolist(), top.log_probs.tolist(), strict=True):
        above = 0.0 if parent is None else parent.score
        pairs = [(token, min(q, 0.0)) for token, q in zip(ids, log_probs, strict=True) if q > -math.inf]
        found.append([Node(parent, token, above + q, q, depth) for token, q in pairs])
    return found


def _as_tree(nodes: list[Node]) -> DraftTree:
    """Nodes with all parents before them; a bonus counts in choosing only."""
    places = {id(node): place for place, node in enumerate(nodes)}
    parents = np.array([-1 if node.parent is None else places[id(node.parent)] for node in nodes])
    scores: list[float] = []
    for node, parent in zip(nodes, parents.tolist(), strict=True):
        scores.append((0.0 if parent < 0 else scores[parent]) + node.log_prob)
    evidence = {"log_prob": np.array([node.log_prob for node in nodes])}
    return DraftTree(np.array([node.token for node in nodes]), parents, np.array(scores), evidence=evidence)


@register_drafter("cats")
class CatsTree(Cats):
    summary = "early layers draft, middle layers correct, as a tree (2605.11186)"


@register_drafter("cats-chain")
class CatsChain(Cats):
    summary = "early layers draft, middle layers correct, as a chain (2605.11186)"
    default_branching = 1
    tree = False
