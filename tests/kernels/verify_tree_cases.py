"""Batches of draft trees with probabilities and uniforms, and what the shipped verifiers make of each sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from adaptspec.kernels.verify_tree import PADDING, Walk
from adaptspec.types import DraftTree
from adaptspec.verify import verify_deterministic, verify_greedy, verify_token_wise

ALMOST_ONE = 1.0 - 2.0**-53


class Injected:
    """Uniforms from a list; counts how many are used."""

    def __init__(self, uniforms: np.ndarray) -> None:
        self.uniforms = uniforms.tolist()
        self.used = 0

    def random(self) -> float:
        self.used += 1
        return self.uniforms[self.used - 1]


@dataclass(frozen=True)
class Batch:
    """B trees of at most N nodes; for the chain rule the first `lengths[b]` tokens are read as a chain."""

    parents: np.ndarray
    token_ids: np.ndarray
    lengths: np.ndarray
    probs: np.ndarray
    draft_probs: np.ndarray
    draft_rows: np.ndarray
    uniforms: np.ndarray
    drawn: bool = True

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(getattr(self, name)))

    def argmax(self) -> torch.Tensor:
        """int64 [B, N + 1]."""
        return torch.from_numpy(self.probs.argmax(-1))

    def tree(self, b: int) -> DraftTree:
        real = self.parents[b] != PADDING
        return DraftTree(self.token_ids[b][real], self.parents[b][real], np.zeros(int(real.sum())))

    def chain(self, b: int) -> DraftTree:
        n = int(self.lengths[b])
        if not self.drawn:
            return DraftTree.chain(self.token_ids[b, :n])
        rows = np.append(self.draft_rows[b, :n], -1)
        return DraftTree.chain(
            self.token_ids[b, :n], siblings="without-replacement", draft_probs=self.draft_probs, draft_rows=rows
        )


def distribution(rng: np.random.Generator, vocab_size: int, kind: str) -> np.ndarray:
    """[V]; "spread" over all tokens, "sparse" with zeros, or "peaked" at a few of the first and last."""
    weights = rng.random(vocab_size) + 1e-3
    if kind == "sparse":
        weights[rng.permutation(vocab_size)[: vocab_size // 2]] = 0.0
    elif kind == "peaked":
        weights *= 1e-4
        weights[[0, vocab_size // 2, vocab_size - 1]] += rng.random(3) * vocab_size
    return weights / weights.sum()


def random_batch(
    *,
    seed: int,
    batch: int,
    nodes: int,
    vocab_size: int,
    kind: str = "spread",
    shape: str = "any",
    dtype: type = np.float32,
    drawn: bool = True,
    same: bool = False,
) -> Batch:
    """`same`: q is p, up to rounding. Tokens of peaked distributions are drawn from the few likely ones."""
    rng = np.random.default_rng(seed)
    low = {"chain": lambda i: i - 1, "star": lambda i: -1, "any": lambda i: rng.integers(-1, i)}[shape]
    parents = np.array([[low(i) for i in range(nodes)] for _ in range(batch)], dtype=np.int64).reshape(batch, nodes)
    likely = [0, vocab_size // 2, vocab_size - 1] if kind == "peaked" else range(vocab_size)
    lengths = rng.integers(0, nodes + 1, batch)
    lengths[0] = nodes
    for b in range(batch):
        parents[b, lengths[b] :] = PADDING
    probs = np.stack([[distribution(rng, vocab_size, kind) for _ in range(nodes + 1)] for _ in range(batch)]).astype(
        dtype
    )
    draft_rows = rng.permutation(batch * nodes).reshape(batch, nodes)
    draft_probs = np.zeros((batch * nodes + 1, vocab_size), dtype)
    for b in range(batch):
        for i in range(nodes):
            row = probs[b, i] if same else distribution(rng, vocab_size, kind)
            draft_probs[draft_rows[b, i]] = row
    draft_probs[-1] = np.nan
    return Batch(
        parents=parents,
        token_ids=rng.choice(likely, (batch, nodes)),
        lengths=lengths,
        probs=probs,
        draft_probs=draft_probs,
        draft_rows=draft_rows,
        uniforms=rng.random((batch, nodes + 1)),
        drawn=drawn,
    )


def _with_uniforms_at_the_edges(batch: Batch) -> Batch:
    ends = np.random.default_rng(15).choice([0.0, ALMOST_ONE], batch.uniforms.shape)
    return replace(batch, uniforms=ends)


def _rejecting_everything(batch: Batch) -> Batch:
    """With q = p nothing is left of p - q after a rejection, which only rounding brings about; here a uniform of 1."""
    uniforms = batch.uniforms.copy()
    uniforms[:, 0] = 1.0
    return replace(batch, uniforms=uniforms)


def _on_the_borders(batch: Batch) -> Batch:
    """Probabilities and uniforms in eighths, so that running sums and thresholds are equal exactly."""
    rng = np.random.default_rng(24)
    eighths = np.array([[1, 2, 4, 1], [0, 4, 0, 4], [2, 2, 2, 2]]) / 8
    return replace(
        batch,
        probs=eighths[rng.integers(3, size=batch.probs.shape[:2])],
        draft_probs=eighths[rng.integers(3, size=len(batch.draft_probs))],
        uniforms=rng.integers(8, size=batch.uniforms.shape) / 8,
    )


def _with_other_sums(batch: Batch) -> Batch:
    """Sums that the verifiers forgive, after which they normalise. Uniforms lie so close to the ratio p / q on either
    side that one which is not normalised decides otherwise."""
    rng = np.random.default_rng(17)
    uniforms = batch.uniforms.copy()
    for b, i in np.ndindex(batch.token_ids.shape):
        token, draft_row = batch.token_ids[b, i], batch.draft_rows[b, i]
        ratio = batch.probs[b, i, token] / batch.draft_probs[draft_row, token]
        uniforms[b, i] = min(ratio * rng.choice([0.985, 1.015]), ALMOST_ONE)
    probs = batch.probs * rng.choice([0.96, 1.04], (*batch.probs.shape[:2], 1))
    return replace(batch, probs=probs, draft_probs=batch.draft_probs * 1.04, uniforms=uniforms)


def _with_one_hot_target(batch: Batch) -> Batch:
    return replace(batch, probs=(batch.probs == batch.probs.max(-1, keepdims=True)).astype(np.float32))


def _disjoint(batch: Batch) -> Batch:
    probs, draft = batch.probs.copy(), batch.draft_probs.copy()
    probs[..., ::2], draft[..., 1::2] = 0.0, 0.0
    probs, draft = (rows / rows.sum(-1, keepdims=True) for rows in (probs, draft))
    return replace(batch, probs=probs, draft_probs=draft)


def _with_bad_rows(batch: Batch) -> Batch:
    """Negative entries and impossible sums, in some rows that are visited and some that are not."""
    generator = np.random.default_rng(22)
    probs, draft = batch.probs.copy(), batch.draft_probs.copy()
    for b, row in np.ndindex(probs.shape[:2]):
        if generator.random() < 0.3:
            probs[b, row] = [[0.5, -0.125, 0.625], [3.0, 1.0, 2.0], [0.0, 0.0, 0.0]][generator.integers(3)]
    draft[generator.random(len(draft)) < 0.25] = [0.875, -0.125, 0.25]
    return replace(batch, probs=probs, draft_probs=draft)


BATCHES: dict[str, Callable[[int], Batch]] = {
    "few tokens": lambda n: random_batch(seed=39, batch=n, nodes=4, vocab_size=3),
    "star": lambda n: random_batch(seed=31, batch=n, nodes=4, vocab_size=6, shape="star"),
    "chain": lambda n: random_batch(seed=42, batch=n, nodes=4, vocab_size=2, shape="chain", dtype=np.float64),
    "half precision": lambda n: random_batch(seed=4, batch=n, nodes=3, vocab_size=3, dtype=np.float16),
    "zeros": lambda n: random_batch(seed=38, batch=n, nodes=3, vocab_size=4, kind="sparse"),
    "several blocks": lambda n: random_batch(seed=6, batch=1, nodes=2, vocab_size=4500, kind="peaked"),
    "a block and one": lambda n: random_batch(seed=7, batch=1, nodes=2, vocab_size=2049, kind="peaked", shape="star"),
    "one node": lambda n: random_batch(seed=8, batch=n, nodes=1, vocab_size=2),
    "no nodes": lambda n: random_batch(seed=9, batch=n, nodes=0, vocab_size=5),
    "one token": lambda n: random_batch(seed=10, batch=1, nodes=2, vocab_size=1),
    "chosen": lambda n: random_batch(seed=31, batch=n, nodes=3, vocab_size=3, drawn=False),
    "chosen, several blocks": lambda n: random_batch(
        seed=12, batch=1, nodes=2, vocab_size=4500, kind="peaked", drawn=False
    ),
    "q is p": lambda n: random_batch(seed=13, batch=n, nodes=2, vocab_size=4, same=True),
    "nothing left": lambda n: _rejecting_everything(
        random_batch(seed=30, batch=n, nodes=2, vocab_size=4, kind="sparse", same=True)
    ),
    "uniforms on borders": lambda n: _on_the_borders(random_batch(seed=25, batch=n, nodes=3, vocab_size=4)),
    "uniforms at the edges": lambda n: _with_uniforms_at_the_edges(
        random_batch(seed=14, batch=n, nodes=3, vocab_size=4, kind="sparse")
    ),
    "sums that are not 1": lambda n: _with_other_sums(
        random_batch(seed=42, batch=n, nodes=3, vocab_size=3, dtype=np.float64)
    ),
    "certain target": lambda n: _with_one_hot_target(random_batch(seed=19, batch=n, nodes=2, vocab_size=3)),
    "disjoint": lambda n: _disjoint(random_batch(seed=32, batch=n, nodes=2, vocab_size=6)),
    "bad rows": lambda n: _with_bad_rows(random_batch(seed=33, batch=n, nodes=3, vocab_size=3)),
}
"""One batch per regime; the argument says how many sequences, except where one is enough. Seeds are such that two
sequences show every fault in the tests."""


RULES = ("greedy", "deterministic", "token-wise")


def run(module: Any, batch: Batch, rule: str, **options: Any) -> Walk:
    """A batch by the function of `module` that is made for `rule`."""
    tree = batch["parents"], batch["token_ids"]
    if rule == "greedy":
        return module.greedy_walk(*tree, batch.argmax(), **options)
    if rule == "deterministic":
        return module.target_walk(*tree, batch["probs"], batch["uniforms"], **options)
    draft = (batch["draft_probs"], batch["draft_rows"]) if batch.drawn else (None, None)
    return module.chain_rejection(
        batch["token_ids"], batch["lengths"], batch["probs"], *draft, batch["uniforms"], **options
    )


def assert_agrees(batch: Batch, walk: Walk, rule: str) -> None:
    """The walk is what the shipped verifier `rule` ("greedy", "deterministic" or "token-wise") decides."""
    for b in range(len(batch.token_ids)):
        where = f"{rule}, sequence {b}"
        rng = Injected(batch.uniforms[b])
        try:
            if rule == "greedy":
                tree = batch.tree(b)
                verdict = verify_greedy(tree, batch.argmax()[b, : len(tree) + 1].numpy())
            elif rule == "deterministic":
                verdict = verify_deterministic(batch.tree(b), batch.probs[b], rng)
            else:
                verdict = verify_token_wise(batch.chain(b), batch.probs[b], rng)
        except ValueError as error:
            kind, row = "target", int(walk.bad_target_row[b])
            if row < 0:
                kind, row = "draft", int(walk.bad_draft_row[b])
            assert f"{kind}_probs[{row}]" in str(error), where
            found = f"minimum {float(walk.bad_minimum[b])} and sum {float(walk.bad_sum[b])}"
            assert found in str(error), where  # sums of eighths are exact
            continue
        assert int(walk.bad_target_row[b]) == int(walk.bad_draft_row[b]) == -1, where
        assert float(walk.bad_minimum[b]) == float(walk.bad_sum[b]) == 0.0, where
        accepted = len(verdict.path)
        rest = walk.nodes - accepted
        assert int(walk.accepted[b]) == accepted, where
        assert walk.path[b].tolist() == [*verdict.path.tolist(), *[-1] * rest], where
        assert walk.token_ids[b].tolist() == [*verdict.token_ids.tolist(), *[-1] * rest], where
        assert int(walk.uniforms_used[b]) == rng.used, where
