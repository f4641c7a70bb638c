"""Shorter drafts where a step may hold no more: the scheduler's budget of draft tokens."""

from __future__ import annotations

import numpy as np


def fit_budget(
    arms: np.ndarray,
    drafters: np.ndarray,
    lengths: np.ndarray,
    *,
    caps: np.ndarray | None,
    budget: int | None,
    uniform: bool,
    worth: np.ndarray | None,
) -> np.ndarray:
    """Arms of the same drafters that together draft at most `budget` tokens; the tokens of least worth go first.

    Args:
        arms: int64 [R], what the rows would get, -1 for nothing.
        drafters, lengths: int64 [A], of every arm; lengths ascending within a drafter.
        caps: int64 [R], at most so many tokens per row; None for no limit.
        budget: None for no limit.
        uniform: all rows get the same.
        worth: float [K, D, R], expected accepted tokens by position; None: the deepest tokens are worth least.
    """
    if budget is None:
        return arms
    drafting = arms >= 0
    asked = np.where(drafting, lengths[arms] if caps is None else np.minimum(lengths[arms], caps), 0)
    if int(asked.sum()) <= budget:
        return arms
    if uniform:
        rooms = np.full(len(arms), budget // max(int(np.count_nonzero(drafting)), 1))
    else:
        if worth is None:
            value = np.broadcast_to(-np.arange(float(lengths.max()))[:, None], (int(lengths.max()), len(arms)))
        else:
            value = worth[:, drafters[arms], np.arange(len(arms))]
        rooms = _within(asked, budget=budget, worth=value)
    return np.array(
        [
            _shorter(arm, room, drafters, lengths) if room < tokens else arm
            for arm, room, tokens in zip(arms.tolist(), rooms.tolist(), asked.tolist(), strict=True)
        ],
        dtype=np.int64,
    )


def _shorter(arm: int, room: int, drafters: np.ndarray, lengths: np.ndarray) -> int:
    """The longest arm of the same drafter of at most `room` tokens, -1 if there is none."""
    fits = np.flatnonzero((drafters == drafters[arm]) & (lengths <= room))
    return int(fits[-1]) if len(fits) else -1


def _within(lengths: np.ndarray, *, budget: int, worth: np.ndarray) -> np.ndarray:
    """Cut draft lengths [R] so that they sum to at most `budget`: the token of least worth goes first.

    Args:
        worth: float64 [K, R], expected accepted tokens by position, falling along a row.
    """
    places = np.arange(worth.shape[0])[:, None]
    value = np.where(places < lengths, worth, -np.inf)
    order = np.argsort(-value, axis=None, kind="stable")[:budget]
    kept = np.zeros(value.size, dtype=bool)
    kept[order] = value.ravel()[order] > -np.inf
    return kept.reshape(value.shape).sum(axis=0)
