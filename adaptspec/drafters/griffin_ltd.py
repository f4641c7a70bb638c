"""GRIFFIN+LTD: two small policies, trained offline, choose depth and size of every tree."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from adaptspec.drafters.base import Drafter
from adaptspec.drafters.draft_policies import EVERY, MOST_DEPTH, MOST_NODES, DraftPolicies, describe_tree, read_policies
from adaptspec.drafters.registry import register_drafter
from adaptspec.drafters.sized import SizedDrafter, make_backbone, shipped_rule_of
from adaptspec.trees import truncate
from adaptspec.types import DraftContext, DraftTree

if TYPE_CHECKING:
    from adaptspec.target.base import Target


@register_drafter("griffin-ltd")
class GriffinLTD(SizedDrafter):
    """GRIFFIN+LTD, the trained baseline: Learning to Draft (arXiv 2603.01639) on GRIFFIN or any other feature-recursive
    drafter.

    After every third level, to depth 12, the depth policy goes on or stops; then the size policy takes one of 24 sizes,
    10 to 240, of the arm's budget where that is smaller. Both see path scores, depth and the length of the text, see
    `describe_tree`. They decide on deterministic trees before anything is verified, so output is lossless. Their own
    time is part of drafting. How they are trained: `adaptspec train griffin-ltd`.

    Args:
        path: a file of that command, or `DraftPolicies`; None for those trained for the embedded model.
        drafter: in place of the one that the file names.

    Raises:
        ValueError: a damaged file, or another kind of drafter; on `bind`, another target than the one trained on.
    """

    summary = "GRIFFIN's trees, depth and size chosen by two trained policies (Learning to Draft, 2603.01639)"
    weights = "griffin-ltd"

    def __init__(
        self, path: str | os.PathLike[str] | DraftPolicies | None = None, *, drafter: str | Drafter | None = None
    ) -> None:
        if path is None:
            path = shipped_rule_of(self.name)
        self.policies = path if isinstance(path, DraftPolicies) else read_policies(path)
        self._where = "the policies" if isinstance(path, DraftPolicies) else str(path)
        named = self.policies.drafter if drafter is None else drafter
        super().__init__(make_backbone(named, max_depth=MOST_DEPTH))

    def bind(self, target: Target) -> None:
        self._check_target(self.policies.card, target, where=self._where)
        super().bind(target)

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        levels: list[np.ndarray] = []

        def stop(depth: int, scores: np.ndarray) -> bool:
            levels.append(scores)
            if depth % EVERY or depth == MOST_DEPTH:
                return False
            return self.policies.stops(describe_tree(levels, length=context.length))

        within = replace(context, max_depth=min(context.max_depth, MOST_DEPTH))
        tree = self.backbone.propose(within, min(budget, MOST_NODES), stop=stop)
        if not levels:
            return tree
        return truncate(tree, self.policies.nodes(describe_tree(levels, length=context.length)))
