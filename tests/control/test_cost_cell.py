"""A cost cell by hand: clipping, first use, takeover by the median of the recent few."""

from __future__ import annotations

import json

import numpy as np
import pytest

from adaptspec.control.cost_cell import (
    FIRST_WEIGHT,
    MEMORY,
    RECENT,
    CostCell,
    check_fields,
    check_seconds,
    merge_cells,
)


def fed(*seconds):
    cell = CostCell(seconds[0])
    for value in seconds[1:]:
        cell.add(value)
    return cell


def test_values_by_hand():
    cell = CostCell(4.0)
    assert (cell.value, cell.weight, cell.count) == (4.0, FIRST_WEIGHT, 1)
    cell.add(5.0)  # replaces the first
    assert (cell.value, cell.weight, cell.count) == (5.0, 1.0, 2)
    cell.add(7.0)
    assert (cell.value, cell.weight) == (6.0, 2.0)
    cell.add(3.0)
    assert (cell.value, cell.weight) == (5.0, 3.0)
    cell.add(100.0)  # counts as 10, twice the value before it
    assert (cell.value, cell.weight, cell.count) == (6.25, 4.0, 5)
    assert cell.recent == [4.0, 5.0, 7.0, 3.0, 100.0]


def test_a_slow_first_use_is_gone_with_the_second():
    assert fed(2.0, 0.04).value == 0.04
    assert fed(2.0, 0.04, 0.04, 0.04).value == pytest.approx(0.04)


def test_a_second_measurement_is_clipped_too():
    assert fed(1.0, 100.0).value == 2.0


def test_the_memory_is_bounded():
    cell = fed(*[1.0] * 100)
    assert cell.weight == MEMORY
    cell.add(1.5)
    assert cell.value == pytest.approx(1.0 + 0.5 / MEMORY)
    assert len(cell.recent) == RECENT


@pytest.mark.parametrize("times", [100.0, 1e6])
def test_one_outlier_moves_a_settled_cell_by_less_than_five_percent(times):
    rng = np.random.default_rng(0)
    cell = fed(*rng.uniform(0.9, 1.1, 60))
    before = cell.value
    cell.add(times * before)
    assert cell.value == pytest.approx(before, rel=0.05)
    for value in rng.uniform(0.9, 1.1, 60):
        cell.add(value)
        assert cell.value == pytest.approx(1.0, rel=0.07)
    assert cell.value == pytest.approx(1.0, rel=0.03)


def test_an_early_outlier_is_forgotten_within_twenty_measurements():
    assert fed(1.0, 100.0, *[1.0] * 20).value == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("factor", [3.0, 1 / 3, 1.5])
def test_a_lasting_change_takes_over_after_exactly_seven_measurements(factor):
    cell = fed(*[1.0] * 60)
    for _ in range(RECENT - 1):
        cell.add(factor)
    assert abs(cell.value - factor) > 0.2 * factor
    cell.add(factor)
    assert (cell.value, cell.weight) == (factor, RECENT)


@pytest.mark.parametrize("factor", [1.2, 0.85])
def test_a_small_change_is_followed_within_fifty_measurements(factor):
    cell = fed(*[1.0] * 60, *[factor] * 50)
    assert cell.value == pytest.approx(factor, rel=0.05)


def test_outliers_do_not_make_a_change():
    cell = fed(*[1.0] * 40)
    for _ in range(10):
        cell.add(50.0)
        for _ in range(6):
            cell.add(1.0)
    assert 1.0 < cell.value < 1.3


def test_two_alternating_costs_give_their_mean():
    rng = np.random.default_rng(1)
    cell = fed(*rng.permutation([1.0] * 200 + [1.8] * 200))
    assert cell.value == pytest.approx(1.4, rel=0.15)


def test_the_mean_of_noise_is_unbiased():
    values = []
    for seed in range(20):
        values.append(fed(*np.random.default_rng(seed).lognormal(-0.02, 0.2, 200)).value)
    assert np.mean(values) == pytest.approx(1.0, rel=0.02)


def test_zero_seconds_is_a_cost_that_can_grow():
    cell = fed(*[0.0] * 20)
    assert cell.value == 0.0
    for _ in range(RECENT):
        cell.add(0.5)
    assert cell.value == 0.5


def test_what_is_shown_follows_material_moves_only():
    cell = fed(*[1.0] * 40)
    cell.show()
    cell.add(1.2)
    assert cell.value > 1.0 and not cell.moved()
    cell.add(1.5)
    assert cell.moved()


def test_a_distrusted_cell_lasts_until_the_first_measurement():
    cell = fed(*[1.0] * 40)
    cell.distrust()
    assert (cell.value, cell.count) == (1.0, 0)
    cell.add(9.0)
    assert (cell.value, cell.weight, cell.count) == (9.0, FIRST_WEIGHT, 1)
    cell.add(8.0)
    assert (cell.value, cell.weight, cell.count) == (8.0, 1.0, 2)


def test_restored_cells_have_the_same_future():
    rng = np.random.default_rng(2)
    cell = fed(*rng.lognormal(0, 0.5, 30))
    twin = CostCell.from_state(json.loads(json.dumps(cell.state_dict())))
    for value in rng.lognormal(1, 0.5, 40):
        cell.add(value)
        twin.add(value)
        assert twin.state_dict() == cell.state_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": -1.0}, "value must be in"),
        ({"value": float("nan")}, "value must be a finite number"),
        ({"shown": None}, "shown must be a finite number"),
        ({"weight": 0.0}, "weight must be in"),
        ({"count": 1.5}, "count must be a whole number"),
        ({"recent": [1.0] * 8}, "recent must be a list of at most 7"),
        ({"recent": [-1.0]}, "recent must be a finite number >= 0, got -1.0"),
        ({"valeu": 1.0}, "unknown field of a cost cell 'valeu'; did you mean 'value'"),
    ],
)
def test_damaged_states_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        CostCell.from_state(fed(1.0, 2.0).state_dict() | change)


def test_incomplete_states_are_refused():
    with pytest.raises(ValueError, match="count of a cost cell is missing"):
        state = fed(1.0).state_dict()
        del state["count"]
        CostCell.from_state(state)
    with pytest.raises(ValueError, match="a thing must be a mapping, got 3"):
        check_fields(3, ("a",), what="a thing")


@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf"), "1", None, True])
def test_bad_seconds(value):
    with pytest.raises(ValueError, match="draft_seconds must be a finite number >= 0, got"):
        check_seconds("draft_seconds", value)


def test_merging_by_hand():
    one, two = fed(9.0, 2.0, 4.0), fed(9.0, 6.0)  # 3 with weight 2, 6 with weight 1
    merged = merge_cells([one, two], base=None)
    assert (merged.value, merged.weight, merged.count) == (4.0, 3.0, 5)
    assert (one.value, two.value) == (3.0, 6.0)


def test_merging_from_a_base_weighs_what_is_new():
    base = fed(*[1.0] * 40)
    idle, busy = (CostCell.from_state(base.state_dict()) for _ in range(2))
    for _ in range(RECENT):
        busy.add(3.0)
    merged = merge_cells([idle, busy], base=base)
    assert (merged.value, merged.count) == (3.0, 47)
    assert merge_cells([idle, idle], base=base).value == 1.0


def test_an_old_value_gives_way_to_two_measurements_that_agree() -> None:
    cell = CostCell(1.0)
    for _ in range(30):
        cell.add(1.0)
    cell.doubt()
    cell.add(0.4)
    assert cell.value > 0.9, "one may be an outlier"
    cell.add(0.4)
    assert cell.value == pytest.approx(0.4)
    assert not cell.doubted
    for _ in range(30):
        cell.add(0.4)
    cell.doubt()
    cell.add(5.0)
    cell.add(0.4)
    assert cell.value == pytest.approx(0.4, rel=0.05), "two that disagree change little"
    assert CostCell.from_state(cell.state_dict()).doubted is False
