"""Vocabulary heads on law and code: static sizes and buffers, with a trained head and with a draft model."""

from __future__ import annotations

from experiments.sweeps import Configuration, Sweep, drafter_slug

LIVE = "experiments.live:LiveRun"
DOMAINS = ("law", "code")
DRAFTERS = {"coupled": "eagle3", "decoupled": "draft-model"}
"""A head that shares the target's embeddings, and a model of its own."""

STATIC = (8192, 16384, 32768)
BUFFERS = (256, 512, 1024)
FULL_HEADS = (
    "full",
    *(f"fr:{size}" for size in STATIC),
    *(f"trim:{size}" for size in STATIC),
    *("coral", "dynaspec", "microspec"),
    *(f"evospec:{size}+{buffer}" for size in STATIC for buffer in BUFFERS),
)
QUICK_HEADS = ("full", "fr:8192", "fr:16384", "microspec", "evospec:16384+512")


def _points(heads: tuple[str, ...], budget: int) -> tuple[Configuration, ...]:
    points = [
        Configuration(
            f"{drafter_slug(head)}-head",
            "experiments.heads:HeadSeconds",
            {"head": head, "rows": (1, 8), "domains": None},
            seeded=False,
        )
        for head in heads
    ]
    for kind, drafter in DRAFTERS.items():
        for domain in DOMAINS:
            for head in heads:
                arm = f"{drafter}@{budget}" if head == "full" else f"{drafter}@{budget}/{head}"
                parameters = {
                    "head": head,
                    "draft": kind,
                    "pool": (drafter,),
                    "strategy": f"fixed:{arm}",
                    "budgets": (budget,),
                    "vocab": (head,),
                    "domains": (domain,),
                }
                points.append(Configuration(f"{drafter_slug(head)}-{kind}-{domain}", LIVE, parameters))
    return tuple(points)


QUICK = Sweep(_points(QUICK_HEADS, 8), seeds=1, max_new_tokens=32, per_category=2)
FULL = Sweep(_points(FULL_HEADS, 32), seeds=3, max_new_tokens=256, per_category=80)
