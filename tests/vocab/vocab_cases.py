"""A small head, what heads need beside it, and steps to show them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from adaptspec.types import DraftTree, Observation, Verdict
from adaptspec.vocab import FrequencyList, HeadData, VocabHeads, train_router

VOCAB_SIZE = 300
HIDDEN = 16
KEEP = (2, 7, 299)
"""Special tokens; the lists below name them last."""

NAMES = (
    "full",
    "fr:100",
    "trim:50",
    "microspec:64",
    "evospec:60+10",
    "evospec:60+10+align",
    "coral:2",
    "dynaspec:80",
)


@lru_cache(maxsize=1)
def weight() -> torch.Tensor:
    """[V, H]; shared, nobody may write to it."""
    return torch.randn((VOCAB_SIZE, HIDDEN), generator=torch.Generator().manual_seed(3))


def hidden(rows: int = 3, *, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, HIDDEN), generator=torch.Generator().manual_seed(seed))


@lru_cache(maxsize=1)
def data() -> HeadData:
    """A frequency list of all tokens, and routers trained for `weight`."""
    order = np.random.default_rng(5).permutation(VOCAB_SIZE)
    last = np.isin(order, KEEP)
    frequencies = FrequencyList(np.concatenate([order[~last], order[last]]), VOCAB_SIZE)
    features = hidden(600, seed=9)
    top = (features @ weight().T).topk(4).indices
    routers = {
        kind: train_router(features, top, kind=kind, weight=weight(), groups=groups, floor=8, steps=60)[0]
        for kind, groups in (("coral", 6), ("dynaspec", 30))
    }
    return HeadData(frequencies, routers)


def bound(names: Sequence[str] = NAMES, *, head: torch.Tensor | None = None) -> VocabHeads:
    heads = VocabHeads(names)
    heads.bind(weight() if head is None else head, vocab_size=VOCAB_SIZE, keep=KEEP, data=data())
    return heads


def prompt(seed: int = 0, *, length: int = 12, k: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Committed tokens, the root last, and the target's top tokens in the prompt."""
    rng = np.random.default_rng(seed)
    return rng.integers(VOCAB_SIZE, size=length), rng.integers(VOCAB_SIZE, size=(length - 1, k))


def step(seed: int = 0, *, nodes: int = 4, k: int = 8) -> Observation:
    """A verified chain of which the first node was accepted."""
    rng = np.random.default_rng(seed)
    tree = DraftTree.chain(rng.integers(VOCAB_SIZE, size=nodes))
    tokens = np.array([tree.token_ids[0], rng.integers(VOCAB_SIZE)])
    top = np.stack([rng.permutation(VOCAB_SIZE)[:k] for _ in range(nodes + 1)])
    logits = -np.sort(-rng.normal(size=top.shape).astype(np.float32))
    verdict = Verdict(np.array([0]), tokens)
    return Observation(tree, verdict, tokens, top, target_top_logits=logits)
