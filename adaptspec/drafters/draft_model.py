"""Two-model speculation: an independent small causal language model drafts (arXiv 2211.17192, 2302.01318)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from adaptspec.drafters.base import Drafter, Needs
from adaptspec.drafters.paying_levels import PayingLevels
from adaptspec.drafters.registry import register_drafter
from adaptspec.pretrained import is_weights_folder
from adaptspec.types import DraftContext, DraftTree, Observation, Siblings

if TYPE_CHECKING:
    import torch

    from adaptspec.drafters.model_rows import DraftHead, ModelRows
    from adaptspec.target.base import Target
    from adaptspec.target.hf import HFTarget
    from adaptspec.vocab import VocabHeads


@register_drafter("draft-model")
class DraftModel(Drafter):
    """A causal language model with the target's token ids drafts a chain or a tree.

    It keeps its own KV cache: rows of accepted draft tokens stay, the rest is forgotten, and whatever it has not seen
    (the last draft token after a full acceptance, steps in which another drafter played) is run in one batched pass at
    the next proposal. Sampled chains carry q after the target's temperature, top-k and nucleus. With a reduced
    vocabulary the head computes the rows in use only, and q is normalised over them.

    Args:
        path: a hub id, local folder, GGUF file or "embedded", a folder of trained weights, a transformers model, or
            None for the weights shipped for the target.
        branching: 1 drafts a chain; k > 1 a tree of at most k children per node (EAGLE-2's expansion and reranking),
            which is deterministic at any temperature.
        max_depth: tokens drafted in a row at most, each a forward pass of the model.
        min_confidence: a greedy chain ends where the model's probability for its token falls below this; sampled
            chains and trees do not look at it.

    Raises:
        ValueError: options out of range; on `bind`, token ids that differ from the target's, no weights for it, or a
            head that cannot be reduced.
    """

    summary = "an independent small causal LM with the same token ids"
    needs = Needs()
    isolate = False
    takes_vocab = True
    weights = "draft-model"

    def __init__(
        self,
        path: str | torch.nn.Module | None = None,
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
        self._root_outputs: torch.Tensor | None = None
        self._made_for: torch.nn.Module | None = None
        self._heads: VocabHeads | None = None
        self._view: torch.nn.Module | None = None
        self._rows: ModelRows | None = None
        self._row_tokens: list[tuple[int, int]] = []
        self._levels = PayingLevels()

    def use_vocab(self, names: Sequence[str]) -> None:
        from adaptspec.vocab import VocabHeads

        super().use_vocab(names)
        heads = VocabHeads(names)  # says which names it knows
        self._heads = None if self.vocab == ("full",) else heads
        self._view = None

    def bind(self, target: Target) -> None:
        from adaptspec.drafters.model_rows import without_head

        self._load(target)
        runner = self._open()
        _check_same_tokens(runner, target)
        self._vocab_size = target.vocab_size
        if self._heads is None:
            self.needs = Needs()
            return
        if self._view is None:
            self._view = without_head(runner.model)
        weight = runner.model.get_output_embeddings().weight[: target.vocab_size]  # without padding beyond
        special = getattr(target, "special_ids", tuple)()
        self._heads.bind(weight, vocab_size=target.vocab_size, keep=[token for token in special if token < len(weight)])
        self.needs = Needs(target_top_k=self._heads.needs_top_k, prompt_top_k=self._heads.needs_prompt_top_k)

    def _load(self, target: Target) -> None:
        """The model, once; one that was trained for a target again when that changes."""
        from adaptspec.drafters.cell_weights import shipped_for
        from adaptspec.drafters.small_model import load_small_model
        from adaptspec.target.hf import HFTarget
        from adaptspec.target.loading import load_target

        model: Any = self.path
        if model is None or (isinstance(model, str) and is_weights_folder(model)):
            if not isinstance(target, HFTarget):
                raise ValueError(f"draft-model needs a transformers target, got {type(target).__name__}")
            if model is None:
                command = "adaptspec train draft-model"
                model = str(shipped_for(target, self.weights, name=self.name, command=command))
            if self._made_for is not target.model:
                self._runner = HFTarget(load_small_model(model, target), tokenizer=target.tokenizer)
                self._made_for, self._view = target.model, None
            return
        if self._runner is None:
            tokenizer = None
            if isinstance(model, str):
                model, tokenizer = load_target(
                    model, dtype=str(getattr(target, "dtype", "auto")).removeprefix("torch.")
                )
            self._runner = HFTarget(model, tokenizer=tokenizer)

    def prefill(
        self,
        token_ids: np.ndarray,
        features: Mapping[int, Any] | None = None,
        top_ids: np.ndarray | None = None,
    ) -> None:
        import torch

        runner = self._open()
        if self._heads is not None:
            self._heads.prefill(token_ids, top_ids)
        self._forget_rows()
        limit = runner.context_limit
        if limit is not None and len(token_ids) > limit:
            raise ValueError(f"the prompt has {len(token_ids)} tokens, the draft model's context holds {limit}")
        runner.prefill(torch.from_numpy(np.minimum(token_ids[:-1], runner.vocab_size - 1)))
        self._pending = token_ids[-1:].copy()
        self._root_outputs = None

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        from adaptspec.drafters import model_rows

        runner = self._open()
        depth = min(budget, context.max_depth, self.max_depth)
        if runner.context_limit is not None:
            depth = min(depth, runner.context_limit - runner.length - len(self._pending))
        if depth < 1:
            return DraftTree.empty()
        self._run_pending(len(self._pending))
        root_outputs = self._root_outputs
        assert root_outputs is not None
        head = self._head(context.vocab)
        runner.rollback(runner.length)
        self._row_tokens = []
        rows = self._rows = model_rows.ModelRows(runner, root_cached=True, model=self._view)
        options: dict[str, Any] = {"depth": depth, "vocab_size": self._vocab_size, "head": head}
        if self.branching == 1 and not context.sampling.greedy:
            tree = model_rows.sampled_chain(rows, root_outputs, context, **options)
        elif self.branching == 1:
            options |= {
                "min_confidence": self.min_confidence,
                "stop": self._levels.stop(context, budget=budget, width=1),
            }
            tree = model_rows.greedy_chain(rows, root_outputs, **options)
            self._levels.proposed(tree)
        else:
            levels: list[int] = []  # of the rows that `expand` was given

            def expand(token_ids: np.ndarray, parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
                level = 1 if parents[0] < 0 else levels[parents[0]] + 1
                levels.extend([level] * len(parents))
                if parents[0] < 0:
                    return head.top(root_outputs, self.branching, depth=level)
                self._row_tokens += zip(parents.tolist(), token_ids.tolist(), strict=True)
                return head.top(rows.run(token_ids, parents), self.branching, depth=level)

            return self._levels.grow(expand, context, budget=budget, width=self.branching, depth=depth)
        self._row_tokens = list(enumerate(tree.token_ids[:-1].tolist()))
        return tree

    def observe(self, observation: Observation) -> None:
        tokens = observation.tokens
        self._levels.observe(tokens, verified=len(observation.tree))
        if self._heads is not None:
            self._heads.observe(observation)
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
        self._root_outputs = None

    def finish(self) -> None:
        self._forget_rows()
        self._levels.forget()
        if self._heads is not None:
            self._heads.finish()
        if self._runner is not None:
            self._runner.close()

    def reset(self) -> None:
        self._levels = PayingLevels()
        if self._heads is not None:
            self._heads.reset()

    def state_dict(self) -> dict[str, Any]:
        """What vocabulary heads learnt over requests."""
        state = {} if self._heads is None else self._heads.state_dict()
        return {"vocab": state} if state else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping) or set(state) - {"vocab"} or (state and self._heads is None):
            got = ", ".join(sorted(map(str, state))) if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(f"state of drafter {self.name!r} must have no key but 'vocab', got {got}")
        if self._heads is not None:
            self._heads.load_state_dict(state.get("vocab", {}))

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
        visible = np.tri(count, dtype=bool)
        self._root_outputs = runner.run_rows(ids, np.arange(count), visible, model=self._view)[-1:]
        runner.keep(np.arange(count))
        self._pending = self._pending[count:]

    def _head(self, vocab: str) -> DraftHead:
        from adaptspec.drafters.model_rows import ReducedHead, WholeHead

        return WholeHead(self._vocab_size) if self._heads is None else ReducedHead(self._heads[vocab])

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
