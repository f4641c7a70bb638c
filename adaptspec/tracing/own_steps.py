"""Drafters that learn from verified trees, recorded along the steps that they would have made themselves."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from adaptspec.drafters import Drafter, Needs
from adaptspec.types import ROOT, DraftContext, DraftTree, Observation, Verdict

if TYPE_CHECKING:
    from adaptspec.target.base import Target


class OwnSteps(Drafter):
    """Lets a drafter live through its own steps while the text is committed one token at a time.

    What such a drafter knows depends on which trees were verified, so it is played as a fixed arm is live: where one of
    its steps begins its proposal is verified; where that step ends it is told of it, all at once, as a `Session` tells
    it. At the positions in between it is asked, too, but may not know more than the text so far: the pass at the step's
    begin has already seen the target's word on all of the accepted path. There a copy answers that has been told of
    each committed token and of the target's top tokens at the root.

    Args:
        drafter: can be copied.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.name = drafter.name  # type: ignore[misc]  # a class's name elsewhere; here it is the wrapped drafter's
        self.siblings = drafter.siblings
        self.isolate = drafter.isolate
        self._begin_step()

    def _begin_step(self) -> None:
        self._tree = DraftTree.empty()
        self._rows = np.zeros(1, np.int64)
        self._top_ids: np.ndarray | None = None
        self._tokens: list[int] = []
        self._path: list[int] = []
        self._untold: list[Observation] = []
        self._between: Drafter | None = None

    @property
    def beginning(self) -> bool:
        """Whether the next proposal is the one that a step of this drafter verifies."""
        return not self._tokens

    @property
    def needs(self) -> Needs:  # type: ignore[override]  # some drafters know only after `bind` what they need
        return self.drafter.needs

    @property
    def lag(self) -> int:
        return len(self._untold)

    def catch_up(self) -> None:
        """Make the copy that answers between steps, so that neither drafting nor observing is charged with it."""
        if self._between is None:
            self._between = copy.deepcopy(self.drafter)
        for observation in self._untold:
            self._between.observe(observation)
        self._untold.clear()

    def place(self, rows: np.ndarray) -> None:
        """Where the target's word on the root and on each node stands in the pass of this step.

        Args:
            rows: int64 [N + 1].
        """
        self._rows = rows

    def bind(self, target: Target) -> None:
        self.drafter.bind(target)

    def prefill(self, token_ids: np.ndarray, features: Mapping[int, Any] | None = None) -> None:
        self._begin_step()
        self.drafter.prefill(token_ids, features)

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        if self._between is not None:
            return self._between.propose(context, budget)
        self._tree = self.drafter.propose(context, budget)
        return self._tree

    def observe(self, observation: Observation) -> None:
        """Take in one committed token; at the end of a step, tell the drafter of the whole of it."""
        assert len(observation.tokens) == 1 and observation.target_top_ids is not None
        token = int(observation.tokens[0])
        if self.beginning:
            self._top_ids = observation.target_top_ids[self._rows]
        self._tokens.append(token)
        node = self._path[-1] if self._path else ROOT
        children = np.flatnonzero((self._tree.parents == node) & (self._tree.token_ids == token))
        if not len(children):
            self._end_step()
            return
        self._path.append(int(children[0]))
        alone = Verdict(np.zeros(0, np.int64), observation.tokens)
        self._untold.append(Observation(DraftTree.empty(), alone, observation.tokens, observation.target_top_ids[:1]))

    def _end_step(self) -> None:
        tokens = np.array(self._tokens, dtype=np.int64)
        path = np.array(self._path[: len(tokens) - 1], dtype=np.int64)
        self.drafter.observe(Observation(self._tree, Verdict(path, tokens), tokens, self._top_ids))
        self._begin_step()

    def finish(self) -> None:
        if self._tokens:  # the text ended inside an accepted path
            self._end_step()
        self.drafter.finish()

    def reset(self) -> None:
        self._begin_step()
        self.drafter.reset()

    def state_dict(self) -> dict[str, Any]:
        return self.drafter.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._begin_step()
        self.drafter.load_state_dict(state)
