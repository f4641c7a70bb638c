"""The guard on whole streams: it keeps its promise where all is built to hurt, and lets go where speculation pays."""

from __future__ import annotations

import numpy as np
import pytest

from adaptspec.control.strategies import GUARD_CREDIT
from tests.control.world import Drafter, Step, World, constantly, rate

ALPHA = 0.05
NOISE = 0.995
"""Clocks are noisy, so the rate without speculation is known that well only."""

LEARNING = 0.02
"""Share of the time that asking drafters only to learn from may take, all together."""

GUARDED = ("hedge", "ucb", "exp3", "thompson", "ema", "sw-ucb", "fixed-share")


def hurtful(drafters: int = 2, *, seconds: float = 0.0001) -> World:
    """Random text, dear verification, and drafters that are as sure of themselves as they are wrong."""
    lookups = {
        f"lookup{index}": Drafter(
            constantly(0.03), claim=constantly(0.6), evidence="lookup", seconds=constantly(seconds)
        )
        for index in range(drafters)
    }
    return World(lookups, verify=lambda nodes: 0.030 + 0.004 * nodes)


def make_it_pay(world: World) -> None:
    world.drafters["lookup0"].accept = constantly(0.85)
    world.verify = lambda nodes: 0.030 + 0.0005 * nodes


def kept(steps: list[Step], *, credit: float = GUARD_CREDIT) -> np.ndarray:
    """Tokens per second so far, after every step, with the credit that was given once."""
    tokens, seconds = np.cumsum([(step.tokens, step.seconds) for step in steps], axis=0).T
    return (tokens + credit) / seconds


@pytest.mark.parametrize("strategy", GUARDED)
def test_a_stream_built_to_hurt_costs_5_percent_at_most(strategy: str) -> None:
    world = hurtful()
    ar = world.rate("ar", tokens=1500)
    steps = world.run(world.controller(strategy, guard=ALPHA), tokens=1500)
    promised = (1.0 - ALPHA) * NOISE * (1.0 - LEARNING) * ar
    assert (kept(steps)[100:] >= promised).all()  # at every moment, not only in the end
    assert rate(steps) < ar


@pytest.mark.parametrize("strategy", ["ucb", "exp3", "thompson", "hedge"])
def test_without_the_guard_the_same_stream_costs_more(strategy: str) -> None:
    world = hurtful()
    ar = world.rate("ar", tokens=600)
    steps = world.run(world.controller(strategy), tokens=600)
    assert kept(steps)[-1] < 0.93 * ar


@pytest.mark.parametrize("strategy", ["hedge", "fixed-share", "mixture", "draft-then-choose"])
def test_many_cheap_drafters_are_not_cheap_together(strategy: str) -> None:
    """Each of six takes 1.6 percent of a step and is asked to learn from; together they take a tenth."""
    world = hurtful(6, seconds=0.0005)
    ar = world.rate("ar", tokens=1500)
    guard = None if strategy in ("mixture", "draft-then-choose") else ALPHA
    steps = world.run(world.controller(strategy, guard=guard), tokens=1500 if guard else 500)
    floor = 0.96 if guard is None else (1.0 - ALPHA) * NOISE * (1.0 - LEARNING)
    assert kept(steps, credit=0.0 if guard is None else GUARD_CREDIT)[-1] >= floor * ar


# Steps until half of the steps speculate again, and steps after which the rate is twice that of no speculation.
RESUMES = {"ucb": 150, "thompson": 150, "sw-ucb": 150, "ema": 150, "fixed-share": 300, "exp3": 500, "hedge": 700}


@pytest.mark.parametrize("strategy", RESUMES)
def test_speculation_resumes_when_it_pays_again(strategy: str) -> None:
    world = hurtful()
    controller = world.controller(strategy, guard=ALPHA)
    world.run(controller, tokens=800)
    make_it_pay(world)
    world.run(controller, steps=RESUMES[strategy])
    again = world.run(controller, steps=200)
    ar = world.rate("ar", tokens=300)
    assert np.mean([step.verified > 0 for step in again]) > 0.5
    assert rate(again) > 1.5 * ar


def test_who_never_tries_again_never_resumes() -> None:
    """Mutant: off for good, as a switch would do it that looks at acceptance while it is off."""
    world = hurtful()
    controller = world.controller("fixed:ar")
    world.run(controller, tokens=800)
    make_it_pay(world)
    assert not any(step.verified for step in world.run(controller, steps=200))


@pytest.mark.parametrize("strategy", ["ucb", "hedge"])
def test_a_guard_does_not_hold_back_what_pays(strategy: str) -> None:
    rates = []
    for guard in (None, ALPHA):
        world = hurtful()
        make_it_pay(world)
        rates.append(rate(world.run(world.controller(strategy, guard=guard), steps=700)[200:]))
    assert rates[1] > 0.9 * rates[0]


def test_alternating_good_and_bad_times_never_break_the_promise() -> None:
    world = hurtful()
    controller = world.controller("thompson", guard=ALPHA)
    bad: list[Step] = []
    for _ in range(4):
        world.drafters["lookup0"].accept = constantly(0.8)
        world.run(controller, steps=100)
        world.drafters["lookup0"].accept = constantly(0.03)
        start = len(bad)
        bad += world.run(controller, steps=150)
        ar = world.rate("ar", tokens=300)
        seconds, tokens = (sum(getattr(step, what) for step in bad[start:]) for what in ("seconds", "tokens"))
        # What was won before may be spent, up to the credit limit of 20 tokens; never more than that.
        assert tokens >= (1.0 - ALPHA) * ar * seconds - 20.0 - 3.0
