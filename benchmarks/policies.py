"""Microseconds per `select` + `update` of every policy and wrapper: `python benchmarks/policies.py --n-arms 64`.

Processor time per step over batches of steps: the median batch, and the fastest one, which other work on the machine
disturbs least. Feedback is made beforehand; what making it costs is printed on its own line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from adaptspec.bandits import (
    POLICIES,
    Blocked,
    Delayed,
    Feedback,
    Guard,
    Lazy,
    PerContext,
    Policy,
    PolicyContext,
    WithPrior,
    make_policy,
)

LIMITS = {"hedge": 25.0, "ucb": 25.0, "exp3": 25.0, "normal-hedge": 60.0}
"""Microseconds allowed at 64 arms on one core of an ordinary server."""


def subjects(n_arms: int) -> dict[str, tuple[Callable[[], Policy], Any]]:
    """Name -> (how to make it, context)."""

    def make(name: str) -> Callable[[int], Policy]:
        return lambda seed: make_policy(name, n_arms=n_arms, seed=seed)

    plain = {name: ((lambda name=name: make(name)(0)), None) for name in POLICIES}
    hedge = make("hedge")
    return plain | {
        "linucb (8 features)": (lambda: make_policy("linucb", n_arms=n_arms, dimension=8), np.linspace(0.0, 1.0, 8)),
        "delayed(hedge)": (lambda: Delayed(hedge(0)), None),
        "lazy(hedge)": (lambda: Lazy(hedge(0)), None),
        "lazy(hedge), coupling": (lambda: Lazy(hedge(0), method="coupling"), None),
        "blocked(exp3)": (lambda: Blocked(make("exp3")(0)), None),
        "with-prior(hedge)": (lambda: WithPrior(hedge), PolicyContext(request="r")),
        "per-context(hedge)": (lambda: PerContext(hedge), PolicyContext(bucket="code")),
        "guard(hedge)": (lambda: Guard(hedge(0)), None),
    }


def feedback_stream(n_arms: int, *, share_observed: float, seed: int = 0) -> list[Feedback]:
    """256 rounds of gains around different means."""
    rng = np.random.default_rng(seed)
    means = rng.uniform(0.2, 0.8, n_arms)
    stream = []
    for _ in range(256):
        gains = np.clip(means + rng.normal(0.0, 0.1, n_arms), 0.0, 1.0)
        stream.append(Feedback.from_gains(gains, rng.random(n_arms) < share_observed, tokens=2.0, seconds=0.02))
    return stream


def microseconds(run: Callable[[int], None], *, batches: int, steps: int) -> tuple[float, float]:
    """Median and least, over batches, of the mean processor time of one call."""
    for step in range(steps):
        run(step)
    times = []
    for _ in range(batches):
        start = time.thread_time()
        for step in range(steps):
            run(step)
        times.append((time.thread_time() - start) / steps)
    return statistics.median(times) * 1e6, min(times) * 1e6


def measure(policy: Policy, context: Any, stream: list[Feedback], *, batches: int, steps: int) -> tuple[float, float]:
    """Median and least microseconds per step."""

    def step(index: int) -> None:
        policy.update(policy.select(context), stream[index % len(stream)])

    return microseconds(step, batches=batches, steps=steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n-arms", type=int, default=64)
    parser.add_argument("--batches", type=int, default=15)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--json", metavar="FILE", help="also write the numbers to FILE")
    arguments = parser.parse_args()
    n_arms, timing = arguments.n_arms, {"batches": arguments.batches, "steps": arguments.steps}

    full = feedback_stream(n_arms, share_observed=1.1)
    partial = feedback_stream(n_arms, share_observed=0.5)
    rows: dict[str, dict[str, float]] = {}
    print(f"microseconds per select + update at {n_arms} arms: median (fastest batch)")
    print(f"{'policy':24}{'all observed':>16}{'half observed':>16}   limit")
    for name, (make, context) in subjects(n_arms).items():
        cells = []
        for column, stream in (("all_observed", full), ("half_observed", partial)):
            median, least = measure(make(), context, stream, **timing)
            rows.setdefault(name, {}).update({column: median, f"{column}_fastest": least})
            cells.append(f"{median:.1f} ({least:.1f})")
        limit = f"{LIMITS[name]:g}" if name in LIMITS and n_arms == 64 else ""
        print(f"{name:24}{cells[0]:>16}{cells[1]:>16}   {limit}")
    gains, observed = full[0].gains, full[0].observed
    median, least = microseconds(lambda _: Feedback.from_gains(gains, observed), **timing)
    rows["Feedback.from_gains"] = {"all_observed": median, "all_observed_fastest": least}
    print(f"{'Feedback.from_gains':24}{f'{median:.1f} ({least:.1f})':>16}")
    if arguments.json:
        with open(arguments.json, "x", encoding="utf-8") as file:  # never overwrites a result
            json.dump({"n_arms": n_arms, "microseconds": rows}, file, indent=1)


if __name__ == "__main__":
    main()
