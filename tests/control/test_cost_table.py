"""Tables of curves: changes of speed, neighbours, bounded memory."""

from __future__ import annotations

import json

import numpy as np
import pytest

from adaptspec.control.cost_cell import RECENT
from adaptspec.control.cost_curve import MAX_NODES, CostPrior
from adaptspec.control.cost_table import MAX_CURVES, MAX_POINTS, CostTable

HERE = ("full", 0, 9)
SIZES = (0, 1, 2, 4, 8, 16, 32, 64)


def cost(size):
    return 0.036 + 0.0015 * size


def settled(key=HERE, sizes=SIZES, repeats=40):
    rng = np.random.default_rng(0)
    table = CostTable(CostPrior(0.01, 0.0001))
    for _ in range(repeats):
        for size in rng.permutation(sizes).tolist():
            table.observe(key, size, cost(size) * rng.uniform(0.95, 1.05))
    return table


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_cost_change_is_followed_within_fifty_steps_whatever_is_played(factor):
    """Accept-only control fails when costs change: here they do, with the node count varying at every step."""
    table, rng = settled(), np.random.default_rng(1)
    for _ in range(50):
        size = int(rng.integers(65))
        table.observe(HERE, size, factor * cost(size) * rng.uniform(0.9, 1.1))
    for size in range(97):
        assert table.curve(HERE)[size] == pytest.approx(factor * cost(size), rel=0.12)


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_cost_change_seen_at_one_size_moves_all_the_others(factor):
    table = settled()
    for _ in range(50):
        table.observe(HERE, 8, factor * cost(8))
    for size in (0, 32, 64, 128):
        assert table.curve(HERE)[size] == pytest.approx(factor * cost(size), rel=0.06)
    assert table.curve(HERE)[8] == pytest.approx(factor * cost(8), rel=0.01)


def test_cost_change_reaches_other_batch_and_context_buckets():
    table = settled()
    for _ in range(10):
        table.observe(("full", 3, 12), 8, 1.0)
    for _ in range(20):
        table.observe(HERE, 4, 2 * cost(4))
    assert table.curve(("full", 3, 12))[8] == pytest.approx(2.0, rel=0.06)


def test_sizes_measured_since_the_change_are_not_scaled_again():
    table = settled()
    for size in (3, 5, 6, 7, 9, 10, 11, 12):
        table.observe(HERE, size, 3 * cost(size))
    assert table.curve(HERE)[64] == pytest.approx(cost(64), rel=0.05)  # new sizes do not suffice
    before = table.curves[HERE][3].value
    table.observe(HERE, 8, 3 * cost(8))
    assert table.curve(HERE)[64] == pytest.approx(3 * cost(64), rel=0.1)
    assert table.curves[HERE][3].value == before
    assert table.curves[HERE][12].value == 3 * cost(12)


def test_a_change_of_one_size_alone_does_not_move_the_others():
    table = settled(sizes=(0, 8, 64))
    for step in range(60):
        table.observe(HERE, (0, 8)[step % 2], (cost(0), 1.8 * cost(8))[step % 2])
    assert table.curve(HERE)[8] == pytest.approx(1.8 * cost(8), rel=0.05)
    assert table.curve(HERE)[[0, 64]] == pytest.approx([cost(0), cost(64)], rel=0.05)


def test_one_outlier_at_any_size_leaves_the_whole_curve():
    for size in SIZES:
        table = settled()
        before = table.curve(HERE).copy()
        table.observe(HERE, size, 100 * cost(size))
        assert table.curve(HERE)[:65] == pytest.approx(before[:65], rel=0.05)


def test_a_slow_first_use_of_a_large_size_does_not_put_it_out_of_reach():
    table = settled()
    table.observe(HERE, 128, 50.0)  # compiles
    expected = settled().curve(HERE)[128]
    assert table.curve(HERE)[128] == pytest.approx(2 * expected)
    table.observe(HERE, 128, cost(128))
    assert table.curve(HERE)[128] == pytest.approx(cost(128))


def test_slow_first_uses_of_many_sizes_are_no_change_of_speed():
    table = settled()
    for size in range(33, 33 + 2 * RECENT):
        table.observe(HERE, size, 5 * cost(size))  # every shape compiles
    assert table.curve(HERE)[list(SIZES)] == pytest.approx([cost(size) for size in SIZES], rel=0.05)


def test_a_steep_cost_is_found_even_where_the_curve_was_flat():
    table = CostTable(CostPrior(1.0))
    for size in (0, 1):
        table.observe(HERE, size, 1.0)
    for _ in range(RECENT):
        table.observe(HERE, 512, 100.0)
    assert table.curve(HERE)[512] == 100.0


def test_nothing_measured_gives_the_prior():
    assert CostTable(CostPrior(0.5, 0.25)).curve(("full", 1, 9))[[0, 1]].tolist() == [0.75, 1.25]


def test_an_empty_bucket_borrows_the_nearest_curve_scaled_by_the_prior():
    table = CostTable(CostPrior(1.0, 1.0))
    for size, seconds in ((0, 4.0), (1, 6.0)):
        table.observe(HERE, size, seconds)
    assert table.curve(("full", 0, 14))[[0, 1]].tolist() == [4.0, 6.0]
    # Two requests: 2 and 4 rows for 1 and 2, so twice the seconds.
    assert table.curve(("full", 1, 9))[[0, 1]].tolist() == [8.0, 12.0]


def test_the_nearest_bucket_is_borrowed_from():
    table = CostTable(CostPrior(1.0))
    table.observe(("full", 0, 9), 0, 1.0)
    table.observe(("full", 0, 13), 0, 5.0)
    table.observe(("full", 4, 10), 0, 9.0)
    table.observe(("small", 0, 10), 0, 0.1)
    assert [table.curve(("full", 0, context))[0] for context in (10, 12, 20)] == [1.0, 5.0, 5.0]
    assert table.curve(("full", 5, 10))[0] == 9.0
    assert table.curve(("small", 5, 10))[0] == 0.1
    assert table.curve(("tiny", 0, 10))[0] == 0.1


def test_own_measurements_scale_what_is_borrowed():
    table = CostTable(CostPrior(1.0))
    for size, seconds in ((0, 1.0), (8, 2.0), (16, 4.0)):
        table.observe(HERE, size, seconds)
    there = ("full", 0, 13)
    table.observe(there, 8, 3.0)
    assert table.curve(there)[[0, 8, 12, 16]].tolist() == [1.5, 3.0, 4.5, 6.0]


def test_curves_are_cached_and_read_only():
    table = settled()
    curve = table.curve(HERE)
    table.observe(HERE, 8, cost(8))  # moves nothing materially
    assert table.curve(HERE) is curve
    with pytest.raises(ValueError, match="read-only"):
        curve[0] = 1.0
    table.observe(HERE, 9, cost(9))
    assert table.curve(HERE) is not curve


def test_what_is_cached_is_what_would_be_computed():
    rng = np.random.default_rng(3)
    table = CostTable(CostPrior(0.01, 0.001))
    keys = [("full", batch, context) for batch in range(3) for context in (9, 11)]
    for step in range(600):
        key, size = keys[rng.integers(6)], int(rng.integers(20))
        table.observe(key, size, (1 + size) * rng.lognormal(0, 0.3) * (3 if step > 300 else 1))
        key = keys[rng.integers(6)]
        fresh = CostTable.from_state(table.state_dict(), prior=table.prior)
        assert (table.curve(key) == fresh.curve(key)).all()


def test_memory_is_bounded():
    table = CostTable(CostPrior(1.0))
    for size in range(MAX_NODES + 1):
        table.observe(HERE, size, 1.0 + size)
        table.curve(("full", 0, 9 + size % 40))
    assert sorted(table.curves[HERE]) == list(range(MAX_NODES + 1 - MAX_POINTS, MAX_NODES + 1))
    for batch in range(20):
        for context in range(9, 19):
            table.observe(("full", batch, context), 0, 1.0)
            table.curve(("full", batch, context))
    assert len(table.curves) == MAX_CURVES
    assert list(table.curves)[-1] == ("full", 19, 18) and HERE not in table.curves
    assert len(table._cache) <= MAX_CURVES and len(table._alone) <= MAX_CURVES
    assert len(table._nearest) <= 2 * MAX_CURVES + 1
    assert len(json.dumps(table.state_dict())) < 100_000


def test_another_machine_lends_its_shape_until_this_one_measures():
    table = CostTable(CostPrior(1.0))
    table.lean_on(settled())
    assert table.curve(HERE)[64] == pytest.approx(cost(64), rel=0.03)
    table.observe(HERE, 0, 10 * cost(0))
    assert table.curve(HERE)[[0, 64]] == pytest.approx([10 * cost(0), 10 * cost(64)], rel=0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"curves": [["full", 0, 8, []]]}, "context must be a whole number in"),
        ({"curves": [["full", -1, 9, []]]}, "batch must be a whole number in"),
        ({"curves": [["", 0, 9, []]]}, "vocab must be a name"),
        ({"curves": [["full", 0, 9, []]]}, "curves must be different and hold different sizes"),
        ({"curves": [["full", 0, 9]]}, "curves must hold rows of 4 values"),
        ({"curves": [["full", 0, 9, [[0, {}]]]]}, "value of a cost cell is missing"),
        ({"curves": 3}, "curves must be a list of at most 64 rows"),
        ({"window": [["full", 0, 9, 0, 1.0]]}, "window must hold rows of 7 values"),
        ({"window": [["full", 0, 9, 0, float("nan"), 1.0, True]]}, "window must be a finite number"),
        ({"window": [["full", 0, 9, 0, 1.0, 0.0, True]]}, "window must hold expected > 0"),
        ({"window": [["full", 0, 9, 0, 1.0, 1.0, 1]]}, "window must hold expected > 0 and a flag"),
        ({"window": [["full", 0, 9, -1, 1.0, 1.0, True]]}, "size must be a whole number in"),
        ({"clock": -1}, "clock must be a whole number"),
        ({"more": 1}, "unknown field of a cost table 'more'"),
    ],
)
def test_damaged_states_are_refused(change, message):
    state = json.loads(json.dumps(CostTable(CostPrior(1.0)).state_dict()))
    with pytest.raises(ValueError, match=message):
        CostTable.from_state(state | change, prior=CostPrior(1.0))


def test_a_basis_has_no_basis():
    inner = CostTable(CostPrior(1.0)).state_dict()
    with pytest.raises(ValueError, match="basis of a basis must be None"):
        CostTable.from_state(inner | {"basis": inner | {"basis": inner}}, prior=CostPrior(1.0))
