"""What a drafter is: it proposes a `DraftTree` for a node budget and is told what the target committed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from adaptspec.types import DraftContext, DraftTree, ExtraRows, Observation, Siblings

if TYPE_CHECKING:
    from adaptspec.target.base import Target


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter needs from the target beyond the committed tokens.

    Attributes:
        target_top_k: the k most likely tokens after every verified row, 0 for none.
        taps: decoder layers whose output hidden states are wanted; `k` means after k layers.
        extra_rows: the drafter adds rows of its own to the verify pass (`Drafter.extra_rows`).
        target: the drafter runs the target's own layers and keeps the `Target` that `bind` hands it.
    """

    target_top_k: int = 0
    taps: tuple[int, ...] = ()
    extra_rows: bool = False
    target: bool = False


class Drafter(ABC):
    """Life of a drafter: `bind` once per target; then per request `prefill`, any number of `propose` / `observe`, and
    `finish`. What was learnt over requests stays until `reset`.

    A drafter that has no evidence declines with `DraftTree.empty()`. `propose` must not change what later calls return
    beyond its own caches: it may be called and its tree thrown away.

    Class attributes:
        needs: what to hand to `observe` besides tokens.
        siblings: how `propose` chooses siblings when the target samples; at temperature 0 every tree is deterministic.
        isolate: run `propose` in a watched thread, so that a call that never returns is set aside. True unless a
            drafter is known not to block, which saves the hand-over (about 0.05 ms).
        lag: tokens that it must catch up on before its next proposal because it was not asked for some steps. What a
            proposal at every step takes anyway does not count. Drafters with caches of their own make it a property.
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    needs: Needs = Needs()
    siblings: Siblings = "deterministic"
    isolate: bool = True
    lag: int = 0

    def bind(self, target: Target) -> None:
        """Meet the target. Raise ValueError when the two do not fit (vocabulary, layers)."""

    @abstractmethod
    def prefill(self, token_ids: np.ndarray, features: Mapping[int, Any] | None = None) -> None:
        """Start a request.

        Args:
            token_ids: int64 [T], all committed tokens: the prompt and the first generated token, which is the root.
            features: per tap a tensor [T - 1, H] for the prompt positions.
        """

    @abstractmethod
    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """A tree of at most `budget` nodes and depth at most `context.max_depth`; empty to decline."""

    @abstractmethod
    def observe(self, observation: Observation) -> None:
        """Take in what one step committed."""

    def catch_up(self) -> None:
        """Work off the `lag`; called before `propose`, and timed apart from it."""

    def extra_rows(self, context: DraftContext, budget: int) -> ExtraRows | None:
        """Rows to add to the verify pass of this step; asked for only if `needs.extra_rows`."""
        return None

    def finish(self) -> None:
        """The request ended; move what is worth keeping to stores shared by later requests."""

    def reset(self) -> None:
        """Forget everything learnt."""

    def state_dict(self) -> dict[str, Any]:
        """What was learnt over requests, as plain Python and numpy values; empty if nothing is."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`. Raises ValueError on a foreign or damaged state."""
        if state:
            raise ValueError(f"drafter {self.name!r} keeps no state, got the keys {', '.join(sorted(state))}")
