"""Every drafter and every strategy, category by category. Give Spec-Bench's `question.jsonl` by --prompts."""

from __future__ import annotations

from experiments.sweeps import Configuration, Sweep

LIVE = "experiments.live:LiveRun"
FREE = (
    *("prompt-lookup", "ngram-cache", "suffix", "sam", "rest"),
    *("token-recycling", "lookahead", "layer-skip"),
)
TRAINED = (
    *("draft-model", "medusa", "hydra", "eagle1", "eagle2", "eagle-self", "eagle3", "eagle3-lk"),
    *("griffin", "griffin-gs", "griffin-ltd", "mtp1", "mtp1-kl", "mtp1-lk", "mtp3", "confu"),
    *("dflash", "ddtree", "treeflash", "taps", "kangaroo", "draft-verify", "cats-chain", "cats", "cats-eagle"),
)
STRATEGIES = ("mixture", "draft-then-choose", "hedge", "ucb", "exp3")
POOL = ("prompt-lookup", "suffix", "token-recycling")


def _points(drafters: tuple[str, ...], strategies: tuple[str, ...], budgets: tuple[int, ...]) -> tuple:
    points = [
        Configuration(
            f"{drafter}-b{budget}",
            LIVE,
            {
                "method": f"{drafter}@{budget}",
                "pool": (drafter,),
                "strategy": f"fixed:{drafter}@{budget}",
                "budgets": (budget,),
                "answers": True,
            },
        )
        for drafter in drafters
        for budget in budgets
    ]
    points += [
        Configuration(
            name,
            LIVE,
            {"method": name, "pool": POOL, "strategy": name, "budgets": budgets, "answers": True},
        )
        for name in strategies
    ]
    baseline = {"method": "ar", "pool": (), "strategy": "fixed:ar", "answers": True}
    return (Configuration("ar", LIVE, baseline), *points)


QUICK = Sweep(_points((*FREE, *TRAINED), STRATEGIES, (8,)), seeds=1, max_new_tokens=24, per_category=1, limit=4)
FULL = Sweep(_points((*FREE, *TRAINED), STRATEGIES, (8, 30, 60)), seeds=3, max_new_tokens=1024)
