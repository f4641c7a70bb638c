"""Groups of rows of equal size, of which a router picks a few."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from adaptspec.vocab.registry import register_vocab_head
from adaptspec.vocab.routed import RoutedHead, read_number_and_path

ACTIVE = 3


@register_vocab_head("coral")
class CoralHead(RoutedHead):
    """CORAL (Weng et al. 2025, 2502.16880): the `active` groups to which the router gives most.

    "coral" computes 3 groups, "coral:2" fewer; "coral:FOLDER" and "coral:2:FOLDER" take a router of one's own.
    """

    summary = "groups of rows that a trained router picks: coral, coral:GROUPS or coral:FOLDER"

    def __init__(self, name: str, active: int = ACTIVE, path: Path | None = None) -> None:
        super().__init__(name, path)
        if active < 1:
            raise ValueError(f"vocab {name!r} must compute at least 1 group, got {active}")
        self.active = active

    @classmethod
    def parse(cls, name: str, argument: str) -> CoralHead:
        active, path = read_number_and_path(argument)
        return cls(name, ACTIVE if active is None else active, path)

    def _bound_groups(self) -> None:
        if self.active > len(self.sizes):
            raise ValueError(f"vocab {self.name!r} must compute at most {len(self.sizes)} groups, got {self.active}")

    @property
    def rows(self) -> int:
        if self._router is None:
            return 0
        return len(self._always) + int(np.sort(self.sizes)[-self.active :].sum())

    def _scores(self, outputs: torch.Tensor) -> torch.Tensor:
        return torch.softmax(outputs.float(), dim=-1)

    def _pick(self, scores: np.ndarray, *, depth: int) -> np.ndarray:
        return np.argsort(-scores, kind="stable")[: self.active]
