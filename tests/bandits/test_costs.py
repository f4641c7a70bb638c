"""Memory does not grow with the steps, and a step takes microseconds."""

from __future__ import annotations

import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest

from adaptspec.bandits import POLICIES, Delayed, Feedback, Guard, PolicyContext, WithPrior, make_policy

ARMS = 8


def hedge(seed):
    return make_policy("hedge", n_arms=ARMS, seed=seed)


SUBJECTS = {name: (lambda name=name: make_policy(name, n_arms=ARMS)) for name in POLICIES} | {
    "delayed(hedge)": lambda: Delayed(hedge(0), capacity=256),
    "guard(hedge)": lambda: Guard(hedge(0)),
    "with-prior(hedge)": lambda: WithPrior(hedge, max_requests=8),
}


def stream(n_arms):
    rng = np.random.default_rng(0)
    return [Feedback.from_gains(rng.random(n_arms), tokens=1.0, seconds=1.0) for _ in range(64)]


def grown_bytes(policy, *, steps, context, skip=0):
    """Bytes that `steps` steps add, every `skip`-th of them never answered."""
    feedback = stream(policy.n_arms)

    def run(count):
        for step in range(count):
            decision = policy.select(context(step))
            if not skip or step % skip:
                policy.update(decision, feedback[step % 64])

    run(1000)
    tracemalloc.start()
    run(300)
    before = tracemalloc.get_traced_memory()[0]
    run(steps)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return after - before


@pytest.mark.parametrize("name", SUBJECTS)
def test_memory_does_not_grow(name):
    def context(step):
        return PolicyContext(request=step // 20)

    assert grown_bytes(SUBJECTS[name](), steps=1500, context=context, skip=3) < 16_000


def test_memory_does_not_grow_in_a_hundred_thousand_steps():
    policy = make_policy("ucb", n_arms=2)
    assert grown_bytes(policy, steps=100_000, context=lambda step: None) < 2_000


@pytest.mark.parametrize(("name", "microseconds"), [("hedge", 25), ("ucb", 25), ("exp3", 25), ("normal-hedge", 60)])
def test_a_step_at_64_arms_takes_microseconds(name, microseconds):
    policy, rng = make_policy(name, n_arms=64), np.random.default_rng(0)
    feedback = [Feedback.from_gains(rng.random(64)) for _ in range(64)]
    times = []
    for _ in range(20):
        start = time.thread_time()
        for step in range(64):
            policy.update(policy.select(), feedback[step])
        times.append((time.thread_time() - start) / 64 * 1e6)
    # The limits are for one idle core of an ordinary server; the fastest batch on a busy small machine may take twice.
    assert min(times) <= 2 * microseconds


def test_only_numpy_and_the_standard_library_are_imported():
    code = "import sys, adaptspec.bandits; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "scipy", "transformers", "triton"} & {name.partition(".")[0] for name in modules}
    own = {name for name in modules if name.startswith("adaptspec.") and not name.startswith("adaptspec.bandits")}
    assert own <= {"adaptspec.names", "adaptspec.types"}
