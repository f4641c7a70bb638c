"""Inputs for `tree_attention` as they come in practice: views of larger caches, ragged, NaN elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from adaptspec.kernels.tree_attention import pack_ancestors


@dataclass(frozen=True)
class Case:
    """Shapes as in `adaptspec.kernels.tree_attention`; `before` tree rows were run earlier, so W = before + nodes.

    Attributes:
        lengths: used prefix per sequence, default: all of it.
        spread: factor of the queries; 100 makes softmax pick one key, and overflows where the maximum is not taken off.
        alone: rows see no row but themselves.
        blind: row 0 does not even see itself.
    """

    heads: int = 2
    groups: int = 1
    nodes: int = 5
    prefix: int = 20
    size: int = 16
    lengths: tuple[int, ...] = ()
    before: int = 0
    softcap: float | None = None
    spread: float = 1.0
    dtype: torch.dtype = torch.float32
    alone: bool = False
    blind: bool = False

    def inputs(self) -> dict[str, Any]:
        """The arguments of `tree_attention`, always the same."""
        generator = torch.Generator().manual_seed(11)
        lengths = self.lengths or (self.prefix,)
        batch, width = len(lengths), self.before + self.nodes

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        caches = []
        for _ in range(2):  # [B, C, Hkv, D] with NaN between and behind, seen as [B, Hkv, C, D]
            cache = torch.full((batch, self.prefix + width + 3, self.groups + 1, self.size + 5), torch.nan)
            cache = cache.to(self.dtype)[:, :, : self.groups, : self.size].transpose(1, 2)
            for sequence, length in enumerate(lengths):
                cache[sequence, :, :length] = normal(self.groups, length, self.size)
            cache[:, :, self.prefix : self.prefix + width] = normal(batch, self.groups, width, self.size)
            caches.append(cache)
        keys, values = caches
        trees = [np.eye(width, dtype=bool) if self.alone else random_tree(width, seed=b) for b in range(batch)]
        visible = np.stack(trees)[:, self.before :]
        if self.blind:
            visible[:, 0] = False
        query = normal(batch, self.nodes, self.heads, self.size).transpose(1, 2) * self.spread
        return {
            "query": query,
            "prefix_keys": keys[:, :, : self.prefix],
            "prefix_values": values[:, :, : self.prefix],
            "tree_keys": keys[:, :, self.prefix : self.prefix + width],
            "tree_values": values[:, :, self.prefix : self.prefix + width],
            "lengths": torch.tensor(lengths),
            "ancestors": torch.from_numpy(pack_ancestors(visible)),
            "scale": self.size**-0.5,
            "softcap": self.softcap,
        }


def random_tree(width: int, *, seed: int) -> np.ndarray:
    """Visibility bool [W, W] of a tree with random parents; row 0 is the root."""
    rng = np.random.default_rng(seed)
    visible = np.eye(width, dtype=bool)
    for row in range(1, width):
        visible[row] |= visible[rng.integers(row)]
    return visible


def attend_in_float64(
    query: torch.Tensor,
    prefix_keys: torch.Tensor,
    prefix_values: torch.Tensor,
    tree_keys: torch.Tensor,
    tree_values: torch.Tensor,
    *,
    lengths: torch.Tensor,
    ancestors: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """The definition, one row at a time over the keys it sees, in float64 [B, Hq, N, D]."""
    batch, heads, rows, size = query.shape
    share = heads // prefix_keys.shape[1]
    output = torch.zeros(batch, heads, rows, size, dtype=torch.float64)
    for b, h, n in np.ndindex(batch, heads, rows):
        used, words = int(lengths[b]), ancestors[b, n].tolist()
        seen = [j for j in range(tree_keys.shape[2]) if words[j // 64] >> (j % 64) & 1]
        keys = torch.cat([prefix_keys[b, h // share, :used], tree_keys[b, h // share, seen]]).double()
        values = torch.cat([prefix_values[b, h // share, :used], tree_values[b, h // share, seen]]).double()
        scores = keys @ query[b, h, n].double() * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        output[b, h, n] = torch.softmax(scores, 0) @ values
    return output
