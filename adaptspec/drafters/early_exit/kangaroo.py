"""Kangaroo: double early exit (arXiv 2404.18911)."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import numpy as np

from adaptspec.drafters.early_exit.adapted import Adapted
from adaptspec.drafters.lookup import share, whole_number
from adaptspec.drafters.registry import register_drafter
from adaptspec.types import DraftContext, DraftTree

if TYPE_CHECKING:
    from adaptspec.drafters.early_exit.adapter import Adapters


@register_drafter("kangaroo")
class Kangaroo(Adapted):
    """The target's first layers and an adapter of one attention and two norms draft a chain with the target's head. The
    verify pass goes on behind these layers, so a drafted token costs no layer twice.

    Args:
        path, exit: see `Adapted`.
        min_confidence: a token to which the adapter gives less is the last of its draft (the second early exit).
        max_depth: tokens drafted in a row at most, each a pass of the first layers and the adapter.

    Raises:
        ValueError: options out of range; on `bind`, weights that are missing or do not fit the target.
    """

    summary = "the target's first layers and a small adapter, which the verify pass goes on from (2404.18911)"
    kind = "kangaroo"
    weights = "kangaroo"

    def __init__(
        self,
        path: str | os.PathLike[str] | Adapters | None = None,
        *,
        exit: int | None = None,
        min_confidence: float = 0.6,
        max_depth: int = 6,
    ) -> None:
        super().__init__(path, exit=exit)
        self.min_confidence = share("min_confidence", min_confidence)
        self.max_depth = whole_number("max_depth", max_depth, 1)

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        target = self._open()
        depth = min(budget, context.max_depth, self.max_depth)
        if depth < 1:
            return DraftTree.empty()
        (rows,), (layers,) = self._rows, self._exits
        head, trunk = self._head(context.vocab), target.trunk()
        least = math.log(max(self.min_confidence, 1e-30))
        outputs = rows.begin(trunk.run(np.array([context.root]), np.array([-1]), layers=layers))
        tokens: list[int] = []
        log_probs: list[float] = []
        while True:
            top = head.top(outputs, k=1, depth=len(tokens) + 1)
            tokens.append(int(top.ids[0, 0]))
            log_probs.append(min(float(top.log_probs[0, 0]), 0.0))
            if len(tokens) == depth or log_probs[-1] < least:
                evidence = {"log_prob": np.array(log_probs)}
                return DraftTree.chain(tokens, np.cumsum(log_probs), evidence=evidence)
            above = np.array([len(tokens) - 1])
            outputs = rows.draft(trunk.run(np.array(tokens[-1:]), above, layers=layers), above)
