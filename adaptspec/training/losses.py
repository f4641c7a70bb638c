"""What a drafter is trained to make small, per row, against the target's most likely tokens.

The head of training has R rows S (the most frequent tokens); q is the softmax over them. Of the target's p the k most
likely tokens are known exactly, and p(S). Tokens of S that are not among the k are one bucket, of mass p(S) minus the
listed ones, on both sides. With all tokens listed every formula is exact; with fewer, merging tokens into a bucket can
only make KL smaller and alpha larger.

Mass of p outside S cannot be drafted whatever q is. By the chain rule
    KL(p || full q) = KL of the two masses of S  +  p(S) KL(p given S || q)  +  what the other rows decide,
so the part that these rows decide is p(S) KL(p given S || q), and that is the KL here. alpha counts mass of S alone,
because that is what is accepted: p is not renormalised in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from adaptspec.names import unknown_name

_SMALLEST = 1e-6
"""Below this a bucket counts as empty: differences of numbers near 1 are no better in float32."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What the target says at N rows.

    Attributes:
        rows: int64 [N, k], rows of the head of its most likely tokens, most likely first; -1: the token has no row.
        log_probs: [N, k], over the whole vocabulary.
        inside: [N], p(S).
        labels: int64 [N], the row of the token that was written; -1: it has no row.
    """

    rows: torch.Tensor
    log_probs: torch.Tensor
    inside: torch.Tensor
    labels: torch.Tensor


def cross_entropy(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    """-log q(token that was written), [N]; 0 where that token has no row."""
    known = targets.labels >= 0
    picked = logits.gather(1, targets.labels.clamp(min=0)[:, None])[:, 0]
    return (logits.logsumexp(dim=1) - picked) * known


def kl(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    """p(S) KL(p given S || q) = sum_v p_v log(p_v / (p(S) q_v)) over S, [N]."""
    log_q, q_rest, p, p_rest = _masses(logits, targets)
    inside = targets.inside.clamp(min=_SMALLEST)
    listed = torch.where(p > 0, p * (p.clamp(min=1e-30).log() - inside.log()[:, None] - log_q), 0.0).sum(dim=1)
    rest = p_rest * (p_rest.clamp(min=_SMALLEST).log() - inside.log() - q_rest.clamp(min=_SMALLEST).log())
    return listed + rest


def acceptance(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    """alpha = sum_v min(p_v, q_v), [N]: how often a token drawn from q is accepted (arXiv 2211.17192)."""
    log_q, q_rest, p, p_rest = _masses(logits, targets)
    return torch.minimum(p, log_q.exp()).sum(dim=1) + torch.minimum(p_rest, q_rest)


def lk_alpha(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    """-log alpha, [N] (LK losses, arXiv 2602.23881)."""
    return -acceptance(logits, targets).clamp(min=_SMALLEST).log()


def lk_lambda(logits: torch.Tensor, targets: Targets, *, eta: float = 3.0) -> torch.Tensor:
    """lambda KL + (1 - lambda)(1 - alpha) with lambda = exp(-eta alpha), no gradient through lambda; [N].

    KL leads while the drafter is bad, where 1 - alpha hardly has a gradient, and the acceptance once it is good. Public
    code takes eta = 3 and eta = 1 (arXiv 2602.23881).
    """
    if not 0.0 <= eta < math.inf:
        raise ValueError(f"eta must be >= 0 and finite, got {eta}")
    alpha = acceptance(logits, targets)
    share = torch.exp(-eta * alpha.detach())
    return share * kl(logits, targets) + (1.0 - share) * (1.0 - alpha)


def top_cross_entropy(logits: torch.Tensor, targets: Targets, *, count: int = 10) -> torch.Tensor:
    """-sum of p_v log q_v over the target's `count` most likely tokens, [N] (HASS, arXiv 2408.15766)."""
    if not 1 <= count <= targets.rows.shape[1]:
        raise ValueError(f"count must be in [1, {targets.rows.shape[1]}], got {count}")
    log_q, _, p, _ = _masses(logits, targets)
    return -(p * log_q)[:, :count].sum(dim=1)


def feature_distance(predicted: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Smooth L1 (0.5 d^2 below |d| = 1, |d| - 0.5 above), the mean over the features; [N, H] -> [N]."""
    return functional.smooth_l1_loss(predicted, wanted, reduction="none").mean(dim=1)


def _masses(logits: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """log q and p of the listed tokens [N, k] (0 and 0 for those without a row), and both masses of the bucket [N]."""
    known = targets.rows >= 0
    log_q = logits.gather(1, targets.rows.clamp(min=0)) - logits.logsumexp(dim=1, keepdim=True)
    q_rest = (1.0 - (log_q.exp() * known).sum(dim=1)).clamp(min=0.0)
    p = targets.log_probs.exp() * known
    p_rest = (targets.inside - p.sum(dim=1)).clamp(min=0.0)
    # -inf would turn min(0, q) and 0 log q into what they are not.
    return torch.where(known, log_q, -60.0), q_rest, p, p_rest


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss by name, with the weights of its parts.

    "ce", "kl", "lk-alpha", "lk-lambda" look at the distribution alone. "feature" is EAGLE's: smooth L1 of the predicted
    hidden state + 0.1 KL (arXiv 2401.15077; its cross-entropy with p differs from KL by a constant). "griffin" adds
    0.5 times the cross-entropy of the top 10 (arXiv 2502.11018).

    Raises:
        ValueError: unknown name, or eta out of range.
    """

    name: str
    eta: float = 3.0

    def __post_init__(self) -> None:
        if self.name not in OBJECTIVES:
            raise unknown_name("loss", self.name, OBJECTIVES)
        if not 0.0 <= self.eta < math.inf:
            raise ValueError(f"eta must be >= 0 and finite, got {self.eta}")

    @property
    def needs_features(self) -> bool:
        """The predicted hidden state is compared with the target's."""
        return self.name in ("feature", "griffin")

    def __call__(
        self,
        logits: torch.Tensor,
        targets: Targets,
        *,
        predicted: torch.Tensor | None = None,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Loss per row, [N], of logits [N, R] and, where needed, hidden states [N, H]."""
        if self.name == "lk-lambda":
            return lk_lambda(logits, targets, eta=self.eta)
        if not self.needs_features:
            return OBJECTIVES[self.name](logits, targets)
        assert predicted is not None and wanted is not None
        loss = feature_distance(predicted, wanted) + 0.1 * kl(logits, targets)
        if self.name == "griffin":
            loss = loss + 0.5 * top_cross_entropy(logits, targets, count=min(10, targets.rows.shape[1]))
        return loss


OBJECTIVES: dict[str, Callable[..., torch.Tensor]] = {
    "ce": cross_entropy,
    "kl": kl,
    "lk-alpha": lk_alpha,
    "lk-lambda": lk_lambda,
    "feature": feature_distance,
    "griffin": feature_distance,
}
"""Losses by name; those on features are put together by `Objective`."""
