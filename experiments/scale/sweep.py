"""Fleets on other hardware: millions of requests, batches of 1 to 256, replicas that share what they learn or not."""

from __future__ import annotations

from experiments.sweeps import Configuration, Sweep, drafter_slug

POOL = ("prompt-lookup", "suffix", "rest", "token-recycling")
BUDGETS = (4, 8, 16, 32)
HARDWARE = ("a40", "a800", "h100", "h200")
POLICIES = ("hedge", "ucb", "exp3")
SHARING = ("isolated", "merged:256", "merged:32", "shared")
ARMS = ("ar", *(f"{drafter}@{budget}" for drafter in POOL for budget in BUDGETS))

SLOTS = 4096
"""Requests that a fleet serves at the same time."""


def _points(
    hardware: tuple[str, ...], batches: tuple[int, ...], *, requests: int, shards: int
) -> tuple[Configuration, ...]:
    traces = tuple(
        Configuration(
            f"trace-{shard}",
            "experiments.recording:RecordTrace",
            {"pool": POOL, "nodes": max(BUDGETS), "shard": shard, "shards": shards},
            seeded=False,
        )
        for shard in range(shards)
    )
    table = Configuration(
        "table",
        "experiments.fleet:make_table",
        {"budgets": BUDGETS},
        needs=tuple(trace.id for trace in traces),
        seeded=False,
    )
    plays = [(f"fixed:{arm}", "isolated") for arm in ARMS]
    plays += [(policy, sharing) for policy in POLICIES for sharing in SHARING]
    fleets = tuple(
        Configuration(
            f"{drafter_slug(policy)}-{drafter_slug(sharing)}-{name}-b{batch}",
            "experiments.fleet:play_fleet",
            {
                "hardware": name,
                "batch": batch,
                "policy": policy,
                "sharing": sharing,
                # A single arm is the same for every request: a tenth of them say what it is worth.
                "requests": requests // 10 if policy.startswith("fixed:") else requests,
                "replicas": max(1, SLOTS // batch),
            },
            needs=("table",),
        )
        for name in hardware
        for batch in batches
        for policy, sharing in plays
    )
    return (*traces, table, *fleets)


QUICK = Sweep(_points(("a40", "h200"), (1, 64), requests=20_000, shards=2), seeds=1, max_new_tokens=64, per_category=1)
FULL = Sweep(
    _points(("cpu", *HARDWARE), (1, 4, 16, 64, 256), requests=2_000_000, shards=8),
    seeds=3,
    max_new_tokens=128,
    per_category=20,
)
