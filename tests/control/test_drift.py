"""A drafter that breaks or recovers is noticed within a few trials; one that only has bad luck is left alone."""

from __future__ import annotations

import json

import numpy as np
import pytest

from adaptspec.control.calibration import Calibrator
from adaptspec.control.drift import KEPT, DriftWatch, Trials
from adaptspec.types import DraftTree

SIZES = {"score": (11, 66)}


def trial(hit: bool) -> Trials:
    return Trials("score", np.array([3]), np.array([20]), np.array([hit]))


def feed(watch: DriftWatch, rate: float, *, predicted: float, count: int, seed: int) -> tuple[int, list[Trials]] | None:
    """The number of the trial that raised the first alarm, and what it returned."""
    for number, draw in enumerate(np.random.default_rng(seed).random(count)):
        since = watch.add(trial(draw < rate), np.array([predicted]))
        if since is not None:
            return number, since
    return None


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
def test_luck_raises_no_alarm(rate: float) -> None:
    assert feed(DriftWatch(), rate, predicted=rate, count=10_000, seed=1) is None


@pytest.mark.parametrize(("before", "after"), [(0.8, 0.1), (0.1, 0.8), (0.5, 0.02)])
def test_a_change_is_noticed_soon_and_dated(before: float, after: float) -> None:
    watch = DriftWatch()
    assert feed(watch, before, predicted=before, count=500, seed=2) is None
    alarm = feed(watch, after, predicted=before, count=100, seed=3)
    assert alarm is not None
    number, since = alarm
    assert number < 25
    assert number - 1 <= len(since) <= min(KEPT, number + 12)  # hardly anything from before the change


def test_a_calibrator_forgets_a_drafter_that_broke() -> None:
    tree = DraftTree.chain([5], np.log([0.7]))
    calibrator = Calibrator()
    rng = np.random.default_rng(0)
    for draw in rng.random(800):
        calibrator.update(tree, [5] if draw < 0.8 else [6])
    assert calibrator.conditional(tree)[0] > 0.7
    for _ in range(20):
        calibrator.update(tree, [6])
    assert calibrator.conditional(tree)[0] < 0.35
    for _ in range(40):
        calibrator.update(tree, [5])
    assert calibrator.conditional(tree)[0] > 0.6


def test_a_restored_watch_goes_on_alike() -> None:
    watch, other = DriftWatch(), DriftWatch()
    feed(watch, 0.3, predicted=0.5, count=6, seed=4)
    other.load_state_dict(json.loads(json.dumps(watch.state_dict())), sizes=SIZES)
    assert other.state_dict() == watch.state_dict()
    first, second = (feed(each, 0.02, predicted=0.5, count=60, seed=5) for each in (watch, other))
    assert first is not None and second is not None
    assert first[0] == second[0] and len(first[1]) == len(second[1])


@pytest.mark.parametrize(
    "damage",
    [
        None,
        {"sums": [0.0], "since": [[], []]},
        {"sums": [-1.0, 0.0], "since": [[], []]},
        {"sums": [0.0, 0.0], "since": [[]]},
        {"sums": [0.0, 0.0], "since": [[["nowhere", [0], [0], [True]]], []]},
        {"sums": [0.0, 0.0], "since": [[["score", [11], [0], [True]]], []]},
        {"sums": [0.0, 0.0], "since": [[["score", [0, 1], [0], [True]]], []]},
    ],
)
def test_damaged_states_are_refused(damage: object) -> None:
    watch = DriftWatch()
    with pytest.raises(ValueError, match="state"):
        watch.load_state_dict(damage, sizes=SIZES)
    assert watch.state_dict() == DriftWatch().state_dict()
