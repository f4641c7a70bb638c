"""What drafters with language-model heads of their own share: vocabularies, and what these learn over requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from adaptspec.drafters.base import Drafter
from adaptspec.drafters.paying_levels import PayingLevels
from adaptspec.types import Observation

if TYPE_CHECKING:
    from adaptspec.vocab import HeadSets


class HeadedDrafter(Drafter):
    """A drafter whose heads compute the rows of the vocabulary that `DraftContext.vocab` names.

    Subclasses bind `_head_sets()` in `bind`, set `_bound` to what they have met, and return early while it stays so.
    """

    isolate = False
    takes_vocab = True

    def __init__(self) -> None:
        self._sets: HeadSets | None = None
        self._levels = PayingLevels()
        self._bound: tuple[Any, ...] = ()

    def use_vocab(self, names: Sequence[str]) -> None:
        super().use_vocab(names)
        if self._head_sets().names != self.vocab:  # else they stay with what they learnt
            self._sets, self._bound = None, ()
            self._head_sets()  # says which names it knows

    def observe(self, observation: Observation) -> None:
        self._head_sets().observe(observation)
        self._levels.observe(observation.tokens, verified=len(observation.tree))

    def finish(self) -> None:
        self._head_sets().finish()
        self._levels.forget()

    def reset(self) -> None:
        self._head_sets().reset()
        self._levels = PayingLevels()

    def state_dict(self) -> dict[str, Any]:
        """What vocabulary heads learnt over requests."""
        return self._head_sets().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._head_sets().load_state_dict(state, drafter=self.name, bound=bool(self._bound))

    def _head_sets(self) -> HeadSets:
        if self._sets is None:
            from adaptspec.vocab import HeadSets

            self._sets = HeadSets(self.vocab)
        return self._sets
