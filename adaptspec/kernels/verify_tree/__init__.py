"""Verification of draft trees on the target's device: from probabilities to accepted path and bonus token.

The rules are those of `adaptspec.verify`; with the same uniforms they give the same tokens, up to the rounding of
float64 sums. Shapes: B batch, N nodes (of the largest tree), V vocabulary, U uniforms, R rows of draft probabilities.
Results stay on the device, so a step can go on, or be captured in a graph, without waiting for them.
"""

from __future__ import annotations

import torch

from adaptspec.kernels.backend import Backend, implementation
from adaptspec.kernels.verify_tree.reference import PADDING, Walk

__all__ = ["MAX_NODES", "PADDING", "Walk", "chain_rejection", "greedy_walk", "target_walk"]

MAX_NODES = 1023


def greedy_walk(
    parents: torch.Tensor, token_ids: torch.Tensor, target_argmax: torch.Tensor, *, backend: Backend | None = None
) -> Walk:
    """Follow the target's argmax while it is a child; the first argmax that is none is the bonus.

    Args:
        parents: int64 [B, N], `parents[i] < i`; -1 is the root, `PADDING` marks entries that are no nodes.
        token_ids: int64 [B, N].
        target_argmax: int64 [B, N + 1], row 0 of the root, row i + 1 of node i.
        backend: see `adaptspec.kernels.backend.choose`.

    Raises:
        ValueError: shapes, types or devices that do not fit.

    >>> chain = torch.tensor([[5, 6, 7]])
    >>> greedy_walk(torch.tensor([[-1, 0, 1]]), chain, torch.tensor([[5, 6, 9, 1]])).token_ids.tolist()
    [[5, 6, 9, -1]]
    """
    batch, nodes = _check_tree(token_ids, parents=parents)
    _check("target_argmax", target_argmax, (batch, nodes + 1), torch.int64, token_ids.device)
    module = implementation("verify_tree", token_ids.device, backend=backend)
    return module.greedy_walk(parents, token_ids, target_argmax)


def target_walk(
    parents: torch.Tensor,
    token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    uniforms: torch.Tensor,
    *,
    backend: Backend | None = None,
) -> Walk:
    """Sample a token from the target, by inversion; follow it if it is a child, else it is the bonus.

    Args:
        parents, token_ids: as for `greedy_walk`.
        target_probs: [B, N + 1, V], any floating type, each row in use summing to 1. Others may hold anything.
        uniforms: float64 [B, U] in [0, 1], U above the greatest depth: number d decides the token at depth d + 1.
        backend: see `adaptspec.kernels.backend.choose`.

    Raises:
        ValueError: shapes, types or devices that do not fit. A visited row that is no distribution is reported in the
            result, so that nobody has to wait for the device.
    """
    batch, nodes = _check_tree(token_ids, parents=parents)
    _check_probs("target_probs", target_probs, (batch, nodes + 1), token_ids.device)
    _check("uniforms", uniforms, (batch, None), torch.float64, token_ids.device)
    module = implementation("verify_tree", token_ids.device, backend=backend)
    return module.target_walk(parents, token_ids, target_probs, uniforms)


def chain_rejection(
    token_ids: torch.Tensor,
    lengths: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    draft_rows: torch.Tensor | None,
    uniforms: torch.Tensor,
    *,
    backend: Backend | None = None,
) -> Walk:
    """Speculative sampling (arXiv 2211.17192): accept x with probability min(1, p[x] / q[x]); the first rejected
    position emits a sample of norm((p - q)+), the end of the chain one of p.

    Args:
        token_ids: int64 [B, N].
        lengths: int64 [B], nodes of each chain, at most N.
        target_probs: as for `target_walk`.
        draft_probs: [R, V], the distributions tokens were drawn from; None if they were chosen: q is one-hot.
        draft_rows: int64 [B, N], which of them; None like `draft_probs`.
        uniforms: float64 [B, N + 1] in [0, 1): one for each test, then one for the last token.
        backend: see `adaptspec.kernels.backend.choose`.

    Raises:
        ValueError: as for `target_walk`. That tokens are below V and draft rows below R is the caller's promise.
    """
    batch, nodes = _check_tree(token_ids)
    device = token_ids.device
    _check("lengths", lengths, (batch,), torch.int64, device)
    _check_probs("target_probs", target_probs, (batch, nodes + 1), device)
    _check("uniforms", uniforms, (batch, nodes + 1), torch.float64, device)
    if (draft_probs is None) != (draft_rows is None):
        raise ValueError("draft_probs and draft_rows belong together, got only one of them")
    if draft_probs is not None and draft_rows is not None:
        _check_probs("draft_probs", draft_probs, (None,), device, vocab_size=target_probs.shape[-1])
        _check("draft_rows", draft_rows, (batch, nodes), torch.int64, device)
    module = implementation("verify_tree", device, backend=backend)
    return module.chain_rejection(token_ids, lengths, target_probs, draft_probs, draft_rows, uniforms)


def _check_tree(token_ids: torch.Tensor, parents: torch.Tensor | None = None) -> tuple[int, int]:
    """Batch and nodes."""
    if token_ids.dim() != 2 or token_ids.shape[1] > MAX_NODES:
        raise ValueError(f"token_ids must have shape [B, N] with N <= {MAX_NODES}, got {list(token_ids.shape)}")
    batch, nodes = token_ids.shape
    for name, tensor in (("token_ids", token_ids), ("parents", parents)):
        if tensor is not None:
            _check(name, tensor, (batch, nodes), torch.int64, token_ids.device)
    return batch, nodes


def _check_probs(
    name: str, probs: torch.Tensor, shape: tuple[int | None, ...], device: torch.device, vocab_size: int | None = None
) -> None:
    _check(name, probs, (*shape, vocab_size), None, device)
    if not probs.dtype.is_floating_point or probs.shape[-1] == 0:
        raise ValueError(f"{name} must hold floating-point numbers, got {probs.dtype} {list(probs.shape)}")


def _check(
    name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], dtype: torch.dtype | None, device: torch.device
) -> None:
    fits = tensor.dim() == len(shape) and all(
        wanted is None or wanted == size for wanted, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits or (dtype is not None and tensor.dtype != dtype) or tensor.device != device:
        wanted_shape = [size if size is not None else "any" for size in shape]
        raise ValueError(
            f"{name} must be {dtype or 'floating point'} {wanted_shape} on {device}, "
            f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )
