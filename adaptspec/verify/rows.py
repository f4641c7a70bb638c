"""The operations on probability rows that the sampling rules are written in.

A row holds the probabilities of one position over the vocabulary [V]. Rows on a CUDA device stay there; all others are
read as numpy arrays. Arithmetic is in float64 on both.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from adaptspec.types import DraftTree
from adaptspec.verify.base import Rows

Row = Any
"""float64 [V]: a numpy array, or a tensor on a CUDA device."""


def _stays_on_device(tensor: Any) -> bool:
    return tensor.is_cuda


def _resident(values: Any) -> Any:
    """`values` as a numpy array, or the tensor itself if it stays on its device."""
    if isinstance(values, np.ndarray):
        return values
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(values, torch.Tensor):
        return np.asarray(values)
    values = values.detach()
    if _stays_on_device(values):
        return values
    return (values if values.dtype in (torch.float32, torch.float64) else values.float()).cpu().numpy()


def check_sums(lowest: float, total: float, name: str) -> None:
    """Raises ValueError unless these are least entry and sum of probabilities."""
    # Written so that NaN fails. The margin forgives half-precision softmax; logits passed by mistake do not fit it.
    if not (lowest >= 0.0 and 0.95 <= total <= 1.05):
        raise ValueError(f"{name} must hold probabilities >= 0 that sum to 1, got minimum {lowest} and sum {total}")


def as_row(values: Any, *, name: str, like: Row | None = None) -> Row:
    """A fresh float64 row that sums to 1.

    Args:
        values: [V], numpy or torch.
        name: what to call it in errors.
        like: a row whose device and length the result must have.

    Raises:
        ValueError: not one-dimensional, NaN, negative, sum not 1 within float error, or not as long as `like`.
    """
    row = _resident(values)
    if like is not None and isinstance(row, np.ndarray) != isinstance(like, np.ndarray):
        row = row.double().cpu().numpy() if isinstance(like, np.ndarray) else like.new_tensor(row)
    if row.ndim != 1 or len(row) == 0 or (like is not None and len(row) != len(like)):
        wanted = "V" if like is None else len(like)
        raise ValueError(f"{name} must have shape [{wanted}], got {list(row.shape)}")
    if isinstance(row, np.ndarray):
        lowest, row = float(row.min()), row.astype(np.float64)
        total = float(row.sum())
        check_sums(lowest, total, name)
        row /= total
        return row
    row = row.double() if like is None else row.to(like)
    lowest, total = _stack(row.min(), row.sum()).tolist()
    check_sums(lowest, total, name)
    return row / total


def _stack(*scalars: Any) -> Any:
    import torch

    return torch.stack(scalars)


def target_row(target_probs: Rows, node: int) -> Row:
    """The target's distribution after `node` (`ROOT` for the last committed token)."""
    return as_row(target_probs[node + 1], name=f"target_probs[{node + 1}]")


def draft_row(tree: DraftTree, node: int, *, like: Row) -> Row | None:
    """The distribution that the children of `node` were drawn from; None for deterministic trees: q is one-hot."""
    if tree.siblings == "deterministic":
        return None
    row = int(tree.draft_rows[node + 1])
    if not 0 <= row < len(tree.draft_probs):
        raise ValueError(f"draft_rows must name a row of draft_probs for the parent {node} of drawn nodes, got {row}")
    return as_row(tree.draft_probs[row], name=f"draft_probs[{row}]", like=like)


def pick(p: Row, q: Row | None, token: int) -> tuple[float, float]:
    """`p[token]` and `q[token]`, in one transfer. Without `q` the draft was certain of `token`."""
    if q is None:
        return float(p[token]), 1.0
    if isinstance(p, np.ndarray):
        return float(p[token]), float(q[token])
    p_token, q_token = _stack(p[token], q[token]).tolist()
    return p_token, q_token


def excess(p: Row, q: Row | None, token: int, *, weight: float = 1.0) -> tuple[Row, float]:
    """`(weight p - q)+` and its sum. Without `q`, q is one-hot at `token`."""
    if q is None:
        row = p * weight
        row[token] = 0.0
    else:
        row = positive_part((p if weight == 1.0 else p * weight) - q)
    return row, float(row.sum())


def positive_part(row: Row) -> Row:
    """`row` with negative entries set to 0, in place."""
    return np.maximum(row, 0.0, out=row) if isinstance(row, np.ndarray) else row.clamp_(min=0.0)


def residual(p: Row, q: Row | None, token: int) -> Row:
    """`norm((p - q)+)`, the target's distribution once `token`, drawn from q, was rejected.

    `p` itself where nothing is left: then p equals q up to rounding and the rejection had no probability.
    """
    row, total = excess(p, q, token)
    return row / total if total > 0.0 else p


def without(q: Row | None, token: int) -> Row | None:
    """`q` renormalised over what is left once `token` was drawn; all zero if nothing is."""
    if q is None:
        return None
    row = q * 1.0
    row[token] = 0.0
    total = float(row.sum())
    return row / total if total > 0.0 else row


def entropy(p: Row) -> float:
    """Entropy in nats; zeros contribute nothing."""
    positive = p[p > 0.0]
    return float(-(positive * (np.log(positive) if isinstance(positive, np.ndarray) else positive.log())).sum())


# Sampling ------------------------------------------------------------------------------------------------------------

_BLOCK = 256


def sample(probs: Any, u: float, *, name: str = "probabilities") -> int:
    """The token at which the cumulative distribution first exceeds `u`: one uniform in, one token out.

    Never returns a token of probability zero, whatever `u`.

    Args:
        probs: [V], numpy or torch, summing to 1 within float error.
        u: in [0, 1].
        name: what to call `probs` in errors.

    Raises:
        ValueError: NaN, negative or no probabilities, or `u` outside [0, 1].

    >>> sample(np.array([0.0, 0.25, 0.75, 0.0]), 0.2), sample(np.array([0.0, 0.25, 0.75, 0.0]), 1.0)
    (1, 2)
    """
    if not 0.0 <= u <= 1.0:
        raise ValueError(f"u must be in [0, 1], got {u}")
    row = _resident(probs)
    if row.ndim != 1 or len(row) == 0:
        raise ValueError(f"{name} must have shape [V], got {list(row.shape)}")
    if not isinstance(row, np.ndarray):
        return _sample_on_device(row, u, name)
    cumulative = _cumulative(row)
    check_sums(float(row.min()), float(cumulative[-1]), name)
    return _invert(row, cumulative, u)


def draw(p: Row, u: float) -> int:
    """`sample` from a row that `as_row` and the operations above made."""
    return _invert(p, _cumulative(p), u) if isinstance(p, np.ndarray) else _sample_on_device(p, u, "p")


def _cumulative(row: np.ndarray) -> np.ndarray:
    """Running sums: per token, or per block of a long row, which is several times faster."""
    if len(row) <= 8 * _BLOCK:
        return row.cumsum(dtype=np.float64)
    return np.add.reduceat(row.astype(np.float64, copy=False), np.arange(0, len(row), _BLOCK)).cumsum()


def _invert(row: np.ndarray, cumulative: np.ndarray, u: float) -> int:
    threshold = u * float(cumulative[-1])
    index = _first_above(cumulative, threshold)
    if len(cumulative) == len(row):
        return index
    if index:
        threshold -= float(cumulative[index - 1])
    inside = row[index * _BLOCK : (index + 1) * _BLOCK].cumsum(dtype=np.float64)
    return index * _BLOCK + _first_above(inside, threshold)


def _first_above(cumulative: np.ndarray, threshold: float) -> int:
    """First index whose cumulative sum exceeds `threshold`, at most the last one that adds to the sum."""
    index = int(cumulative.searchsorted(threshold, side="right"))
    return index if index < len(cumulative) else int(cumulative.searchsorted(cumulative[-1], side="left"))


def _sample_on_device(row: Any, u: float, name: str) -> int:
    import torch

    row = row.double()
    cumulative = row.cumsum(0)
    total = cumulative[-1:]
    index = torch.searchsorted(cumulative, total * u, right=True).clamp_(max=len(row) - 1)
    token, probability, lowest, mass = torch.cat([index.double(), row[index], row.min().reshape(1), total]).tolist()
    check_sums(lowest, mass, name)
    if probability > 0.0:
        return int(token)
    # A parallel running sum may step at a zero, and u may lie past the last step: take the nearest token before.
    positive = row.nonzero().flatten().cpu().numpy()
    return int(positive[max(int(positive.searchsorted(token)) - 1, 0)])
