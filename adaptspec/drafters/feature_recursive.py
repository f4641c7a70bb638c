"""Drafters that run a small cell on the target's features and then on its own output: EAGLE, GRIFFIN, MTP."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np

from adaptspec.drafters.base import Needs
from adaptspec.drafters.headed import HeadedDrafter
from adaptspec.drafters.lookup import whole_number
from adaptspec.drafters.static_tree import limit_depth, rank_template, static_tree
from adaptspec.names import unknown_name
from adaptspec.trees import Expand, ExpandRows, Stop, Template, sampled_chain, sampled_tree
from adaptspec.types import SIBLINGS, DraftContext, DraftTree, Observation, Sampling, Siblings

if TYPE_CHECKING:
    import torch

    from adaptspec.drafters.cell_weights import CellWeights
    from adaptspec.drafters.cells import Cell
    from adaptspec.drafters.cells.recursion import Recursion
    from adaptspec.target.base import Target
    from adaptspec.vocab import VocabHead

Tree = Literal["chain", "dynamic", "static"]


class FeatureRecursive(HeadedDrafter):
    """A cell takes the target's hidden state of a position and the embedding of the next token, gives a hidden state
    for the head, and is run on along a tree by being fed what it returned.

    Its keys and values of committed tokens always come from the target's features: after every step the rows it had
    guessed are thrown away and those of the committed tokens run again, in one pass, at the start of the next proposal.
    So a proposal depends on the committed text alone. While it is not asked it keeps the features, and catches up in
    one batched pass.

    Args:
        path: a folder of trained weights, a published checkpoint (folder, file or hub id), a `Cell` or `CellWeights`,
            or None for the weights shipped for the target.
        tree: "chain"; "dynamic" expands the most likely nodes and reranks (EAGLE-2, arXiv 2406.16858); "static" has a
            fixed shape per budget. Trees of smaller budgets are part of those of larger ones.
        branching: most children per node, and with "dynamic" nodes expanded per depth.
        max_depth: tokens drafted in a row at most, each a pass of the cell.
        siblings: how siblings are chosen when the target samples: by default "iid" for a chain, whose tokens are then
            drawn from q after the target's temperature, top-k and nucleus, else "deterministic". Static trees can be
            drawn, too, "iid" or "without-replacement".

    Raises:
        ValueError: options out of range; on `bind`, weights that are missing or do not fit the target.
    """

    kind: ClassVar[str] = ""
    """Of the cell."""
    layers: ClassVar[int | None] = None
    """Layers that the cell must have, None for any number."""
    default_tree: ClassVar[Tree] = "dynamic"
    default_branching: ClassVar[int] = 10
    default_depth: ClassVar[int] = 6

    def __init__(
        self,
        path: str | os.PathLike[str] | Cell | CellWeights | None = None,
        *,
        tree: Tree | None = None,
        branching: int | None = None,
        max_depth: int | None = None,
        siblings: Siblings | None = None,
    ) -> None:
        super().__init__()
        self.path = path
        self.tree: Tree = self.default_tree if tree is None else tree
        self.branching = whole_number("branching", self.default_branching if branching is None else branching, 1, 32)
        self.max_depth = whole_number("max_depth", self.default_depth if max_depth is None else max_depth, 1)
        if self.tree not in get_args(Tree):
            raise unknown_name("tree", self.tree, get_args(Tree))
        self.siblings = ("iid" if self.tree == "chain" else "deterministic") if siblings is None else siblings
        if self.siblings not in SIBLINGS:
            raise unknown_name("siblings", self.siblings, SIBLINGS)
        if self.siblings != "deterministic" and self.tree == "dynamic":
            raise ValueError(f"siblings of a dynamic tree must be 'deterministic', got {self.siblings!r}")
        if self.siblings == "without-replacement" and self.tree == "chain":
            raise ValueError("siblings of a chain must be 'iid' or 'deterministic', got 'without-replacement'")
        self._recursion: Recursion | None = None
        self._vocab_size = 0

    def bind(self, target: Target) -> None:
        from functools import partial

        from torch.nn.functional import embedding

        from adaptspec.drafters.cell_weights import load_cell
        from adaptspec.drafters.target_parts import target_parts

        parts = target_parts(target, drafter=self.name)
        bound = (parts.embed, parts.head.data_ptr(), parts.device, parts.dtype, parts.special_ids)
        if self._bound == bound:  # a target is made per request, the model behind it is mostly the same
            return
        weights = load_cell(self.path, name=self.name, kind=self.kind, shipped=self.weights, target=target)
        config = weights.cell.config
        if self.layers is not None and config.num_layers != self.layers:
            raise ValueError(f"{self.name} needs a cell of {self.layers} layers, got one of {config.num_layers}")
        cell = weights.cell.to(device=parts.device, dtype=parts.dtype).eval().requires_grad_(False)
        if config.final_norm:
            cell.use_final_norm(parts.norm)
        embed = parts.embed
        if weights.embeddings is not None:
            embed = partial(embedding, weight=weights.embeddings.to(device=parts.device, dtype=parts.dtype))
        matrices = weights.heads or (parts.head if weights.head is None else weights.head,)
        heads = self._head_sets()
        heads.bind(
            [matrix.to(device=parts.device, dtype=parts.dtype) for matrix in matrices],
            token_ids=weights.token_ids,
            vocab_size=parts.vocab_size,
            keep=parts.special_ids,
        )
        self.needs = Needs(
            taps=tuple(sorted(set(config.taps))),
            target_top_k=heads.needs_top_k,
            prompt_top_k=heads.needs_prompt_top_k,
            target_top_logits=heads.needs_top_logits,
        )
        self._recursion = self._new_recursion(cell, embed)
        self._vocab_size = parts.vocab_size
        self._bound = bound

    def prefill(
        self,
        token_ids: np.ndarray,
        features: Mapping[int, Any] | None = None,
        top_ids: np.ndarray | None = None,
    ) -> None:
        recursion = self._open()
        recursion.start()
        self._head_sets().prefill(token_ids, top_ids)
        if features is None:
            raise ValueError(f"{self.name} needs the hidden states of the layers {list(self.needs.taps)}, got none")
        self._begin(recursion, token_ids[1:], features)

    def propose(self, context: DraftContext, budget: int, *, stop: Stop | None = None) -> DraftTree:
        """See `Drafter.propose`; `stop` ends the growth of a dynamic tree early."""
        recursion = self._open()
        depth = min(budget, context.max_depth, self.max_depth)
        if depth < 1 or not recursion.ready:
            return DraftTree.empty()
        self._settle(recursion)
        if self.siblings != "deterministic" and not context.sampling.greedy:
            return self._drawn(context, budget=budget, depth=depth)
        # More children per node, or nodes per depth, than the budget cannot be among its best nodes.
        width = 1 if self.tree == "chain" else min(self.branching, budget)
        expand = self._expand(context.vocab, width)
        if self.tree == "static":
            return static_tree(expand, self._template(budget), root=context.root, max_depth=depth)
        return self._levels.grow(expand, context, budget=budget, width=width, depth=depth, stop=stop)

    def observe(self, observation: Observation) -> None:
        recursion = self._open()
        super().observe(observation)
        recursion.push(observation.tokens, observation.features)

    @property
    def lag(self) -> int:
        # The rows of the last step's tokens are run by every proposal.
        return 0 if self._recursion is None else self._recursion.lag

    def catch_up(self) -> None:
        self._open().settle(but_last=True)

    def finish(self) -> None:
        super().finish()
        self._open().start()

    def reset(self) -> None:
        super().reset()
        if self._recursion is not None:
            self._recursion.start()

    def draft_probs_along(self, context: DraftContext, token_ids: np.ndarray) -> np.ndarray:
        """q along given tokens: float32 [n, V], row j is what token j would be drawn from if the cell had drafted the
        tokens before it, by the cell's own recursion. For judging steps in which the drafter was not played.

        Args:
            context: of the proposal; at temperature 0 q is that of temperature 1.
            token_ids: int64 [n], the tokens after the root.

        Raises:
            RuntimeError: no request is open, or one that is too short to draft from.
        """
        recursion = self._open()
        if not recursion.ready:
            raise RuntimeError(f"{self.name} needs at least {recursion.layers + 1} committed tokens")
        self._settle(recursion)
        if context.sampling.greedy:
            context = replace(context, sampling=Sampling(temperature=1.0))
        rows = self._expand_rows(context)
        before = np.concatenate([[context.root], token_ids[:-1]]).astype(np.int64)[: len(token_ids)]
        q = [rows(before[j : j + 1], np.array([j - 1])) for j in range(len(token_ids))]
        return np.concatenate(q) if q else np.zeros((0, self._vocab_size), np.float32)

    def _drawn(self, context: DraftContext, *, budget: int, depth: int) -> DraftTree:
        rows = self._expand_rows(context)
        if self.tree == "chain":
            tree = sampled_chain(rows, root=context.root, length=depth, rng=context.rng)
        else:
            shape = limit_depth(self._template(budget), depth)
            siblings: Any = self.siblings
            tree = sampled_tree(rows, shape, root=context.root, siblings=siblings, rng=context.rng)
        if not len(tree):
            return tree
        return replace(tree, evidence={"log_prob": tree.scores - np.append(tree.scores, 0.0)[tree.parents]})

    def _expand(self, vocab: str, count: int) -> Expand:
        """The cell as tree builders ask for it: the most likely children of each row."""
        recursion, depth = self._open(), 0

        def expand(token_ids: np.ndarray, parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            nonlocal depth
            hidden = recursion.root() if depth == 0 else recursion.draft(token_ids, parents)
            depth += 1
            head = self._head(vocab, depth)
            top = head.top(hidden, k=min(count, max(1, head.rows)), depth=depth)
            return top.ids.cpu().numpy(), np.minimum(top.log_probs.double().cpu().numpy(), 0.0)

        return expand

    def _expand_rows(self, context: DraftContext) -> ExpandRows:
        """The same with whole distributions: q over the rows in use, 0 elsewhere."""
        from adaptspec.drafters.model_rows import ReducedHead

        recursion, depth = self._open(), 0

        def expand(token_ids: np.ndarray, parents: np.ndarray) -> np.ndarray:
            nonlocal depth
            hidden = recursion.root() if depth == 0 else recursion.draft(token_ids, parents)
            depth += 1
            head = ReducedHead(self._head(context.vocab, depth))
            return head.distribution(hidden, context.sampling, depth=depth).cpu().numpy()

        return expand

    def _head(self, vocab: str, depth: int) -> VocabHead:
        heads = self._head_sets()
        return heads[min(depth, len(heads)) - 1][vocab]

    def _new_recursion(self, cell: Cell, embed: Callable[[torch.Tensor], torch.Tensor]) -> Recursion:
        from adaptspec.drafters.cells.recursion import Recursion

        return Recursion(cell, embed)

    def _begin(self, recursion: Recursion, token_ids: np.ndarray, features: Mapping[int, Any]) -> None:
        """Run the rows of the prompt."""
        recursion.push(token_ids, features)
        recursion.settle()

    def _settle(self, recursion: Recursion) -> None:
        """Run what is pending before a proposal."""
        recursion.settle()

    def _template(self, budget: int) -> Template:
        return rank_template(self.branching, budget, self.max_depth)

    def _open(self) -> Recursion:
        if self._recursion is None:
            raise RuntimeError(f"{self.name} has no target yet; call bind first")
        return self._recursion
