"""Attention of draft-tree rows over a cached prefix and over each other under an ancestor mask."""

from __future__ import annotations

import numpy as np
import torch

from adaptspec.kernels.backend import Backend, implementation

MAX_HEAD_SIZE = 256
WORD = 64


def tree_attention(
    query: torch.Tensor,
    prefix_keys: torch.Tensor,
    prefix_values: torch.Tensor,
    tree_keys: torch.Tensor,
    tree_values: torch.Tensor,
    *,
    lengths: torch.Tensor,
    ancestors: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """softmax(cap(scale * q k^T)) v over the prefix and the visible tree rows; cap(x) = softcap * tanh(x / softcap).

    Shapes: B batch, N query rows, W tree rows (W = N, or more when the queries are the last of several tree forwards),
    P prefix capacity, Hq query heads, Hkv key-value heads (Hq is a multiple), D head size. Strides are free but for 1
    along D, so views of a cache need no copy; what lies behind the used length may be anything, NaN included.

    Args:
        query: [B, Hq, N, D].
        prefix_keys, prefix_values: [B, Hkv, P, D]; every query row sees the first `lengths[b]` of them.
        tree_keys, tree_values: [B, Hkv, W, D].
        lengths: int32 or int64 [B], at most P; not checked, because reading them would wait for the device.
        ancestors: int64 [B, N, ceil(W / 64)]; bit j % 64 of word j // 64 says whether the row sees tree row j. A row
            sees itself only if its own bit is set. See `pack_ancestors`.
        scale: factor of the scores, usually D ** -0.5.
        softcap: bound of the scores, None for none.
        backend: see `adaptspec.kernels.backend`.

    Returns:
        [B, Hq, N, D] in the dtype of `query`, zeros for rows that see nothing. `result.transpose(1, 2)` is contiguous.

    Raises:
        ValueError: shapes or dtypes that do not fit, a head size above `MAX_HEAD_SIZE`.
        RuntimeError: the backend asked for is not there.
    """
    _check(query, prefix_keys, prefix_values, tree_keys, tree_values, lengths, ancestors, softcap)
    module = implementation("tree_attention", query.device, backend=backend)
    return module.tree_attention(
        query,
        prefix_keys,
        prefix_values,
        tree_keys,
        tree_values,
        lengths=lengths,
        ancestors=ancestors,
        scale=scale,
        softcap=softcap,
    )


def pack_ancestors(visible: np.ndarray) -> np.ndarray:
    """Visibility bool [..., N, W] as int64 words [..., N, ceil(W / 64)].

    >>> pack_ancestors(np.array([[True, False], [True, True]])).tolist()
    [[1], [3]]
    """
    width = visible.shape[-1]
    padded = np.zeros((*visible.shape[:-1], -(-width // WORD) * WORD), dtype=bool)
    padded[..., :width] = visible
    return np.packbits(padded, axis=-1, bitorder="little").view("<i8").astype(np.int64, copy=False)


def _check(
    query: torch.Tensor,
    prefix_keys: torch.Tensor,
    prefix_values: torch.Tensor,
    tree_keys: torch.Tensor,
    tree_values: torch.Tensor,
    lengths: torch.Tensor,
    ancestors: torch.Tensor,
    softcap: float | None,
) -> None:
    batch, heads, rows, size = query.shape
    width, groups = tree_keys.shape[2], prefix_keys.shape[1]
    if groups == 0 or heads % groups:
        raise ValueError(f"query heads must be a multiple of the {groups} key-value heads, got {heads}")
    if not 1 <= size <= MAX_HEAD_SIZE:
        raise ValueError(f"head size must be in [1, {MAX_HEAD_SIZE}], got {size}")
    expected = {
        "query": (query, tuple(query.shape)),
        "prefix_keys": (prefix_keys, (batch, groups, prefix_keys.shape[2], size)),
        "prefix_values": (prefix_values, (batch, groups, prefix_keys.shape[2], size)),
        "tree_keys": (tree_keys, (batch, groups, width, size)),
        "tree_values": (tree_values, (batch, groups, width, size)),
        "lengths": (lengths, (batch,)),
        "ancestors": (ancestors, (batch, rows, -(-width // WORD))),
    }
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
        if name in ("lengths", "ancestors"):
            if tensor.dtype not in (torch.int64, *((torch.int32,) if name == "lengths" else ())):
                raise ValueError(f"{name} must be int64, got {tensor.dtype}")
        elif tensor.dtype != query.dtype:
            raise ValueError(f"{name} must have the dtype of query, {query.dtype}, got {tensor.dtype}")
        elif tensor.stride(-1) != 1:
            raise ValueError(f"{name} must have stride 1 along D, got {tensor.stride(-1)}")
    if softcap is not None and not softcap > 0.0:
        raise ValueError(f"softcap must be > 0 or None, got {softcap}")
