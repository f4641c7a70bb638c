"""Ratios of sums and how sure we may be of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def rate(tokens: float, seconds: float) -> float:
    """Tokens per second; 0 where no time was measured."""
    return tokens / seconds if seconds > 0 else 0.0


def bootstrap_speedup(
    tokens: Sequence[float],
    seconds: Sequence[float],
    base_tokens: Sequence[float],
    base_seconds: Sequence[float],
    *,
    rng: np.random.Generator,
    level: float = 0.9,
    resamples: int = 2000,
) -> tuple[float, float] | None:
    """Percentile interval of (sum tokens / sum seconds) / (the same of the base), resampling prompts.

    Every prompt keeps its pair of measurements, so what makes a prompt slow for both cancels out.

    Args:
        tokens, seconds, base_tokens, base_seconds: one value per prompt, all of the same length.

    Returns:
        Lower and upper end, or None for fewer than two prompts, which say nothing about spread.
    """
    columns = np.asarray([tokens, seconds, base_tokens, base_seconds], dtype=np.float64)
    prompts = columns.shape[1]
    if prompts < 2:
        return None
    weights = rng.multinomial(prompts, np.full(prompts, 1.0 / prompts), size=resamples).astype(np.float64)
    sum_tokens, sum_seconds, sum_base_tokens, sum_base_seconds = columns @ weights.T
    usable = (sum_seconds > 0) & (sum_base_seconds > 0) & (sum_base_tokens > 0)
    if not usable.any():
        return None
    ratios = (sum_tokens[usable] / sum_seconds[usable]) / (sum_base_tokens[usable] / sum_base_seconds[usable])
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(ratios, [tail, 1.0 - tail])
    return float(low), float(high)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first element that differs (the shorter length if one is a prefix of the other), None if equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))
