"""From steps to one number: the reduced head, the objective, and how much each step counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from adaptspec.training.batches import Batch
from adaptspec.training.losses import Objective, Targets
from adaptspec.training.unroll import Rollout

ALIGNED_TOP = 3
"""GRIFFIN (arXiv 2502.11018): a row goes on as long as the tokens it is fed were among its own most likely three."""


@dataclass(frozen=True, slots=True)
class LossSettings:
    """How steps become a loss.

    Attributes:
        objective: per row.
        steps: unrolled.
        decay: step k counts decay^k (EAGLE-3 and Medusa: 0.8).
        aligned: leave out, from step 1 on, rows fed with a token that the step before had not among its top 3, there or
            earlier (GRIFFIN's token-alignable training).
    """

    objective: Objective
    steps: int
    decay: float = 0.8
    aligned: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be >= 1, got {self.steps}")
        if not 0.0 < self.decay <= 1.0:
            raise ValueError(f"decay must be in (0, 1], got {self.decay}")


def batch_loss(
    rollout: Rollout, batch: Batch, *, head: torch.Tensor, settings: LossSettings
) -> tuple[torch.Tensor, list[float]]:
    """The loss of a batch, sum over k of decay^k times the weighted mean of step k, and these means.

    Args:
        head: [R, H], the rows of the output matrix that are computed.
    """
    weights = batch.weights
    going = torch.ones(weights.shape[:2], dtype=torch.bool, device=weights.device)
    total = head.new_zeros(())
    means = []
    for number, step in enumerate(rollout.steps(batch, settings.steps)):
        rows = step.rows((weights[:, :, number] > 0) & going)
        if not len(rows[0]):
            means.append(0.0)
            continue
        logits = step.logits(rows, head).float()
        targets = targets_of(batch, number, rows)
        predicted = wanted = None
        if settings.objective.needs_features:
            if step.feature is None:
                raise ValueError("this loss needs a drafter that predicts hidden states")
            predicted, wanted = step.feature[rows].float(), rollout.target_feature(batch, number)[rows]
        losses = settings.objective(logits, targets, predicted=predicted, wanted=wanted)
        weight = weights[:, :, number][rows]
        for other in step.also:
            losses = losses + settings.objective((other[rows] @ head.T).float(), targets)
        mean = (losses * weight).sum() / weight.sum()
        total = total + settings.decay**number * mean
        means.append(float(mean.detach()))
        if settings.aligned and number + 1 < settings.steps:
            hit = hits(logits.detach(), targets.labels, count=ALIGNED_TOP)
            going = going.index_put(rows, hit)
    return total, means


def targets_of(batch: Batch, step: int, rows: tuple[torch.Tensor, ...]) -> Targets:
    """What the target says about some rows [B, R] at a step."""
    return Targets(
        batch.top_rows[:, :, step][rows],
        batch.top_log_probs[:, :, step][rows],
        batch.inside[:, :, step][rows],
        batch.labels[:, :, step][rows],
    )


def hits(logits: torch.Tensor, labels: torch.Tensor, *, count: int) -> torch.Tensor:
    """bool [N], whether the label is among the `count` largest logits [N, R]; False for label -1. Ties count for it."""
    return ranks(logits, labels) < count


def ranks(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """int64 [N], how many logits of a row [N, R] are larger than its label's; R for label -1."""
    larger = logits > logits.gather(1, labels.clamp(min=0)[:, None])
    if logits.device.type == "cpu":  # numpy counts ten times faster than torch
        found = torch.from_numpy(np.count_nonzero(larger.numpy(), axis=1))
    else:
        found = larger.sum(dim=1)
    return torch.where(labels >= 0, found, logits.shape[1])
