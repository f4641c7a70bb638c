"""Drafting with a causal language model: rows run one depth after the other behind a cached prefix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from adaptspec.target.hf import HFTarget
from adaptspec.target.views import headless
from adaptspec.types import DraftContext, DraftTree, Sampling

if TYPE_CHECKING:
    from adaptspec.trees import Stop
    from adaptspec.vocab import VocabHead


class ModelRows:
    """Draft rows of one proposal behind the cached prefix of `runner`.

    Rows are numbered as `adaptspec.trees` builders number them: row 0 is the root, later rows have earlier parents.

    Args:
        runner: holds the prefix; its `length` includes the root if `root_cached`.
        root_cached: the root is part of the prefix, else it must be the first row that is run.
        model: a view of the runner's model with fewer layers, or None.
    """

    def __init__(self, runner: HFTarget, *, root_cached: bool, model: torch.nn.Module | None = None) -> None:
        self.runner = runner
        self.model = model
        self.first = 1 if root_cached else 0
        self.depths = [0]
        self.visible = [np.zeros(0, dtype=bool)] if root_cached else []

    def run(self, token_ids: np.ndarray, parents: np.ndarray) -> torch.Tensor:
        """What the model gives after new rows: logits [R, V], or hidden states [R, H] of a view without its head.
        `parents` are row numbers, -1 for the root itself."""
        rows = len(token_ids)
        before = len(self.visible) - self.first
        width = before + rows
        visible = np.zeros((rows, width), dtype=bool)
        depths = np.zeros(rows, dtype=np.int64)
        for i, parent in enumerate(parents.tolist()):
            if parent >= 0:
                seen = self.visible[parent]
                visible[i, : len(seen)] = seen
                depths[i] = self.depths[parent] + 1
                self.depths.append(int(depths[i]))
            visible[i, before + i] = True
        self.visible.extend(visible)
        return self.runner.run_rows(token_ids, depths - self.first, visible, model=self.model)


def draft_distribution(logits: torch.Tensor, sampling: Sampling, vocab_size: int) -> torch.Tensor:
    """q as it is drawn from: after temperature, top-k and nucleus, over the target's vocabulary; float32 [R, V]."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = fit_vocabulary(logits.float(), vocab_size)
    ids = torch.zeros((len(scores), 1), dtype=torch.long)
    if sampling.temperature not in (0.0, 1.0):
        scores = TemperatureLogitsWarper(sampling.temperature)(ids, scores)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(ids, scores)
    if sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(ids, scores)
    return torch.softmax(scores, dim=-1)


def fit_vocabulary(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Logits over exactly the target's ids: padding beyond is dropped, missing ids get probability 0."""
    width = logits.shape[-1]
    if width > vocab_size:
        return logits[..., :vocab_size]
    if width < vocab_size:
        return torch.nn.functional.pad(logits, (0, vocab_size - width), value=-torch.inf)
    return logits


def top_children(logits: torch.Tensor, count: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` most likely next tokens per row and their log-probabilities, [R, count] each."""
    scores = torch.log_softmax(fit_vocabulary(logits.float(), vocab_size), dim=-1)
    values, ids = scores.topk(min(count, scores.shape[-1]), dim=-1)
    return ids.cpu().numpy(), values.double().cpu().numpy()


class DraftHead(ABC):
    """Turns what a draft model gives for a row into tokens."""

    @abstractmethod
    def top(self, outputs: torch.Tensor, count: int, *, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """The `count` most likely next tokens per row and their log-probabilities, [R, count] each; places without a
        token have -inf."""

    @abstractmethod
    def distribution(self, outputs: torch.Tensor, sampling: Sampling, *, depth: int) -> torch.Tensor:
        """q as it is drawn from, float32 [R, V]."""


class WholeHead(DraftHead):
    """The model's own head, of which the logits come."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def top(self, outputs: torch.Tensor, count: int, *, depth: int) -> tuple[np.ndarray, np.ndarray]:
        return top_children(outputs, count, self.vocab_size)

    def distribution(self, outputs: torch.Tensor, sampling: Sampling, *, depth: int) -> torch.Tensor:
        return draft_distribution(outputs, sampling, self.vocab_size)


class ReducedHead(DraftHead):
    """Some rows of the head, applied to hidden states; q is normalised over these rows."""

    def __init__(self, head: VocabHead) -> None:
        self.head = head

    @torch.inference_mode()
    def top(self, outputs: torch.Tensor, count: int, *, depth: int) -> tuple[np.ndarray, np.ndarray]:
        top = self.head.top(outputs, k=min(count, self.head.rows), depth=depth)
        return top.ids.cpu().numpy(), top.log_probs.double().cpu().numpy()

    @torch.inference_mode()
    def distribution(self, outputs: torch.Tensor, sampling: Sampling, *, depth: int) -> torch.Tensor:
        ids, logits = self.head.logits(outputs, depth=depth)
        q = draft_distribution(logits, sampling, logits.shape[-1])
        return q.new_zeros((len(q), self.head.vocab_size)).index_copy_(1, ids, q)


def greedy_chain(
    rows: ModelRows,
    root_outputs: torch.Tensor,
    *,
    depth: int,
    min_confidence: float,
    vocab_size: int,
    head: DraftHead | None = None,
    stop: Stop | None = None,
) -> DraftTree:
    """The most likely token at every depth, ending where the model's probability for it falls below
    `min_confidence` (Draft & Verify, arXiv 2309.08168, section 4: adaptive draft exit), or where `stop` says so."""
    head = WholeHead(vocab_size) if head is None else head
    tokens: list[int] = []
    scores: list[float] = []
    total = 0.0
    outputs = root_outputs
    while len(tokens) < depth:
        ids, log_probs = head.top(outputs, 1, depth=len(tokens) + 1)
        if log_probs[0, 0] < np.log(max(min_confidence, 1e-30)):
            break
        total = min(total, total + float(log_probs[0, 0]))
        tokens.append(int(ids[0, 0]))
        scores.append(total)
        if stop is not None and stop(len(tokens), np.array([total])):
            break
        if len(tokens) < depth:
            outputs = rows.run(np.array(tokens[-1:]), np.array([len(tokens) - 1]))
    return DraftTree.chain(tokens, scores, evidence={"log_prob": np.diff(scores, prepend=0.0)})


def sampled_chain(
    rows: ModelRows,
    root_outputs: torch.Tensor,
    context: DraftContext,
    *,
    depth: int,
    vocab_size: int,
    head: DraftHead | None = None,
) -> DraftTree:
    """Tokens drawn from q at every depth, with the q rows (Leviathan et al., arXiv 2211.17192)."""
    head = WholeHead(vocab_size) if head is None else head
    tokens: list[int] = []
    drawn: list[torch.Tensor] = []
    scores: list[float] = []
    total = 0.0
    outputs = root_outputs
    while len(tokens) < depth:
        q = head.distribution(outputs, context.sampling, depth=len(tokens) + 1)[0]
        cumulative = torch.cumsum(q.double(), dim=0)
        threshold = context.rng.random() * float(cumulative[-1])
        token = int(
            torch.searchsorted(cumulative, torch.tensor([threshold], device=q.device, dtype=torch.float64), right=True)
        )
        token = min(token, int(torch.nonzero(q)[-1]))
        total = min(total, total + float(torch.log(q[token])))
        tokens.append(token)
        drawn.append(q)
        scores.append(total)
        if len(tokens) < depth:
            outputs = rows.run(np.array(tokens[-1:]), np.array([len(tokens) - 1]))
    if not tokens:
        return DraftTree.empty()
    draft_rows = np.append(np.arange(len(tokens)), -1)
    evidence = {"log_prob": np.diff(scores, prepend=0.0)}
    return DraftTree.chain(
        tokens, scores, siblings="iid", draft_probs=torch.stack(drawn), draft_rows=draft_rows, evidence=evidence
    )


_SCALED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def without_head(model: Any) -> torch.nn.Module:
    """A view of a causal language model that gives hidden states [.., H] in place of logits; it shares every parameter
    and leaves the model as it is.

    Raises:
        ValueError: logits are more than the product with one matrix.
    """
    head = model.get_output_embeddings()
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    scaled = [name for name in _SCALED_LOGITS if getattr(config, name, None) not in (None, 1, 1.0)]
    if getattr(head, "bias", None) is not None:
        scaled.append("a bias")
    if scaled:
        raise ValueError(
            f"the head of {type(model).__name__} cannot be reduced: its logits have {' and '.join(scaled)}; "
            "use vocab 'full'"
        )
    return headless(model)
