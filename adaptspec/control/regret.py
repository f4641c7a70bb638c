"""Regret: what a run lost against a comparator, along the tokens of one stream.

Both emit the same tokens, so they are compared where both have emitted as many:

    rounds(n)  = steps of the run until n tokens are out - steps of the comparator
    seconds(n) = seconds of the run until n tokens are out - seconds of the comparator
    tokens(n)  = tokens that the comparator has out when the run has n - n

Within a step, tokens are taken to come out evenly, and a comparator that has finished goes on at its mean rate. The
value at the end of the stream is the regret of the run; divided by the comparator's total, the share that was lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from adaptspec.control.replay import ReplayRun
from adaptspec.control.trace import Trace
from adaptspec.names import unknown_name

Order = Literal["as-recorded", "shuffle", "blocks"]

UNITS = ("rounds", "tokens", "seconds")


def order_requests(trace: Trace, order: str, *, rng: np.random.Generator) -> np.ndarray:
    """int64 [R], the requests of a trace as a stream.

    Args:
        order: "as-recorded"; "shuffle", all mixed; or "blocks", one domain after the other, both shuffled.
        rng: not used as recorded.
    """
    count = len(trace.requests)
    if order == "as-recorded":
        return np.arange(count)
    if order == "shuffle":
        return rng.permutation(count)
    if order == "blocks":
        domains = list(dict.fromkeys(request.domain for request in trace.requests))
        place = dict(zip(domains, rng.permutation(len(domains)).tolist(), strict=True))
        mixed = rng.permutation(count)
        blocks = [place[trace.requests[index].domain] for index in mixed]
        return mixed[np.argsort(blocks, kind="stable")]
    raise unknown_name("order", order, get_args(Order))


@dataclass(frozen=True, slots=True)
class Regret:
    """Cumulative regret, float64 [G] each, once `position` tokens of the stream are out."""

    position: np.ndarray
    rounds: np.ndarray
    tokens: np.ndarray
    seconds: np.ndarray


def regret(run: ReplayRun, comparator: ReplayRun, *, points: int = 100) -> Regret:
    """Regret of a run along the stream, from 0 to all tokens in `points` steps.

    Raises:
        ValueError: the two answered other requests or in another order, or there are no steps.
    """
    if not np.array_equal(run.order, comparator.order):
        raise ValueError("run and comparator must have answered the same requests in the same order")
    if not len(run.seconds):
        raise ValueError("run must have at least one step")
    if points < 1:
        raise ValueError(f"points must be >= 1, got {points}")
    out, seconds = _progress(run)
    other_out, other_seconds = _progress(comparator)
    position = np.linspace(0.0, float(out[-1]), points + 1)
    now = np.interp(position, out, seconds)
    rounds = np.interp(position, out, np.arange(len(out)))
    other_rounds = np.interp(position, other_out, np.arange(len(other_out)))
    ahead = np.interp(now, other_seconds, other_out)
    ahead += np.maximum(now - other_seconds[-1], 0.0) * comparator.tokens_per_second
    return Regret(
        position, rounds - other_rounds, ahead - position, now - np.interp(position, other_out, other_seconds)
    )


def _progress(run: ReplayRun) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and seconds [S + 1] before the first step and after each."""
    return np.append(0, np.cumsum(run.emitted)), np.append(0.0, np.cumsum(run.seconds))


@dataclass(frozen=True, slots=True)
class Band:
    """Several curves at the same places: mean, smallest and largest value, float64 [G] each."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def band(curves: Sequence[np.ndarray]) -> Band:
    """The band of curves [G] over seeds and stream orders.

    >>> band([np.array([0.0, 1.0]), np.array([0.0, 3.0])])
    Band(mean=array([0., 2.]), low=array([0., 1.]), high=array([0., 3.]))
    """
    if not curves:
        raise ValueError("curves must not be empty")
    stacked = np.stack(curves)
    return Band(stacked.mean(axis=0), stacked.min(axis=0), stacked.max(axis=0))
