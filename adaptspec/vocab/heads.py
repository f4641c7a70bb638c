"""The vocabulary heads that one drafter is asked with, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from adaptspec.names import unknown_name
from adaptspec.types import Observation
from adaptspec.vocab.base import HeadData, VocabHead
from adaptspec.vocab.registry import check_vocab, make_head


class VocabHeads:
    """Several `VocabHead`s over one matrix, led through a drafter's life together.

    A drafter makes it in `use_vocab`, adds the needs to its own, binds it once it knows its head, passes on `prefill`,
    `observe` and `finish`, and looks up `heads[context.vocab]` in `propose`.

    Args:
        names: for example ("full", "fr:16384").

    Raises:
        ValueError: unknown or repeated names, or none.

    >>> heads = VocabHeads(("full",))
    >>> heads.bind(torch.eye(3), vocab_size=3)
    >>> heads["full"].top(torch.tensor([[0.0, 2.0, 1.0]]), k=2, depth=1).ids.tolist()
    [[1, 2]]
    """

    def __init__(self, names: Sequence[str] = ("full",)) -> None:
        self.names = check_vocab(names)
        self._heads = {name: make_head(name) for name in self.names}

    @property
    def needs_prompt_top_k(self) -> int:
        """For `Needs.prompt_top_k`."""
        return max(head.needs_prompt_top_k for head in self._heads.values())

    @property
    def needs_top_k(self) -> int:
        """For `Needs.target_top_k`."""
        return max(head.needs_top_k for head in self._heads.values())

    @property
    def needs_top_logits(self) -> bool:
        """For `Needs.target_top_logits`."""
        return any(head.needs_top_logits for head in self._heads.values())

    def bind(
        self,
        weight: torch.Tensor,
        *,
        token_ids: torch.Tensor | None = None,
        vocab_size: int,
        keep: Sequence[int] = (),
        data: HeadData | None = None,
    ) -> None:
        """See `VocabHead.bind`."""
        for head in self._heads.values():
            head.bind(weight, token_ids=token_ids, vocab_size=vocab_size, keep=keep, data=data)

    def __getitem__(self, name: str) -> VocabHead:
        if name not in self._heads:
            raise unknown_name("vocab", name, self._heads)
        return self._heads[name]

    def __iter__(self) -> Iterator[VocabHead]:
        return iter(self._heads.values())

    def __len__(self) -> int:
        return len(self._heads)

    def prefill(self, token_ids: np.ndarray, top_ids: np.ndarray | None = None) -> None:
        """A request starts. Raises ValueError if `top_ids` is missing or narrower than what was asked for."""
        needed = self.needs_prompt_top_k
        if needed and (top_ids is None or top_ids.shape[1] < min(needed, self._vocab_size())):
            raise ValueError(f"top_ids must have {needed} columns, got {None if top_ids is None else top_ids.shape}")
        for head in self._heads.values():
            head.prefill(token_ids, top_ids if head.needs_prompt_top_k else None)

    def observe(self, observation: Observation) -> None:
        """A step was verified."""
        for head in self._heads.values():
            head.observe(observation)

    def finish(self) -> None:
        """The request ended."""
        for head in self._heads.values():
            head.finish()

    def reset(self) -> None:
        """Forget everything learnt."""
        for head in self._heads.values():
            head.reset()

    def state_dict(self) -> dict[str, Any]:
        """What was learnt over requests, by name; only heads that learn are in it."""
        return {name: state for name, head in self._heads.items() if (state := head.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`. Raises ValueError on a state of other heads, or a damaged one."""
        for name in state:
            if name not in self._heads:
                raise unknown_name("vocab in the state:", name, self._heads)
        for name, head in self._heads.items():
            head.load_state_dict(state.get(name, {}))

    def _vocab_size(self) -> int:
        return next(iter(self._heads.values())).vocab_size
