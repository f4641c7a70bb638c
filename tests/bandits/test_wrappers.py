"""Delayed, lazy, blocked, per-context and prior-plus-request play."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptspec.bandits import (
    POLICIES,
    Blocked,
    Delayed,
    Feedback,
    Lazy,
    PerContext,
    PolicyContext,
    WithPrior,
    make_policy,
)
from adaptspec.bandits.sampling import SamplingPolicy
from tests.bandits.playing import FULL_INFORMATION, play, teach_all

ARMS = 4


def maker(name, n_arms=ARMS, **options):
    return lambda seed: make_policy(name, n_arms=n_arms, seed=seed, **options)


def random_feedback(rng, n_arms=ARMS):
    return Feedback.from_gains(rng.random(n_arms), rng.random(n_arms) < 0.7, tokens=2.0, seconds=0.5)


class TestDelayed:
    @pytest.mark.parametrize("name", POLICIES)
    @pytest.mark.parametrize("seed", range(3))
    def test_any_order_ends_in_the_same_state(self, name, seed):
        ordered, shuffled = Delayed(maker(name)(1)), Delayed(maker(name)(1))
        rng = np.random.default_rng(seed)
        for _ in range(6):
            decisions = [ordered.select() for _ in range(8)]
            assert [shuffled.select() for _ in range(8)] == decisions
            feedback = [random_feedback(rng) for _ in decisions]
            for decision, earned in zip(decisions, feedback, strict=True):
                ordered.update(decision, earned)
            for position in rng.permutation(8):
                shuffled.update(decisions[position], feedback[position])
            assert shuffled.state_dict() == ordered.state_dict()

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(order=st.permutations(range(7)), lost=st.sets(st.integers(0, 6)))
    def test_lost_ones_that_are_skipped_do_not_matter_either(self, order, lost):
        states = []
        for sequence in (range(7), order):
            policy = Delayed(maker("normal-hedge")(2))
            rng = np.random.default_rng(0)
            feedback = [random_feedback(rng) for _ in range(7)]
            decisions = [policy.select() for _ in range(7)]
            for position in sequence:
                if position in lost:
                    policy.skip(decisions[position])
                else:
                    policy.update(decisions[position], feedback[position])
            assert policy.waiting == 0
            states.append(policy.state_dict())
        assert states[0] == states[1]

    @pytest.mark.parametrize("name", ["adahedge", "fixed-share", "d-ucb", "sw-ucb"])
    def test_without_the_wrapper_order_does_matter(self, name):
        states = []
        for sequence in ((0, 1, 2), (2, 0, 1)):
            policy = maker(name)(1)
            decisions = [policy.select() for _ in range(3)]
            gains = np.random.default_rng(0).random((3, ARMS))
            for position in sequence:
                policy.update(decisions[position], Feedback.from_gains(gains[position]))
            states.append(policy.state_dict()["learned"])
        assert states[0] != states[1]

    def test_feedback_waits_for_the_earlier_ones(self):
        inner = maker("hedge")(0)
        policy = Delayed(inner)
        first, second, third = (policy.select() for _ in range(3))
        policy.update(third, Feedback.from_gains([0.5] * ARMS))
        policy.update(second, Feedback.from_gains([0.5] * ARMS))
        assert (inner.rounds, policy.waiting) == (0, 2)
        policy.update(first, Feedback.from_gains([0.5] * ARMS))
        assert (inner.rounds, policy.waiting) == (3, 0)

    def test_a_missing_one_is_given_up_after_capacity_later_decisions(self):
        inner = maker("hedge")(0)
        policy = Delayed(inner, capacity=5)
        lost = policy.select()
        for step in range(1, 20):
            policy.update(policy.select(), Feedback.from_gains([0.5] * ARMS))
            assert policy.waiting <= 5
            assert inner.rounds == (0 if step < 5 else step)
        policy.update(lost, Feedback.from_gains([0.5] * ARMS))
        assert policy.dropped == 1
        assert inner.rounds == 19

    def test_waiting_feedback_survives_saving(self):
        policy, restored = (Delayed(maker("exp3-ix")(0)) for _ in range(2))
        rng = np.random.default_rng(0)
        decisions = [policy.select() for _ in range(6)]
        for position in (3, 1, 5):
            policy.update(decisions[position], random_feedback(rng))
        policy.skip(decisions[4])
        restored.load_state_dict(json.loads(json.dumps(policy.state_dict(), allow_nan=False)))
        for position in (2, 0):
            feedback = random_feedback(rng)
            policy.update(decisions[position], feedback)
            restored.update(decisions[position], feedback)
        assert restored.waiting == 0
        assert restored.state_dict() == policy.state_dict()

    def test_skipping_is_checked(self):
        policy = Delayed(maker("hedge")(0))
        decision = policy.select()
        policy.skip(decision)
        with pytest.raises(ValueError, match="step_id 0 already had its feedback"):
            policy.skip(decision)
        with pytest.raises(ValueError, match="step_id must be one of the latest"):
            policy.skip(maker("hedge")(0).select().__class__(7, 0))

    def test_capacity(self):
        with pytest.raises(ValueError, match="capacity must be at most 2048, got 5000"):
            Delayed(maker("hedge")(0), capacity=5000)


class TestLazy:
    @pytest.mark.parametrize("method", ["dartboard", "coupling"])
    @pytest.mark.parametrize("name", ["hedge", "normal-hedge"])
    def test_every_step_has_the_inner_distribution(self, name, method):
        gains = np.random.default_rng(1).random((6, 3)) * [1.0, 0.6, 0.8]
        counts, runs = np.zeros((6, 3)), 1000
        for seed in range(runs):
            policy = Lazy(make_policy(name, n_arms=3, seed=seed), method=method, seed=10_000 + seed)
            for step, row in enumerate(gains):
                decision = policy.select()
                counts[step, decision.index] += 1
                policy.update(decision, Feedback.from_gains(row))
        inner = make_policy(name, n_arms=3)
        for step, row in enumerate(gains):
            p = inner.probabilities()
            assert np.abs(counts[step] / runs - p).max() <= 4.0 * np.sqrt(0.25 / runs)
            teach_all(inner, row)

    def test_it_switches_less_and_coupling_least(self):
        gains = np.clip(0.5 + np.random.default_rng(2).normal(0, 0.3, (1000, 5)), 0, 1)

        def switches(policy):
            arms = []
            for row in gains:
                arms.append(teach_all(policy, row).index)
            return np.count_nonzero(np.diff(arms))

        eager = switches(make_policy("hedge", n_arms=5, horizon=1000))
        dartboard = switches(Lazy(make_policy("hedge", n_arms=5, horizon=1000)))
        coupling = switches(Lazy(make_policy("hedge", n_arms=5, horizon=1000), method="coupling"))
        assert coupling < dartboard < 0.2 * eager

    def test_dartboard_keeps_with_the_ratio_of_the_weights(self):
        # Learning rate ln 2, gains (1, 0): arm 1's weight halves against the best, arm 0 never needs to be left.
        left = {0: 0, 1: 0}
        began = {0: 0, 1: 0}
        for seed in range(1500):
            policy = Lazy(make_policy("hedge", n_arms=2, seed=seed, learning_rate=np.log(2.0)), seed=seed + 5000)
            first = teach_all(policy, [1.0, 0.0]).index
            began[first] += 1
            left[first] += policy.select().index != first
        assert left[0] == 0
        # Left by arm 1: a redraw (1/2) that hits arm 0 (2/3).
        assert left[1] / began[1] == pytest.approx(1 / 3, abs=0.05)

    def test_equal_distributions_never_switch(self):
        policy = Lazy(maker("hedge")(0), method="coupling")
        arms = {teach_all(policy, [0.5] * ARMS).index for _ in range(200)}
        assert len(arms) == 1

    def test_refusals(self):
        with pytest.raises(ValueError, match="lazy play needs a full-information policy, got 'exp3'"):
            Lazy(maker("exp3")(0))
        with pytest.raises(ValueError, match="unknown method 'dartbord'; did you mean 'dartboard'"):
            Lazy(maker("hedge")(0), method="dartbord")
        with pytest.raises(ValueError, match="draws from probabilities, got 'follow-the-leader'"):
            Lazy(maker("follow-the-leader")(0)).select()


class TestBlocked:
    def test_plays_blocks_and_teaches_their_means(self):
        inner = make_policy("ucb", n_arms=2)
        policy = Blocked(inner, length=3)
        gains = iter([0.1, 0.2, 0.6, 0.9, 0.9, 0.9])
        arms = []
        for _ in range(6):
            decision = policy.select()
            arms.append(decision.index)
            policy.update(decision, Feedback.of_arm(2, decision.index, gain=next(gains)))
        assert arms == [0, 0, 0, 1, 1, 1]
        assert inner.state_dict()["learned"]["sums"] == pytest.approx([0.3, 0.9])
        assert inner.rounds == 2

    def test_mean_is_over_the_rounds_an_arm_was_observed(self):
        inner = make_policy("follow-the-leader", n_arms=3)
        policy = Blocked(inner, length=2)
        teach_all(policy, [0.2, 0.8, 0.0], [True, True, False])
        teach_all(policy, [0.4, 0.0, 0.0], [True, False, False])
        learned = inner.state_dict()["learned"]
        assert learned["sums"] == pytest.approx([0.3, 0.8, 0.0])
        assert learned["counts"] == [1.0, 1.0, 0.0]

    def test_counts_are_summed_for_policies_that_read_them(self):
        policy = Blocked(make_policy("heuristic", n_arms=4, lengths=(1, 2, 3, 4), start=2), length=2)
        for accepted in (2, 1):
            decision = policy.select()
            policy.update(decision, Feedback.from_gains([1.0] * 4, drafted=2, accepted=accepted))
        assert policy.select().index == 0  # 3 of 4 accepted is no full accept

    def test_late_and_lost_feedback(self):
        inner = make_policy("exp3", n_arms=2, seed=0)
        policy = Blocked(inner, length=2)
        decisions = [policy.select() for _ in range(2 * (Blocked.OPEN_BLOCKS + 2))]
        assert inner.rounds == 0
        policy.update(decisions[-1], Feedback.from_gains([0.5, 0.5]))
        policy.update(decisions[-2], Feedback.from_gains([0.5, 0.5]))
        assert inner.rounds == 1
        policy.update(decisions[0], Feedback.from_gains([0.5, 0.5]))  # its block was given up
        assert inner.rounds == 1

    def test_still_learns_and_switches_rarely(self):
        rng = np.random.default_rng(0)
        gains = (rng.random((2400, 4)) < [0.8, 0.4, 0.4, 0.4]).astype(float)
        policy = Blocked(make_policy("exp3-ix", n_arms=4, seed=1), length=8)
        arms = []
        for row in gains:
            decision = policy.select()
            arms.append(decision.index)
            policy.update(decision, Feedback.of_arm(4, decision.index, gain=float(row[decision.index])))
        switches = np.flatnonzero(np.diff(arms)) + 1
        assert (switches % 8 == 0).all()
        assert arms[1600:].count(0) >= 560


class TestPerContext:
    def test_buckets_learn_apart(self):
        policy = PerContext(maker("hedge"), seed=0)
        gains = {"code": [0.9, 0.1, 0.1, 0.1], "chat": [0.1, 0.1, 0.1, 0.9]}
        for bucket in ["code", "chat"] * 60:
            policy.update(policy.select(PolicyContext(bucket=bucket)), Feedback.from_gains(gains[bucket]))
        assert policy.policy_of("code").probabilities()[0] > 0.99
        assert policy.policy_of("chat").probabilities()[3] > 0.99
        assert policy.policy_of(None).rounds == 0

    def test_a_bare_bucket_and_nested_features(self):
        policy = PerContext(maker("linucb", dimension=2), seed=0)
        context = PolicyContext(bucket=3, features=np.ones(2))
        policy.update(policy.select(context), Feedback.from_gains([0.5] * ARMS))
        assert policy.policy_of(3).rounds == 1
        plain = PerContext(maker("ucb"))
        plain.update(plain.select("law"), Feedback.from_gains([0.5] * ARMS))
        assert plain.policy_of("law").rounds == 1
        with pytest.raises(TypeError, match="bucket must be text, a whole number or None, got list"):
            plain.select(["law"])

    def test_buckets_beyond_the_limit_share_one_policy(self):
        policy = PerContext(maker("ucb"), max_buckets=2)
        for bucket in ("a", "b", "c", "d"):
            policy.update(policy.select(bucket), Feedback.from_gains([0.5] * ARMS))
        assert policy.policy_of("c") is policy.policy_of("d") is policy.policy_of(None)
        assert policy.policy_of("c").rounds == 2
        assert policy.policy_of("a").rounds == 1

    def test_feedback_returns_to_the_bucket_it_came_from(self):
        policy = PerContext(maker("ucb"))
        waiting = {bucket: policy.select(bucket) for bucket in ("a", "b")}
        policy.update(waiting["b"], Feedback.from_gains([1.0] * ARMS))
        assert (policy.policy_of("a").rounds, policy.policy_of("b").rounds) == (0, 1)


class TestWithPrior:
    @pytest.mark.parametrize("name", [n for n, p in POLICIES.items() if p.additive])
    def test_the_global_policy_learns_from_every_request(self, name):
        policy = WithPrior(maker(name), seed=0)
        rng = np.random.default_rng(0)
        for step in range(30):
            decision = policy.select(PolicyContext(request=step % 3))
            policy.update(decision, Feedback.from_gains(rng.random(ARMS)))
        assert policy.prior.rounds == 30
        assert policy.open_requests == 3

    def test_hedge_starts_from_the_average_gain_at_the_prior_strength(self):
        policy = WithPrior(maker("hedge", learning_rate=0.5), strength=8.0)
        means = np.array([0.75, 0.5, 0.25, 0.0])
        for _ in range(100):
            policy.update(policy.select(), Feedback.from_gains(means))
        expected = np.exp(0.5 * 8.0 * means)
        assert policy.select("new").probabilities == pytest.approx(expected / expected.sum())
        # The global policy itself has long decided.
        assert policy.prior.probabilities()[0] > 0.99

    def test_means_start_as_pseudo_rounds(self):
        policy = WithPrior(maker("follow-the-leader"), strength=4.0)
        for _ in range(10):
            policy.update(policy.select(), Feedback.from_gains([0.5, 0.25, 0.0, 0.0]))
        for earned, expected in [([0.0, 0.5, 0, 0], 0), ([0.0, 0.5, 0, 0], 0), ([0.0, 0.5, 0, 0], 1)]:
            policy.update(policy.select("r"), Feedback.from_gains(earned))
            # Sums 4 * 0.5 against 4 * 0.25 + 0.5 k: level after two rounds, the other ahead after three.
            assert policy.select("r").index == expected

    def test_early_on_the_prior_counts_for_no_more_than_it_knows(self):
        policy = WithPrior(maker("hedge", learning_rate=1.0), strength=100.0)
        policy.update(policy.select(), Feedback.from_gains([1.0, 0.0, 0.0, 0.0]))
        expected = np.exp([1.0, 0.0, 0.0, 0.0])
        assert policy.select("r").probabilities == pytest.approx(expected / expected.sum())

    def test_strength_zero_starts_afresh(self):
        policy = WithPrior(maker("hedge"), strength=0.0)
        for _ in range(20):
            policy.update(policy.select(), Feedback.from_gains([1.0, 0.0, 0.0, 0.0]))
        assert policy.select("r").probabilities == pytest.approx([0.25] * ARMS)

    def test_it_beats_one_global_and_fresh_learners_on_mixed_requests(self):
        rng = np.random.default_rng(3)
        arms, requests, steps = 32, 80, 20
        rows = []
        for _ in range(requests):  # every request has one of three best arms; most arms are never good
            means = np.full(arms, 0.2)
            means[rng.choice([2, 7, 11])] = 0.9
            means[[2, 7, 11]] = np.maximum(means[[2, 7, 11]], 0.5)
            rows.append(np.clip(means + rng.normal(0, 0.25, (steps, arms)), 0, 1))
        gains = np.concatenate(rows)

        def earned(policy):
            return play(policy, gains, context=lambda step: PolicyContext(request=step // steps)).sum()

        both = earned(WithPrior(maker("hedge", n_arms=arms), strength=10.0))
        assert both >= 1.02 * earned(make_policy("hedge", n_arms=arms))
        assert both >= 1.02 * earned(WithPrior(maker("hedge", n_arms=arms), strength=0.0))

    def test_requests_end_and_are_bounded(self):
        policy = WithPrior(maker("hedge"), max_requests=3)
        decisions = {request: policy.select(request) for request in ("a", "b", "c")}
        policy.select("a")
        policy.select("d")  # b was played longest ago
        assert policy.open_requests == 3
        policy.finish("a")
        policy.finish("never seen")
        assert policy.open_requests == 2
        again = policy.select("a")  # the same key, another request
        for decision in (*decisions.values(), again):
            policy.update(decision, Feedback.from_gains([0.5] * ARMS))
        assert policy.prior.rounds == 4

    def test_policies_that_do_not_add_up_are_refused(self):
        with pytest.raises(
            ValueError, match="with_prior needs a policy whose learnt state adds up, 'adahedge' does not"
        ):
            WithPrior(maker("adahedge"))


def test_wrappers_compose():
    policy = PerContext(lambda seed: WithPrior(lambda s: maker("hedge")(s), seed=seed), seed=1)
    contexts = itertools.cycle([PolicyContext(bucket=b, request=r) for b in ("x", "y") for r in (1, 2)])
    gains = {"x": [0.9, 0.1, 0.1, 0.1], "y": [0.1, 0.1, 0.9, 0.1]}
    for _, context in zip(range(200), contexts, strict=False):
        policy.update(policy.select(context), Feedback.from_gains(gains[context.bucket]))
    assert policy.select(PolicyContext(bucket="x", request=9)).index == 0
    assert policy.select(PolicyContext(bucket="y", request=9)).index == 2
    assert policy.name == "per-context(with-prior(hedge))"
    assert isinstance(policy.policy_of("x").prior, SamplingPolicy)
    assert set(FULL_INFORMATION) >= {"hedge"}
