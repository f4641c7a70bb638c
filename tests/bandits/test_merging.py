"""What replicas learnt adds up."""

from __future__ import annotations

import json

import numpy as np
import pytest

from adaptspec.bandits import POLICIES, Feedback, make_policy, merge
from tests.bandits.playing import continue_playing, trained

MERGEABLE = [name for name, policy in POLICIES.items() if policy.additive]


@pytest.mark.parametrize("name", MERGEABLE)
def test_sums_add_up_and_the_rest_is_the_first_replicas(name):
    states = [trained(name, seed=seed).state_dict() for seed in (1, 2, 3)]
    fresh = make_policy(name, n_arms=5).state_dict()
    merged = merge(states)
    for key in POLICIES[name].additive:
        start = np.array(fresh["learned"][key])
        total = sum(np.array(state["learned"][key]) - start for state in states)
        assert np.array(merged["learned"][key]) == pytest.approx(start + total)
    assert merged["rounds"] == sum(state["rounds"] for state in states)
    assert {k: merged[k] for k in ("rng", "next_step", "pending")} == {
        k: states[0][k] for k in ("rng", "next_step", "pending")
    }
    make_policy(name, n_arms=5).load_state_dict(json.loads(json.dumps(merged)))


@pytest.mark.parametrize("name", MERGEABLE)
def test_a_shared_start_is_counted_once(name):
    start = trained(name).state_dict()
    replicas = []
    for seed in (5, 6):
        policy = make_policy(name, n_arms=5)
        policy.load_state_dict(start)
        continue_playing(policy, rounds=20, seed=seed)
        replicas.append(policy.state_dict())
    merged = merge(replicas, base=start)
    assert merged["rounds"] == pytest.approx(start["rounds"] + 40)
    for key in POLICIES[name].additive:
        expected = sum(np.array(state["learned"][key]) for state in replicas) - np.array(start["learned"][key])
        assert np.array(merged["learned"][key]) == pytest.approx(expected)
    nothing_new = merge([start, start], base=start)
    for key in POLICIES[name].additive:
        assert nothing_new["learned"][key] == start["learned"][key]


def test_two_halves_know_what_the_whole_knows():
    gains = np.random.default_rng(0).random((60, 4))
    whole, halves = make_policy("hedge", n_arms=4), [make_policy("hedge", n_arms=4, seed=s) for s in (1, 2)]
    for step, row in enumerate(gains):
        for policy in (whole, halves[step % 2]):
            policy.update(policy.select(), Feedback.from_gains(row))
    merged = make_policy("hedge", n_arms=4)
    merged.load_state_dict(merge([half.state_dict() for half in halves]))
    assert merged.probabilities() == pytest.approx(whole.probabilities())


def test_linucb_recomputes_its_inverses():
    states = [trained("linucb", seed=seed).state_dict() for seed in (1, 2)]
    merged = merge(states)["learned"]
    assert np.array(merged["inverses"]) == pytest.approx(np.linalg.inv(np.array(merged["grams"])))


def test_open_decisions_of_the_first_replica_stay_open():
    one, other = trained("ucb", seed=1), trained("ucb", seed=2)
    waiting = one.select()
    one.load_state_dict(merge([one.state_dict(), other.state_dict()]))
    one.update(waiting, Feedback.from_gains([0.5] * 5))


def test_refusals():
    states = [trained(name).state_dict() for name in ("ucb", "exp3")]
    with pytest.raises(ValueError, match="states must hold at least one state, got none"):
        merge([])
    with pytest.raises(ValueError, match="states must agree on the policy, got 'ucb' and 'exp3'"):
        merge(states)
    with pytest.raises(ValueError, match="states must agree on n_arms"):
        merge([states[0], make_policy("ucb", n_arms=6).state_dict()])
    with pytest.raises(ValueError, match="states must agree on options"):
        merge([states[0], make_policy("ucb", n_arms=5, gain_range=(0.0, 0.5)).state_dict()])
    with pytest.raises(ValueError, match="unknown policy to merge 'adahedge'.* Valid: ada-normal-hedge"):
        merge([trained("adahedge").state_dict()])
    later = trained("ucb", rounds=60).state_dict()
    with pytest.raises(ValueError, match="(counts|sums) must be finite and in"):
        merge([states[0], states[0]], base=later)
