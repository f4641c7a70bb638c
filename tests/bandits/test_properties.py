"""Identities that the papers promise, on random histories."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptspec.bandits import Feedback, make_policy
from adaptspec.bandits.exp3 import tsallis_weights
from adaptspec.bandits.hedge import mix_gain
from adaptspec.bandits.sampling import draw
from adaptspec.bandits.ucb import kl_upper_bound
from tests.bandits.playing import SAMPLING

CHECK = settings(max_examples=20, deadline=None, derandomize=True)


@st.composite
def histories(draw_):
    """(gains [T, K], observed [T, K]) with ties, extremes and unobserved rounds."""
    arms, rounds = draw_(st.integers(1, 6)), draw_(st.integers(1, 25))
    gain = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0.0, 1.0))
    rows = draw_(st.lists(st.lists(gain, min_size=arms, max_size=arms), min_size=rounds, max_size=rounds))
    masks = draw_(st.lists(st.lists(st.booleans(), min_size=arms, max_size=arms), min_size=rounds, max_size=rounds))
    return np.array(rows), np.array(masks)


def run(policy, history, *, complete=False):
    for row, mask in zip(*history, strict=True):
        decision = policy.select()
        yield decision, row, mask
        policy.update(decision, Feedback.from_gains(row, None if complete else mask))


@pytest.mark.parametrize("name", SAMPLING)
@CHECK
@given(history=histories(), seed=st.integers(0, 5))
def test_probabilities_are_a_distribution_and_zero_is_never_played(name, history, seed):
    policy = make_policy(name, n_arms=history[0].shape[1], seed=seed)
    for decision, _, _ in run(policy, history):
        p = decision.probabilities
        assert abs(p.sum() - 1.0) < 1e-12
        assert (p >= 0.0).all()
        assert decision.propensity == p[decision.index] > 0.0


@CHECK
@given(history=histories())
def test_normal_hedge_potential_is_e(history):
    policy = make_policy("normal-hedge", n_arms=history[0].shape[1])
    for _ in run(policy, history):
        regrets = np.maximum(policy.state_dict()["learned"]["regrets"], 0.0)
        if regrets.any():
            assert np.mean(np.exp(regrets**2 / (2.0 * policy.scale()))) == pytest.approx(math.e, rel=1e-9)
        else:
            assert policy.scale() == 0.0
            assert np.ptp(policy.probabilities()) == 0.0


@CHECK
@given(history=histories(), complete=st.booleans())
def test_adahedge_gap_grows_and_rate_falls(history, complete):
    policy = make_policy("adahedge", n_arms=history[0].shape[1])
    gap, rate = 0.0, math.inf
    for decision, row, _ in run(policy, history, complete=complete):
        assert policy.state_dict()["learned"]["gap"] >= gap
        assert policy.learning_rate <= rate
        gap, rate = policy.state_dict()["learned"]["gap"], policy.learning_rate
        # Jensen: the mix gain is at least the expected gain and at most the best.
        mix = mix_gain(decision.probabilities, row, rate=decision.memo)
        assert decision.probabilities.dot(row) - 1e-9 <= mix <= row.max() + 1e-9
    assert gap <= len(history[0])


@CHECK
@given(history=histories())
def test_adahedge_regret_is_at_most_twice_the_gap(history):
    policy = make_policy("adahedge", n_arms=history[0].shape[1])
    earned = sum(decision.probabilities.dot(row) for decision, row, _ in run(policy, history, complete=True))
    assert history[0].sum(axis=0).max() - earned <= 2.0 * policy.state_dict()["learned"]["gap"] + 1e-9


@CHECK
@given(
    losses=st.lists(st.floats(0.0, 1e7), min_size=1, max_size=64),
    log_eta=st.floats(-5.0, 1.0),
)
def test_tsallis_weights_solve_their_equation(losses, log_eta):
    losses, eta = np.array(losses), 10.0**log_eta
    p = np.empty(len(losses))
    tsallis_weights(losses, eta, out=p)
    assert p.sum() == pytest.approx(1.0, abs=1e-9)
    # Some x makes all of 4 (eta (losses - x))^-2: x = losses - 2 / (eta sqrt p) is the same for every arm.
    x = losses - 2.0 / (eta * np.sqrt(p))
    assert x == pytest.approx(x[0], rel=1e-9, abs=1e-6 * (1.0 / eta + losses.max()))
    assert (np.diff(p[np.argsort(losses)]) <= 1e-15).all()


@CHECK
@given(mean=st.floats(0.0, 1.0), level=st.floats(1e-6, 50.0))
def test_kl_upper_bound_is_the_root(mean, level):
    q = float(kl_upper_bound(np.array([mean]), np.array([level]))[0])
    assert mean <= q <= 1.0

    def divergence(q):
        first = mean * math.log(mean / q) if mean > 0.0 else 0.0
        return first + ((1.0 - mean) * math.log((1.0 - mean) / (1.0 - q)) if mean < 1.0 else 0.0)

    below, above = q - 1e-7, q + 1e-7
    if below > mean:
        assert divergence(below) <= level
    if above < 1.0:
        assert divergence(above) >= level


@CHECK
@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-12, 1e6)), min_size=1, max_size=20), uniform=st.floats(0, 1)
)
def test_draw_is_the_inverse_of_the_distribution_function(weights, uniform):
    weights = np.array(weights)
    if not weights.any():
        weights[0] = 1.0
    index, probabilities = draw(weights, np.empty(len(weights)), uniform=uniform)
    assert weights[index] > 0.0
    assert probabilities == pytest.approx(weights / weights.sum())
    edges = np.concatenate([[0.0], np.cumsum(weights / weights.sum())])
    assert edges[index] - 1e-9 <= uniform <= edges[index + 1] + 1e-9


@pytest.mark.parametrize("name", ["hedge", "adahedge", "normal-hedge", "ada-normal-hedge", "fixed-share"])
@CHECK
@given(history=histories(), shift=st.floats(0.0, 0.5))
def test_what_all_arms_gain_alike_changes_nothing(name, history, shift):
    gains, observed = history[0] / 2.0, history[1]
    one, other = (make_policy(name, n_arms=gains.shape[1], seed=1) for _ in range(2))
    for row, mask in zip(gains, observed, strict=True):
        a, b = one.select(), other.select()
        if name == "adahedge" and np.abs(a.probabilities - b.probabilities).max() > 1e-6:
            return  # leaders tied up to rounding: an infinite rate tells 1e-17 from 0
        assert a.probabilities == pytest.approx(b.probabilities, abs=1e-6)
        one.update(a, Feedback.from_gains(row, mask))
        other.update(b, Feedback.from_gains(row + shift, mask))


@pytest.mark.parametrize("name", ["hedge", "normal-hedge", "ada-normal-hedge", "adahedge", "fixed-share"])
def test_a_sleeping_arm_is_neither_punished_nor_favoured(name):
    # Arm 2 earns as much as the mixture's best, but is evaluated in one round of five.
    policy = make_policy(name, n_arms=3, seed=0)
    for step in range(300):
        policy.update(policy.select(), Feedback.from_gains([0.3, 0.5, 0.9], [True, True, step % 5 == 0]))
    assert policy.probabilities()[2] > 0.9
