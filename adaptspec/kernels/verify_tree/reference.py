"""The walks in plain torch, one sequence after the other: the specification, and what runs on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

PADDING = -2
"""The parent of entries that are no nodes."""

LEAST_SUM, GREATEST_SUM = 0.95, 1.05
"""What probabilities may sum to: half-precision softmax is forgiven, logits passed by mistake are not."""

_FIELDS = 6


@dataclass(frozen=True, slots=True)
class Walk:
    """Where B walks ended, in one buffer that one transfer brings to the host.

    Attributes:
        buffer: int64 [B, 2 N + 7].
        nodes: N.
    """

    buffer: torch.Tensor
    nodes: int

    @classmethod
    def empty(cls, batch: int, nodes: int, device: torch.device) -> Walk:
        """With uninitialised memory, for a kernel to fill."""
        return cls(torch.empty((batch, 2 * nodes + _FIELDS + 1), dtype=torch.int64, device=device), nodes)

    def cpu(self) -> Walk:
        return Walk(self.buffer.cpu(), self.nodes)

    @property
    def accepted(self) -> torch.Tensor:
        """int64 [B], accepted nodes."""
        return self.buffer[:, 0]

    @property
    def uniforms_used(self) -> torch.Tensor:
        """int64 [B], how many of the sequence's uniforms were used, from the first on."""
        return self.buffer[:, 1]

    @property
    def bad_target_row(self) -> torch.Tensor:
        """int64 [B], the first visited row of target probabilities that is no distribution, -1 if all are. Where there
        is such a row, here or in `bad_draft_row`, what else the walk says means nothing."""
        return self.buffer[:, 2]

    @property
    def bad_draft_row(self) -> torch.Tensor:
        """int64 [B], the same for draft probabilities."""
        return self.buffer[:, 3]

    @property
    def bad_minimum(self) -> torch.Tensor:
        """float64 [B], the least entry of the bad row."""
        return self.buffer[:, 4].view(torch.float64)

    @property
    def bad_sum(self) -> torch.Tensor:
        """float64 [B], the sum of the bad row."""
        return self.buffer[:, 5].view(torch.float64)

    @property
    def path(self) -> torch.Tensor:
        """int64 [B, N], accepted nodes from the root down, then -1."""
        return self.buffer[:, _FIELDS : _FIELDS + self.nodes]

    @property
    def token_ids(self) -> torch.Tensor:
        """int64 [B, N + 1], accepted tokens and the bonus token, then -1."""
        return self.buffer[:, _FIELDS + self.nodes :]


class _Bad(NamedTuple):
    target: int
    draft: int
    minimum: float
    total: float


def greedy_walk(parents: torch.Tensor, token_ids: torch.Tensor, target_argmax: torch.Tensor) -> Walk:
    """See `adaptspec.kernels.verify_tree.greedy_walk`."""
    batch, nodes = token_ids.shape
    walk = _blank(batch, nodes, token_ids.device)
    for b in range(batch):
        path, tokens = _follow(parents[b].tolist(), token_ids[b].tolist(), target_argmax[b].tolist())
        _fill(walk, b, path=path, tokens=tokens, used=0)
    return walk


def target_walk(
    parents: torch.Tensor, token_ids: torch.Tensor, target_probs: torch.Tensor, uniforms: torch.Tensor
) -> Walk:
    """See `adaptspec.kernels.verify_tree.target_walk`."""
    batch, nodes = token_ids.shape
    walk = _blank(batch, nodes, token_ids.device)
    for b in range(batch):
        parent_of = parents[b].tolist()
        wanted: list[int] = []
        bad: dict[int, _Bad] = {}
        for row in range(nodes + 1):
            depth, node = 0, row - 1
            while node >= 0:
                depth, node = depth + 1, parent_of[node]
            probs = target_probs[b, row].double()
            minimum, total = float(probs.min()), float(probs.sum())
            if not _is_distribution(minimum, total):
                bad[row] = _Bad(row, -1, minimum, total)
            depth = min(depth, uniforms.shape[1] - 1)  # rows of padding
            wanted.append(-1 if row in bad else sample(probs, float(uniforms[b, depth])))
        path, tokens = _follow(parent_of, token_ids[b].tolist(), wanted)
        _fill(walk, b, path=path, tokens=tokens, used=len(tokens), bad=bad.get(path[-1] + 1 if path else 0))
    return walk


def chain_rejection(
    token_ids: torch.Tensor,
    lengths: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    draft_rows: torch.Tensor | None,
    uniforms: torch.Tensor,
) -> Walk:
    """See `adaptspec.kernels.verify_tree.chain_rejection`."""
    batch, nodes = token_ids.shape
    walk = _blank(batch, nodes, token_ids.device)
    for b in range(batch):
        tokens: list[int] = []
        used, bad = 0, None
        for i in range(int(lengths[b]) + 1):
            p = target_probs[b, i].double()
            minimum, total = float(p.min()), float(p.sum())
            if not _is_distribution(minimum, total):
                bad = _Bad(i, -1, minimum, total)
                break
            p = p / total
            if i < int(lengths[b]):
                token = int(token_ids[b, i])
                if draft_probs is None or draft_rows is None:
                    q = torch.zeros_like(p)
                    q[token] = 1.0
                else:
                    q = draft_probs[int(draft_rows[b, i])].double()
                    minimum, total = float(q.min()), float(q.sum())
                    if not _is_distribution(minimum, total):
                        bad = _Bad(-1, int(draft_rows[b, i]), minimum, total)
                        break
                    q = q / total
                if q[token] > 0.0:  # else it was never drawn under q, and the chain ends before it
                    used += 1
                    if float(uniforms[b, used - 1]) * float(q[token]) < float(p[token]):
                        tokens.append(token)
                        continue
                    rest = (p - q).clamp_(min=0.0)
                    p = rest if float(rest.sum()) > 0.0 else p
            used += 1
            tokens.append(sample(p, float(uniforms[b, used - 1])))
            break
        _fill(walk, b, path=list(range(len(tokens) - 1)), tokens=tokens, used=used, bad=bad)
    return walk


def sample(row: torch.Tensor, u: float) -> int:
    """The token at which the running sum of `row` [V] first exceeds `u` times the whole; never one of weight zero."""
    running = row.double().cumsum(0)
    token = int(torch.searchsorted(running, u * running[-1], right=True))
    # With u near 1 rounding can leave none: the last one that adds to the sum.
    return token if token < len(row) else int(torch.searchsorted(running, running[-1]))


def _is_distribution(minimum: float, total: float) -> bool:
    return minimum >= 0.0 and LEAST_SUM <= total <= GREATEST_SUM  # False for NaN


def _follow(parents: list[int], token_ids: list[int], wanted: list[int]) -> tuple[list[int], list[int]]:
    """From the root to the child that carries the wanted token, the first of several, and so on. `wanted` [N + 1]."""
    node, path, tokens = -1, [], []
    for child, (parent, token) in enumerate(zip(parents, token_ids, strict=True)):  # children come after their parent
        if parent == node and token == wanted[node + 1]:
            path.append(child)
            tokens.append(token)
            node = child
    return path, [*tokens, wanted[node + 1]]


def _blank(batch: int, nodes: int, device: torch.device) -> Walk:
    walk = Walk.empty(batch, nodes, device)
    walk.buffer.fill_(-1)
    walk.bad_minimum.zero_()
    walk.bad_sum.zero_()
    return walk


def _fill(walk: Walk, b: int, *, path: list[int], tokens: list[int], used: int, bad: _Bad | None = None) -> None:
    walk.accepted[b] = len(path)
    walk.uniforms_used[b] = used
    if bad is not None:
        walk.bad_target_row[b], walk.bad_draft_row[b] = bad.target, bad.draft
        walk.bad_minimum[b], walk.bad_sum[b] = bad.minimum, bad.total
        return
    for i, node in enumerate(path):
        walk.path[b, i] = node
    for i, token in enumerate(tokens):
        walk.token_ids[b, i] = token
