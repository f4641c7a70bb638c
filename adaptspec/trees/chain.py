"""A single path of draft tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from adaptspec.trees._checks import check_log_probs
from adaptspec.types import DraftTree


def chain(
    token_ids: np.ndarray | Sequence[int],
    log_probs: np.ndarray | Sequence[float] | None = None,
    *,
    evidence: Mapping[str, np.ndarray] | None = None,
) -> DraftTree:
    """One path; score(i) = sum over j <= i of log_probs(j), as in two-model drafting (Leviathan et al., 2211.17192).

    Args:
        token_ids: [D], each the child of the one before.
        log_probs: [D], of each token given its prefix; certain (0) when left out.
        evidence: columns [D] to attach.

    Raises:
        ValueError: the lengths differ, or `log_probs` are not log-probabilities.
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    if log_probs is None:
        scores = np.zeros(len(ids))
    else:
        scores = check_log_probs("log_probs", np.asarray(log_probs)).cumsum()
        if scores.shape != ids.shape:
            raise ValueError(f"log_probs must have shape {list(ids.shape)} like token_ids, got {list(scores.shape)}")
    return DraftTree(ids, np.arange(-1, len(ids) - 1, dtype=np.int64), scores, evidence=dict(evidence or {}))
