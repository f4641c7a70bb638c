"""The most likely tokens and their log-probabilities under some rows of a language-model head."""

from __future__ import annotations

import torch

from adaptspec.kernels.backend import Backend, implementation
from adaptspec.kernels.vocab_head.reference import TopTokens

__all__ = ["MAX_K", "TopTokens", "vocab_head"]

MAX_K = 32


def vocab_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor | None = None,
    *,
    k: int,
    gathered: bool = False,
    backend: Backend | None = None,
) -> TopTokens:
    """Top-k and log-sum-exp of `hidden @ weight[ids].T`; on a GPU without ever writing `weight[ids]`.

    Logits are accumulated in float32. Among equal logits the lowest position in `ids` comes first. Log-probabilities
    are normalised over the rows in use. Where fewer than `k` logits are above -inf, token -1 with log-probability -inf
    fills up.

    Args:
        hidden: [M, H].
        weight: [V, H], rows contiguous, of the type of `hidden`; never written to.
        ids: int32 [V'], the rows in use, which are the token ids returned; -1 marks an entry that is not in use.
            None: all rows.
        k: 1 to 32.
        gathered: `weight` is [V', H] and holds the rows of `ids` already, in that order.
        backend: see `adaptspec.kernels.backend.choose`.

    Raises:
        ValueError: shapes, types or devices that do not fit, or `k` out of range. That ids are below V is the caller's
            promise: looking would make the CPU wait for the GPU.

    >>> head = torch.tensor([[0.0], [1.0], [2.0], [1.0]])
    >>> vocab_head(torch.ones(1, 1), head, torch.tensor([3, 0, 1], dtype=torch.int32), k=2).ids.tolist()
    [[3, 1]]
    """
    _check(hidden, weight, ids, k=k, gathered=gathered)
    module = implementation("vocab_head", hidden.device, backend=backend)
    return module.vocab_head(hidden, weight, ids, k=k, gathered=gathered)


def _check(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor | None, *, k: int, gathered: bool) -> None:
    if not 1 <= k <= MAX_K:
        raise ValueError(f"k must be in [1, {MAX_K}], got {k}")
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden and weight must have shapes [M, H] and [V, H], got {list(hidden.shape)} and {list(weight.shape)}"
        )
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden and weight must be of one type, got {hidden.dtype} and {weight.dtype}")
    if weight.shape[1] > 1 and weight.stride(1) != 1:
        raise ValueError(f"rows of weight must be contiguous, got strides {list(weight.stride())}")
    if weight.device != hidden.device:
        raise ValueError(f"hidden and weight must be on one device, got {hidden.device} and {weight.device}")
    if ids is None:
        return
    if ids.dim() != 1 or ids.dtype != torch.int32 or ids.device != hidden.device:
        raise ValueError(
            f"ids must be int32 [V'] on {hidden.device}, got {ids.dtype} {list(ids.shape)} on {ids.device}"
        )
    if gathered and len(ids) != len(weight):
        raise ValueError(f"gathered weight must have one row per id, got {len(weight)} rows and {len(ids)} ids")
