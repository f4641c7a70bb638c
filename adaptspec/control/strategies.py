"""From the name of a strategy to the controller that plays it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from adaptspec.bandits import POLICIES, Blocked, Guard, Lazy, PerContext, Policy, WithPrior, make_policy
from adaptspec.control.controller import Controller, FixedController, InTurnController
from adaptspec.control.cost import CostModel
from adaptspec.control.learning import FEATURES, OBJECTIVES, Objective, PolicyController
from adaptspec.control.mixture import EvidenceController, Mode
from adaptspec.names import unknown_name
from adaptspec.types import Arm

GUARD_CREDIT = 10.0
"""Tokens that the guard lets a fresh learner lose once, so that it may try arms before it has earned it."""

BLOCK_STEPS = 8
"""How many steps in a row "+blocks" plays an arm."""

EVIDENCE_STRATEGIES: tuple[Mode, ...] = ("mixture", "draft-then-choose")
"""Strategies that look at this step's drafts before they decide."""

NOT_COMPOSED = frozenset([*EVIDENCE_STRATEGIES, "lookup-else", "heuristic"])
"""Strategies that take no `OPTIONS`."""

OPTIONS: dict[str, str] = {
    "context": "one learner per context length (powers of two)",
    "request": "one learner per request that starts from what all requests taught",
    "lazy": "keeps an arm as long as the chances allow (full information)",
    "blocks": f"plays an arm {BLOCK_STEPS} steps in a row (bandits)",
}
"""What may be added to a policy's name, for example "hedge+request" or "exp3+context+blocks"."""


def strategy_names() -> tuple[str, ...]:
    """What `strategy=` takes besides "fixed:<arm>"; policies also with `OPTIONS`."""
    return tuple(sorted({*EVIDENCE_STRATEGIES, *POLICIES} - {"fixed"}))


def check_strategy(name: str) -> str:
    """`name`, if it is a strategy that `make_controller` knows.

    Raises:
        ValueError: unknown strategy or option.
    """
    if name.startswith("fixed:"):
        Arm.parse(name.removeprefix("fixed:"))
        return name
    base, *options = name.split("+")
    if base not in strategy_names() or (options and base in NOT_COMPOSED):
        raise unknown_name("strategy", name, [*strategy_names(), "fixed:<arm>"])
    for option in options:
        if option not in OPTIONS:
            raise unknown_name(f"option of strategy {name!r}:", option, OPTIONS)
    if len(set(options)) < len(options):
        raise ValueError(f"strategy {name!r} names an option twice")
    return name


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
        strategy: "fixed:<arm>", a policy's name with or without `OPTIONS`, or a `Policy` over `len(arms)` arms.
        arms: no speculation first.
        drafters: names in the pool.
        objective: what arms are judged by.
        guard: share of the speed without speculation that a policy may lose at most; None for no guard. It does not
            apply to hand-written rules ("fixed:", "lookup-else", "heuristic"), nor to strategies that decide on
            evidence, which may verify nothing at any step.
        seed: of the policy.

    Raises:
        ValueError: unknown strategy or option, a fixed arm outside the pool, a budget that the strategy cannot play.
    """
    if objective not in OBJECTIVES:
        raise unknown_name("objective", objective, OBJECTIVES)
    if guard is not None and not 0.0 < guard < 1.0:
        raise ValueError(f"guard must be in (0, 1) or None, got {guard}")
    if isinstance(strategy, Policy):
        return PolicyController(arms, _guarded(strategy, guard), cost=CostModel(), objective=objective, seed=seed)
    if not isinstance(strategy, str):
        raise ValueError(f"strategy must be a name or a Policy, got {strategy!r}")
    check_strategy(strategy)
    if strategy.startswith("fixed:"):
        arm = _fixed_arm(strategy, drafters)
        if arm.budget == "auto":
            vocab = {arm.drafter: (arm.vocab,)}
            nodes = _most_nodes(arms)
            return EvidenceController([arm.drafter], cost=CostModel(), vocab=vocab, max_nodes=nodes, label=arm)
        return FixedController(arm)
    if strategy in EVIDENCE_STRATEGIES:
        vocab: dict[str, list[str]] = {}
        for arm in arms[1:]:
            heads = vocab.setdefault(arm.drafter, [])
            if arm.vocab not in heads:
                heads.append(arm.vocab)
        return EvidenceController(
            list(vocab), cost=CostModel(), mode=strategy, vocab=vocab, max_nodes=_most_nodes(arms), seed=seed
        )
    if strategy == "lookup-else":
        return InTurnController(_first_arms(strategy, arms))
    if strategy == "heuristic":
        return _length_heuristic(arms, objective=objective, seed=seed)
    policy = _guarded(_policy(strategy, n_arms=len(arms), seed=seed), guard)
    return PolicyController(arms, policy, cost=CostModel(), objective=objective, seed=seed)


def _policy(strategy: str, *, n_arms: int, seed: int) -> Policy:
    """A policy by name, with the options written behind it applied from the inside out."""
    name, *options = strategy.split("+")
    extra = {"dimension": FEATURES} if name == "linucb" else {}
    make: Callable[[int], Policy] = partial(_make, name, n_arms, extra)
    for option in ("lazy", "blocks", "request", "context"):
        if option in options:
            make = partial(_WRAPPED[option], make)
    return make(seed)


def _make(name: str, n_arms: int, options: dict[str, int], seed: int) -> Policy:
    return make_policy(name, n_arms=n_arms, seed=seed, **options)


_WRAPPED: dict[str, Callable[[Callable[[int], Policy], int], Policy]] = {
    "lazy": lambda make, seed: Lazy(make(seed), seed=seed),
    "blocks": lambda make, seed: Blocked(make(seed), length=BLOCK_STEPS),
    "request": lambda make, seed: WithPrior(make, seed=seed),
    "context": lambda make, seed: PerContext(make, seed=seed),
}


def _guarded(policy: Policy, guard: float | None) -> Policy:
    return policy if guard is None else Guard(policy, alpha=guard, initial_credit=GUARD_CREDIT)


def _length_heuristic(arms: Sequence[Arm], *, objective: Objective, seed: int) -> Controller:
    """The +2 / -1 rule over the budgets of the pool's first drafter."""
    first = _first_arms("heuristic", arms)[0]
    lengths = sorted({arm.budget for arm in arms if arm.drafter == first.drafter and isinstance(arm.budget, int)})
    own = [Arm.autoregressive(), *(Arm(first.drafter, length, first.vocab) for length in lengths)]
    policy = make_policy("heuristic", n_arms=len(own), seed=seed, lengths=(0, *lengths))
    return PolicyController(own, policy, cost=CostModel(), objective=objective, seed=seed)


def _first_arms(strategy: str, arms: Sequence[Arm]) -> list[Arm]:
    """The first arm of every drafter, in the order of the pool."""
    first: dict[str, Arm] = {}
    for arm in arms:
        if arm.drafter != "ar" and arm.budget != "auto":
            first.setdefault(arm.drafter, arm)
    if not first:
        raise ValueError(f"strategy {strategy!r} needs a drafter with a budget that is a number, got no such arm")
    return list(first.values())


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
