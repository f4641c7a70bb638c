"""The loop: batches, losses, a schedule that ends with the budget, held-out checks, and checkpoints to go on from."""

from __future__ import annotations

import math
import pickle
import time
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from adaptspec.files import whole_file
from adaptspec.names import unknown_name
from adaptspec.training.batches import Batch, Batches
from adaptspec.training.evaluate import HeldOut, evaluate
from adaptspec.training.optimisers import Optimisers, rate_factor
from adaptspec.training.step_losses import LossSettings, batch_loss
from adaptspec.training.unroll import Rollout

CHECKPOINT = "checkpoint.pt"
PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """How long and how fast.

    Attributes:
        minutes, steps: when to end; exactly one of them. With minutes the learning rate follows the clock, so only runs
            by steps can be repeated exactly.
        evaluations: held-out checks over the run, the last at its end.
        patience: end early when so many checks in a row brought nothing; the best weights are kept in any case.
        checkpoint_seconds: between checkpoints.
        clip: largest norm of the gradient.
        optimiser, lr, vector_lr, weight_decay: see `Optimisers`.
        precision: of matrix products: "float32", or "bfloat16" with weights and sums kept in float32, several times
            faster where the processor multiplies bfloat16. Checks before the last then look at rounded logits.
    """

    minutes: float | None = None
    steps: int | None = None
    evaluations: int = 10
    patience: int = 4
    checkpoint_seconds: float = 60.0
    clip: float = 1.0
    optimiser: str = "muon"
    lr: float = 0.02
    vector_lr: float = 1e-3
    weight_decay: float = 0.0
    precision: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise ValueError("give either minutes or steps")
        if self.minutes is not None and not 0.0 < self.minutes < math.inf:
            raise ValueError(f"minutes must be > 0 and finite, got {self.minutes}")
        if self.precision not in PRECISIONS:
            raise unknown_name("precision", self.precision, PRECISIONS)
        for name, least in (("steps", 1), ("evaluations", 1), ("patience", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be >= {least}, got {value}")
        for name in ("checkpoint_seconds", "clip", "lr", "vector_lr"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")


@dataclass(slots=True)
class Progress:
    """Where a run is; all of it is in checkpoints.

    Attributes:
        step: optimiser steps made.
        epoch, batch: the next batch.
        positions: rows learnt from, first steps only.
        seconds: of training, held-out checks included.
        loss: running mean of the last losses, None before the first.
        history: per check its step, seconds, loss and held-out figures.
        best: held-out figures of the best weights, None before the first check.
        stale: checks since then.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    positions: int = 0
    seconds: float = 0.0
    loss: float | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Any] | None = None
    best_score: float = -math.inf
    stale: int = 0

    @property
    def positions_per_second(self) -> float:
        """Rows learnt from per second."""
        return self.positions / self.seconds if self.seconds else 0.0


class Trainer:
    """Trains one drafter.

    Everything random is a function of the seed and the step, so a checkpoint is weights, optimisers and `Progress`,
    and a run that was killed goes on exactly as it would have.

    Args:
        rollout: the drafter.
        head: [R, H], rows of the target's output matrix.
        loss: see `LossSettings`.
        training, held_out: batches; the weights of held-out ones mark the positions that count.
        row_of: int64 [V], the row of each token, -1 for none.
        depth: steps looked at on held-out texts.
        folder: where checkpoints go.
        identity: plain values that a checkpoint must have been made with.
        by_alpha: the best weights are those of the largest `HeldOut.drawn_length`, not of the largest `HeldOut.score`.
        report: called after every step with the progress and the share of the run that is over.
    """

    def __init__(
        self,
        rollout: Rollout,
        *,
        head: torch.Tensor,
        loss: LossSettings,
        settings: TrainingSettings,
        training: Batches,
        held_out: Batches,
        row_of: torch.Tensor,
        depth: int,
        folder: str | Path,
        identity: dict[str, Any] | None = None,
        by_alpha: bool = False,
        report: Callable[[Progress, float], None] = lambda progress, share: None,
    ) -> None:
        if training.steps < loss.steps or held_out.steps < depth:
            raise ValueError(
                f"batches hold {training.steps} and {held_out.steps} steps, {loss.steps} and {depth} are needed"
            )
        self.rollout, self.loss, self.settings = rollout, loss, settings
        self.training, self.held_out = training, held_out
        self.row_of, self.depth, self.folder, self.report = row_of, depth, Path(folder), report
        self._head = head
        self._by_alpha = by_alpha
        self._identity = {**(identity or {}), "settings": asdict(settings), "loss": _plain(loss)}
        self.optimisers = Optimisers(
            rollout.module,
            kind=settings.optimiser,
            lr=settings.lr,
            vector_lr=settings.vector_lr,
            decay=settings.weight_decay,
            precision=settings.precision,
        )
        self.progress = Progress()
        self._best: dict[str, torch.Tensor] = {}

    def run(self) -> Progress:
        """Train to the end of the budget, or until it stops getting better; the module then has its best weights.

        Raises:
            ValueError: a checkpoint of another run in the folder, or a loss that is NaN or infinite.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / CHECKPOINT).is_file():
            self._load()
        progress = self.progress
        started, before = time.monotonic(), progress.seconds
        saved = started
        self.rollout.module.train()
        if not progress.history:
            self._check()
        while (share := self._share()) < 1.0 and progress.stale < self.settings.patience:
            order = self.training.order(seed=self.settings.seed, epoch=progress.epoch)
            batch = replace(self.training.make(order[progress.batch]), draw=(self.settings.seed, progress.step))
            self._step(batch, rate_factor(share))
            progress.batch += 1
            if progress.batch == len(order):
                progress.epoch, progress.batch = progress.epoch + 1, 0
            progress.seconds = before + time.monotonic() - started
            share = self._share()
            if share >= min(1.0, len(progress.history) / self.settings.evaluations):
                self._check()
                progress.seconds = before + time.monotonic() - started
            if time.monotonic() - saved >= self.settings.checkpoint_seconds:
                self.save_checkpoint()
                saved = time.monotonic()
            self.report(progress, share)
        self.rollout.module.load_state_dict(self._best)
        self.rollout.module.eval()
        if self.settings.precision != "float32":
            progress.best = self._evaluate().to_dict()
        return progress

    def _share(self) -> float:
        """How much of the budget is used up."""
        if self.settings.steps is not None:
            return self.progress.step / self.settings.steps
        assert self.settings.minutes is not None
        return self.progress.seconds / (60.0 * self.settings.minutes)

    def _step(self, batch: Batch, factor: float) -> None:
        progress = self.progress
        with self._products():
            loss, means = batch_loss(self.rollout, batch, head=self._head, settings=self.loss)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise ValueError(
                f"the loss became {value} at step {progress.step} (means per unrolled step: {means}); lower lr = "
                f"{self.settings.lr}, or look at the features"
            )
        progress.step += 1
        if loss.requires_grad:
            self.optimisers.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.rollout.module.parameters(), self.settings.clip)
            if not torch.isfinite(norm):
                raise ValueError(f"the gradient became {float(norm)} at step {progress.step}; lower lr")
            self.optimisers.step(factor)
        progress.positions += batch.size
        progress.loss = value if progress.loss is None else 0.95 * progress.loss + 0.05 * value

    def _check(self) -> HeldOut:
        """Look at held-out texts; keep the weights if they are the best so far."""
        progress = self.progress
        with self._products():
            found = self._evaluate()
        figures = found.to_dict()
        progress.history.append(
            {"step": progress.step, "seconds": round(progress.seconds, 1), "loss": progress.loss, **figures}
        )
        progress.stale += 1
        score = found.drawn_length if self._by_alpha else found.score
        if score > progress.best_score:
            progress.best, progress.best_score, progress.stale = figures, score, 0
            self._best = {name: tensor.detach().clone() for name, tensor in self.rollout.module.state_dict().items()}
        return found

    def _evaluate(self) -> HeldOut:
        return evaluate(self.rollout, self.held_out.all(), head=self._head, row_of=self.row_of, depth=self.depth)

    def _products(self) -> torch.autocast:
        """Matrix products in here are of the precision that is set."""
        reduced = self.settings.precision == "bfloat16"
        return torch.autocast(self._head.device.type, dtype=torch.bfloat16, enabled=reduced)

    def save_checkpoint(self) -> None:
        """Write all that `run` needs to go on."""
        state = {
            "identity": self._identity,
            "module": self.rollout.module.state_dict(),
            "best": self._best,
            "optimisers": self.optimisers.state_dict(),
            "progress": asdict(self.progress),
        }
        with whole_file(self.folder / CHECKPOINT) as file:
            torch.save(state, file)

    def _load(self) -> None:
        path = self.folder / CHECKPOINT
        if not zipfile.is_zipfile(path):
            raise ValueError(f"{path} is damaged; delete it to begin anew")
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, pickle.UnpicklingError) as error:
            raise ValueError(f"{path} is damaged; delete it to begin anew: {error}") from error
        if not isinstance(state, dict) or "identity" not in state:
            raise ValueError(f"{path} is no checkpoint of a training run")
        for name, value in self._identity.items():
            if state["identity"].get(name) != value:
                raise ValueError(
                    f"{path} is of a run with {name} = {state['identity'].get(name)!r}, this one has {value!r}; delete "
                    "it to begin anew, or choose another folder"
                )
        self.rollout.module.load_state_dict(state["module"])
        self.optimisers.load_state_dict(state["optimisers"])
        self._best = state["best"]
        self.progress = Progress(**state["progress"])


def _plain(loss: LossSettings) -> dict[str, Any]:
    return {
        "name": loss.objective.name,
        "eta": loss.objective.eta,
        "steps": loss.steps,
        "decay": loss.decay,
        "aligned": loss.aligned,
    }
