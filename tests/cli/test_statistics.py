from __future__ import annotations

import numpy as np
import pytest

from adaptspec.cli.statistics import bootstrap_speedup, first_difference, rate


def test_rate() -> None:
    assert rate(10, 4.0) == 2.5
    assert rate(10, 0.0) == 0.0


@pytest.mark.parametrize(
    ("left", "right", "index"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [5], 0), ([], [], None)],
)
def test_first_difference(left: list[int], right: list[int], index: int | None) -> None:
    assert first_difference(left, right) == index
    assert first_difference(right, left) == index


def bootstrap(*columns: list[float], seed: int = 0, level: float = 0.9) -> tuple[float, float] | None:
    return bootstrap_speedup(*columns, rng=np.random.default_rng(seed), level=level)


def test_a_constant_ratio_has_no_spread() -> None:
    seconds = [1.0, 2.0, 4.0]
    low, high = bootstrap([10, 20, 40], [s / 1.5 for s in seconds], [10, 20, 40], seconds)
    assert low == pytest.approx(1.5) and high == pytest.approx(1.5)


def test_pairs_stay_together() -> None:
    # One prompt is a hundred times slower for both: without pairing the interval would span orders of magnitude.
    low, high = bootstrap([10, 10, 10], [1.0, 100.0, 1.0], [10, 10, 10], [1.2, 120.0, 1.2])
    assert low == pytest.approx(1.2) and high == pytest.approx(1.2)


def test_interval_matches_the_enumeration_of_two_prompts() -> None:
    # Two prompts, ratios 1 and 3: the resample is both (ratio of sums 4 / 2... by hand below) or one of them twice.
    tokens, seconds, base_seconds = [10, 10], [1.0, 1.0], [1.0, 3.0]
    low, high = bootstrap(tokens, seconds, tokens, base_seconds)
    assert (low, high) == pytest.approx((1.0, 3.0))  # either extreme has probability 1/4 > 5 %
    low, high = bootstrap(tokens, seconds, tokens, base_seconds, level=0.4)
    assert (low, high) == pytest.approx((2.0, 2.0))  # the middle 40 % is always the full sample, (1 + 3) / 2


def test_interval_covers_the_true_ratio_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for trial in range(200):
        base = rng.lognormal(0.0, 0.5, 40)
        own = base / 1.3 * rng.lognormal(-0.02, 0.2, 40)  # mean of the noise is 1
        tokens = [100.0] * 40
        low, high = bootstrap(tokens, own.tolist(), tokens, base.tolist(), seed=trial)
        hits += low <= 1.3 <= high
    assert 160 <= hits <= 196  # 90 % of 200 is 180; the bootstrap of 40 prompts is a little too narrow


def test_same_seed_same_interval_and_too_few_prompts() -> None:
    columns = [[10.0, 20.0, 5.0], [1.0, 3.0, 2.0], [10.0, 20.0, 5.0], [2.0, 3.0, 2.5]]
    assert bootstrap(*columns, seed=3) == bootstrap(*columns, seed=3)
    assert bootstrap([10.0], [1.0], [10.0], [2.0]) is None
    assert bootstrap([0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]) is None
