"""A server runs for months: memory and saved states stay as large as they were.

Memory is counted in a process of its own, where no thread of a test before allocates anything.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import sys
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

from adaptspec.bandits import Feedback, Policy, make_policy
from tests.control.world import Drafter, World, constantly

ARMS = 8


def alone(check: Callable[..., None], *arguments: object) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        process.submit(check, *arguments).result()


def blocks() -> int:
    """Blocks of memory in use, garbage aside."""
    gc.collect()
    return sys.getallocatedblocks()


def play(policy: Policy, steps: int, feedback: list[Feedback]) -> None:
    select, update, count = policy.select, policy.update, len(feedback)
    for step in range(steps):
        update(select(), feedback[step % count])


def peak_of(work: Callable[[], object]) -> int:
    """Bytes that are held at most, above what was held before."""
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize(("name", "steps"), [("ucb", 1_000_000), ("hedge", 200_000)])
def test_a_million_policy_steps_leave_nothing_behind(name: str, steps: int) -> None:
    alone(check_policy, name, steps)


def check_policy(name: str, steps: int) -> None:
    """Traced at a tenth of the way and at the end; in between, where tracing would take minutes, blocks are counted."""
    rng = np.random.default_rng(0)
    feedback = [Feedback.from_gains(rng.random(ARMS)) for _ in range(97)]
    policy = make_policy(name, n_arms=ARMS)
    window = 5_000
    play(policy, steps // 10 - window, feedback)
    early_peak = peak_of(lambda: play(policy, window, feedback))
    early_size, early_blocks = len(json.dumps(policy.state_dict())), blocks()
    play(policy, steps - steps // 10 - window, feedback)
    late_peak = peak_of(lambda: play(policy, window, feedback))
    late_size, late_blocks = len(json.dumps(policy.state_dict())), blocks()
    assert policy.state_dict()["next_step"] == steps
    assert late_peak <= early_peak + 32_768  # a list of 8 bytes per step would be 45 times that
    assert late_blocks <= early_blocks + 200
    assert late_size <= 1.01 * early_size + 32  # counters have more digits


def long_world() -> World:
    """Requests of many lengths of context, costs and acceptance that wander: all that may open new cells of a table."""
    lookup = Drafter(lambda position: 0.85 if position // 200 % 2 else 0.2, evidence="lookup")
    head = Drafter(lambda position: 0.4 + 0.3 * np.sin(position / 5000.0), seconds=constantly(0.001))
    return World({"lookup": lookup, "head": head}, request_tokens=1500)


@pytest.mark.parametrize(
    ("strategy", "guard", "steps"),
    [("ucb", 0.05, 20_000), ("hedge", None, 15_000), ("exp3+request", None, 10_000), ("mixture", None, 5_000)],
)
def test_fifty_thousand_controller_steps_leave_nothing_behind(strategy: str, guard: float | None, steps: int) -> None:
    """All four together; traced and counted as above."""
    alone(check_controller, strategy, guard, steps)


def check_controller(strategy: str, guard: float | None, steps: int) -> None:
    world = long_world()
    controller = world.controller(strategy, budgets=(2, 4), guard=guard)

    def on(count: int) -> None:
        for _ in range(count):
            world.step(controller)

    window = 300
    on(steps // 10 - window)
    early_peak = peak_of(lambda: on(window))
    early_size, early_blocks = len(json.dumps(controller.state_dict())), blocks()
    on(steps - steps // 10 - window)
    late_peak = peak_of(lambda: on(window))
    late_size, late_blocks = len(json.dumps(controller.state_dict())), blocks()
    assert late_peak <= 1.01 * early_peak + 32_768
    assert late_blocks <= early_blocks + 1000
    # Digits come and go with the values, and cells are opened by what is met first; both are bounded.
    assert late_size <= 1.1 * early_size + 4096


def test_what_grows_is_caught() -> None:
    """Mutant: a policy that keeps every decision until it is answered, for ever."""
    alone(check_hoarder)


def check_hoarder() -> None:
    rng = np.random.default_rng(0)
    feedback = [Feedback.from_gains(rng.random(ARMS)) for _ in range(97)]
    policy, kept = make_policy("ucb", n_arms=ARMS), []
    select = policy.select
    policy.select = lambda context=None: kept.append(select(context)) or kept[-1]  # type: ignore[method-assign,func-returns-value]
    before = blocks()
    play(policy, 10_000, feedback)
    assert blocks() > before + 5_000
