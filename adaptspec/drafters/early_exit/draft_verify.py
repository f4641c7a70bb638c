"""Draft & Verify (arXiv 2309.08168): skipped sub-layers found by a search, and a threshold that follows acceptance."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from adaptspec.drafters.early_exit.own_layers import OwnLayers
from adaptspec.drafters.early_exit.skipped import SkippedLayers, load_skipped, middle_layers
from adaptspec.drafters.lookup import share
from adaptspec.drafters.registry import register_drafter
from adaptspec.types import DraftContext, DraftTree, Observation

if TYPE_CHECKING:
    import torch

    from adaptspec.target.hf import HFTarget

_LEARNT = ("threshold", "acceptance")
_HIGHEST = 0.99
"""Where the threshold stops rising: at 1 nothing would be drafted any more, and nothing could lower it again."""


@register_drafter("draft-verify")
class DraftVerify(OwnLayers):
    """Drafts a chain with the target minus the attention and feed-forward layers that a search found it can do without
    (`adaptspec train layers`), until the shortened model's probability for a token falls below a threshold.

    The threshold follows how much is accepted (section 4.2, equations 3 to 5): with the share r of the last draft that
    was accepted, a <- b1 a + (1 - b1) r; then t <- b2 t + (1 - b2) t', where t' = t + e if a <= `acceptance`, else
    t - e. A draft that did not end by the threshold does not lower it. It stays at most 0.99, and is kept from request
    to request.

    Args:
        path: a file of `adaptspec train layers`, or `SkippedLayers`; None leaves out every second layer of the middle
            half.
        threshold: t at the start.
        acceptance: the share of draft tokens that ought to be accepted.
        step: e.
        acceptance_memory: b1.
        threshold_memory: b2.
        max_depth: tokens drafted in a row at most, each a pass of the shortened model.

    Raises:
        ValueError: options out of range; on `bind`, a file of another target, or layers that it does not have.
    """

    summary = "the target without the sub-layers that a search found (2309.08168)"

    def __init__(
        self,
        path: str | os.PathLike[str] | SkippedLayers | None = None,
        *,
        threshold: float = 0.6,
        acceptance: float = 0.9,
        step: float = 0.01,
        acceptance_memory: float = 0.5,
        threshold_memory: float = 0.9,
        max_depth: int = 12,
    ) -> None:
        super().__init__(max_depth=max_depth)
        self.path = path
        self.start = share("threshold", threshold)
        self.acceptance = share("acceptance", acceptance)
        self.step = share("step", step)
        self.acceptance_memory = share("acceptance_memory", acceptance_memory)
        self.threshold_memory = share("threshold_memory", threshold_memory)
        self._drafts: dict[
            tuple[int, ...], bool
        ] = {}  # proposed since the last step, and whether the threshold ended it
        self._forget()

    @property
    def threshold(self) -> float:
        """The probability below which a draft ends now."""
        return self._threshold

    def _shorten(self, target: HFTarget) -> torch.nn.Module:
        if isinstance(self.path, SkippedLayers):
            return self.path.view(target)
        if self.path is not None:
            return load_skipped(self.path, target).view(target)
        middle = middle_layers(len(target.layout.layers))
        return SkippedLayers(middle, middle).view(target)

    def _min_confidence(self) -> float:
        return self._threshold

    def prefill(
        self, token_ids: np.ndarray, features: Mapping[int, Any] | None = None, top_ids: np.ndarray | None = None
    ) -> None:
        super().prefill(token_ids, features, top_ids)
        self._drafts.clear()

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        tree = super().propose(context, budget)
        if len(tree):
            ended = len(tree) < min(budget, context.max_depth, self.max_depth)
            tokens = tuple(tree.token_ids.tolist())
            self._drafts[tokens] = self._drafts.get(tokens, False) or ended
        return tree

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        drafts, self._drafts = self._drafts, {}
        verified = [draft for draft in drafts if _holds(observation.tree, draft)]
        if not verified:
            return
        draft = max(verified, key=len)  # shorter ones are its beginnings, asked for and thrown away
        committed = observation.tokens[:-1].tolist()
        accepted = 0
        while accepted < min(len(draft), len(committed)) and draft[accepted] == committed[accepted]:
            accepted += 1
        memory = self.acceptance_memory
        self._accepted = memory * self._accepted + (1.0 - memory) * accepted / len(draft)
        move = self.step if self._accepted <= self.acceptance else -self.step if drafts[draft] else 0.0
        self._threshold = min(max(self._threshold + (1.0 - self.threshold_memory) * move, 0.0), _HIGHEST)

    def finish(self) -> None:
        super().finish()
        self._drafts.clear()

    def reset(self) -> None:
        super().reset()
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """The threshold, the mean acceptance, and what vocabulary heads learnt."""
        return {**super().state_dict(), "threshold": self._threshold, "acceptance": self._accepted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in _LEARNT:
            value = state.get(name) if isinstance(state, Mapping) else None
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} of the state of drafter {self.name!r} must be in [0, 1], got {value!r}")
        super().load_state_dict({key: value for key, value in state.items() if key not in _LEARNT})
        self._threshold, self._accepted = (float(state[name]) for name in _LEARNT)
        self._drafts.clear()

    def _forget(self) -> None:
        self._threshold, self._accepted = self.start, 1.0
        self._drafts.clear()


def _holds(tree: DraftTree, draft: tuple[int, ...]) -> bool:
    """Whether the tokens are a path of the tree from the root on."""
    children = {key: node for node, key in enumerate(zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True))}
    node = -1
    return all((node := children.get((node, token), -1)) >= 0 for token in draft)
