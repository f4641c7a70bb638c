"""What one round of `decide` and `observe` takes for a whole batch: `python benchmarks/serving_policy.py`.

Simulated acceptance. What is measured is processor time of the two calls; other processes on the same cores still
slow them down, so that the fastest rounds say most.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from adaptspec.serving.policy import ServingPolicy
from adaptspec.serving.types import StepContext, StepOutcome

ROUNDS = 400
DRAFTERS, LENGTHS = 4, 8


def measure(requests: int, *, seconds_per_token: float) -> dict[str, list[float]]:
    """Milliseconds of each round, by whether anything was drafted."""
    arms = [f"d{drafter}@{length}" for drafter in range(DRAFTERS) for length in range(1, LENGTHS + 1)]
    policy = ServingPolicy(arms, "hedge", policy_share=1.0)
    rng = np.random.default_rng(0)
    ids, lengths = [f"r{i}" for i in range(requests)], rng.integers(100, 2000, requests)
    rounds: dict[str, list[float]] = {"drafting": [], "off": []}
    for _ in range(ROUNDS):
        context = StepContext(ids, lengths)
        start = time.thread_time()
        decision = policy.decide(context)
        decided = time.thread_time() - start
        accepted = np.minimum(rng.geometric(0.3, requests) - 1, decision.lengths)
        seconds = 0.02 + seconds_per_token * float(decision.lengths.sum())
        outcome = StepOutcome(decision.lengths, decision.lengths, accepted, verify_seconds=seconds)
        start = time.thread_time()
        policy.observe(decision, outcome)
        rounds["off" if decision.off else "drafting"].append(1e3 * (decided + time.thread_time() - start))
    return rounds


def main() -> None:
    """Print a table."""
    print(f"{DRAFTERS * LENGTHS} arms; decide + observe, milliseconds on one core")
    for requests in (1, 16, 64, 256):
        for name, seconds_per_token in (("drafts are free", 0.0), ("drafts never pay", 0.02)):
            for state, times in measure(requests, seconds_per_token=seconds_per_token).items():
                if len(times) >= ROUNDS // 10:
                    fastest, median, slow = min(times), statistics.median(times), statistics.quantiles(times, n=10)[-1]
                    print(
                        f"{requests:4d} requests, {name:16s}  {state:8s} {len(times):4d} rounds  "
                        f"fastest {fastest:5.2f}  median {median:5.2f}  90 % {slow:5.2f}"
                    )


if __name__ == "__main__":
    main()
