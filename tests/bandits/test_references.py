"""Every learner agrees with a few independent lines that recompute everything from the whole history."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import beta

from adaptspec.bandits import POLICIES, Feedback, make_policy

ROUNDS = 60
ARMS = 4
WINDOW = 9


@dataclass
class Round:
    index: int
    propensity: float
    probabilities: np.ndarray | None
    gains: np.ndarray
    observed: np.ndarray
    features: np.ndarray

    @property
    def gain(self) -> float:
        return float(self.gains[self.index])

    @property
    def mixture(self) -> float:
        """What the mixture of the observed arms earned."""
        p = self.probabilities * self.observed
        if p.sum() == 0.0:
            p = self.observed.astype(float)
        return float(np.sum(p * np.where(self.observed, self.gains, 0.0)) / p.sum())

    @property
    def filled(self) -> np.ndarray:
        return np.where(self.observed, self.gains, self.mixture)


def plays(history: list[Round], arm: int) -> list[float]:
    return [r.gain for r in history if r.index == arm]


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def mean_plus(history, bonus):
    return np.array([np.mean(plays(history, a)) + bonus(len(plays(history, a))) for a in range(ARMS)])


def ucb(history):
    return mean_plus(history, lambda n: math.sqrt(2 * math.log(len(history)) / n))


def ucb_tuned(history):
    t = len(history)
    scores = []
    for arm in range(ARMS):
        gains = plays(history, arm)
        v = np.var(gains) + math.sqrt(2 * math.log(t) / len(gains))
        scores.append(np.mean(gains) + math.sqrt(math.log(t) / len(gains) * min(0.25, v)))
    return np.array(scores)


def kl_ucb(history):
    def bound(arm):
        gains = plays(history, arm)
        p, level = np.mean(gains), math.log(len(history)) / len(gains)
        divergence = lambda q: p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)) - level  # noqa: E731
        return brentq(divergence, p, 1 - 1e-15, xtol=1e-13)

    return np.array([bound(arm) for arm in range(ARMS)])


def sw_ucb(history):
    recent = history[-WINDOW:]
    t = min(len(history), WINDOW)
    return mean_plus(recent, lambda n: math.sqrt(0.6 * math.log(t) / n))


def d_ucb(history):
    fade = [0.95 ** (len(history) - 1 - s) for s in range(len(history))]
    counts = [sum(f for f, r in zip(fade, history, strict=True) if r.index == a) for a in range(ARMS)]
    sums = [sum(f * r.gain for f, r in zip(fade, history, strict=True) if r.index == a) for a in range(ARMS)]
    return np.array([s / n + 2 * math.sqrt(0.6 * math.log(sum(counts)) / n) for s, n in zip(sums, counts, strict=True)])


def ucbspec(history):
    t = len(history) + 1
    inside = lambda n: (1 + n) / n**2 * (1 + 2 * math.log(ARMS * t**2 * math.sqrt(1 + n) / 0.05))  # noqa: E731
    return mean_plus(history, lambda n: 0.5 * math.sqrt(inside(n)))


def exp3(history):
    gamma = min(1.0, math.sqrt(ARMS * math.log(ARMS) / (math.e - 1) / (len(history) + 1)))
    estimates = [sum(r.gain / r.propensity for r in history if r.index == a) for a in range(ARMS)]
    return (1 - gamma) * softmax(gamma / ARMS * np.array(estimates)) + gamma / ARMS


def exp3spec(history):
    eta = math.sqrt(math.log(ARMS) / (ARMS * (len(history) + 1)))
    losses = [sum((1 - r.gain) / r.propensity for r in history if r.index == a) for a in range(ARMS)]
    return softmax(-eta * np.array(losses))


def exp3_ix(history):
    losses = np.zeros(ARMS)
    for t, r in enumerate(history, start=1):
        losses[r.index] += (1 - r.gain) / (r.propensity + 0.5 * math.sqrt(math.log(ARMS) / (ARMS * t)))
    return softmax(-math.sqrt(math.log(ARMS) / (ARMS * (len(history) + 1))) * losses)


def exp3_s(history):
    gamma, alpha = 0.3, 0.01
    w = np.ones(ARMS)
    for r in history:
        grown = w.copy()
        grown[r.index] *= math.exp(gamma * r.gain / r.propensity / ARMS)
        w = grown + math.e * alpha / ARMS * w.sum()
    return (1 - gamma) * w / w.sum() + gamma / ARMS


def tsallis_inf(history):
    eta = 2 / math.sqrt(len(history) + 1)
    losses = np.array([sum((1 - r.gain) / r.propensity for r in history if r.index == a) for a in range(ARMS)])
    p = lambda x: 4 / (eta * (losses - x)) ** 2  # noqa: E731
    x = brentq(lambda x: p(x).sum() - 1, losses.min() - 2 * math.sqrt(ARMS) / eta, losses.min() - 2 / eta, xtol=1e-13)
    return p(x)


def hedge(history):
    return softmax(
        math.sqrt(8 * math.log(ARMS) / (len(history) + 1)) * sum((r.filled for r in history), np.zeros(ARMS))
    )


def adahedge(history):
    totals, gap = np.zeros(ARMS), 0.0
    for r in history:
        losses, w = 1 - r.filled, r.probabilities
        if gap == 0.0:
            mix = losses[w > 0].min()
        else:
            eta = math.log(ARMS) / gap
            mix = -math.log(np.sum(w * np.exp(-eta * losses))) / eta
        gap += w @ losses - mix
        totals += losses
    return (
        softmax(-math.log(ARMS) / gap * totals)
        if gap > 0
        else (totals == totals.min()) / (totals == totals.min()).sum()
    )


def fixed_share(history):
    w = np.full(ARMS, 1 / ARMS)
    for r in history:
        w = w * np.exp(0.7 * r.filled)
        w = 0.9 * w / w.sum() + 0.1 / ARMS
    return w


def regrets(history):
    return sum((np.where(r.observed, r.gains - r.mixture, 0.0) for r in history), np.zeros(ARMS))


def normal_hedge(history):
    positive = np.maximum(regrets(history), 0.0)
    if not positive.any():
        return np.full(ARMS, 1 / ARMS)
    top = positive.max()
    mean_potential = lambda c: np.mean(np.exp(positive**2 / (2 * c))) - math.e  # noqa: E731
    c = brentq(mean_potential, top**2 / (2 * (1 + math.log(ARMS))) * 0.999, top**2 / 2 * 1.001, xtol=1e-16, rtol=1e-14)
    w = positive / c * np.exp(positive**2 / (2 * c))
    return w / w.sum()


def ada_normal_hedge(history):
    r, c = regrets(history), np.zeros(ARMS)
    for step in history:
        c += np.abs(np.where(step.observed, step.gains - step.mixture, 0.0))
    phi = lambda r, c: np.exp(np.maximum(r, 0) ** 2 / (3 * c))  # noqa: E731
    w = 0.5 * (phi(r + 1, c + 1) - phi(r - 1, c + 1))
    return w / w.sum() if w.any() else np.full(ARMS, 1 / ARMS)


def thompson(history):
    x = (np.arange(512) + 0.5) / 512
    mass = []
    for arm in range(ARMS):
        gains = plays(history, arm)
        density = beta.pdf(x, 1 + sum(gains), 1 + len(gains) - sum(gains))
        mass.append(density / density.sum())
    below = [np.cumsum(m) - m / 2 for m in mass]
    p = np.array([np.sum(mass[a] * np.prod([below[b] for b in range(ARMS) if b != a], axis=0)) for a in range(ARMS)])
    return p / p.sum()


def linucb(history, x):
    scores = []
    for arm in range(ARMS):
        rows = np.array([r.features for r in history if r.index == arm]).reshape(-1, 3)
        a = np.eye(3) + rows.T @ rows
        theta = np.linalg.solve(a, rows.T @ np.array(plays(history, arm)))
        scores.append(theta @ x + math.sqrt(x @ np.linalg.solve(a, x)))
    return np.array(scores)


INDEX_POLICIES = {
    "ucb": (ucb, {}),
    "ucb-tuned": (ucb_tuned, {}),
    "kl-ucb": (kl_ucb, {}),
    "sw-ucb": (sw_ucb, {"window": WINDOW}),
    "d-ucb": (d_ucb, {"discount": 0.95}),
    "ucbspec": (ucbspec, {}),
}
SAMPLING_POLICIES = {
    "exp3": (exp3, {}),
    "exp3spec": (exp3spec, {}),
    "exp3-ix": (exp3_ix, {}),
    "exp3-s": (exp3_s, {"exploration": 0.3, "share": 0.01}),
    "tsallis-inf": (tsallis_inf, {}),
    "hedge": (hedge, {}),
    "adahedge": (adahedge, {}),
    "fixed-share": (fixed_share, {"learning_rate": 0.7, "share": 0.1}),
    "normal-hedge": (normal_hedge, {}),
    "ada-normal-hedge": (ada_normal_hedge, {}),
    "thompson": (thompson, {}),
}


def step(policy, history, rng, *, share_observed, context=None):
    decision = policy.select(context)
    gains, observed = rng.uniform(0.02, 0.98, ARMS) * [1.0, 0.8, 0.9, 0.6], rng.random(ARMS) < share_observed
    observed[decision.index] = True
    policy.update(decision, Feedback.from_gains(gains, observed))
    features = np.zeros(0) if context is None else context
    history.append(Round(decision.index, decision.propensity, decision.probabilities, gains, observed, features))
    return decision


@pytest.mark.parametrize("name", INDEX_POLICIES)
@pytest.mark.parametrize("seed", [0, 1])
def test_index_policies(name, seed):
    reference, options = INDEX_POLICIES[name]
    policy, history, rng = make_policy(name, n_arms=ARMS, **options), [], np.random.default_rng(seed)
    for t in range(ROUNDS):
        held = history[-WINDOW:] if name == "sw-ucb" else history
        untried = set(range(ARMS)) - {r.index for r in held}
        if not untried:
            scores = reference(history)
            assert policy.scores() == pytest.approx(scores, abs=1e-8), f"round {t}"
        decision = step(policy, history, rng, share_observed=0.5)
        assert decision.index in untried if untried else scores[decision.index] == pytest.approx(scores.max(), abs=1e-8)
        assert decision.propensity == 1.0
        assert decision.probabilities is None


@pytest.mark.parametrize("name", SAMPLING_POLICIES)
@pytest.mark.parametrize("share_observed", [1.1, 0.4])
def test_sampling_policies(name, share_observed):
    reference, options = SAMPLING_POLICIES[name]
    policy, history, rng = make_policy(name, n_arms=ARMS, seed=5, **options), [], np.random.default_rng(7)
    for t in range(ROUNDS):
        expected = reference(history)
        assert policy.probabilities() == pytest.approx(expected, abs=1e-8), f"round {t}"
        decision = step(policy, history, rng, share_observed=share_observed)
        assert decision.probabilities == pytest.approx(expected, abs=1e-8)
        assert decision.propensity == decision.probabilities[decision.index]


def test_linucb():
    policy, history, rng = make_policy("linucb", n_arms=ARMS, dimension=3), [], np.random.default_rng(2)
    for _ in range(ROUNDS):
        x = np.append(rng.uniform(-1, 1, 2), 1.0)
        scores = linucb(history, x)
        decision = step(policy, history, rng, share_observed=0.5, context=x)
        assert scores[decision.index] == pytest.approx(scores.max(), abs=1e-9)


def test_thompson_propensities_are_those_of_sampled_posteriors():
    policy, history, rng = make_policy("thompson", n_arms=ARMS, seed=1), [], np.random.default_rng(3)
    for _ in range(ROUNDS):
        step(policy, history, rng, share_observed=0.0)
    gains = [plays(history, arm) for arm in range(ARMS)]
    draws = np.array([rng.beta(1 + sum(g), 1 + len(g) - sum(g), 200_000) for g in gains])
    frequencies = np.bincount(draws.argmax(axis=0), minlength=ARMS) / draws.shape[1]
    assert policy.probabilities() == pytest.approx(frequencies, abs=5e-3)


def test_every_learner_has_a_reference():
    rules = {"fixed", "ema", "heuristic", "lookup-else", "follow-the-leader"}
    assert set(POLICIES) - rules == {*INDEX_POLICIES, *SAMPLING_POLICIES, "linucb"}
