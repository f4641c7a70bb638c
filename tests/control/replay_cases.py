"""Small traces made up for tests of replays and of what is computed from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from adaptspec.control.cost import CostModel
from adaptspec.control.cost_worlds import StepCosts
from adaptspec.control.trace import Proposals, Trace, TracedRequest
from adaptspec.types import DraftTree


def request(
    tokens: Sequence[int],
    trees: Mapping[str, Sequence[DraftTree]],
    *,
    name: str = "0",
    domain: str = "any",
    prompt_length: int = 10,
) -> TracedRequest:
    """One output with a tree per drafter and position."""
    proposals = {drafter: Proposals.of(list(found)) for drafter, found in trees.items()}
    return TracedRequest(name, domain, prompt_length, np.array(tokens, dtype=np.int64), proposals)


def trace(requests: Sequence[TracedRequest], *, nodes: int, max_new_tokens: int | None = None) -> Trace:
    """These requests, none of which reached `max_new_tokens` unless it is given."""
    longest = max(len(r.tokens) for r in requests) + 1 if max_new_tokens is None else max_new_tokens
    drafters = dict.fromkeys(requests[0].proposals, nodes)
    return Trace(tuple(requests), drafters, longest, 0.0, CostModel().state_dict(), "test")


def random_tree(rng: np.random.Generator, *, nodes: int, truth: Sequence[int], words: int) -> DraftTree:
    """A tree of at most `nodes` nodes, some of which are right about what comes."""
    parents: list[int] = []
    tokens: list[int] = []
    depths: list[int] = []
    taken: set[tuple[int, int]] = set()
    for _ in range(int(rng.integers(0, nodes + 1))):
        parent = int(rng.integers(-1, len(parents)))
        depth = 0 if parent < 0 else depths[parent] + 1
        right = depth < len(truth) and rng.random() < 0.6
        token = int(truth[depth]) if right else int(rng.integers(words))
        if (parent, token) not in taken and depth < len(truth):
            taken.add((parent, token))
            parents.append(parent)
            tokens.append(token)
            depths.append(depth)
    # Scores may tie, and may rise a little from parent to child, which budgets must not mind.
    scores = -np.round(rng.random(len(parents)) * 3.0, 1)
    for node, parent in enumerate(parents):
        if parent >= 0:
            scores[node] = min(0.0, scores[node] + scores[parent] + 0.5)
    return DraftTree(np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64), scores)


def random_trace(
    seed: int,
    *,
    lengths: Sequence[int],
    drafters: Sequence[str] = ("a", "b"),
    nodes: int = 4,
    words: int = 3,
    max_new_tokens: int | None = None,
) -> Trace:
    """Random text and trees; requests of two domains in turn."""
    rng = np.random.default_rng(seed)
    requests = []
    for number, length in enumerate(lengths):
        tokens = rng.integers(words, size=length).tolist()
        trees = {
            drafter: [
                random_tree(rng, nodes=nodes, truth=tokens[position + 1 :], words=words)
                for position in range(length - 1)
            ]
            for drafter in drafters
        }
        requests.append(request(tokens, trees, name=str(number), domain=("law", "code")[number % 2]))
    return trace(requests, nodes=nodes, max_new_tokens=max_new_tokens)


def random_costs(seed: int, *, drafters: Sequence[str] = ("a", "b"), nodes: int = 4) -> StepCosts:
    """Rising seconds of verification in two ranges of context, and drafters of which some cost."""
    rng = np.random.default_rng(seed)
    curve = 1.0 + np.cumsum(rng.random(nodes + 1)) * rng.random()
    return StepCosts(
        np.stack([curve, curve * (1.0 + rng.random())]),
        (13, 100),
        draft={drafter: float(rng.random() * rng.integers(2)) for drafter in drafters},
        overhead=float(rng.random()),
    )
