"""Feedback accepts what it promises and names what is wrong with the rest."""

from __future__ import annotations

import numpy as np
import pytest

from adaptspec.bandits import Feedback


def test_unobserved_values_are_ignored_and_zeroed():
    feedback = Feedback.from_gains([0.25, np.nan, 7.0], [True, False, False], tokens=3, seconds=0.5)
    assert feedback.gains.tolist() == [0.25, 0.0, 0.0]
    assert feedback.observed.tolist() == [True, False, False]
    assert (feedback.tokens, feedback.seconds, feedback.complete) == (3, 0.5, False)


def test_without_a_mask_all_arms_are_observed():
    feedback = Feedback.from_gains((0.0, 1.0))
    assert feedback.complete
    assert feedback.observed.all()


def test_later_changes_of_the_callers_arrays_do_not_reach_it():
    gains, observed = np.array([0.5, 0.5]), np.array([True, True])
    feedback = Feedback.from_gains(gains, observed)
    gains[0], observed[1] = 0.9, False
    assert feedback.gains.tolist() == [0.5, 0.5]
    assert feedback.observed.tolist() == [True, True]


@pytest.mark.parametrize("gain", [-0.001, 1.001, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("arm", [0, 1, 2])
def test_gains_outside_the_unit_interval_name_the_arm(gain, arm):
    gains = np.full(3, 0.5)
    gains[arm] = gain
    with pytest.raises(ValueError, match=rf"gains must be in \[0, 1\], got .* for arm {arm}"):
        Feedback.from_gains(gains, [True] * 3)


@pytest.mark.parametrize(
    ("gains", "observed", "message"),
    [
        ([], None, r"gains must have shape \[n_arms\] with n_arms >= 1"),
        ([[0.1, 0.2]], None, r"gains must have shape \[n_arms\]"),
        (0.5, None, r"gains must have shape \[n_arms\]"),
        ([0.1, 0.2], [True], r"observed must be bool of shape \[2\]"),
        ([0.1, 0.2], [1, 0], r"observed must be bool of shape \[2\], got int64"),
    ],
)
def test_shapes(gains, observed, message):
    with pytest.raises(ValueError, match=message):
        Feedback.from_gains(gains, observed)


@pytest.mark.parametrize("name", ["tokens", "seconds", "drafted", "accepted"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_counts_and_seconds(name, value):
    with pytest.raises(ValueError, match=f"{name} must be >= 0 and finite"):
        Feedback.from_gains([0.5], **{name: value})


def test_direct_construction_is_checked_too():
    with pytest.raises(ValueError, match="gains must be a float64 array"):
        Feedback(np.array([1, 0]), np.array([True, True]))
    with pytest.raises(ValueError, match="observed must be a bool array"):
        Feedback(np.array([1.0, 0.0]), np.array([True]))
    with pytest.raises(ValueError, match=r"got 2.0 for arm 1"):
        Feedback(np.array([1.0, 2.0]), np.array([True, False]))


def test_of_arm():
    feedback = Feedback.of_arm(3, 2, gain=0.5)
    assert feedback.gains.tolist() == [0.0, 0.0, 0.5]
    assert feedback.observed.tolist() == [False, False, True]
    with pytest.raises(ValueError, match=r"index must be in \[0, 3\), got 3"):
        Feedback.of_arm(3, 3, gain=0.5)
