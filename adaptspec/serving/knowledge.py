"""All that a serving policy learns, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adaptspec.control.cost_curve import CostPrior
from adaptspec.serving.acceptance import AcceptanceModel
from adaptspec.serving.arms import ArmTable
from adaptspec.serving.choosing import PlanChooser
from adaptspec.serving.planning import Planner
from adaptspec.serving.requests import RequestTable
from adaptspec.serving.reusing import Reuse
from adaptspec.serving.seconds import StepSeconds

_PARTS = {"acceptance": "acceptance", "seconds": "seconds", "planner": "planner", "requests": "table"}
"""By their names in a state."""


class Knowledge:
    """See the module.

    Args:
        strategy: a name of `strategies.strategy_names()`, None where one arm is always played.
        timed: False judges plans by tokens alone.
        policy_share: share of a step's time that deciding may take.

    Attributes:
        table: of each request.
        acceptance: of drafts.
        seconds: of steps.
        planner: prices of tokens.
        chooser: which plans do well; None where one arm is always played.
        reuse: what deciding takes.
    """

    def __init__(
        self,
        arms: ArmTable,
        *,
        strategy: str | None,
        timed: bool,
        guard: float | None,
        seed: int,
        uniform: bool,
        policy_share: float,
        prior: CostPrior,
        max_requests: int,
    ) -> None:
        count = len(arms.drafters)
        self.chooser: PlanChooser | None = None
        if strategy is not None:
            self.chooser = PlanChooser(count, strategy=strategy, guard=guard, seed=seed, uniform=uniform)
        self.table = RequestTable(count, longest=arms.longest, max_requests=max_requests)
        self.acceptance = AcceptanceModel(count, arms.longest)
        self.seconds = StepSeconds(count, prior=prior)
        self.planner = Planner(arms.whose, arms.lengths, timed=timed)
        self.reuse = Reuse(policy_share)

    def state_dict(self) -> dict[str, Any]:
        """Of all parts but `reuse`."""
        return {
            **{name: getattr(self, part).state_dict() for name, part in _PARTS.items()},
            "chooser": None if self.chooser is None else self.chooser.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`. Raises ValueError on anything else; what was known before is then half gone."""
        for name, part in _PARTS.items():
            getattr(self, part).load_state_dict(state.get(name))
        if self.chooser is not None:
            self.chooser.load_state_dict(state.get("chooser"))
