"""The guard: the promise holds at every step whatever the inner policy wants, and off is never for good."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from adaptspec.bandits import Feedback, Guard, Policy, PolicyContext, make_policy

ALPHA = 0.05


@dataclass
class World:
    """What a step of each arm emits and takes: `outcome(step, arm) -> (tokens, seconds)`."""

    outcome: Callable[[int, int], tuple[float, float]]
    n_arms: int
    played: list[int] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def feedback(self, index: int, tokens: float, seconds: float) -> Feedback:
        gain = min(1.0, tokens / seconds / 10.0)
        return Feedback.of_arm(self.n_arms, index, gain=gain, tokens=tokens, seconds=seconds)

    def run(self, policy: Policy, steps: int, *, context=None) -> World:
        for _ in range(steps):
            decision = policy.select(context)
            tokens, seconds = self.outcome(len(self.played), decision.index)
            policy.update(decision, self.feedback(decision.index, tokens, seconds))
            self.played.append(decision.index)
            self.tokens.append(tokens)
            self.seconds.append(seconds)
        return self

    def rates(self) -> np.ndarray:
        """Cumulative tokens per second after each step."""
        return np.cumsum(self.tokens) / np.cumsum(self.seconds)


def table(*rows):
    return lambda step, arm: rows[arm]


# No speculation makes 1 token per second. Arm 1 pays, arm 2 loses a little, arm 3 loses much.
MIXED = table((1, 1.0), (3, 1.5), (1, 1.2), (1, 2.9))


@pytest.mark.parametrize("inner", ["fixed:1", "fixed:2", "fixed:3", "ucb", "exp3", "hedge", "thompson", "ema"])
@pytest.mark.parametrize("alpha", [0.01, 0.05, 0.3])
def test_the_rate_is_never_below_the_promise(inner, alpha):
    guard = Guard(make_policy(inner, n_arms=4, seed=1), alpha=alpha)
    world = World(MIXED, 4).run(guard, 1500)
    assert (world.rates() >= (1.0 - alpha) * 1.0 - 1e-9).all()
    assert guard.balance >= -1e-9
    assert world.played[:3] == [0, 0, 0]
    assert set(world.played) > {0}, "it must not keep the promise by never speculating"


class NoFloor(Guard):
    """Mutant: everything is affordable."""

    def _needs(self, rate, known):
        return np.full(self.n_arms, -1.0)


def test_without_the_floor_the_promise_breaks():
    world = World(MIXED, 4).run(NoFloor(make_policy("fixed:3", n_arms=4), alpha=ALPHA), 500)
    assert world.rates().min() < 0.6


def test_a_hopeless_arm_costs_almost_exactly_the_share():
    world = World(MIXED, 4).run(Guard(make_policy("fixed:3", n_arms=4), alpha=ALPHA, probe_every=0), 5000)
    assert 0.95 <= world.rates()[-1] <= 0.96


def test_a_paying_arm_is_hardly_held_back():
    guard = Guard(make_policy("fixed:1", n_arms=4), alpha=ALPHA)
    world = World(MIXED, 4).run(guard, 2000)
    first = world.played.index(1)
    assert first <= 45  # 1.85 tokens of worst case at 0.05 a step
    later = world.played[first + 1 :]
    assert later.count(1) >= 0.98 * len(later)
    assert later.count(0) == (2000 - first) // 257  # only to measure the rate again


def test_initial_credit_and_calibration_start_earlier():
    for guard, first in [
        (Guard(make_policy("fixed:1", n_arms=4), initial_credit=2.0), 3),
        (Guard(make_policy("fixed:1", n_arms=4), initial_credit=0.0), 37),
    ]:
        assert World(MIXED, 4).run(guard, 100).played.index(1) == first
    guard = Guard(make_policy("fixed:1", n_arms=4))
    guard.calibrate(1, seconds=1.5)  # needs 0.95 * 1.5 - 1 = 0.425 tokens: 9 steps at 0.05
    assert World(MIXED, 4).run(guard, 100).played.index(1) == 9


def test_off_is_left_when_speculation_begins_to_pay():
    def outcome(step, arm):
        return ((1, 1.0), (1, 1.3) if step < 1000 else (4, 1.3))[arm]

    for inner in ("ucb", "ema", "follow-the-leader", "thompson"):
        world = World(outcome, 2).run(Guard(make_policy(inner, n_arms=2, seed=0), alpha=ALPHA), 2500)
        assert world.played[600:1000].count(0) >= 320, inner
        assert world.played[2200:].count(1) >= 280, inner
        assert (world.rates() >= 0.95 - 1e-9).all()


def test_probes_happen_even_if_the_inner_policy_wants_none():
    world = World(MIXED, 4).run(Guard(make_policy("fixed:0", n_arms=4), probe_every=50), 1000)
    probes = [arm for arm in world.played if arm]
    assert set(probes) == {1, 2, 3}
    assert 12 <= len(probes) <= 20
    assert (world.rates() >= 0.95 - 1e-9).all()
    assert set(World(MIXED, 4).run(Guard(make_policy("fixed:0", n_arms=4), probe_every=0), 500).played) == {0}


def test_an_arm_dearer_than_the_credit_limit_is_still_tried_again():
    def outcome(step, arm):
        return ((1, 1.0), (1, 60.0))[arm]

    guard = Guard(make_policy("fixed:1", n_arms=2), alpha=ALPHA, credit_limit=5.0, probe_every=0)
    world = World(outcome, 2).run(guard, 6000)
    tries = np.flatnonzero(np.array(world.played) == 1)
    assert len(tries) >= 3
    # The first try could not know the price. Afterwards 56 tokens are saved up before each.
    assert (np.diff(tries) >= 56 / 0.05 - 60).all()
    assert (world.rates()[tries[1] - 1 :] >= 0.95 - 1e-9).all()


def test_one_stall_does_not_banish_a_good_arm():
    def outcome(step, arm):
        return ((1, 1.0), (3, 150.0) if step == 500 else (3, 1.5))[arm]

    guard = Guard(make_policy("fixed:1", n_arms=2), alpha=ALPHA)
    world = World(outcome, 2).run(guard, 5000)
    assert world.played[500] == 1
    assert world.played[-300:].count(1) >= 290
    # Never below the promise before the stall, nor since it was made good.
    assert (world.rates()[:500] >= 0.95 - 1e-9).all()
    assert world.rates()[-1] >= 1.5


def test_a_faster_baseline_is_noticed():
    def outcome(step, arm):  # at first speculation doubles the rate, then no speculation is three times as fast
        return ((1, 1.0 if step < 1000 else 0.33), (2, 1.0))[arm]

    guard = Guard(make_policy("fixed:1", n_arms=2), alpha=ALPHA, baseline_every=100)
    world = World(outcome, 2).run(guard, 4000)
    assert world.played[500:1000].count(1) >= 490
    late = np.array(world.played[3000:])
    tokens, seconds = sum(world.tokens[3000:]), sum(world.seconds[3000:])
    assert (late == 0).mean() >= 0.85
    assert tokens / seconds >= 0.95 / 0.33 - 0.01
    assert guard.baseline_rate == pytest.approx(1 / 0.33)
    noticed = world.played.index(0, 1000)
    assert noticed <= 1100
    assert world.played[noticed : noticed + 3] == [0, 0, 0]


def test_one_odd_baseline_step_changes_little():
    def outcome(step, arm):
        return ((1, 3.0 if step == 600 else 1.0), (3, 1.5))[arm]

    guard = Guard(make_policy("fixed:1", n_arms=2), alpha=ALPHA, baseline_every=100)
    world = World(outcome, 2).run(guard, 600)
    while guard.select().index:  # on to the next measurement
        world.run(guard, 1)
    before = guard.baseline_rate
    world = World(lambda step, arm: outcome(600 + step, arm), 2).run(guard, 3)
    assert guard.baseline_rate >= 0.9 * before


def test_a_good_past_does_not_pay_for_a_bad_future():
    def outcome(step, arm):
        return ((1, 1.0), (4, 1.0) if step < 2000 else (1, 2.0))[arm]

    guard = Guard(make_policy("fixed:1", n_arms=2), alpha=ALPHA, credit_limit=10.0)
    world = World(outcome, 2).run(guard, 3000)
    tokens, seconds = sum(world.tokens[2000:]), sum(world.seconds[2000:])
    assert tokens >= 0.95 * seconds - 10.0 - 1e-6


def test_open_decisions_cannot_spend_the_balance_together():
    guard = Guard(make_policy("fixed:1", n_arms=2), alpha=ALPHA)
    world = World(table((1, 1.0), (1, 3.0)), 2)
    for _ in range(300):
        decisions = [guard.select() for _ in range(16)]
        for decision in decisions:
            tokens, seconds = world.outcome(0, decision.index)
            guard.update(decision, world.feedback(decision.index, tokens, seconds))
            world.tokens.append(tokens)
            world.seconds.append(seconds)
            world.played.append(decision.index)
    assert world.rates()[15:].min() >= 0.95 - 0.01
    assert world.played.count(1) >= 50


def test_lost_decisions_do_not_hold_credit_for_good():
    guard = Guard(make_policy("fixed:1", n_arms=2), alpha=ALPHA)
    world = World(table((1, 1.0), (2, 1.2)), 2).run(guard, 200)
    for _ in range(400):
        guard.select()  # never answered
    world.run(guard, 600)
    assert world.played[-200:].count(1) >= 195


def test_noise_in_the_seconds():
    rng = np.random.default_rng(0)

    def outcome(step, arm):
        jitter = rng.gamma(20.0, 1.0 / 20.0)  # mean 1, 22 % spread
        return ((1, jitter), (1, 1.4 * jitter), (rng.integers(1, 6), 1.6 * jitter))[arm]

    for inner in ("fixed:1", "exp3", "ucb"):
        world = World(outcome, 3).run(Guard(make_policy(inner, n_arms=3, seed=0), alpha=ALPHA), 3000)
        assert world.rates()[500:].min() >= 0.95 * 0.98


def test_a_known_baseline_needs_no_measuring():
    guard = Guard(make_policy("fixed:1", n_arms=2), initial_credit=5.0)
    context = PolicyContext(baseline_seconds=1.0)
    world = World(table((1, 1.0), (3, 1.5)), 2).run(guard, 1000, context=context)
    assert world.played == [1] * 1000
    assert guard.baseline_rate is None
    # A step that costs more than it is worth under the load of the moment is refused.
    assert guard.select(PolicyContext(baseline_seconds=0.01)).index == 0
    for seconds in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="baseline_seconds must be positive"):
            guard.select(PolicyContext(baseline_seconds=seconds))


def test_propensities_count_refused_arms_as_no_speculation():
    inner = make_policy("hedge", n_arms=4, seed=3)
    guard = Guard(inner, alpha=ALPHA, probe_every=0)
    World(table((1, 1.0), (3, 1.5), (1, 30.0), (1, 30.0)), 4).run(guard, 400)
    wanted = inner.probabilities()
    decisions = [guard.select() for _ in range(200)]
    for decision in decisions:
        p = decision.probabilities
        assert p.sum() == pytest.approx(1.0)
        assert decision.propensity == p[decision.index]
        assert p[2] == p[3] == 0.0
        assert p[0] >= wanted[0] + wanted[2] + wanted[3] - 1e-12
        assert p[1] == pytest.approx(wanted[1]) or p[1] == 0.0


def test_importance_weighted_policies_learn_only_from_their_own_draws():
    inner = make_policy("exp3", n_arms=4, seed=3)
    guard = Guard(inner, alpha=ALPHA)
    world = World(table((1, 1.0), (3, 1.5), (1, 30.0), (1, 30.0)), 4)
    own, overruled = 0, 0
    for _ in range(400):
        decision = guard.select()
        before = inner.rounds
        tokens, seconds = world.outcome(0, decision.index)
        guard.update(decision, Feedback.from_gains([0.5] * 4, tokens=tokens, seconds=seconds))
        if decision.memo[0].index == decision.index:
            own += 1
            assert inner.rounds == before + 1
        else:
            overruled += 1
            assert inner.rounds == before
    assert own > 50
    assert overruled > 50


def test_feedback_without_tokens_or_seconds():
    guard = Guard(make_policy("hedge", n_arms=2))
    for fields in ({}, {"tokens": 1}, {"seconds": 1.0}, {"tokens": 1, "seconds": 0.0}):
        decision = guard.select()
        with pytest.raises(ValueError, match="guard needs tokens and seconds > 0"):
            guard.update(decision, Feedback.from_gains([0.5, 0.5], **fields))
    assert guard.policy.rounds == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0.0}, "alpha must be"),
        ({"alpha": 1.5}, "alpha must be"),
        ({"warmup": 0}, "warmup must be"),
        ({"probe_every": -1}, "probe_every must be"),
        ({"assumed_slowdown": 0.5}, "assumed_slowdown must be"),
        ({"credit_limit": float("nan")}, "credit_limit must be"),
    ],
)
def test_options(options, message):
    with pytest.raises(ValueError, match=message):
        Guard(make_policy("hedge", n_arms=2), **options)
    with pytest.raises(TypeError, match="policy must be a Policy, got str"):
        Guard("hedge")


def test_calibration_is_checked():
    guard = Guard(make_policy("hedge", n_arms=2))
    with pytest.raises(ValueError, match=r"index must be in \[0, 2\), got 2"):
        guard.calibrate(2, seconds=1.0)
    with pytest.raises(ValueError, match="seconds and tokens must be positive"):
        guard.calibrate(1, seconds=0.0)


def test_state_in_the_middle_of_a_refusal():
    def fresh():
        return Guard(make_policy("exp3", n_arms=4, seed=5), probe_every=20, baseline_every=30)

    guard = fresh()
    World(MIXED, 4).run(guard, 137)
    restored = fresh()
    restored.load_state_dict(json.loads(json.dumps(guard.state_dict(), allow_nan=False)))
    assert World(MIXED, 4).run(restored, 200).played == World(MIXED, 4).run(guard, 200).played
    assert restored.balance == guard.balance
