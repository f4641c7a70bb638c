"""Every policy on the same recorded answers, at several machines' costs and in several orders."""

from __future__ import annotations

from experiments.sweeps import Configuration, Sweep

POOL = ("prompt-lookup", "suffix", "rest", "token-recycling")
BUDGETS = (4, 8, 16, 32)
ORDERS = ("shuffle", "blocks")
QUICK_COSTS = ("recorded", "cpu-fp32", "cpu-bf16", "h100", "loaded")
FULL_COSTS = (*QUICK_COSTS, "a40:1", "a800:1", "h200:1", "h100:16", "h200:64")

QUICK_POLICIES = (
    *("hedge", "adahedge", "fixed-share", "normal-hedge"),
    *("ucb", "ucbspec", "thompson", "exp3", "exp3spec"),
    *("ema", "lookup-else", "draft-then-choose", "mixture"),
)
FULL_POLICIES = (
    *QUICK_POLICIES,
    *("ada-normal-hedge", "follow-the-leader", "linucb", "heuristic"),
    *("ucb-tuned", "kl-ucb", "sw-ucb", "d-ucb", "exp3-ix", "exp3-s", "tsallis-inf"),
    *("hedge+request", "hedge+lazy", "hedge+context", "exp3+blocks"),
)


def _points(
    pool: tuple[str, ...], policies: tuple[str, ...], costs: tuple[str, ...], *, shards: int, nodes: int
) -> tuple[Configuration, ...]:
    traces = tuple(
        Configuration(
            f"trace-{shard}",
            "experiments.recording:RecordTrace",
            {"pool": pool, "nodes": nodes, "shard": shard, "shards": shards},
            seeded=False,
        )
        for shard in range(shards)
    )
    recorded = tuple(trace.id for trace in traces)
    points = list(traces)
    for cost in costs:
        for order in ORDERS:
            common = {"costs": cost, "order": order, "budgets": BUDGETS, "switches": 8, "guard": 0.05}
            place = f"{cost.replace(':', '-b')}-{order}"
            points.append(
                Configuration(f"oracles-{place}", "experiments.replaying:play_comparators", common, needs=recorded)
            )
            for policy in policies:
                points.append(
                    Configuration(
                        f"{policy}-{place}",
                        "experiments.replaying:play_policy",
                        {**common, "policy": policy},
                        needs=(*recorded, f"oracles-{place}"),
                    )
                )
    return tuple(points)


QUICK = Sweep(
    _points(POOL, QUICK_POLICIES, QUICK_COSTS, shards=2, nodes=32), seeds=3, max_new_tokens=96, per_category=2
)
FULL = Sweep(_points(POOL, FULL_POLICIES, FULL_COSTS, shards=16, nodes=64), seeds=10, max_new_tokens=128)
