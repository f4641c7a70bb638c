"""TreeFlash (arXiv 2606.03819): what a block's row would have said had it known the token before its own.

With h the un-normed hidden state of a place, e the embedding of the token before it and n the backbone's last norm,

    h' = n(h + W_d (silu(g) * u)),    [u; g] = W_ug [rms(e); n(h)] + b,

so that softmax(head h') approximates the distribution given that token, out of one backbone pass for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from adaptspec.drafters.block.backbone import Backbone
from adaptspec.drafters.cells.base import RMSNorm

_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class TransitionConfig:
    """Shape of `TransitionCorrection`.

    Raises:
        ValueError: a size below 1.
    """

    hidden_size: int
    intermediate_size: int

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number >= 1, got {value!r}")

    def to_dict(self) -> Mapping[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


class TransitionCorrection(nn.Module):
    """The correction; it begins at zero. Parameter names are those of published checkpoints.

    >>> module = TransitionCorrection(TransitionConfig(hidden_size=8, intermediate_size=16))
    >>> bool((module(torch.ones(3, 8), torch.ones(3, 8)) == 0).all())
    True
    """

    def __init__(self, config: TransitionConfig) -> None:
        super().__init__()
        self.config = config
        self.ug = nn.Linear(2 * config.hidden_size, 2 * config.intermediate_size)
        self.d = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.norm = RMSNorm(config.hidden_size, _EPS)
        nn.init.zeros_(self.d.weight)

    def forward(self, before: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """What is added to the un-normed hidden states.

        Args:
            before: [..., H], embeddings of the tokens before.
            normed: [..., H], normed hidden states of the places.
        """
        u, g = self.ug(torch.cat([self.norm(before), normed], dim=-1)).chunk(2, dim=-1)
        return self.d(functional.silu(g) * u)


class TreeFlashModel(nn.Module):
    """A backbone and the correction on it."""

    def __init__(self, model: Backbone, ar_approximation: TransitionCorrection) -> None:
        super().__init__()
        if ar_approximation.config.hidden_size != model.config.hidden_size:
            raise ValueError(
                f"hidden_size of the correction must be the backbone's {model.config.hidden_size}, "
                f"got {ar_approximation.config.hidden_size}"
            )
        self.model = model
        self.ar_approximation = ar_approximation

    def corrected(self, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """What the head multiplies, [..., H], for un-normed hidden states and embeddings of the tokens before."""
        return self.model.norm(hidden + self.ar_approximation(before, self.model.norm(hidden)))
