"""Worlds that change midway: domains in blocks, load that comes and goes, throttling, a drafter that breaks."""

from __future__ import annotations

from experiments.drifting import WORLDS
from experiments.sweeps import Configuration, Sweep

POOL = ("prompt-lookup", "suffix", "rest", "token-recycling")
QUICK_POLICIES = ("hedge", "fixed-share", "ucb", "sw-ucb", "exp3", "exp3-s", "ema", "draft-then-choose", "mixture")
FULL_POLICIES = (
    *QUICK_POLICIES,
    *("adahedge", "normal-hedge", "d-ucb", "thompson", "tsallis-inf", "lookup-else", "hedge+request"),
)


def _points(policies: tuple[str, ...], *, shards: int, repeats: int) -> tuple[Configuration, ...]:
    traces = tuple(
        Configuration(
            f"trace-{shard}",
            "experiments.recording:RecordTrace",
            {"pool": POOL, "nodes": 32, "shard": shard, "shards": shards},
            seeded=False,
        )
        for shard in range(shards)
    )
    plays = tuple(
        Configuration(
            f"{policy}-{world}",
            "experiments.drifting:play_world",
            {"world": world, "policy": policy, "budgets": (4, 8, 16, 32), "guard": 0.05, "repeats": repeats},
            needs=tuple(trace.id for trace in traces),
        )
        for world in WORLDS
        for policy in policies
    )
    return (*traces, *plays)


QUICK = Sweep(_points(QUICK_POLICIES, shards=2, repeats=1), seeds=2, max_new_tokens=64, per_category=1)
FULL = Sweep(_points(FULL_POLICIES, shards=8, repeats=3), seeds=10, max_new_tokens=128, per_category=20)
