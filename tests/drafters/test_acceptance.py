"""The acceptance table: posterior means, forgetting, its state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from adaptspec.drafters.acceptance import AcceptanceTable


def table() -> AcceptanceTable:
    return AcceptanceTable(np.array([[0.5, 0.25], [0.1, 0.1]]), strength=4.0, limit=10.0)


def test_counts_move_the_prior() -> None:
    acceptance = table()
    assert np.exp(acceptance.log_probabilities()) == pytest.approx(np.array([[0.5, 0.25], [0.1, 0.1]]))
    acceptance.record(0, 1)
    acceptance.record(0, None)
    # (4 * 0.5 + 0) / (4 + 2) and (4 * 0.25 + 1) / (4 + 2)
    assert np.exp(acceptance.log_probabilities()[0]) == pytest.approx([2 / 6, 2 / 6])
    assert np.exp(acceptance.log_probabilities()[1]) == pytest.approx([0.1, 0.1])
    acceptance.reset()
    assert np.exp(acceptance.log_probabilities()[0]) == pytest.approx([0.5, 0.25])


def test_old_trials_fade() -> None:
    acceptance = table()
    for _ in range(10):
        acceptance.record(0, 0)
    assert acceptance.trials[0] == 10
    acceptance.record(0, None)
    assert acceptance.trials[0] == 6 and acceptance.hits[0].tolist() == [5, 0]
    for _ in range(100):
        acceptance.record(0, None)
    assert acceptance.trials[0] <= 10 and acceptance.hits[0, 0] < 0.01


def test_probabilities_never_exceed_one() -> None:
    acceptance = AcceptanceTable(np.array([[0.9, 0.1]]))
    for _ in range(5000):
        acceptance.record(0, 0)
    assert 0.99 < np.exp(acceptance.log_probabilities()).sum() <= 1 + 1e-12


def test_state_round_trip() -> None:
    acceptance, copy = table(), table()
    for column in (0, 1, None, 0):
        acceptance.record(1, column)
    state = acceptance.state_dict()
    copy.load_state_dict(state)
    acceptance.record(1, 0)
    assert copy.trials.tolist() == [0, 4] and copy.hits.tolist() == [[0, 0], [2, 1]]
    copy.record(1, 0)
    assert (copy.log_probabilities() == acceptance.log_probabilities()).all()
    assert state["trials"].tolist() == [0, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hits": np.zeros((2, 3))}, "hits of the state must be floats of shape"),
        ({"trials": np.zeros(2, np.int64)}, "trials of the state must be floats of shape"),
        ({"trials": np.array([0.0, 11.0])}, r"trials of the state must be in \[0, 10\]"),
        ({"trials": np.array([0.0, np.nan])}, r"trials of the state must be in \[0, 10\]"),
        ({"hits": np.array([[1.0, 0.0], [0.0, 0.0]])}, "must add up to at most the trials"),
        ({"other": 1}, "must have the keys hits and trials"),
    ],
)
def test_damaged_states_are_refused(change: dict[str, Any], message: str) -> None:
    acceptance = table()
    with pytest.raises(ValueError, match=message):
        acceptance.load_state_dict({**acceptance.state_dict(), **change})
