"""Two-model speculation: an independent small causal language model drafts (arXiv 2211.17192, 2302.01318)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from adaptspec.drafters.base import Drafter, Needs
from adaptspec.drafters.registry import register_drafter
from adaptspec.trees import beam_rerank
from adaptspec.types import DraftContext, DraftTree, Observation, Siblings

if TYPE_CHECKING:
    import torch

    from adaptspec.drafters.model_rows import ModelRows
    from adaptspec.target.base import Target
    from adaptspec.target.hf import HFTarget


@register_drafter("draft-model")
class DraftModel(Drafter):
    """A causal language model with the target's token ids drafts a chain or a tree.

    It keeps its own KV cache: rows of accepted draft tokens stay, the rest is forgotten, and whatever it has not seen
    (the last draft token after a full acceptance, steps in which another drafter played) is run in one batched pass at
    the next proposal. Sampled chains carry q after the target's temperature, top-k and nucleus.

    Args:
        path: a hub id, local folder, GGUF file or "embedded", or a transformers model.
        branching: 1 drafts a chain; k > 1 a tree of at most k children per node (EAGLE-2's expansion and reranking),
            which is deterministic at any temperature.
        max_depth: tokens drafted in a row at most, each a forward pass of the model.
        min_confidence: a greedy chain ends where the model's probability for its token falls below this; sampled
            chains and trees do not look at it.

    Raises:
        ValueError: options out of range; on `bind`, token ids that differ from the target's.
    """

    summary = "an independent small causal LM with the same token ids"
    needs = Needs()
    isolate = False

    def __init__(
        self,
        path: str | torch.nn.Module,
        *,
        branching: int = 1,
        max_depth: int = 8,
        min_confidence: float = 0.0,
    ) -> None:
        if branching < 1:
            raise ValueError(f"branching must be >= 1, got {branching}")
        if max_depth < 1:
            raise ValueError(f"max_depth must be >= 1, got {max_depth}")
        if not 0.0 <= min_confidence < 1.0:
            raise ValueError(f"min_confidence must be in [0, 1), got {min_confidence}")
        self.path = path
        self.branching = branching
        self.siblings: Siblings = "iid" if branching == 1 else "deterministic"
        self.max_depth = max_depth
        self.min_confidence = min_confidence
        self._runner: HFTarget | None = None
        self._vocab_size = 0
        self._pending = np.zeros(0, np.int64)
        self._root_logits: torch.Tensor | None = None
        self._rows: ModelRows | None = None
        self._row_tokens: list[tuple[int, int]] = []

    def bind(self, target: Target) -> None:
        from adaptspec.target.hf import HFTarget
        from adaptspec.target.loading import load_target

        if self._runner is None:
            model, tokenizer = self.path, None
            if isinstance(model, str):
                model, tokenizer = load_target(
                    model, dtype=str(getattr(target, "dtype", "auto")).removeprefix("torch.")
                )
            self._runner = HFTarget(model, tokenizer=tokenizer)
        _check_same_tokens(self._runner, target)
        self._vocab_size = target.vocab_size

    def prefill(self, token_ids: np.ndarray, features: Mapping[int, Any] | None = None) -> None:
        import torch

        runner = self._open()
        self._forget_rows()
        limit = runner.context_limit
        if limit is not None and len(token_ids) > limit:
            raise ValueError(f"the prompt has {len(token_ids)} tokens, the draft model's context holds {limit}")
        runner.prefill(torch.from_numpy(np.minimum(token_ids[:-1], runner.vocab_size - 1)))
        self._pending = token_ids[-1:].copy()
        self._root_logits = None

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        from adaptspec.drafters import model_rows

        runner = self._open()
        depth = min(budget, context.max_depth, self.max_depth)
        if runner.context_limit is not None:
            depth = min(depth, runner.context_limit - runner.length - len(self._pending))
        if depth < 1:
            return DraftTree.empty()
        self._run_pending(len(self._pending))
        root_logits = self._root_logits
        assert root_logits is not None
        runner.rollback(runner.length)
        self._row_tokens = []
        rows = self._rows = model_rows.ModelRows(runner, root_cached=True)
        if self.branching == 1 and not context.sampling.greedy:
            tree = model_rows.sampled_chain(rows, root_logits, context, depth=depth, vocab_size=self._vocab_size)
        elif self.branching == 1:
            tree = model_rows.greedy_chain(
                rows, root_logits, depth=depth, min_confidence=self.min_confidence, vocab_size=self._vocab_size
            )
        else:

            def expand(token_ids: np.ndarray, parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
                if parents[0] < 0:
                    return model_rows.top_children(root_logits, self.branching, self._vocab_size)
                self._row_tokens += zip(parents.tolist(), token_ids.tolist(), strict=True)
                return model_rows.top_children(rows.run(token_ids, parents), self.branching, self._vocab_size)

            return beam_rerank(expand, root=context.root, budget=budget, width=self.branching, max_depth=depth)
        self._row_tokens = list(enumerate(tree.token_ids[:-1].tolist()))
        return tree

    def observe(self, observation: Observation) -> None:
        tokens = observation.tokens
        kept: list[int] = []
        if self._rows is not None and not len(self._pending):
            # Walk the own rows along what was committed; the last committed token is the new root and stays pending.
            children = {key: row for row, key in enumerate(self._row_tokens, start=1)}
            row = 0
            for token in tokens[:-1].tolist():
                if (found := children.get((row, token))) is None:
                    break
                row = found
                kept.append(row - 1)
            self._open().keep(np.asarray(kept, dtype=np.int64))
        self._forget_rows()
        self._pending = np.concatenate([self._pending, tokens[len(kept) :]])
        self._root_logits = None

    def finish(self) -> None:
        self._forget_rows()
        if self._runner is not None:
            self._runner.close()

    @property
    def lag(self) -> int:
        # A step in which this drafter was fully accepted leaves two tokens to run: its last one and the bonus.
        return max(0, len(self._pending) - 2)

    def catch_up(self) -> None:
        self._run_pending(self.lag)

    def _run_pending(self, count: int) -> None:
        """Run the first `count` committed tokens that the cache lacks; the root is the last of all."""
        if not count:
            return
        runner = self._open()
        runner.rollback(runner.length)
        ids = np.minimum(self._pending[:count], runner.vocab_size - 1)
        self._root_logits = runner.run_rows(ids, np.arange(count), np.tri(count, dtype=bool))[-1:]
        runner.keep(np.arange(count))
        self._pending = self._pending[count:]

    def _forget_rows(self) -> None:
        self._rows = None
        self._row_tokens = []

    def _open(self) -> HFTarget:
        if self._runner is None:
            raise RuntimeError("draft-model has no model yet; call bind first")
        return self._runner


def _check_same_tokens(draft: HFTarget, target: Target) -> None:
    """Raise ValueError unless both models use the same token ids."""
    ours, theirs = getattr(draft, "tokenizer", None), getattr(target, "tokenizer", None)
    if ours is not None and theirs is not None:
        if ours.get_vocab() != theirs.get_vocab():
            raise ValueError("the draft model's tokenizer has other token ids than the target's")
    elif draft.vocab_size != target.vocab_size:
        raise ValueError(
            f"the draft model's vocabulary has {draft.vocab_size} entries, the target's {target.vocab_size}; if only "
            "the padding differs, name the draft model by its folder and pass the target's tokenizer= to generate"
        )
