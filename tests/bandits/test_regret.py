"""Regret within the papers' bounds on stochastic, adversarial and switching gains, and mutants that must not be."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from adaptspec.bandits import Feedback, make_policy
from adaptspec.bandits.exp3 import EXP3, EXP3IX, EXP3Spec
from adaptspec.bandits.ucb import UCB1
from tests.bandits.playing import bernoulli, best_with_switches, play

ROUNDS, ARMS = 2000, 6
MEANS = np.array([0.8, 0.5, 0.5, 0.4, 0.3, 0.2])
GAPS = (0.8 - MEANS)[1:]


def stochastic(seed, rounds=ROUNDS):
    return bernoulli(MEANS, rounds=rounds, seed=seed)


def adversarial(rounds=ROUNDS):
    """Arms 0 and 1 take turns with a gain of 1, so whoever follows the leader gets nothing; arm 2 always earns 0.55."""
    gains = np.zeros((rounds, ARMS))
    gains[np.arange(rounds), np.arange(rounds) % 2] = 1.0
    gains[:, 2] = 0.55
    gains[0, 0] = 0.5
    return gains


def switching(seed, rounds=ROUNDS):
    means = np.full((rounds, ARMS), 0.3)
    for phase, arm in enumerate((0, 3, 1, 5)):
        means[phase * rounds // 4 : (phase + 1) * rounds // 4, arm] = 0.8
    return (np.random.default_rng(seed).random((rounds, ARMS)) < means).astype(float)


T, K, LOG_K = ROUNDS, ARMS, math.log(ARMS)
ADVERSARIAL_BOUNDS = {
    "exp3": 2.63 * math.sqrt(T * K * LOG_K),
    "exp3spec": 2.0 * math.sqrt(T * K * LOG_K),
    "exp3-ix": 2.0 * math.sqrt(2.0 * T * K * LOG_K),
    "tsallis-inf": 4.0 * math.sqrt(K * T) + 1.0,
    "hedge": 2.0 * math.sqrt(T * LOG_K / 2.0) + math.sqrt(LOG_K / 8.0),
    "adahedge": math.sqrt(T * LOG_K) + 16.0 / 3.0 * LOG_K + 2.0,
    "normal-hedge": math.sqrt(3.0 * T * (1.0 + LOG_K)),
    "ada-normal-hedge": math.sqrt(3.0 * T * (LOG_K + math.log(1.0 + 1.5 * math.log(1.0 + T)) + math.log(1.0 + LOG_K))),
}
UCB1_BOUND = (8.0 * math.log(T) / GAPS).sum() + (1.0 + math.pi**2 / 3.0) * GAPS.sum()
STOCHASTIC_SHARES = {  # of the regret of playing at random; all far below the papers' bounds
    "ucb": 0.35,
    "ucb-tuned": 0.15,
    "kl-ucb": 0.15,
    "ucbspec": 0.35,
    "sw-ucb": 0.35,
    "d-ucb": 0.6,
    "exp3": 0.5,
    "exp3spec": 0.35,
    "exp3-ix": 0.45,
    "exp3-s": 0.6,
    "tsallis-inf": 0.25,
    "thompson": 0.15,
    "hedge": 0.05,
    "adahedge": 0.05,
    "normal-hedge": 0.05,
    "ada-normal-hedge": 0.05,
    "fixed-share": 0.1,
    "follow-the-leader": 0.05,
    "ema": 0.15,
}


def regret(policy, gains):
    return gains.sum(axis=0).max() - play(policy, gains).sum()


@pytest.mark.parametrize("name", ADVERSARIAL_BOUNDS)
def test_adversarial(name):
    gains = adversarial()
    assert gains[:, 2].sum() - gains[:, 0].sum() == pytest.approx(100.5)
    assert regret(make_policy(name, n_arms=K, seed=0), gains) <= ADVERSARIAL_BOUNDS[name]


@pytest.mark.parametrize("name", STOCHASTIC_SHARES)
def test_stochastic(name):
    regrets, at_random = [], []
    for seed in range(2):
        gains = stochastic(seed)
        regrets.append(gains[:, 0].sum() - play(make_policy(name, n_arms=K, seed=seed), gains).sum())
        at_random.append(gains[:, 0].sum() - gains.mean(axis=1).sum())
    assert np.mean(regrets) <= STOCHASTIC_SHARES[name] * np.mean(at_random)
    assert np.mean(regrets) <= ADVERSARIAL_BOUNDS.get(name, UCB1_BOUND)


@pytest.mark.parametrize("name", ["hedge", "adahedge", "normal-hedge", "ada-normal-hedge"])
@pytest.mark.parametrize("seed", range(3))
def test_full_information_bounds_hold_in_every_prefix(name, seed):
    rng = np.random.default_rng(seed)
    walk = np.clip(0.5 + np.cumsum(rng.normal(0.0, 0.05, (400, K)), axis=0), 0.0, 1.0)
    earned = np.cumsum(play(make_policy(name, n_arms=K, seed=seed), walk))
    regrets = np.cumsum(walk, axis=0).max(axis=1) - earned
    t = np.arange(1, 401)
    bounds = {
        "hedge": 2.0 * np.sqrt(t * LOG_K / 2.0) + math.sqrt(LOG_K / 8.0),
        "adahedge": np.sqrt(t * LOG_K) + 16.0 / 3.0 * LOG_K + 2.0,
        "normal-hedge": np.sqrt(3.0 * t * (1.0 + LOG_K)) + 1.0,
        "ada-normal-hedge": np.sqrt(3.0 * t * (LOG_K + np.log(1 + 1.5 * np.log(1 + t)) + math.log(1 + LOG_K))) + 1.0,
    }
    assert (regrets <= bounds[name] + 1e-9).all()


@pytest.mark.parametrize("switches", [3, 10])
def test_fixed_share_tracks_switches_within_its_bound(switches):
    gains = switching(0)
    policy = make_policy("fixed-share", n_arms=K, horizon=T, switches=switches)
    share = switches / (T - 1)
    entropy = -share * math.log(share) - (1 - share) * math.log1p(-share)
    spread = (switches + 1) * LOG_K + (T - 1) * entropy
    assert best_with_switches(gains, switches) - play(policy, gains).sum() <= math.sqrt(T * spread / 2.0)


@pytest.mark.parametrize(
    ("name", "options", "share"),
    [
        ("fixed-share", {"horizon": T, "switches": 3}, 0.15),
        ("ema", {}, 0.1),
        ("sw-ucb", {"window": 250}, 0.35),
        ("d-ucb", {"discount": 0.999}, 0.5),
        ("exp3-s", {"horizon": T, "switches": 3}, 0.8),
    ],
)
def test_policies_that_forget_track_switches(name, options, share):
    regrets, global_learner = [], []
    for seed in range(2):
        gains = switching(seed)
        best = best_with_switches(gains, 3)
        regrets.append(best - play(make_policy(name, n_arms=K, seed=seed, **options), gains).sum())
        global_learner.append(best - play(make_policy("hedge", n_arms=K, seed=seed), gains).sum())
    assert np.mean(regrets) <= share * np.mean(global_learner)


def test_linucb_learns_what_depends_on_the_context():
    rng = np.random.default_rng(0)
    features = np.column_stack([np.ones(1500), rng.choice([-1.0, 1.0], 1500)])
    gains = np.clip(0.5 + features @ np.array([[0, 0, 0.1], [0.3, -0.3, 0.0]]) + rng.normal(0, 0.1, (1500, 3)), 0, 1)
    contextual = play(make_policy("linucb", n_arms=3, dimension=2, width=0.5), gains, context=lambda t: features[t])
    blind = play(make_policy("ucb-tuned", n_arms=3), gains)
    assert contextual[300:].mean() >= 0.77  # the best arm of each context earns 0.8, the best arm overall 0.6
    assert blind[300:].mean() <= 0.65


def test_doubling_the_rounds_adds_little():
    for name in ("ucb-tuned", "kl-ucb", "thompson", "tsallis-inf", "hedge"):
        gains = stochastic(5, rounds=3000)
        regrets = np.cumsum(gains[:, 0] - play(make_policy(name, n_arms=K, seed=1), gains))
        assert regrets[2999] - regrets[1499] <= 0.12 * 1500 * GAPS.mean()  # at random: GAPS.mean() * 5 / 6 per round


class UnscaledBonus(UCB1):
    """Mutant: rewards of up to 200 tokens per second with the bonus of rewards of up to 1."""

    def scores(self):
        return self._means + (super().scores() - self._means) / 200.0


class ConstantBonus(UCB1):
    """Mutant: one bonus for all arms, which decides nothing."""

    def scores(self):
        return self._means + math.sqrt(6.0 * math.log(self.rounds) / self.rounds)


@pytest.mark.parametrize("mutant", [UnscaledBonus, ConstantBonus])
def test_a_bonus_that_ignores_the_range_is_greedy_and_caught(mutant):
    gains = stochastic(0)
    gains[:K] = 0.0
    gains[1, 1] = 1.0  # the best arm is unlucky in its first pull, another one lucky

    def share_of_best(policy):
        play(policy, gains)
        return policy.state_dict()["learned"]["counts"][0] / ROUNDS

    assert share_of_best(UCB1(K)) >= 0.6
    assert share_of_best(mutant(K)) <= 0.05


def test_a_range_that_is_too_wide_explores_too_much():
    gains = 0.5 + 0.02 * stochastic(1)
    scaled = regret(make_policy("ucb", n_arms=K, gain_range=(0.5, 0.52)), gains) / 0.02
    unscaled = regret(make_policy("ucb", n_arms=K), gains) / 0.02
    assert scaled <= 0.35 * unscaled


class CreditsTheLatest(UCB1):
    """Mutant: learns about the arm it chose last instead of the one the feedback belongs to."""

    def _choose(self, context):
        choice = super()._choose(context)
        self._latest = choice[0]
        return choice

    def _learn(self, decision, feedback):
        gain = float(feedback.gains[decision.index])
        super()._learn(replace(decision, index=self._latest), Feedback.of_arm(K, self._latest, gain=gain))


def delayed_regret(policy, gains, *, delay):
    """Played regret when feedback comes `delay` steps late."""
    waiting, earned = [], 0.0
    for row in gains:
        decision = policy.select()
        earned += row[decision.index]
        waiting.append((decision, Feedback.of_arm(K, decision.index, gain=float(row[decision.index]))))
        if len(waiting) > delay:
            policy.update(*waiting.pop(0))
    return gains[:, 0].sum() - earned


def test_late_feedback_is_credited_to_its_own_decision():
    gains = stochastic(2)
    at_random = gains[:, 0].sum() - gains.mean(axis=1).sum()
    assert delayed_regret(UCB1(K), gains, delay=10) <= 0.35 * at_random
    assert delayed_regret(CreditsTheLatest(K), gains, delay=10) >= 0.5 * at_random


class NoWeightEXP3(EXP3):
    """Mutant: the importance weight is missing."""

    def _estimate(self, decision, gain):
        return gain


class NoWeightEXP3Spec(EXP3Spec):
    """Mutant: the importance weight is missing."""

    def _estimate(self, decision, gain):
        return 1.0 - gain


GAINS = np.array([0.7, 0.4, 0.1])


def mean_estimates(cls):
    """What one round adds to the estimates on average over the drawn arm, from unequal probabilities; and those."""
    policy = cls(3, 0)
    direction = 1.0 if issubclass(cls, EXP3) else -1.0
    state = policy.state_dict()
    state |= {"rounds": 30.0, "learned": {"estimates": [20.0 + direction * 12.0, 20.0, 20.0 - direction * 8.0]}}
    mean = np.zeros(3)
    for index in range(3):
        policy.load_state_dict(state)
        decision = policy.select()
        p = decision.probabilities
        assert p.max() > 2 * p.min()
        policy.update(replace(decision, index=index, propensity=p[index]), Feedback.from_gains(GAINS))
        mean += p[index] * (np.array(policy.state_dict()["learned"]["estimates"]) - state["learned"]["estimates"])
    return mean, p


def test_estimates_are_unbiased_only_with_the_importance_weight():
    assert mean_estimates(EXP3)[0] == pytest.approx(GAINS)
    assert mean_estimates(EXP3Spec)[0] == pytest.approx(1.0 - GAINS)
    for mutant, right in ((NoWeightEXP3, GAINS), (NoWeightEXP3Spec, 1.0 - GAINS)):
        mean, p = mean_estimates(mutant)
        assert mean == pytest.approx(p * right)
        assert mean != pytest.approx(right, abs=0.2)
    implicit, p = mean_estimates(EXP3IX)  # biased downwards on purpose
    gamma = 0.5 * math.sqrt(math.log(3.0) / (3.0 * 31.0))
    assert implicit == pytest.approx((1.0 - GAINS) * p / (p + gamma))


def test_without_the_importance_weight_the_wrong_arm_wins():
    # Arm 0 is good at first and bad for ever after; unweighted sums can never overtake it while it is played.
    gains = np.zeros((ROUNDS, 2))
    gains[:400, 0] = 1.0
    gains[400:, 0] = 0.3
    gains[400:, 1] = 0.9
    right = play(EXP3(2, 0, exploration=0.05), gains).sum()
    wrong = play(NoWeightEXP3(2, 0, exploration=0.05), gains).sum()
    assert gains[:, 1].sum() - right <= 2.63 * math.sqrt(ROUNDS * 2 * math.log(2.0))
    assert wrong <= right - 400
