"""Small networks that see a hidden state and say which groups of rows of a head hold the next token."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from adaptspec.names import unknown_name
from adaptspec.pretrained import load_weights, save_weights


class Router(nn.Module, ABC):
    """Scores groups of rows; a group is scored higher the likelier it holds one of the target's next tokens.

    Attributes:
        group_of: int64 [R], the group of each row, in [0, G).
        floor: int64 [F], rows that are always computed: those of the commonest tokens.
    """

    kind = ""

    def __init__(self, hidden_size: int, group_of: torch.Tensor, floor: torch.Tensor) -> None:
        super().__init__()
        for name, rows in (("group_of", group_of), ("floor", floor)):
            if rows.dim() != 1 or rows.is_floating_point() or (len(rows) and int(rows.min()) < 0):
                raise ValueError(f"{name} must be whole numbers >= 0 in one dimension, got {rows.dtype} {rows.shape}")
        if not len(group_of) or (len(floor) and int(floor.max()) >= len(group_of)):
            raise ValueError(f"floor must hold rows below {len(group_of)}, the length of group_of")
        self.hidden_size = hidden_size
        self.groups = int(group_of.max()) + 1
        self.register_buffer("group_of", group_of.to(torch.int64))
        self.register_buffer("floor", floor.to(torch.int64))
        self.group_of: torch.Tensor
        self.floor: torch.Tensor

    @abstractmethod
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [M, G] for hidden states [M, H]."""

    @property
    def row_count(self) -> int:
        """R, rows of the head that it was trained for."""
        return len(self.group_of)

    def config(self) -> dict[str, Any]:
        """What the constructor needs besides the tensors."""
        return {"hidden_size": self.hidden_size}


class CoralRouter(Router):
    """CORAL (Weng et al. 2025, 2502.16880): softmax(W2 (act(W1 h) + h)) over groups of rows of equal size."""

    kind = "coral"

    def __init__(self, hidden_size: int, group_of: torch.Tensor, floor: torch.Tensor) -> None:
        super().__init__(hidden_size, group_of, floor)
        self.first = nn.Linear(hidden_size, hidden_size, bias=False)
        self.second = nn.Linear(hidden_size, self.groups, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.second(nn.functional.silu(self.first(hidden)) + hidden)


class ClusterRouter(Router):
    """DynaSpec (2510.13847): a two-layer meta-classifier over clusters of rows; a sigmoid per cluster."""

    kind = "dynaspec"

    def __init__(self, hidden_size: int, group_of: torch.Tensor, floor: torch.Tensor, *, width: int = 256) -> None:
        super().__init__(hidden_size, group_of, floor)
        self.width = width
        self.first = nn.Linear(hidden_size, width)
        self.second = nn.Linear(width, self.groups)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.second(nn.functional.silu(self.first(hidden)))

    def config(self) -> dict[str, Any]:
        return {"hidden_size": self.hidden_size, "width": self.width}


ROUTERS: dict[str, type[Router]] = {router.kind: router for router in (CoralRouter, ClusterRouter)}


def save_router(folder: str | os.PathLike[str], router: Router, facts: Mapping[str, Any] | None = None) -> None:
    """Write a router as a weights folder; `facts` (data, steps, loss, coverage, ...) go on its card."""
    card = {**(facts or {}), "kind": router.kind, "config": router.config()}
    state = {
        name: tensor if tensor.is_floating_point() else _in_few_bytes(tensor)
        for name, tensor in router.state_dict().items()
    }
    save_weights(folder, state, card)


def _in_few_bytes(whole: torch.Tensor) -> torch.Tensor:
    """The same numbers; a router takes them as int64 again."""
    return whole.to(torch.int16 if whole.numel() and int(whole.max()) < 2**15 else torch.int32)


def load_router(folder: str | os.PathLike[str], *, kind: str) -> Router:
    """The router in a weights folder, in float32.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: a damaged one, or another kind of weights.
    """
    state, card = load_weights(folder)
    if kind not in ROUTERS:
        raise unknown_name("router", kind, ROUTERS)
    if card.get("kind") != kind:
        raise ValueError(f"{folder} must hold weights of kind {kind!r}, got {card.get('kind')!r}")
    try:
        router = ROUTERS[kind](**card["config"], group_of=state["group_of"], floor=state["floor"])
        router.load_state_dict(state)
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{folder} holds no router of kind {kind!r}: {error}") from error
    return router.eval().requires_grad_(False)
