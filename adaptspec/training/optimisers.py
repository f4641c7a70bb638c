"""Muon for matrices, AdamW for the rest, and the learning rate over a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Momentum whose direction is made orthogonal (Jordan et al. 2024, "Muon: an optimizer for hidden layers").

    m = momentum * m + g; the step is -lr * scale * orthogonal(g + momentum * m) with scale = sqrt(max(1, rows /
    columns)), where the nearest semi-orthogonal matrix is approached by five Newton-Schulz iterations with a quintic
    polynomial. Weight decay is decoupled.

    Args:
        parameters: matrices only.
        precision: of the iterations, float32 or bfloat16 (as published).

    Raises:
        ValueError: a parameter that is no matrix, or numbers out of range.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        precision: torch.dtype = torch.float32,
    ) -> None:
        if not lr > 0.0 or not 0.0 <= momentum < 1.0 or weight_decay < 0.0:
            raise ValueError(
                f"lr must be > 0, momentum in [0, 1) and weight_decay >= 0, got {lr}, {momentum}, {weight_decay}"
            )
        parameters = list(parameters)
        for parameter in parameters:
            if parameter.dim() != 2:
                raise ValueError(f"Muon takes matrices, got a parameter of shape {list(parameter.shape)}")
        self._precision = precision
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                average = state["momentum"].mul_(group["momentum"]).add_(parameter.grad)
                ahead = parameter.grad.add(average, alpha=group["momentum"])
                direction = orthogonal(ahead.to(self._precision)).to(parameter.dtype)
                rows, columns = parameter.shape
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                parameter.add_(direction, alpha=-group["lr"] * math.sqrt(max(1.0, rows / columns)))


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Singular values moved near 1 (0.7 to 1.2), singular vectors kept."""
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(_ITERATIONS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if tall else x


class Optimisers:
    """Both optimisers over one module; biases, norms and embeddings go to AdamW.

    Args:
        kind: "muon", or "adamw" for everything.
        lr: of Muon, or of AdamW where that does everything.
        vector_lr: of AdamW for what is no matrix.
        precision: "float32" or "bfloat16", of Muon's iterations.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        kind: str = "muon",
        lr: float = 0.02,
        vector_lr: float = 1e-3,
        decay: float = 0.0,
        precision: str = "float32",
    ) -> None:
        if kind not in ("muon", "adamw"):
            raise ValueError(f"optimiser must be 'muon' or 'adamw', got {kind!r}")
        embeddings = {id(p) for part in module.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}
        trained = [p for p in module.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.dim() == 2 and id(p) not in embeddings]
        chosen = {id(p) for p in matrices}
        others = [p for p in trained if id(p) not in chosen]
        self._all: list[torch.optim.Optimizer] = []
        if kind == "muon" and matrices:
            self._all.append(Muon(matrices, lr=lr, weight_decay=decay, precision=getattr(torch, precision)))
        elif matrices:
            self._all.append(torch.optim.AdamW(matrices, lr=lr, betas=(0.9, 0.95), weight_decay=decay))
        if others:
            self._all.append(torch.optim.AdamW(others, lr=vector_lr, betas=(0.9, 0.95), weight_decay=0.0))
        self._rates = [[group["lr"] for group in optimiser.param_groups] for optimiser in self._all]

    def step(self, factor: float) -> None:
        """One step at `factor` times the learning rates."""
        for optimiser, rates in zip(self._all, self._rates, strict=True):
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = factor * rate
            optimiser.step()

    def zero_grad(self) -> None:
        for optimiser in self._all:
            optimiser.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimiser.state_dict() for optimiser in self._all]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for optimiser, state in zip(self._all, states, strict=True):
            optimiser.load_state_dict(state)


def rate_factor(progress: float, *, warmup: float = 0.05, floor: float = 0.02) -> float:
    """Learning rate over a run, as a share of its peak: up in a line, then down along a cosine to `floor`.

    Args:
        progress: in [0, 1], how much of the run is over.
    """
    if progress < warmup:
        return max(floor, progress / warmup)
    over = min(1.0, (progress - warmup) / (1.0 - warmup))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * over))
