"""What a drafter is: it proposes a `DraftTree` for a node budget and is told what the target committed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from adaptspec.types import DraftContext, DraftTree, ExtraRows, Observation, PairedRows, Siblings

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
        prompt_top_k: the k most likely tokens after every token of the prompt; the target then computes all of the
            prompt's logits.
        target_top_logits: the logits of the `target_top_k` tokens, too.
    """

    target_top_k: int = 0
    taps: tuple[int, ...] = ()
    extra_rows: bool = False
    target: bool = False
    prompt_top_k: int = 0
    target_top_logits: bool = False


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
        takes_vocab: it has a head whose rows can be reduced, so that `DraftContext.vocab` means something to it.
        vocab: names of the vocabularies that it may be asked with, see `use_vocab`.
        weights: name of the trained weights that it takes where no path is given, "" if it needs none.
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    needs: Needs = Needs()
    siblings: Siblings = "deterministic"
    isolate: bool = True
    lag: int = 0
    takes_vocab: ClassVar[bool] = False
    vocab: tuple[str, ...] = ("full",)
    weights: ClassVar[str] = ""

    def use_vocab(self, names: Sequence[str]) -> None:
        """Be told, before `bind`, which vocabularies proposals will be asked for with (`DraftContext.vocab`).

        Raises:
            ValueError: unknown names, or the drafter has no head that could be reduced.
        """
        names = tuple(names)
        if not names or len(set(names)) < len(names):
            raise ValueError(f"vocab must be one or more different names, got {list(names)}")
        if not self.takes_vocab and names != ("full",):
            other = next(name for name in names if name != "full")
            raise ValueError(
                f"vocab of drafter {self.name!r} must be 'full', since it has no head of its own: {other!r}"
            )
        self.vocab = names

    def bind(self, target: Target) -> None:
        """Meet the target. Raise ValueError when the two do not fit (vocabulary, layers)."""

    @abstractmethod
    def prefill(
        self,
        token_ids: np.ndarray,
        features: Mapping[int, Any] | None = None,
        top_ids: np.ndarray | None = None,
    ) -> None:
        """Start a request.

        Args:
            token_ids: int64 [T], all committed tokens: the prompt and the first generated token, which is the root.
            features: per tap a tensor [T - 1, H] for the prompt positions.
            top_ids: int64 [T - 1, k], the target's k most likely tokens after every token of the prompt, most likely
                first. Handed over only to drafters that ask for it (`Needs.prompt_top_k`); others may leave it out.
        """

    @abstractmethod
    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """A tree of at most `budget` nodes and depth at most `context.max_depth`; empty to decline."""

    @abstractmethod
    def observe(self, observation: Observation) -> None:
        """Take in what one step committed."""

    def catch_up(self) -> None:
        """Work off the `lag`; called before `propose`, and timed apart from it."""

    def extra_rows(self, context: DraftContext, budget: int) -> ExtraRows | PairedRows | None:
        """Rows to add to the verify pass of this step; asked for only if `needs.extra_rows`, after `propose`. Paired
        rows are added only where they and the tree together fit into the budget."""
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
