"""Driving a drafter by hand: what it is told, token by token, without a target."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import settings

from adaptspec.drafters import Drafter
from adaptspec.types import DraftContext, DraftTree, Observation, Sampling, Verdict

examples = settings(deadline=None, derandomize=True, max_examples=80)
"""Decorator of property tests: the same examples every time, however slow the machine."""


class Vocabulary:
    """A target of which only the vocabulary size matters."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size


def begin(drafter: Drafter, tokens: Sequence[int]) -> None:
    """Start a request whose prompt and first token are `tokens`."""
    drafter.prefill(np.asarray(tokens, dtype=np.int64))


def commit(drafter: Drafter, tokens: Sequence[int]) -> None:
    """One step that committed `tokens`."""
    ids = np.asarray(tokens, dtype=np.int64)
    accepted = np.arange(len(ids) - 1)
    drafter.observe(Observation(DraftTree.chain(ids[:-1]), Verdict(accepted, ids), ids))


def ask(drafter: Drafter, tokens: Sequence[int], budget: int = 64, *, max_depth: int = 1000) -> DraftTree:
    """A proposal after `tokens`, which the drafter has been told."""
    context = DraftContext(tokens[-1], len(tokens), max_depth, Sampling(), np.random.default_rng(0))
    tree = drafter.propose(context, budget)
    tree.validate(vocab_size=2**31 - 1, budget=budget)
    return tree


def request(drafter: Drafter, tokens: Sequence[int], *, prompt: int = 1) -> None:
    """A whole request: `prompt` tokens (the root is the next one), then one token per step."""
    begin(drafter, tokens[: prompt + 1])
    for token in tokens[prompt + 1 :]:
        commit(drafter, [token])
    drafter.finish()


def paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """Score of every path, by its tokens."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return dict(zip(found, tree.scores.tolist(), strict=True))
