"""ConFu by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from adaptspec.drafters.feature_recursive import FeatureRecursive, Tree
from adaptspec.drafters.registry import register_drafter
from adaptspec.names import unknown_name
from adaptspec.trees import Stop
from adaptspec.types import DraftContext, DraftTree, Observation, PairedRows, Siblings

if TYPE_CHECKING:
    import torch

    from adaptspec.drafters.cell_weights import CellWeights
    from adaptspec.drafters.cells import Cell
    from adaptspec.drafters.cells.recursion import Recursion
    from adaptspec.target.base import Target

Contemplate = Literal["apart", "paired"]


@register_drafter("confu")
class ConFu(FeatureRecursive):
    """ConFu (arXiv 2603.08899): EAGLE-3 with a future token, the target's hidden state at a contemplate token behind
    the last accepted one, which sees soft prompts that nothing else sees. See `ConFuCell`.

    Contemplate tokens are run in one of two ways. With "paired" the root and every node of the verified tree get one in
    the same pass, as in the paper, and so do the soft prompts: a pass of N nodes has 2 (N + 1) + P rows. The budget
    counts all of them but the root, so that N is about half of it; where the tree that is verified leaves no room for
    them (a budget below P + 3, or a tree that another arm's budget made) they are left out, and the next proposal is
    EAGLE-3's. Ordinary rows see none of the added ones, so their logits are the same but for rounding: matrix products
    of other shapes add in another order (on a CPU in float32 logits of the 135M model below differed by up to 4e-5).

    With "apart" only the one that is needed is run, before the proposal, in a pass of its own of P + 1 rows on the
    committed prefix, which then forgets them: the logits of verification are bit for bit what they are without it. It
    is charged where it is spent, to drafting; the budget counts the nodes, which are all that is verified. And what is
    proposed depends on the text alone, whichever drafter made the last step.

    Cost, in processor time of one thread with a target of 135M parameters in float32, P = 4, behind 256 tokens: a pass
    of 13 nodes takes 0.25 s, with its paired rows 0.35 s, and apart adds 0.21 s; with 30 nodes both ways add about six
    tenths of the pass. All paired rows in a second pass would add 0.30 s to the 13 nodes. So no way is cheap there, and
    "apart" is the default on a CPU for what it keeps exact: the logits, the nodes of the budget, and what strategies
    learn of steps that they did not play. Where a pass is bound by reading weights (one sequence on a GPU) rows are
    nearly free, while a pass of its own costs as much as verification; there "paired" is the default.

    Args:
        contemplate: "paired", "apart", or None for the default.
        path, tree, branching, max_depth, siblings: see `FeatureRecursive`.

    Raises:
        ValueError: see `FeatureRecursive`; another way to contemplate.
    """

    summary = "EAGLE-3's cell that sees the target's hidden state at a contemplate token (ConFu, 2603.08899)"
    kind = "confu"
    weights = "confu"
    default_depth = 7

    def __init__(
        self,
        path: str | os.PathLike[str] | Cell | CellWeights | None = None,
        *,
        tree: Tree | None = None,
        branching: int | None = None,
        max_depth: int | None = None,
        siblings: Siblings | None = None,
        contemplate: Contemplate | None = None,
    ) -> None:
        super().__init__(path, tree=tree, branching=branching, max_depth=max_depth, siblings=siblings)
        if contemplate is not None and contemplate not in get_args(Contemplate):
            raise unknown_name("contemplate", contemplate, get_args(Contemplate))
        self.contemplate = contemplate
        self._apart = True
        self._target: Any = None
        self._rows: PairedRows | None = None
        self._tail: list[int] = []  # the last token in the target's cache, and the root
        self._future: torch.Tensor | None = None

    def bind(self, target: Target) -> None:
        before = self._recursion
        super().bind(target)
        self._target = target
        if self._recursion is before:
            return
        cell, embed = self._open().cell, self._open().embed
        device = next(cell.parameters()).device
        self._apart = (device.type == "cpu") if self.contemplate is None else self.contemplate == "apart"
        last = len(self._target.layout.layers)

        def vectors(token_ids: np.ndarray) -> torch.Tensor:
            import torch

            with torch.inference_mode():
                return cell.contemplate(embed(torch.from_numpy(token_ids).to(device)))

        prompts, limit = cell.soft_prompts.weight, target.context_limit
        if limit is not None and len(prompts) >= limit:
            self._bound = ()
            raise ValueError(f"{self.name} has {len(prompts)} soft prompts, the target's context {limit} positions")
        self._rows = PairedRows(prompts, vectors, last)
        taps = tuple(sorted({*self.needs.taps, last}))
        self.needs = replace(self.needs, taps=taps, target=self._apart, extra_rows=not self._apart)

    def prefill(
        self,
        token_ids: np.ndarray,
        features: Mapping[int, Any] | None = None,
        top_ids: np.ndarray | None = None,
    ) -> None:
        super().prefill(token_ids, features, top_ids)
        self._tail, self._future = token_ids[-2:].tolist(), None

    def propose(self, context: DraftContext, budget: int, *, stop: Stop | None = None) -> DraftTree:
        return super().propose(context, budget if self._apart else self._nodes_within(budget), stop=stop)

    def extra_rows(self, context: DraftContext, budget: int) -> PairedRows | None:
        """Nothing where contemplate tokens run apart."""
        return None if self._apart else self._rows

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        self._tail = [*self._tail, *observation.tokens.tolist()][-2:]
        self._future = None if observation.paired is None else observation.paired[-1]

    def finish(self) -> None:
        super().finish()
        self._future = None

    def _nodes_within(self, budget: int) -> int:
        """Nodes of a tree that fits into a budget together with its paired rows; 1 if only it fits."""
        assert self._rows is not None
        return min(budget, max(1, (budget - self._rows.count(0)) // 2))

    def _new_recursion(self, cell: Cell, embed: Callable[[torch.Tensor], torch.Tensor]) -> Recursion:
        from adaptspec.drafters.cells.confu import FutureRecursion

        return FutureRecursion(cell, embed)

    def _begin(self, recursion: Recursion, token_ids: np.ndarray, features: Mapping[int, Any]) -> None:
        recursion.push(token_ids[:-1], {tap: states[:-1] for tap, states in features.items()})
        recursion.settle()
        # The row to draft from waits for its future token.
        recursion.push(token_ids[-1:], {tap: states[-1:] for tap, states in features.items()})

    def _settle(self, recursion: Recursion) -> None:
        if self._apart and self._future is None:
            self._future = self._target.paired(self._tail[0], self._rows)
        recursion.future = self._future  # type: ignore[attr-defined]  # of FutureRecursion
        recursion.settle()
