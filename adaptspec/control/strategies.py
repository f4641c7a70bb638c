"""From the name of a strategy to the controller that plays it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from adaptspec.bandits import POLICIES, Guard, Policy, make_policy
from adaptspec.control.controller import Controller, FixedController
from adaptspec.control.cost import CostModel
from adaptspec.control.learning import OBJECTIVES, Objective, PolicyController
from adaptspec.control.mixture import EvidenceController, Mode
from adaptspec.names import unknown_name
from adaptspec.types import Arm

NOT_STRATEGIES = frozenset(["fixed", "heuristic", "linucb", "lookup-else"])
"""Policies that want more than a list of arms: an index, arms in order of length, features, or evidence."""

GUARD_CREDIT = 10.0
"""Tokens that the guard lets a fresh learner lose once, so that it may try arms before it has earned it."""


EVIDENCE_STRATEGIES: tuple[Mode, ...] = ("mixture", "draft-then-choose")
"""Strategies that look at this step's drafts before they decide."""


def strategy_names() -> tuple[str, ...]:
    """What `strategy=` takes besides "fixed:<arm>"."""
    return tuple(sorted({*EVIDENCE_STRATEGIES, *POLICIES} - NOT_STRATEGIES))


def make_controller(
    strategy: str | Policy,
    *,
    arms: Sequence[Arm],
    drafters: Collection[str],
    objective: Objective = "throughput",
    guard: float | None = None,
    seed: int = 0,
) -> Controller:
    """The controller for a strategy.

    Args:
        strategy: "fixed:<arm>", a policy's name, or a `Policy` over `len(arms)` arms.
        arms: no speculation first.
        drafters: names in the pool.
        objective: what arms are judged by.
        guard: share of the speed without speculation that a policy may lose at most; None for no guard. It does not
            apply to a fixed arm, nor to strategies that decide on evidence, which may verify nothing at any step.
        seed: of the policy.

    Raises:
        ValueError: unknown strategy, a fixed arm outside the pool, a budget that the strategy cannot play.
    """
    if objective not in OBJECTIVES:
        raise unknown_name("objective", objective, OBJECTIVES)
    if guard is not None and not 0.0 < guard < 1.0:
        raise ValueError(f"guard must be in (0, 1) or None, got {guard}")
    if isinstance(strategy, str) and strategy.startswith("fixed:"):
        arm = _fixed_arm(strategy, drafters)
        if arm.budget == "auto":
            return EvidenceController([arm.drafter], cost=CostModel(), max_nodes=_most_nodes(arms), label=arm)
        return FixedController(arm)
    if strategy in EVIDENCE_STRATEGIES:
        names = list(dict.fromkeys(arm.drafter for arm in arms[1:]))
        return EvidenceController(names, cost=CostModel(), mode=strategy, max_nodes=_most_nodes(arms), seed=seed)
    if isinstance(strategy, str):
        if strategy not in strategy_names():
            raise unknown_name("strategy", strategy, [*strategy_names(), "fixed:<arm>"])
        policy = make_policy(strategy, n_arms=len(arms), seed=seed)
    elif isinstance(strategy, Policy):
        policy = strategy
    else:
        raise ValueError(f"strategy must be a name or a Policy, got {strategy!r}")
    if automatic := [str(arm) for arm in arms if arm.budget == "auto"]:
        raise ValueError(
            f"strategy {strategy!r} plays budgets that are numbers, got {', '.join(automatic)}; "
            "budget 'auto' goes with strategy 'mixture', 'draft-then-choose' or 'fixed:<drafter>@auto'"
        )
    if guard is not None:
        policy = Guard(policy, alpha=guard, initial_credit=GUARD_CREDIT)
    return PolicyController(arms, policy, cost=CostModel(), objective=objective)


def _fixed_arm(strategy: str, drafters: Collection[str]) -> Arm:
    arm = Arm.parse(strategy.removeprefix("fixed:"))
    if arm.drafter != "ar" and arm.drafter not in drafters:
        raise ValueError(
            f"strategy {strategy!r} plays the drafter {arm.drafter!r}, which is not in the pool: "
            f"{', '.join(drafters) or '(empty)'}"
        )
    return arm


def _most_nodes(arms: Sequence[Arm]) -> int:
    """The largest budget among the arms; 64 if none has a number."""
    return max((arm.budget for arm in arms if isinstance(arm.budget, int) and arm.budget > 0), default=64)
