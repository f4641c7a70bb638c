"""TAPS (target-aware prefix selection, arXiv 2606.00487): how likely the target is to take an edge of a draft trie.

The siblings c below a trie node n at depth d have marginals p_d(c); all other tokens together have the rest. A small
network looks at each edge, and

    q(c | n) = p_d(c) exp(s_c) / (sum over siblings of p_d exp(s) + rest_n exp(o_d)),

a softmax over the siblings and one "other". s_c comes out of an MLP over projected embeddings of child and parent, an
embedding of the depth, the projected hidden state of the place, and seven numbers; o_d is one number per depth. The
published description names these inputs; the exact widths, the seven numbers, and s and o as corrections of the
marginals (both begin at zero, where q is what the backbone says) are this project's choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from adaptspec.drafters.block.backbone import Backbone
from adaptspec.drafters.cells.base import RMSNorm
from adaptspec.types import DraftTree

SCALARS = 7
_LEAST = -20.0
_TINY = 1e-9
_EPS = 1e-6
_DEPTH_WIDTH = 8


@dataclass(frozen=True, slots=True)
class ScorerConfig:
    """Shape of `PrefixScorer`.

    Attributes:
        depths: places of a block that are drafted.
        width: of each projection.
        inner: of the MLP.

    Raises:
        ValueError: a size below 1.
    """

    hidden_size: int
    depths: int
    width: int = 64
    inner: int = 128

    def __post_init__(self) -> None:
        for name in ("hidden_size", "depths", "width", "inner"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number >= 1, got {value!r}")

    def to_dict(self) -> Mapping[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


class PrefixScorer(nn.Module):
    """Corrections of edges, and of the other mass. Shapes: E edges, H hidden, W width."""

    def __init__(self, config: ScorerConfig) -> None:
        super().__init__()
        self.config = config
        hidden, width = config.hidden_size, config.width
        self.token_norm = RMSNorm(hidden, _EPS)
        self.child = nn.Linear(hidden, width, bias=False)
        self.parent = nn.Linear(hidden, width, bias=False)
        self.hidden = nn.Linear(hidden, width, bias=False)
        self.depth = nn.Embedding(config.depths, _DEPTH_WIDTH)
        self.inner = nn.Linear(3 * width + _DEPTH_WIDTH + SCALARS, config.inner)
        self.score = nn.Linear(config.inner, 1)
        self.other = nn.Embedding(config.depths, 1)
        for zero in (self.score.weight, self.score.bias, self.other.weight):
            nn.init.zeros_(zero)

    def project(self, embeddings: torch.Tensor) -> torch.Tensor:
        """[..., W] of token embeddings [..., H], for tokens as children; once per token, not once per edge."""
        return self.child(self.token_norm(embeddings))

    def forward(
        self,
        children: torch.Tensor,
        parents: torch.Tensor,
        hidden: torch.Tensor,
        depths: torch.Tensor,
        scalars: torch.Tensor,
    ) -> torch.Tensor:
        """s, [...].

        Args:
            children: [..., W], of `project`.
            parents: [..., H], embeddings of the tokens above.
            hidden: [..., H], normed hidden states of the children's places.
            depths: int64 [...], 0 for children of the root.
            scalars: [..., 7], of `edge_scalars`.
        """
        parts = [children, self.parent(self.token_norm(parents)), self.hidden(hidden), self.depth(depths)]
        joined = torch.cat([*(part.expand(*children.shape[:-1], -1) for part in parts), scalars], dim=-1)
        return self.score(functional.silu(self.inner(joined)))[..., 0]


def edge_scalars(
    *,
    log_probs: torch.Tensor,
    best: torch.Tensor,
    ranks: torch.Tensor,
    path: torch.Tensor,
    above: torch.Tensor,
    depths: torch.Tensor,
    entropy: torch.Tensor,
) -> torch.Tensor:
    """The seven numbers of edges, [..., 7], of a size that a network likes.

    Args:
        log_probs: [...], of the child's marginal.
        best: [...], of the likeliest token of its place.
        ranks: [...], of the child there, from 0.
        path: [...], the sum of the marginals' log-probabilities down to the parent; 0 for the root.
        above: [...], that of the parent alone; 0 for the root.
        depths: int64 [...], 0 for children of the root.
        entropy: [...], of the marginal, in nats.
    """
    log_probs, best = log_probs.clamp(min=_LEAST), best.clamp(min=_LEAST)
    path = path.clamp(min=2.0 * _LEAST)
    columns = [
        0.2 * log_probs,
        0.2 * (log_probs - best),
        0.5 * torch.log1p(ranks.to(log_probs.dtype)),
        0.1 * path,
        0.2 * path / depths.clamp(min=1),
        0.2 * above.clamp(min=_LEAST),
        0.2 * entropy,
    ]
    return torch.stack(torch.broadcast_tensors(*columns), dim=-1)


def edge_log_probs(
    scorer: PrefixScorer,
    trie: DraftTree,
    *,
    children: torch.Tensor,
    parents: torch.Tensor,
    hidden: torch.Tensor,
    best: np.ndarray,
    entropy: np.ndarray,
) -> np.ndarray:
    """log q of every node of a trie given its parent, float64 [N].

    Args:
        trie: of `adaptspec.trees.lattice_trie`.
        children, parents: [N, H], embeddings of the nodes' tokens and of the tokens above.
        hidden: [D, H], normed hidden states of the places.
        best: [D], log-probability of the likeliest token of each place.
        entropy: [D], of each marginal, in nats.
    """
    depths = trie.depths() - 1
    log_probs, above = trie.evidence["log_prob"], trie.parents + 1  # 0 is the root
    scores = np.concatenate([[0.0], trie.scores])
    dtype, device = hidden.dtype, hidden.device

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(device=device, dtype=torch.float32)

    places = torch.from_numpy(depths).to(device)
    scalars = edge_scalars(
        log_probs=tensor(log_probs),
        best=tensor(best[depths]),
        ranks=tensor(trie.evidence["rank"]),
        path=tensor(scores[above]),
        above=tensor(np.concatenate([[0.0], log_probs])[above]),
        depths=places,
        entropy=tensor(entropy[depths]),
    )
    corrections = scorer(
        scorer.project(children.to(dtype)), parents.to(dtype), hidden[places], places, scalars.to(dtype)
    )
    masses = np.exp(log_probs)
    rest = np.maximum(1.0 - np.bincount(above, masses, minlength=len(trie) + 1), _TINY)
    # The place below a node is one further; nodes of the last place have no children and need no other mass.
    below = np.concatenate([[0], np.minimum(depths + 1, scorer.config.depths - 1)])
    other = np.log(rest) + scorer.other.weight.float().cpu().numpy()[below, 0].astype(np.float64)
    logits = log_probs + corrections.double().cpu().numpy()
    total = np.exp(other)
    np.add.at(total, above, np.exp(logits))
    return np.minimum(logits - np.log(total)[above], 0.0)


class TapsModel(nn.Module):
    """A backbone and the scorer of its tries."""

    def __init__(self, model: Backbone, scorer: PrefixScorer) -> None:
        super().__init__()
        config = scorer.config
        if (config.hidden_size, config.depths) != (model.config.hidden_size, model.config.block_size - 1):
            raise ValueError(
                f"hidden_size and depths of the scorer must be the backbone's {model.config.hidden_size} and "
                f"{model.config.block_size - 1}, got {config.hidden_size} and {config.depths}"
            )
        self.model = model
        self.scorer = scorer
