"""Tree builders at five budgets and three temperatures."""

from __future__ import annotations

from experiments.sweeps import Configuration, Sweep

LIVE = "experiments.live:LiveRun"
BUDGETS = (16, 30, 32, 60, 64)
TEMPERATURES = (0.0, 0.7, 1.0)
FREE = (
    ("suffix", "chain", {"tree": False}),
    ("suffix", "best-first", {"tree": True}),
    ("rest", "trie-from-counts", {}),
    ("token-recycling", "template", {}),
)
TRAINED = (
    ("draft-model", "chain", {"branching": 1}),
    ("draft-model", "beam-rerank", {"branching": 8}),
    ("medusa", "best-first", {"tree": "best-first"}),
    ("medusa", "template", {"tree": "template"}),
    ("hydra", "beam-rerank", {}),
    ("eagle3", "chain", {"tree": "chain"}),
    ("eagle3", "dynamic", {"tree": "dynamic"}),
    ("eagle3", "static", {"tree": "static"}),
)


def _points(builders: tuple, budgets: tuple[int, ...], temperatures: tuple[float, ...]) -> tuple[Configuration, ...]:
    return tuple(
        Configuration(
            f"{drafter}-{builder}-b{budget}-t{temperature:g}",
            LIVE,
            {
                "builder": builder,
                "pool": ({"drafter": drafter, "options": options},),
                "strategy": f"fixed:{drafter}@{budget}",
                "budgets": (budget,),
                "temperature": temperature,
            },
        )
        for temperature in temperatures
        for drafter, builder, options in builders
        for budget in budgets
    )


QUICK = Sweep(_points((*FREE, TRAINED[6]), (16, 32), (0.0, 1.0)), seeds=1, max_new_tokens=32, limit=4)
FULL = Sweep(_points((*FREE, *TRAINED), BUDGETS, TEMPERATURES), seeds=3, max_new_tokens=256, per_category=20)
