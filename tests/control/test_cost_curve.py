"""Curves from measured sizes: exact at what was measured, monotone, sensible beyond."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptspec.control.cost_cell import CostCell
from adaptspec.control.cost_curve import MAX_NODES, CostPrior, fit_curve, isotonic, scaled

FLAT = np.ones(MAX_NODES + 1)


def cell(seconds, weight=1.0):
    made = CostCell(seconds)
    made.weight = weight
    made.show()
    return made


def points(**by_size):
    return {int(size[1:]): cell(seconds) for size, seconds in by_size.items()}


def test_prior_by_hand():
    assert CostPrior(0.5, 0.25).curve(1)[[0, 1, 4]].tolist() == [0.5, 0.75, 1.5]
    assert CostPrior(0.5, 0.25).curve(2)[[0, 1, 4]].tolist() == [0.75, 1.25, 2.75]  # 2, 4 and 10 rows


@pytest.mark.parametrize("field", ["seconds_at_1", "seconds_per_node"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "x"])
def test_bad_priors(field, value):
    with pytest.raises(ValueError, match=f"{field} must be a finite number >= 0, got"):
        CostPrior(**({"seconds_at_1": 1.0} | {field: value}))


def test_isotonic_by_hand():
    assert isotonic([1.0, 2.0, 2.0, 5.0], [1] * 4) == [1.0, 2.0, 2.0, 5.0]
    assert isotonic([1.0, 4.0, 2.0, 5.0], [1] * 4) == [1.0, 3.0, 3.0, 5.0]
    assert isotonic([1.0, 4.0, 2.0, 5.0], [1, 1, 3, 1]) == [1.0, 2.5, 2.5, 5.0]
    assert isotonic([3.0, 2.0, 1.0], [1, 1, 1]) == [2.0, 2.0, 2.0]


def test_interpolation_and_extrapolation_by_hand():
    curve = fit_curve(points(n0=1.0, n4=3.0, n8=4.0), reference=FLAT)
    assert curve[[0, 2, 4, 6, 8]].tolist() == [1.0, 2.0, 3.0, 3.5, 4.0]
    assert curve[[9, 12, 1024]].tolist() == [4.25, 5.0, 258.0]  # affine through 4 and 8


def test_extrapolation_looks_back_to_half_the_size():
    noisy = points(n0=1.0, n16=3.0, n31=4.0, n32=4.5)
    assert fit_curve(noisy, reference=FLAT)[64] == pytest.approx(4.5 + 32 * (4.5 - 3.0) / 16)
    assert fit_curve(points(n8=1.0, n12=2.0), reference=FLAT)[16] == pytest.approx(3.0)


def test_one_size_takes_the_shape_of_the_reference():
    reference = CostPrior(1.0, 1.0).curve(1)
    curve = fit_curve(points(n3=8.0), reference=reference)
    assert curve[[0, 1, 3, 7]].tolist() == [2.0, 4.0, 8.0, 16.0]
    assert fit_curve(points(n3=8.0), reference=np.zeros(MAX_NODES + 1))[[0, 3, 9]].tolist() == [8.0, 8.0, 8.0]


def test_a_reference_that_is_measured_further_beats_extrapolation():
    reference = np.maximum(CostPrior(1.0, 0.0).curve(1), np.arange(MAX_NODES + 1) / 16)  # flat up to 16
    few = points(n0=2.0, n1=2.5)
    assert fit_curve(few, reference=reference, reach=64)[[8, 32]].tolist() == [2.5, 5.0]
    assert fit_curve(few, reference=reference, reach=1)[8] == pytest.approx(2.5 + 7 * 0.5)


def test_a_cell_measured_once_yields_to_settled_ones():
    curve = fit_curve({8: cell(1.0, 32.0), 16: cell(9.0, 0.1), 32: cell(1.5, 32.0)}, reference=FLAT)
    assert curve[16] == pytest.approx(1.5, rel=0.02)
    assert curve[8] == 1.0


def test_scaling_keeps_curves_monotone_and_survives_zeros():
    curve = scaled(np.array([1.0, 1.1, 1.2]), np.array([1.0, 1.0, 1.0]), np.array([1.0, 2.0, 4.0]))
    assert curve.tolist() == [1.0, 1.0, 1.0]
    assert scaled(np.array([1.0, 2.0]), np.array([0.0, 0.0]), np.array([0.0, 0.0])).tolist() == [1.0, 2.0]


SIZES = st.integers(0, MAX_NODES)
SECONDS = st.floats(0.0, 1e3)
MEASURED = st.dictionaries(SIZES, st.tuples(SECONDS, st.sampled_from([0.1, 1.0, 32.0])), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(MEASURED, st.tuples(SECONDS, SECONDS), st.integers(-1, MAX_NODES))
def test_curves_never_decrease_and_stay_within_what_was_measured(measured, prior, reach):
    cells = {size: cell(seconds, weight) for size, (seconds, weight) in measured.items()}
    curve = fit_curve(cells, reference=CostPrior(*prior).curve(2), reach=reach)
    assert curve.shape == (MAX_NODES + 1,)
    assert np.isfinite(curve).all() and (curve >= 0.0).all() and (np.diff(curve) >= 0.0).all()
    seconds = [value for value, _ in measured.values()]
    inner = curve[min(measured) : max(measured) + 1]
    assert inner.min() >= min(seconds) * (1 - 1e-9) and inner.max() <= max(seconds) * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(SIZES, SECONDS), min_size=1, max_size=12, unique_by=lambda pair: pair[0]))
def test_curves_are_exact_where_measurements_agree(pairs):
    values = sorted(seconds for _, seconds in pairs)
    sizes = sorted(size for size, _ in pairs)
    curve = fit_curve({s: cell(v) for s, v in zip(sizes, values, strict=True)}, reference=FLAT)
    assert curve[sizes] == pytest.approx(values)
