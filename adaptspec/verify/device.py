"""Rules whose work the kernel `verify_tree` does where it runs, which is on a GPU: one pass over all rows and one
transfer of the verdict, instead of some transfers for every visited row.

Each function gives what the ordinary rule gives, leaves the source of randomness where the ordinary rule leaves it, and
returns None where the ordinary rule has to do: for numpy, on a CPU, or when uniforms cannot be drawn ahead.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from adaptspec.types import DraftTree, Verdict
from adaptspec.verify.base import Rows, Uniforms
from adaptspec.verify.rows import check_sums

if TYPE_CHECKING:
    import torch

    from adaptspec.kernels.verify_tree import Walk


def greedy_walk(tree: DraftTree, target_argmax: Any) -> Verdict | None:
    """For `verify_greedy`; takes a tensor int64 [N + 1]."""
    argmax = _resident(target_argmax, dimensions=1)
    if argmax is None or argmax.is_floating_point():
        return None
    from adaptspec.kernels import verify_tree

    if len(tree) > verify_tree.MAX_NODES:
        return None
    parents, token_ids = _move(argmax.device, tree.parents, tree.token_ids)
    return _verdict(verify_tree.greedy_walk(parents, token_ids, argmax.long()[None]))


def target_walk(tree: DraftTree, target_probs: Rows, rng: Uniforms) -> Verdict | None:
    """For `verify_deterministic`."""
    probs = _probabilities(tree, target_probs)
    if probs is None or not isinstance(rng, np.random.Generator):
        return None
    from adaptspec.kernels import verify_tree

    state, ahead = _draw_ahead(rng, len(tree) + 1)
    parents, token_ids, uniforms = _move(probs.device, tree.parents, tree.token_ids, ahead)
    return _verdict(verify_tree.target_walk(parents, token_ids, probs[None], uniforms), rng=rng, state=state)


def chain_rejection(tree: DraftTree, target_probs: Rows, rng: Uniforms) -> Verdict | None:
    """For `verify_token_wise`; `tree` is a chain."""
    probs = _probabilities(tree, target_probs)
    if probs is None or not isinstance(rng, np.random.Generator):
        return None
    nodes, vocab_size = len(tree), probs.shape[1]
    if nodes and not 0 <= tree.token_ids.min() <= tree.token_ids.max() < vocab_size:
        return None
    draft, rows = None, np.zeros(nodes, np.int64)
    if nodes and tree.siblings != "deterministic":
        draft, rows = _resident(tree.draft_probs, dimensions=2), tree.draft_rows[:nodes]
        if draft is None or draft.device != probs.device or draft.shape[1] != vocab_size:
            return None
        if not 0 <= rows.min() <= rows.max() < len(draft):
            return None
    from adaptspec.kernels import verify_tree

    state, ahead = _draw_ahead(rng, nodes + 1)
    token_ids, draft_rows, lengths, uniforms = _move(probs.device, tree.token_ids, rows, np.array([nodes]), ahead)
    walk = verify_tree.chain_rejection(
        token_ids, lengths[0], probs[None], draft, None if draft is None else draft_rows, uniforms
    )
    return _verdict(walk, rng=rng, state=state)


def _resident(values: Any, *, dimensions: int) -> torch.Tensor | None:
    """`values`, or what its method `tensor` gives, if it is a tensor for which the kernel is chosen."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if not isinstance(values, torch.Tensor):
        values = values.tensor() if hasattr(values, "tensor") else None
    if values is None or values.dim() != dimensions:
        return None
    from adaptspec.kernels.backend import choose

    return values.detach() if choose("verify_tree", values.device) == "triton" else None


def _probabilities(tree: DraftTree, target_probs: Rows) -> torch.Tensor | None:
    """[N + 1, V]."""
    probs = _resident(target_probs, dimensions=2)
    if probs is None:
        return None
    from adaptspec.kernels.verify_tree import MAX_NODES

    rows = len(tree) + 1
    return probs[:rows] if probs.is_floating_point() and rows <= min(len(probs), MAX_NODES + 1) else None


def _draw_ahead(rng: np.random.Generator, count: int) -> tuple[Any, np.ndarray]:
    """The state to go back to, and the next `count` numbers."""
    state = rng.bit_generator.state
    return state, rng.random(count)


def _move(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """Arrays of integers or float64 as 64-bit tensors [1, n], moved to the device in one piece."""
    import torch

    words = [array.view(np.int64) if array.dtype.kind == "f" else array.astype(np.int64) for array in arrays]
    together = torch.from_numpy(np.concatenate(words)).to(device)
    parts = together.split([len(array) for array in arrays])
    return [
        (part.view(torch.float64) if array.dtype.kind == "f" else part)[None]
        for array, part in zip(arrays, parts, strict=True)
    ]


def _verdict(walk: Walk, *, rng: np.random.Generator | None = None, state: Any = None) -> Verdict:
    """Wait for the device.

    Raises:
        ValueError: a visited row is not a distribution.
    """
    walk = walk.cpu()
    for name, rows in (("target_probs", walk.bad_target_row), ("draft_probs", walk.bad_draft_row)):
        if (row := int(rows[0])) >= 0:
            check_sums(float(walk.bad_minimum[0]), float(walk.bad_sum[0]), f"{name}[{row}]")
    if rng is not None:
        rng.bit_generator.state = state
        rng.random(int(walk.uniforms_used[0]))
    accepted = int(walk.accepted[0])
    return Verdict(walk.path[0, :accepted].numpy().copy(), walk.token_ids[0, : accepted + 1].numpy().copy())
