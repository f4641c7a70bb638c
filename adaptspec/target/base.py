"""What a target is: the model whose distribution is kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from adaptspec.types import DraftTree, ExtraRows, PairedRows


@dataclass(frozen=True, slots=True)
class Scored:
    """What one verify pass computed.

    Attributes:
        logits: [N + 1, V]; row 0 follows the last committed token, row i + 1 follows node i.
        features: per tap [N + 1, H], hidden states of the root and of every node.
        extra_logits: [E, V] for the extra rows, None without.
        top_ids: int64 [T, k], of a prefill that was asked for it, else None: the most likely tokens after every token
            of the prompt, most likely first.
        paired: [N + 1, H], hidden states of the rows paired with the root and every node (`PairedRows`), None without.
    """

    logits: torch.Tensor
    features: Mapping[int, torch.Tensor] = field(default_factory=dict)
    extra_logits: torch.Tensor | None = None
    top_ids: np.ndarray | None = None
    paired: torch.Tensor | None = None


class Target(ABC):
    """One sequence on one model. The last committed token (the root) is not in the KV cache yet: `score` runs it
    together with the draft, which is why a step without a draft costs exactly one ordinary decoding step.

    Attributes:
        vocab_size: V, the width of the logits.
        context_limit: positions the model can take, None if unlimited.
        length: tokens whose keys and values are cached (committed tokens without the root).
    """

    vocab_size: int
    context_limit: int | None
    length: int

    @abstractmethod
    def prefill(self, token_ids: torch.Tensor, *, top_k: int = 0) -> Scored:
        """Start a sequence: cache all of `token_ids` [T]. Returns logits [1, V] after the last one, and with `top_k`
        the most likely tokens after each of them, which takes a product with the whole head per token."""

    @abstractmethod
    def score(self, root: int, tree: DraftTree, extra: ExtraRows | PairedRows | None = None) -> Scored:
        """Logits after the root and after every node, in one forward pass."""

    @abstractmethod
    def commit(self, path: np.ndarray) -> None:
        """Keep the root and the nodes of `path` in the cache, forget the other rows of the last `score`."""

    @abstractmethod
    def rollback(self, length: int) -> None:
        """Forget everything cached after the first `length` tokens."""

    @abstractmethod
    def close(self) -> None:
        """Release the cache."""

    def synchronize(self) -> None:
        """Wait for the device, so that clocks read true times."""

    def tap(self, layers: tuple[int, ...]) -> Any:
        """Ask for hidden states after the given layers from now on; replaces earlier wishes."""
        if layers:
            raise ValueError(f"this target offers no hidden states, got taps {layers}")
