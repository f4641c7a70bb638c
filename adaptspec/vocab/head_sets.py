"""The vocabulary heads of a drafter with several output matrices, and their state before the matrices are known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from adaptspec.types import Observation
from adaptspec.vocab.heads import VocabHeads


class HeadSets:
    """One `VocabHeads` per output matrix of a drafter, led through its life together.

    How many matrices there are is known at `bind`. A state that is loaded before waits until then.

    Args:
        names: vocabularies, see `VocabHeads`.

    >>> sets = HeadSets(("full",))
    >>> sets.bind([torch.eye(3), torch.eye(3)], vocab_size=3)
    >>> len(sets), sets[1]["full"].rows
    (2, 3)
    """

    def __init__(self, names: Sequence[str] = ("full",)) -> None:
        self._sets = [VocabHeads(names)]
        self.names = self._sets[0].names
        self._state: list[Mapping[str, Any]] | None = None

    def bind(
        self,
        matrices: Sequence[torch.Tensor],
        *,
        token_ids: torch.Tensor | None = None,
        vocab_size: int,
        keep: Sequence[int] = (),
    ) -> None:
        """See `VocabHead.bind`. Other matrices than before begin with what was learnt only if they are as many.

        Raises:
            ValueError: also for a state loaded before that is of another number of matrices, or of other heads.
        """
        if len(self._sets) != len(matrices):
            self._sets = [VocabHeads(self.names) for _ in matrices]
        for heads, matrix in zip(self._sets, matrices, strict=True):
            heads.bind(matrix, token_ids=token_ids, vocab_size=vocab_size, keep=keep)
        if self._state is not None:
            state, self._state = self._state, None
            self._restore(state)

    @property
    def needs_prompt_top_k(self) -> int:
        """For `Needs.prompt_top_k`."""
        return self._sets[0].needs_prompt_top_k

    @property
    def needs_top_k(self) -> int:
        """For `Needs.target_top_k`."""
        return self._sets[0].needs_top_k

    @property
    def needs_top_logits(self) -> bool:
        """For `Needs.target_top_logits`."""
        return self._sets[0].needs_top_logits

    def __len__(self) -> int:
        return len(self._sets)

    def __getitem__(self, matrix: int) -> VocabHeads:
        return self._sets[matrix]

    def __iter__(self) -> Iterator[VocabHeads]:
        return iter(self._sets)

    def prefill(self, token_ids: np.ndarray, top_ids: np.ndarray | None) -> None:
        """A request starts."""
        for heads in self._sets:
            heads.prefill(token_ids, top_ids)

    def observe(self, observation: Observation) -> None:
        """A step was verified."""
        for heads in self._sets:
            heads.observe(observation)

    def finish(self) -> None:
        """The request ended."""
        for heads in self._sets:
            heads.finish()

    def reset(self) -> None:
        """Forget everything learnt."""
        self._state = None
        for heads in self._sets:
            heads.reset()

    def state_dict(self) -> dict[str, Any]:
        """{"vocab": what was learnt per matrix}; empty if nothing was."""
        states = self._state if self._state is not None else [heads.state_dict() for heads in self._sets]
        return {"vocab": list(states)} if any(states) else {}

    def load_state_dict(self, state: Mapping[str, Any], *, drafter: str, bound: bool) -> None:
        """Restore `state_dict()`, now or at the next `bind`.

        Raises:
            ValueError: a state with other keys or of another shape; once bound, also one of other heads.
        """
        if not isinstance(state, Mapping) or set(state) - {"vocab"}:
            got = ", ".join(sorted(map(str, state))) if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(f"state of drafter {drafter!r} must have no key but 'vocab', got {got}")
        states = state.get("vocab", [])
        if not isinstance(states, list) or not all(isinstance(one, Mapping) for one in states):
            raise ValueError(f"vocab of the state of drafter {drafter!r} must be a list of states, got {states!r:.80}")
        if not states:
            self._state = None
            for heads in self._sets:
                heads.load_state_dict({})
        elif bound:
            self._restore(states)
        else:
            VocabHeads(self.names).load_state_dict(states[0])  # says now what it can say
            self._state = states

    def _restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        if len(states) != len(self._sets):
            raise ValueError(f"vocab of the state must be a list of {len(self._sets)} states, got {len(states)}")
        for heads, one in zip(self._sets, states, strict=True):
            heads.load_state_dict(one)
