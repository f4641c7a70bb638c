"""A chain drawn from the marginals of a block keeps the target's joint law: q of a token does not look at those before
it, and needs not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from adaptspec.drafters import make_drafter
from adaptspec.types import DraftTree, Sampling
from adaptspec.verify import choose_verifier
from tests.drafters.block_cases import tiny_block
from tests.drafters.cell_cases import Request, tiny_llama
from tests.lossless.test_sampled import SMALL_VOCAB, p_value

RUNS = 250
PROMPT = [1, 4, 2, 5, 3]


def outcome(sampling: Sampling, *, told: Callable[[DraftTree], DraftTree] = lambda tree: tree) -> tuple[float, int]:
    """p-value of the first two tokens after one drafted step and, where it emitted one token only, one without draft;
    and the draft tokens that were accepted.

    Args:
        told: what verification is told of the chain that was drawn.
    """
    model = tiny_llama(SMALL_VOCAB)
    request = Request(model, make_drafter("dflash", path=tiny_block("dflash"), max_depth=3), PROMPT)

    @cache
    def law(*path: int) -> np.ndarray:
        with torch.no_grad():
            scores = model(torch.tensor([[*PROMPT, *path]])).logits[0, -1].double() / sampling.temperature
        if sampling.top_k:
            scores[scores < scores.topk(sampling.top_k).values[-1]] = -torch.inf
        return torch.softmax(scores, -1).numpy()

    rng = np.random.default_rng(7)
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for _ in range(RUNS):
        tree = told(request.ask(3, sampling=sampling, rng=rng))
        assert tree.siblings == "iid" and len(tree) == 3
        rows = np.stack([law(*tree.token_ids[:depth].tolist()) for depth in range(4)])
        tokens = choose_verifier(tree, greedy=False).verify(tree, rows, rng).token_ids.tolist()
        accepted += len(tokens) - 1
        if len(tokens) == 1:
            tokens.append(int(rng.choice(SMALL_VOCAB, p=law(*tokens))))
        counts[tuple(tokens[:2])] += 1
    joint = {(a, b): law()[a] * law(a)[b] for a in range(SMALL_VOCAB) for b in range(SMALL_VOCAB)}
    assert set(counts) <= {tokens for tokens, probability in joint.items() if probability > 0}
    return p_value(counts, joint, RUNS), accepted


@pytest.mark.parametrize("sampling", [Sampling(temperature=3.0), Sampling(temperature=3.0, top_k=4)])
def test_sampled_blocks_keep_the_joint_law(sampling: Sampling) -> None:
    p, accepted = outcome(sampling)
    assert accepted > RUNS // 8, "the draft is hardly ever accepted, so little is tested"
    assert p > 0.0005


def test_another_distribution_than_the_drawn_one_is_noticed() -> None:
    def told(tree: DraftTree) -> DraftTree:
        flatter = np.asarray(tree.draft_probs) ** 0.1
        return replace(tree, draft_probs=flatter / flatter.sum(1, keepdims=True))

    assert outcome(Sampling(temperature=3.0), told=told)[0] < 0.0005
