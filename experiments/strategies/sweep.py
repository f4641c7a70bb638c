"""UCB, EXP3 and Hedge live against no speculation, from the full pool and from experts for single domains: stores of
text, and trained heads."""

from __future__ import annotations

from experiments.sweeps import Configuration, Sweep

LIVE = "experiments.live:LiveRun"
POOL = ("prompt-lookup", "suffix", "token-recycling")
TRAINED = ("eagle3", "hydra", "medusa")
STRATEGIES = ("hedge", "ucb", "exp3", "mixture")
EXPERTS = (2, 4, 7)
KINDS = {"rest": ("experts", "experts"), "eagle3": ("heads", "experts (EAGLE heads)")}
"""Kinds of experts: what ids and groups call them."""


def _points(strategies: tuple[str, ...], budgets: tuple[int, ...], experts: tuple[int, ...]) -> tuple:
    common = {"budgets": budgets, "temperature": 0.0}
    points = [
        Configuration(
            f"{name}-full", LIVE, {**common, "group": "full pool", "pool": POOL, "strategy": name, "order": "shuffle"}
        )
        for name in strategies
    ]
    points += [
        Configuration(
            f"{name}-trained",
            LIVE,
            {
                **common,
                "group": "full pool with trained heads",
                "pool": (*POOL, *TRAINED),
                "strategy": name,
                "order": "shuffle",
            },
        )
        for name in strategies
    ]
    points += [
        Configuration(
            f"{name}-{short}{count}-{order}",
            LIVE,
            {
                **common,
                "budgets": budgets[:1],  # as published: the choice is among experts alone
                "group": f"{count} {long}, {order}",
                "pool": (),
                "experts": count,
                "expert": kind,
                "strategy": name,
                "order": order,
            },
        )
        for kind, (short, long) in KINDS.items()
        for count in experts
        for order in ("shuffle", "blocks")
        for name in strategies
    ]
    return tuple(points)


QUICK = Sweep(_points(("hedge", "ucb", "exp3"), (8,), (2,)), seeds=1, max_new_tokens=32, per_category=1)
FULL = Sweep(_points(STRATEGIES, (8, 32), EXPERTS), seeds=3, max_new_tokens=128)
