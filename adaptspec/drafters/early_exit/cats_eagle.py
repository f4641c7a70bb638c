"""CATS with branches of an EAGLE drafter (arXiv 2605.11186, "CATS with EAGLE")."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from adaptspec.drafters.base import Drafter, Needs
from adaptspec.drafters.early_exit.adapted import Adapted
from adaptspec.drafters.early_exit.cats import CatsTree
from adaptspec.drafters.lookup import real_number
from adaptspec.drafters.registry import make_drafter, register_drafter
from adaptspec.trees import merge, prune, truncate
from adaptspec.types import DraftContext, DraftTree, Observation

if TYPE_CHECKING:
    from adaptspec.drafters.early_exit.adapter import Adapters
    from adaptspec.target.base import Target


@register_drafter("cats-eagle")
class CatsEagle(CatsTree):
    """The tree of `cats`, with the likely branches of an EAGLE drafter's tree in place of its least likely nodes.

    Args:
        path, branching, max_depth, bonus: see `Cats`.
        eagle: a registered drafter by name, or `name:PATH`, or a drafter object.
        min_probability: of a branch, by the product of EAGLE's probabilities along it.

    Raises:
        ValueError: also for an unknown drafter, or CATS itself.
    """

    summary = "cats and the likely branches of an EAGLE drafter (2605.11186)"

    def __init__(
        self,
        path: str | os.PathLike[str] | Adapters | None = None,
        *,
        branching: int | None = None,
        max_depth: int = 5,
        bonus: float = 2.0,
        eagle: str | Drafter = "eagle3",
        min_probability: float = 0.1,
    ) -> None:
        super().__init__(path, branching=branching, max_depth=max_depth, bonus=bonus)
        if real_number("min_probability", min_probability, 0.0, 1.0) == 0.0:
            raise ValueError(f"min_probability must be in (0, 1], got {min_probability}")
        self.eagle = make_drafter(eagle)
        if isinstance(self.eagle, Adapted):
            raise ValueError(f"eagle must be another kind of drafter, got {self.eagle.name!r}")
        self.min_probability = min_probability

    def use_vocab(self, names: Sequence[str]) -> None:
        super().use_vocab(names)
        if self.eagle.takes_vocab:
            self.eagle.use_vocab(names)

    def bind(self, target: Target) -> None:
        super().bind(target)
        self.eagle.bind(target)
        ours, theirs = self.needs, self.eagle.needs
        self.needs = Needs(
            taps=tuple(sorted({*self._exits, *theirs.taps})),
            target=True,
            target_top_k=max(ours.target_top_k, theirs.target_top_k),
            prompt_top_k=max(ours.prompt_top_k, theirs.prompt_top_k),
            target_top_logits=ours.target_top_logits or theirs.target_top_logits,
        )

    def prefill(
        self, token_ids: np.ndarray, features: Mapping[int, Any] | None = None, top_ids: np.ndarray | None = None
    ) -> None:
        super().prefill(token_ids, features, top_ids)
        wanted = [top_ids] if self.eagle.needs.prompt_top_k else []
        self.eagle.prefill(token_ids, features, *wanted)

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        if not self.eagle.takes_vocab:
            branches = self.eagle.propose(replace(context, vocab="full"), budget)
        else:
            branches = self.eagle.propose(context, budget)
        own = super().propose(context, budget)  # last, so that nothing writes behind the prefix after the trunk
        if branches.siblings != "deterministic" or not len(branches):
            return own
        likely = prune(branches, branches.scores >= math.log(self.min_probability))
        merged = truncate(merge([own, likely])[0], budget)
        steps = merged.scores - np.append(merged.scores, 0.0)[merged.parents]
        return replace(merged, evidence={"log_prob": np.minimum(steps, 0.0)})

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        self.eagle.observe(observation)

    @property
    def lag(self) -> int:
        return max(super().lag, self.eagle.lag)

    def catch_up(self) -> None:
        super().catch_up()
        self.eagle.catch_up()

    def finish(self) -> None:
        super().finish()
        self.eagle.finish()

    def reset(self) -> None:
        super().reset()
        self.eagle.reset()

    def state_dict(self) -> dict[str, Any]:
        """What vocabulary heads learnt, and under "eagle" what the other drafter did."""
        theirs = self.eagle.state_dict()
        return {**super().state_dict(), **({"eagle": theirs} if theirs else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping) or not isinstance(state.get("eagle", {}), Mapping):
            raise ValueError(f"state of drafter {self.name!r} must be a mapping, got {state!r:.80}")
        before = self.eagle.state_dict()
        self.eagle.load_state_dict(state.get("eagle", {}))
        try:
            super().load_state_dict({key: value for key, value in state.items() if key != "eagle"})
        except ValueError:
            self.eagle.load_state_dict(before)
            raise
