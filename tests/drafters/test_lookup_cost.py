"""Work per token and memory per request, counted and not timed: executed lines of Python and allocated bytes."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

from adaptspec.drafters import Drafter, make_drafter
from tests.drafters.driving import ask, begin, commit

NAMES = ("ngram-cache", "prompt-lookup", "sam", "suffix")


def natural(length: int) -> list[int]:
    """Token ids with the frequencies of text and phrases that come back."""
    rng = np.random.default_rng(5)
    tokens: list[int] = []
    while len(tokens) < length:
        if tokens and rng.random() < 0.3:
            start = int(rng.integers(len(tokens)))
            tokens += tokens[start : start + int(rng.integers(3, 20))]
        else:
            tokens += (rng.zipf(1.3, 12) % 5000).tolist()
    return tokens[:length]


TEXTS: dict[str, Callable[[int], list[int]]] = {
    "natural": natural,
    "constant": lambda length: [3] * length,
    "two tokens": lambda length: np.random.default_rng(0).integers(0, 2, length).tolist(),
}


def lines_run(function: Callable[[], Any]) -> int:
    """Lines of Python executed by a call."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return lines


def open_request(name: str, tokens: list[int], **options: Any) -> Drafter:
    drafter = make_drafter(name, **options)
    begin(drafter, tokens)
    return drafter


@pytest.mark.parametrize("habit", TEXTS)
@pytest.mark.parametrize("name", NAMES)
def test_observing_costs_the_same_however_long_the_text(name: str, habit: str) -> None:
    tokens = TEXTS[habit](6400)
    cost = []
    for length in (600, 6000):
        drafter = open_request(name, tokens[:length])
        cost.append(lines_run(lambda d=drafter, n=length: [commit(d, [t]) for t in tokens[n : n + 400]]) / 400)
    assert cost[1] < 1.3 * cost[0] + 5
    assert cost[1] < 500


@pytest.mark.parametrize("habit", TEXTS)
@pytest.mark.parametrize("name", NAMES)
def test_proposing_does_not_scan_the_text(name: str, habit: str) -> None:
    tokens = TEXTS[habit](8000)
    worst = 0
    drafter = open_request(name, tokens[:6000])
    for length in range(6000, 8000, 97):
        worst = max(worst, lines_run(lambda d=drafter, n=length: ask(d, tokens[:n], 16)))
        commit(drafter, tokens[length : length + 97])
    assert worst < 4000


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_linear_and_released(name: str) -> None:
    options = {} if name == "prompt-lookup" else {"max_past_tokens": 0}
    drafter = make_drafter(name, **options)
    tokens = natural(10_000)
    begin(drafter, [1])
    drafter.finish()  # whatever is allocated once
    tracemalloc.start()
    try:
        base = tracemalloc.get_traced_memory()[0]
        begin(drafter, tokens[:2500])
        small = tracemalloc.get_traced_memory()[0] - base
        for start in range(2500, 10_000, 100):
            commit(drafter, tokens[start : start + 100])
        large = tracemalloc.get_traced_memory()[0] - base
        drafter.finish()
        gc.collect()
        left = tracemalloc.get_traced_memory()[0] - base
    finally:
        tracemalloc.stop()
    assert large < 6 * small, "four times the tokens"
    assert large / 10_000 < 1200, "bytes per token"
    assert left < 20_000
