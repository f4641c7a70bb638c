"""Regret along a stream, and the orders of streams."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptspec.control.oracles import Hindsight
from adaptspec.control.regret import band, order_requests, regret
from adaptspec.control.replay import ReplayRun
from adaptspec.types import Arm
from tests.control.replay_cases import random_costs, random_trace

ARMS = (Arm.autoregressive(), Arm("a", 2), Arm("b", 4))


def run(emitted: list[int], seconds: list[float], *, order: tuple[int, ...] = (0,)) -> ReplayRun:
    """Steps of one request."""
    count = len(emitted)
    position = np.cumsum(emitted) - emitted
    zeros = np.zeros(count, dtype=np.int64)
    return ReplayRun(
        ("x",), np.array(order), np.array([0, count]), position, zeros, zeros, np.array(emitted), np.array(seconds)
    )


def test_by_hand() -> None:
    slow, fast = run([1, 1, 2], [1.0, 1.0, 4.0]), run([2, 2], [2.0, 2.0])
    lost = regret(slow, fast, points=4)
    assert lost.position.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert lost.seconds.tolist() == [0.0, 0.0, 0.0, 1.0, 2.0]
    assert lost.rounds.tolist() == [0.0, 0.5, 1.0, 1.0, 1.0]
    # After 4 seconds it has 3 tokens out, the other one 4; after 6 seconds the other one would have gone on to 6.
    assert lost.tokens.tolist() == [0.0, 0.0, 0.0, 1.0, 2.0]


def test_the_faster_has_negative_regret() -> None:
    slow, fast = run([1, 1, 2], [1.0, 1.0, 4.0]), run([2, 2], [2.0, 2.0])
    gained = regret(fast, slow, points=4)
    assert gained.seconds[-1] == -2.0 and gained.rounds[-1] == -1.0
    assert gained.tokens[-1] == -1.0  # after 4 seconds the slow one has 3


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), points=st.integers(1, 50))
def test_ends_are_differences_of_totals(seed: int, points: int) -> None:
    trace, costs = random_trace(seed, lengths=[9, 1, 12]), random_costs(seed)
    hindsight = Hindsight(trace, ARMS, costs=costs, order=[2, 0, 1])
    best = hindsight.best_per_step()
    for arm in ARMS:
        played = hindsight.fixed(arm)
        lost = regret(played, best, points=points)
        assert len(lost.position) == points + 1 and lost.position[-1] == played.tokens
        assert (lost.seconds[0], lost.rounds[0], lost.tokens[0]) == (0.0, 0.0, 0.0)
        assert lost.seconds[-1] == pytest.approx(played.total_seconds - best.total_seconds)
        assert lost.rounds[-1] == len(played.seconds) - len(best.seconds)
        # Beyond its end the comparator goes on at its mean rate, so that tokens and seconds say the same there.
        assert lost.tokens[-1] == pytest.approx(lost.seconds[-1] * best.tokens_per_second)
        own = regret(played, played, points=points)
        assert not own.seconds.any() and not own.rounds.any() and np.allclose(own.tokens, 0.0)


def test_only_equal_streams_are_compared() -> None:
    with pytest.raises(ValueError, match="the same requests in the same order"):
        regret(run([1], [1.0]), run([1], [1.0], order=(1,)))
    with pytest.raises(ValueError, match="at least one step"):
        regret(run([], []), run([], []))
    with pytest.raises(ValueError, match="points must be >= 1, got 0"):
        regret(run([1], [1.0]), run([1], [1.0]), points=0)


def test_a_band_spans_its_curves() -> None:
    found = band([np.array([0.0, 1.0]), np.array([0.0, 4.0]), np.array([0.0, 1.0])])
    assert (found.mean.tolist(), found.low.tolist(), found.high.tolist()) == ([0.0, 2.0], [0.0, 1.0], [0.0, 4.0])
    with pytest.raises(ValueError, match="curves must not be empty"):
        band([])


def test_orders_of_a_stream() -> None:
    trace = random_trace(0, lengths=[3] * 12)  # domains in turn
    domains = np.array([request.domain for request in trace.requests])
    assert order_requests(trace, "as-recorded", rng=np.random.default_rng(0)).tolist() == list(range(12))
    shuffled = order_requests(trace, "shuffle", rng=np.random.default_rng(0))
    assert sorted(shuffled.tolist()) == list(range(12)) != shuffled.tolist()
    blocks = [order_requests(trace, "blocks", rng=np.random.default_rng(seed)) for seed in range(12)]
    for order in blocks:
        assert sorted(order.tolist()) == list(range(12))
        assert (domains[order][1:] != domains[order][:-1]).sum() == 1
    assert {domains[order][0] for order in blocks} == {"law", "code"}
    assert len({tuple(order.tolist()) for order in blocks}) > 8
    again = order_requests(trace, "blocks", rng=np.random.default_rng(3))
    assert again.tolist() == blocks[3].tolist()
    with pytest.raises(ValueError, match="unknown order 'shufle'; did you mean 'shuffle'"):
        order_requests(trace, "shufle", rng=np.random.default_rng(0))
