"""Chains and trees drawn from a cell with a reduced vocabulary keep the target's joint law."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from adaptspec.drafters import make_drafter
from adaptspec.drafters.cell_weights import CellWeights
from adaptspec.types import DraftTree, Sampling
from adaptspec.verify import choose_verifier
from tests.drafters.cell_cases import Request, tiny_cell, tiny_llama
from tests.drafters.cell_variants import DRAFTER_VARIANTS
from tests.lossless.test_sampled import SMALL_VOCAB, p_value

RUNS = 300
PROMPT = [1, 4, 2, 5, 3]
KNOWN = [0, 2, 3, 5]
"""Tokens that the draft's head has rows for; the target uses all six."""

CASES: list[tuple[str, dict[str, Any], float]] = [
    ("eagle3", {"tree": "chain", "max_depth": 3}, 3.0),
    ("mtp3", {"tree": "static", "siblings": "without-replacement", "branching": 3, "max_depth": 3}, 0.7),
]


def outcome(
    name: str,
    options: dict[str, Any],
    temperature: float,
    *,
    told: Callable[[DraftTree], DraftTree] = lambda tree: tree,
) -> tuple[float, int]:
    """p-value of the first two tokens after one drafted step and, where it emitted one token only, one without draft;
    and the draft tokens that were accepted.

    Args:
        told: what verification is told of the tree that was drawn.
    """
    model = tiny_llama(SMALL_VOCAB)
    cell = tiny_cell(DRAFTER_VARIANTS[name], draft_vocab_size=len(KNOWN))
    head = 0.5 * torch.randn((len(KNOWN), 32), generator=torch.Generator().manual_seed(5))
    drafter = make_drafter(name, path=CellWeights(cell, head, torch.tensor(KNOWN)), **options)
    request = Request(model, drafter, PROMPT)

    @cache
    def law(*path: int) -> np.ndarray:
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *path]])).logits[0, -1].double()
        return torch.softmax(logits / temperature, -1).numpy()

    rng = np.random.default_rng(7)
    sampling = Sampling(temperature=temperature)
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for _ in range(RUNS):
        tree = told(request.ask(6, sampling=sampling, rng=rng))
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
            paths.append((*paths[parent + 1], token))
        rows = np.stack([law(*path) for path in paths])
        tokens = choose_verifier(tree, greedy=False).verify(tree, rows, rng).token_ids.tolist()
        accepted += len(tokens) - 1
        if len(tokens) == 1:
            tokens.append(int(rng.choice(SMALL_VOCAB, p=law(*tokens))))
        counts[tuple(tokens[:2])] += 1
    joint = {(a, b): law()[a] * law(a)[b] for a in range(SMALL_VOCAB) for b in range(SMALL_VOCAB)}
    return p_value(counts, joint, RUNS), accepted


@pytest.mark.parametrize(("name", "options", "temperature"), CASES)
def test_sampled_drafts_keep_the_joint_law(name: str, options: dict[str, Any], temperature: float) -> None:
    p, accepted = outcome(name, options, temperature)
    assert accepted > RUNS // 8, "the draft is hardly ever accepted, so little is tested"
    assert p > 0.001 / len(CASES)


def test_another_distribution_than_the_drawn_one_is_noticed() -> None:
    def told(tree: DraftTree) -> DraftTree:
        flatter = np.asarray(tree.draft_probs) ** 0.1
        return replace(tree, draft_probs=flatter / flatter.sum(1, keepdims=True))

    assert outcome(*CASES[0], told=told)[0] < 0.001 / len(CASES)
