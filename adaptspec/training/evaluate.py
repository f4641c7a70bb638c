"""How well a drafter would do on held-out texts, along its own recursion."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from adaptspec.training.batches import Batch
from adaptspec.training.losses import Targets, acceptance
from adaptspec.training.step_losses import ranks, targets_of
from adaptspec.training.unroll import Rollout

TOPS = (1, 3, 8)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Shares of held-out answer positions, per depth, with the text's own tokens fed.

    Attributes:
        top1, top3, top8: the target's most likely token is among that many of the drafter's.
        alpha: sum of min(p, q), the acceptance of sampling at temperature 1 (estimated from the target's top tokens).
        length: of a greedy chain that ends at its first miss, bonus token included.
        length8: the same with the drafter's 8 best per depth, an upper bound for narrow trees.
        positions: rows looked at.
    """

    top1: tuple[float, ...]
    top3: tuple[float, ...]
    top8: tuple[float, ...]
    alpha: tuple[float, ...]
    length: float
    length8: float
    positions: int

    @property
    def score(self) -> float:
        """What training is stopped by: the mean of both lengths, since drafts are chains and trees."""
        return 0.5 * (self.length + self.length8)

    @property
    def drawn_length(self) -> float:
        """Expected length of a chain drawn from q at temperature 1, bonus token included, were depths independent:
        1 + sum over d of alpha_1 .. alpha_d. For drafters whose probabilities matter, not which token is first."""
        total, product = 1.0, 1.0
        for alpha in self.alpha:
            product *= alpha
            total += product
        return total

    def to_dict(self) -> dict[str, Any]:
        """Plain values, rounded, for cards."""
        found = asdict(self)
        for name in ("top1", "top3", "top8", "alpha"):
            found[name] = [round(value, 4) for value in found[name]]
        return {**found, "length": round(self.length, 4), "length8": round(self.length8, 4)}


@torch.no_grad()
def evaluate(
    rollout: Rollout, batches: Iterable[Batch], *, head: torch.Tensor, row_of: torch.Tensor, depth: int
) -> HeldOut:
    """Run `depth` steps over batches whose weights mark the positions that count.

    Args:
        head: [R, H], the rows of the output matrix that are computed.
        row_of: int64 [V], the row of each token of the vocabulary, -1 for none.

    Raises:
        ValueError: no position counts.
    """
    training = rollout.module.training
    rollout.module.eval()
    found = torch.zeros((len(TOPS) + 1, depth), dtype=torch.float64)
    counts = torch.zeros(depth, dtype=torch.float64)
    lengths = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        going = [torch.ones(batch.weights.shape[:2], dtype=torch.bool, device=head.device) for _ in range(2)]
        for number, step in enumerate(rollout.steps(batch, depth)):
            # Drafts begin at answer positions, also where a later step would be the first to reach the answer.
            rows = step.rows((batch.weights[:, :, number] > 0) & (batch.weights[:, :, 0] > 0))
            logits = step.logits(rows, head).float()
            # What counts is the target's own choice, not the token that was drawn.
            wanted = row_of[batch.argmax[:, :, number][rows]]
            rank = ranks(logits, wanted)
            hit = [rank < count for count in TOPS]
            targets: Targets = targets_of(batch, number, rows)
            for i, values in enumerate([*hit, acceptance(logits, targets)]):
                found[i, number] += float(values.double().sum())
            counts[number] += len(rows[0])
            for i, which in enumerate((0, len(TOPS) - 1)):
                here = torch.zeros_like(going[i])
                going[i] = here.index_put(rows, going[i][rows] & hit[which])
                lengths[i] += float(going[i].sum())
    rollout.module.train(training)
    if not counts[0]:
        raise ValueError("no held-out position counts: the held-out answers are too short")
    shares = found / counts.clamp(min=1)
    return HeldOut(
        *(tuple(row.tolist()) for row in shares),
        length=1.0 + float(lengths[0] / counts[0]),
        length8=1.0 + float(lengths[1] / counts[0]),
        positions=int(counts[0]),
    )
