"""A serving policy from the settings of an `AdaptiveSpec`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adaptspec.serving.policy import Objective, ServingPolicy
from adaptspec.serving.strategies import strategy_names
from adaptspec.types import Arm

AUTO_LENGTHS = (1, 2, 4, 8)
"""Draft lengths that stand for an arm that sizes itself."""


def policy_from_settings(
    *, arms: Sequence[Arm], strategy: Any, objective: Objective, guard: float | None, seed: int
) -> ServingPolicy:
    """The policy that decides for a serving stack as these settings say.

    Budgets are taken as draft lengths. Strategies that look at drafts before they decide, and `Policy` objects, have no
    counterpart there, since all rows are decided together before anything is drafted: they become "greedy", which
    plays what is expected to be best.

    Raises:
        ValueError: no arm that drafts.
    """
    sized: list[Arm] = []
    for arm in arms:
        if arm.drafter != "ar":
            lengths = AUTO_LENGTHS if arm.budget == "auto" else (arm.budget,)
            sized += [Arm(arm.drafter, length, arm.vocab) for length in lengths]
    name = strategy.partition("+")[0] if isinstance(strategy, str) else "greedy"
    if name.startswith("fixed:"):
        arm = Arm.parse(name.removeprefix("fixed:"))
        if arm.budget == "auto":
            name = "greedy"
        elif arm.drafter != "ar":
            sized.append(arm)
    elif name not in strategy_names():
        name = "greedy"
    return ServingPolicy(list(dict.fromkeys(sized)), name, objective=objective, guard=guard, seed=seed)
