"""Streams that change: a drafter breaks, acceptance decays or drifts, load comes and goes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from adaptspec.control.strategies import GUARD_CREDIT
from tests.control.world import Drafter, Step, World, asked, constantly, garbage, nodes, rate

# Steps until a broken drafter is dropped, and until one that works again is back. Policies that weigh their whole past
# alike (hedge, adahedge, follow-the-leader, ucb) are not among them: they need about as long as they had been right.
DROPS = {"mixture": 20, "draft-then-choose": 20, "fixed:good@auto": 20, "ema": 20, "fixed-share": 200}
RETURNS = {"mixture": 50, "draft-then-choose": 50, "fixed:good@auto": 50, "ema": 50, "fixed-share": 250}


def with_a_drafter_that_breaks() -> World:
    return World({"good": Drafter(constantly(0.8)), "other": Drafter(constantly(0.5))})


def break_it(world: World) -> None:
    """Garbage, proposed as confidently as before."""
    world.drafters["good"].accept, world.drafters["good"].claim = constantly(0.0), constantly(0.8)


def repair_it(world: World) -> None:
    world.drafters["good"].accept = constantly(0.8)


CREDIT_LIMIT = 20.0 + 8.0
"""Tokens: the most that a guard lets its policy lose of what was won before, and what noisy clocks and asking cheap
drafters may take."""


def tokens_short(steps: list[Step], ar: float) -> float:
    """Tokens that are missing to 0.95 of no speculation."""
    return 0.95 * ar * sum(step.seconds for step in steps) - sum(step.tokens for step in steps)


def garbage_share(steps: list[Step]) -> float:
    """Wrong tokens of the broken drafter per step."""
    return float(np.mean([garbage(step, 0) for step in steps]))


@pytest.mark.parametrize("strategy", DROPS)
def test_a_drafter_that_breaks_is_dropped_and_comes_back(strategy: str) -> None:
    world = with_a_drafter_that_breaks()
    controller = world.controller(strategy)
    world.run(controller, steps=500)
    before = world.best_fixed((2, 8), tokens=3000)
    assert before[0] == "good@8"
    break_it(world)
    world.run(controller, steps=DROPS[strategy])
    broken = world.run(controller, steps=150)
    repair_it(world)
    world.run(controller, steps=RETURNS[strategy])
    back = world.run(controller, steps=200)
    assert garbage_share(broken) < 0.5  # of 8
    alone = world.rate("ar" if strategy.startswith("fixed:") else "other@2", tokens=2000)
    assert rate(broken) > 0.85 * alone
    assert rate(back) > 0.85 * before[1]


def test_what_is_dropped_was_played_before() -> None:
    """Without the break the same steps hold hardly any garbage, and a fixed arm is full of it."""
    world = with_a_drafter_that_breaks()
    break_it(world)
    assert garbage_share(world.run(world.controller("fixed:good@8"), steps=100)) > 7.0


@pytest.mark.parametrize("strategy", ["hedge", "ucb", "exp3", "thompson"])
def test_a_guard_bounds_what_a_broken_drafter_costs_a_learner_with_a_long_memory(strategy: str) -> None:
    world = with_a_drafter_that_breaks()
    world.drafters["other"].accept = constantly(0.05)
    controller = world.controller(strategy, guard=0.05)
    world.run(controller, steps=500)
    break_it(world)
    ar = world.rate("ar", tokens=600)
    broken = world.run(controller, steps=600)
    assert tokens_short(broken, ar) < CREDIT_LIMIT
    repair_it(world)
    back = world.run(controller, steps=600)
    assert rate(back[-200:]) > 2.0 * ar


def test_hedge_drops_a_broken_drafter_after_about_as_long_as_it_had_been_right() -> None:
    world = with_a_drafter_that_breaks()
    controller = world.controller("hedge")
    world.run(controller, steps=100)
    break_it(world)
    broken = world.run(controller, steps=400)
    assert garbage_share(broken[:50]) > 4.0
    assert garbage_share(broken[-100:]) < 2.0


LONG = 3000
"""Tokens of a request in which acceptance decays with the context."""


def decaying(*, honest: bool) -> World:
    """Right with 0.88 at the start of a request, hardly ever after 60 percent of it; verification is dear."""

    def accept(position: int) -> float:
        return 0.03 + 0.85 * max(0.0, 1.0 - position % LONG / (0.6 * LONG))

    head = Drafter(accept, claim=None if honest else constantly(0.7), seconds=constantly(0.002))
    return World({"head": head}, verify=lambda nodes: 0.030 + 0.004 * nodes, request_tokens=LONG)


def of_request(steps: list[Step], low: float, high: float) -> list[Step]:
    """The steps in a part of the requests after the first."""
    return [step for step in steps if step.position >= LONG and low <= step.position % LONG / LONG < high]


@pytest.mark.parametrize("strategy", ["mixture", "draft-then-choose", "fixed:head@auto"])
def test_acceptance_that_decays_with_the_context_ends_in_no_speculation(strategy: str) -> None:
    """Reports 5: 0.19 of the rate at 32k. Where the drafter's confidence decays too, near the best of both."""
    world = decaying(honest=True)
    steps = world.run(world.controller(strategy), tokens=3 * LONG)
    ar, always = world.rate("ar", tokens=LONG), world.run(world.controller("fixed:head@8"), tokens=2 * LONG)
    assert rate(of_request(always, 0.7, 1.0)) < 0.6 * ar
    late, early = of_request(steps, 0.7, 1.0), of_request(steps, 0.0, 0.2)
    assert rate(late) > 0.97 * ar
    assert nodes(late) < 0.3
    assert asked(late, "head") < 0.1  # off costs what never on costs
    assert rate(early) > 0.8 * max(rate(of_request(always, 0.0, 0.2)), ar)


@pytest.mark.parametrize("strategy", ["mixture", "draft-then-choose"])
def test_acceptance_that_decays_unnoticed_by_the_drafter_never_costs_more_than_3_percent(strategy: str) -> None:
    world = decaying(honest=False)
    steps = world.run(world.controller(strategy), tokens=2 * LONG)
    ar = world.rate("ar", tokens=LONG)
    assert rate(of_request(steps, 0.7, 1.0)) > 0.97 * ar
    assert rate(steps) > 0.97 * ar


@pytest.mark.parametrize("strategy", ["hedge", "ucb", "fixed-share"])
def test_guarded_policies_keep_their_promise_while_acceptance_decays(strategy: str) -> None:
    world = decaying(honest=False)
    steps = world.run(world.controller(strategy, guard=0.05), tokens=2 * LONG)
    assert rate(steps) * (1.0 + GUARD_CREDIT / (2 * LONG)) > 0.95 * 0.995 * world.rate("ar", tokens=LONG)


def busy(batch: int) -> Callable[[int], float]:
    """Verification in a batch of equal requests: bound by memory, up to 25 rows, and from there on by arithmetic."""
    return lambda nodes: max(0.030, 0.0012 * batch * (nodes + 1))


def loaded() -> World:
    cheap = Drafter(constantly(0.5))
    dear = Drafter(constantly(0.6), seconds=constantly(0.002))
    return World({"cheap": cheap, "dear": dear}, verify=busy(1))


@pytest.mark.parametrize("strategy", ["mixture", "draft-then-choose"])
def test_load_switches_speculation_off_and_its_end_switches_it_on_again(strategy: str) -> None:
    """Reports 3: batch 1, 64, 1. Off must cost what never on costs (vllm PR 5000) and end by itself (sglang 1979)."""
    world = loaded()
    controller = world.controller(strategy)
    quiet = world.run(controller, steps=400)
    world.verify = busy(64)
    ar = world.rate("ar", tokens=1000)
    assert world.best_fixed((1, 2, 8), tokens=1000)[0] == "ar"
    turning = world.run(controller, steps=50)
    crowded = world.run(controller, steps=400)
    world.verify = busy(1)
    world.run(controller, steps=50)
    again = world.run(controller, steps=300)
    assert rate(quiet[-150:]) > 0.75 * world.best_fixed((2, 8), tokens=3000)[1]
    assert rate(turning) > 0.5 * ar
    assert rate(crowded) > 0.95 * ar
    assert nodes(crowded) < 0.2
    assert asked(crowded, "dear") < 0.1  # probes: 2 percent of the steps, and a few to be sure
    assert nodes(again) > 2.0
    assert rate(again) > 0.8 * rate(quiet[-150:])


def test_off_because_of_load_costs_what_never_on_costs() -> None:
    """A controller that has never seen anything but load, and one that has been on before, spend the same."""
    rates = []
    for quiet_steps in (0, 300):
        world = loaded()
        controller = world.controller("mixture")
        world.run(controller, steps=quiet_steps)
        world.verify = busy(64)
        world.run(controller, steps=100)
        rates.append(rate(world.run(controller, steps=300)))
    assert rates[1] > 0.99 * rates[0]


@pytest.mark.parametrize("strategy", ["ucb", "sw-ucb", "thompson", "fixed-share"])
def test_guarded_policies_follow_load(strategy: str) -> None:
    world = loaded()
    controller = world.controller(strategy, guard=0.05)
    world.run(controller, steps=300)
    world.verify = busy(64)
    ar = world.rate("ar", tokens=1000)
    crowded = world.run(controller, steps=400)
    world.verify = busy(1)
    world.run(controller, steps=300)
    again = world.run(controller, steps=300)
    assert tokens_short(crowded, ar) < CREDIT_LIMIT
    assert rate(again) > 1.3 * world.rate("ar", tokens=500)


DRIFT = 8000
"""Tokens over which the order of two drafters is turned round."""


def drifting(*, honest: bool) -> World:
    """One drafter falls from 0.8 to 0.3 and the other rises as much, in a line: as over days, but sooner."""

    def moved(position: int) -> float:
        return 0.5 * min(1.0, position / DRIFT)

    claim = None if honest else constantly(0.6)
    falling = Drafter(lambda position: 0.8 - moved(position), claim=claim)
    return World({"falling": falling, "rising": Drafter(lambda position: 0.3 + moved(position), claim=claim)})


@pytest.mark.parametrize(
    ("strategy", "honest"), [("mixture", False), ("draft-then-choose", False), ("ema", True), ("fixed-share", True)]
)
def test_a_slow_drift_that_turns_the_order_round_is_followed(strategy: str, honest: bool) -> None:
    """Reports 6: acceptance drifts over days. At the end as good as whoever plays the now better arm always."""
    world = drifting(honest=honest)
    controller = world.controller(strategy)
    early = world.run(controller, tokens=DRIFT // 6)
    world.run(controller, tokens=DRIFT - world.position)
    best = world.best_fixed((2, 8), tokens=1500)
    assert best[0] == "rising@8"
    late = world.run(controller, tokens=1500)
    assert rate(late) > 0.9 * best[1]
    fixed = drifting(honest=honest)
    start = fixed.run(fixed.controller("fixed:falling@8"), tokens=DRIFT // 6)
    assert rate(early) > 0.85 * rate(start)
    assert world.rate("falling@8", tokens=1000) < 0.6 * best[1]  # who does not follow loses this much


@pytest.mark.parametrize("strategy", ["ucb", "sw-ucb", "thompson", "exp3-s"])
def test_bandits_follow_a_slow_drift_too(strategy: str) -> None:
    world = drifting(honest=True)
    controller = world.controller(strategy)
    world.run(controller, tokens=DRIFT + 3000)
    late = world.run(controller, tokens=2000)
    assert rate(late) > 0.75 * world.best_fixed((2, 8), tokens=2000)[1]
