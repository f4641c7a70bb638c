"""What holds for every policy and wrapper: step ids, late and lost feedback, determinism, saving, restoring, errors."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import numpy as np
import pytest

from adaptspec.bandits import (
    PENDING_WINDOW,
    POLICIES,
    Blocked,
    Delayed,
    Feedback,
    Guard,
    Lazy,
    PerContext,
    Policy,
    PolicyContext,
    WithPrior,
    make_policy,
    register_policy,
)
from tests.bandits.playing import SAMPLING, continue_playing

ARMS = 5


def maker(name):
    return lambda seed: make_policy(name, n_arms=ARMS, seed=seed)


WRAPPERS = {
    "delayed(hedge)": lambda seed: Delayed(maker("hedge")(seed)),
    "lazy(hedge)": lambda seed: Lazy(maker("hedge")(seed), seed=seed),
    "lazy(fixed-share)": lambda seed: Lazy(maker("fixed-share")(seed), seed=seed, method="coupling"),
    "blocked(exp3)": lambda seed: Blocked(maker("exp3")(seed), length=3),
    "with-prior(hedge)": lambda seed: WithPrior(maker("hedge"), seed=seed),
    "with-prior(linucb)": lambda seed: WithPrior(maker("linucb"), seed=seed),
    "per-context(exp3-ix)": lambda seed: PerContext(maker("exp3-ix"), seed=seed),
    "guard(hedge)": lambda seed: Guard(maker("hedge")(seed), probe_every=7, baseline_every=11),
    "guard(exp3)": lambda seed: Guard(maker("exp3")(seed), probe_every=7, baseline_every=11),
    "guard(lazy(adahedge))": lambda seed: Guard(Lazy(maker("adahedge")(seed), seed=seed)),
}
EVERYTHING = {**{name: maker(name) for name in POLICIES}, **WRAPPERS}
CONTEXT = PolicyContext(bucket="code", request=7, baseline_seconds=0.5)

every_policy = pytest.mark.parametrize("name", EVERYTHING)


def feedback(n_arms=ARMS, gain=0.5):
    return Feedback.from_gains([gain] * n_arms, tokens=2, seconds=1.0)


def through_json(state):
    return json.loads(json.dumps(state, allow_nan=False))


@every_policy
def test_step_ids_count_up_and_propensities_are_probabilities(name):
    policy = EVERYTHING[name](0)
    for step in range(30):
        decision = policy.select(CONTEXT)
        assert decision.step_id == step
        assert 0 <= decision.index < ARMS
        assert 0.0 < decision.propensity <= 1.0
        if decision.probabilities is not None:
            assert decision.probabilities.sum() == pytest.approx(1.0)
            assert not decision.probabilities.flags.writeable
        policy.update(decision, feedback())


@every_policy
def test_same_seed_same_decisions(name):
    first = continue_playing(EVERYTHING[name](4), rounds=80, seed=1, context=CONTEXT)
    second = continue_playing(EVERYTHING[name](4), rounds=80, seed=1, context=CONTEXT)
    assert first == second


@pytest.mark.parametrize("name", [*SAMPLING, *(w for w in WRAPPERS if "linucb" not in w and "guard" not in w)])
def test_another_seed_plays_other_arms(name):
    arms = {tuple(EVERYTHING[name](seed).select().index for _ in range(20)) for seed in range(4)}
    plays = [[d.index for d in continue_playing(EVERYTHING[name](s), rounds=30, seed=1)] for s in range(4)]
    assert len(arms) > 1 or len({tuple(p) for p in plays}) > 1


@every_policy
@pytest.mark.parametrize("rounds", [0, 3, 60])
def test_a_restored_policy_decides_identically(name, rounds):
    policy = EVERYTHING[name](2)
    continue_playing(policy, rounds=rounds, seed=5, context=CONTEXT)
    state = through_json(policy.state_dict())
    restored = EVERYTHING[name](99) if name in POLICIES else EVERYTHING[name](2)
    restored.load_state_dict(state)
    assert through_json(restored.state_dict()) == state
    ahead = continue_playing(policy, rounds=60, seed=6, context=CONTEXT)
    assert continue_playing(restored, rounds=60, seed=6, context=CONTEXT) == ahead
    assert through_json(restored.state_dict()) == through_json(policy.state_dict())


@every_policy
def test_saving_does_not_disturb_and_does_not_alias(name):
    policy, watched = EVERYTHING[name](2), EVERYTHING[name](2)
    state = watched.state_dict()
    kept = copy.deepcopy(state)
    for seed in range(10):
        watched.state_dict()
        assert continue_playing(watched, rounds=2, seed=seed) == continue_playing(policy, rounds=2, seed=seed)
    assert state == kept


@every_policy
def test_open_decisions_survive_saving(name):
    policy = EVERYTHING[name](2)
    waiting = [policy.select(CONTEXT) for _ in range(4)]
    restored = EVERYTHING[name](2)
    restored.load_state_dict(through_json(policy.state_dict()))
    for decision in waiting:
        policy.update(decision, feedback())
        restored.update(decision, feedback())
    assert restored.select(CONTEXT) == policy.select(CONTEXT)
    with pytest.raises(ValueError, match="already had its feedback"):
        restored.update(waiting[0], feedback())


@every_policy
def test_feedback_for_unknown_steps_is_refused(name):
    policy = EVERYTHING[name](0)
    decision = policy.select(CONTEXT)
    before = policy.state_dict()
    for step_id in (-1, 1, 10**9):
        with pytest.raises(
            ValueError, match=rf"step_id must be one that select\(\) returned \(0 to 0\), got {step_id}"
        ):
            policy.update(replace(decision, step_id=step_id), feedback())
    assert policy.state_dict() == before
    policy.update(decision, feedback())
    with pytest.raises(ValueError, match="step_id 0 already had its feedback"):
        policy.update(decision, feedback())


@every_policy
def test_wrong_decisions_and_feedback_are_refused_and_change_nothing(name):
    policy = EVERYTHING[name](0)
    decision = policy.select(CONTEXT)
    before = policy.state_dict()
    for index in (-1, ARMS):
        with pytest.raises(ValueError, match=rf"index must be in \[0, 5\), got {index}"):
            policy.update(replace(decision, index=index), feedback())
    for propensity in (0.0, -0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"propensity must be in \(0, 1\]"):
            policy.update(replace(decision, propensity=propensity), feedback())
    with pytest.raises(ValueError, match=r"gains must have shape \[5\], got \[4\]"):
        policy.update(decision, feedback(4))
    with pytest.raises(TypeError, match="decision must be a PolicyDecision, got int"):
        policy.update(0, feedback())
    with pytest.raises(TypeError, match="feedback must be a Feedback, got list"):
        policy.update(decision, [0.5] * ARMS)
    assert policy.state_dict() == before
    policy.update(decision, feedback())


@every_policy
def test_feedback_that_observed_nothing_teaches_nothing(name):
    policy = EVERYTHING[name](0)
    continue_playing(policy, rounds=21, seed=1, context=CONTEXT)
    inner = policy.policy if hasattr(policy, "policy") else policy
    before = inner.state_dict()["learned"]
    blind = Feedback.from_gains([0.0] * ARMS, [False] * ARMS, tokens=1, seconds=0.5)
    policy.update(policy.select(CONTEXT), blind)
    after = inner.state_dict()["learned"]
    moves = {
        "retry_at",
        "patience",
        "since_preferred",
        "current",
        "previous",
        "policy",
        "prior",
        "requests",
        "policies",
        "wish",
    }
    assert {k: v for k, v in after.items() if k not in moves} == {k: v for k, v in before.items() if k not in moves}


@pytest.mark.parametrize(
    "name", [n for n, p in POLICIES.items() if not p.full_information and n not in ("lookup-else",)]
)
def test_bandit_policies_use_the_played_arm_only(name):
    one, other = maker(name)(0), maker(name)(0)
    rng = np.random.default_rng(0)
    for _ in range(40):
        a, b = one.select(), other.select()
        assert a == b
        gains = rng.random(ARMS)
        one.update(a, Feedback.of_arm(ARMS, a.index, gain=gains[a.index]))
        other.update(b, Feedback.from_gains(gains))
    assert one.state_dict() == other.state_dict()


@pytest.mark.parametrize("name", [n for n, p in POLICIES.items() if p.full_information])
def test_full_information_policies_use_every_observed_arm(name):
    policy = maker(name)(0)
    for _ in range(60):
        decision = policy.select()
        gains, observed = [0.1, 0.1, 0.1, 0.9, 0.1], [True] * ARMS
        observed[decision.index] = decision.index == 3  # the played arm itself is not seen, unless it is arm 3
        policy.update(decision, Feedback.from_gains(gains, observed))
    assert sum(policy.select().index == 3 for _ in range(20)) >= 19


@every_policy
def test_one_arm(name):
    if name in POLICIES:
        policy = make_policy(name, n_arms=1)
    else:
        make = lambda seed: make_policy("hedge", n_arms=1, seed=seed)  # noqa: E731
        kinds = {"delayed": Delayed, "lazy": Lazy, "blocked": Blocked, "guard": Guard}
        kind = name.split("(")[0]
        policy = (
            kinds[kind](make(0)) if kind in kinds else {"with-prior": WithPrior, "per-context": PerContext}[kind](make)
        )
    for step in range(300):
        decision = policy.select(CONTEXT)
        assert (decision.index, decision.propensity) == (0, 1.0)
        policy.update(decision, Feedback.from_gains([step % 3 / 2], tokens=1, seconds=1.0))


@pytest.mark.parametrize("name", SAMPLING)
def test_propensities_are_the_frequencies(name):
    policy = maker(name)(11)
    continue_playing(policy, rounds=30, seed=8)
    expected = policy.probabilities()
    decisions = [policy.select() for _ in range(PENDING_WINDOW)]
    counts = np.bincount([decision.index for decision in decisions], minlength=ARMS)
    # Four standard deviations of a binomial, and never an arm of probability 0.
    spread = 4.0 * np.sqrt(expected * (1.0 - expected) / len(decisions))
    assert (np.abs(counts / len(decisions) - expected) <= spread + 1e-12).all()
    for decision in decisions[:50]:
        assert decision.probabilities == pytest.approx(expected, abs=1e-15)
        assert decision.propensity == decision.probabilities[decision.index]


def test_only_the_latest_decisions_may_get_feedback():
    policy = make_policy("hedge", n_arms=2)
    decisions = [policy.select() for _ in range(PENDING_WINDOW + 2)]
    for decision in decisions[:2]:
        with pytest.raises(ValueError, match=f"step_id must be one of the latest {PENDING_WINDOW} decisions"):
            policy.update(decision, feedback(2))
    for decision in decisions[2:]:
        policy.update(decision, feedback(2))


@every_policy
def test_foreign_states_are_refused(name):
    policy = EVERYTHING[name](0)
    continue_playing(policy, rounds=5, seed=0, context=CONTEXT)
    state = through_json(policy.state_dict())
    before = through_json(policy.state_dict())
    other = "ucb" if name != "ucb" else "exp3"
    options = {**state["options"], "surprise": 1}
    for change, message in [
        ({"version": 2}, "version must be 1, got 2"),
        ({"policy": other}, f"policy must be .*, got '{other}'"),
        ({"n_arms": ARMS + 1}, "n_arms must be 5, got 6"),
        ({"options": options}, "options must be"),
        ({"next_step": -1}, "next_step must be a whole number"),
        ({"next_step": 1.5}, "next_step must be a whole number"),
        ({"rounds": float("nan")}, "rounds must be a finite number"),
        ({"pending": [10**6]}, "pending must hold steps"),
        ({"rng": {"bit_generator": "MT19937"}}, "rng must be the state of a PCG64 generator"),
        ({"rng": None}, "rng must be the state"),
        ({"learned": None}, "learned must be a mapping"),
    ]:
        with pytest.raises(ValueError, match=message):
            policy.load_state_dict({**state, **change})
    for key in ("version", "policy", "n_arms", "options"):
        with pytest.raises(ValueError, match=f"{key} is missing"):
            policy.load_state_dict({k: v for k, v in state.items() if k != key})
    with pytest.raises(ValueError, match="state must be a mapping"):
        policy.load_state_dict([1, 2])
    for key in state["learned"]:
        for damage in ("x", [1.0] * (ARMS + 1), [float("nan")] * ARMS, {}, *([] if key == "balance" else [-5.5])):
            with pytest.raises(ValueError, match="state"):
                policy.load_state_dict({**state, "learned": {**state["learned"], key: damage}})
    assert through_json(policy.state_dict()) == before
    policy.load_state_dict(state)


@pytest.mark.parametrize("seed", [-1, 1.5, True, "0"])
def test_seeds(seed):
    with pytest.raises(ValueError, match="seed must be a whole number >= 0"):
        make_policy("hedge", n_arms=2, seed=seed)


@pytest.mark.parametrize("n_arms", [0, -1, 2.0, True])
@pytest.mark.parametrize("name", POLICIES)
def test_numbers_of_arms(name, n_arms):
    with pytest.raises(ValueError, match="n_arms must be a whole number >= 1"):
        make_policy(name, n_arms=n_arms)


def test_unknown_names_and_options():
    with pytest.raises(
        ValueError, match=r"unknown policy 'hegde'; did you mean 'hedge'\? Valid: ada-normal-hedge, adahedge"
    ):
        make_policy("hegde", n_arms=2)
    with pytest.raises(ValueError, match=r"unknown option of policy 'hedge': 'horizn'; did you mean 'horizon'\?"):
        make_policy("hedge", n_arms=2, horizn=10)
    with pytest.raises(ValueError, match="policy 'normal-hedge' takes no options, got 'rate'"):
        make_policy("normal-hedge", n_arms=2, rate=1)
    with pytest.raises(ValueError, match="policy 'hedge' takes nothing after ':'"):
        make_policy("hedge:3", n_arms=4)
    with pytest.raises(ValueError, match=r"fixed:INDEX"):
        make_policy("fixed:two", n_arms=4)
    with pytest.raises(ValueError, match=r"index must be a whole number in \[0, 4\), got 4"):
        make_policy("fixed:4", n_arms=4)
    with pytest.raises(ValueError, match="a policy name must be text"):
        make_policy(None, n_arms=4)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ucb", {"gain_range": (0.5, 0.5)}, "gain_range must be"),
        ("ucb", {"gain_range": (0.0, 2.0)}, "gain_range must be"),
        ("kl-ucb", {"c": -1.0}, "c must be"),
        ("sw-ucb", {"window": 0}, "window must be"),
        ("d-ucb", {"discount": 0.5}, "discount must be"),
        ("d-ucb", {"xi": 0.0}, "xi must be"),
        ("ucbspec", {"delta": 0.0}, "delta must be"),
        ("exp3", {"exploration": 0.0}, "exploration must be"),
        ("exp3-s", {"share": 2.0}, "share must be"),
        ("exp3-s", {"horizon": 0}, "horizon must be"),
        ("hedge", {"learning_rate": 0.0}, "learning_rate must be"),
        ("hedge", {"horizon": 5, "learning_rate": 1.0}, "give horizon or learning_rate, not both"),
        ("fixed-share", {"share": -0.1}, "share must be"),
        ("fixed-share", {"switches": -1}, "switches must be"),
        ("thompson", {"resolution": 1}, "resolution must be"),
        ("linucb", {"dimension": 0}, "dimension must be"),
        ("linucb", {"ridge": 0.0}, "ridge must be"),
        ("ema", {"rate": float("nan")}, "rate must be"),
        ("heuristic", {"lengths": (1, 2)}, "lengths must be 3 increasing whole numbers"),
        ("heuristic", {"lengths": (1, 3, 2)}, "lengths must be 3 increasing whole numbers"),
        ("lookup-else", {"preferred": 3}, "preferred must be"),
        ("lookup-else", {"retry_every": 0}, "retry_every must be"),
    ],
)
def test_option_values(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_policy(name, n_arms=3, **options)


def test_linucb_contexts():
    policy = make_policy("linucb", n_arms=2, dimension=3)
    for context in (None, [1.0, 2.0], [1.0, float("nan"), 0.0], PolicyContext()):
        with pytest.raises(ValueError, match="context features must be 3 finite numbers"):
            policy.select(context)
    assert policy.select([1.0, 0.0, 0.0]).step_id == 0


def test_linucb_does_not_alias_the_context():
    one, other = (make_policy("linucb", n_arms=2, dimension=2) for _ in range(2))
    features = np.array([1.0, 2.0])
    first, second = one.select(features), other.select(features.copy())
    features[:] = 9.0
    one.update(first, Feedback.from_gains([0.5, 0.5]))
    other.update(second, Feedback.from_gains([0.5, 0.5]))
    assert one.state_dict() == other.state_dict()


@pytest.mark.parametrize(
    "name", [n for n, p in POLICIES.items() if n in SAMPLING and p.full_information and n != "hedge"]
)
def test_regret_needs_the_played_distribution(name):
    partial = [True, False, True, True, True] if name == "fixed-share" else None
    policy = maker(name)(0)
    decision = replace(policy.select(), probabilities=None)
    with pytest.raises(ValueError, match="probabilities must have shape"):
        policy.update(decision, Feedback.from_gains([0.5] * ARMS, partial))


def test_registering():
    with pytest.raises(ValueError, match="policy name must be non-empty"):
        register_policy("a:b")
    with pytest.raises(TypeError, match="register_policy takes a Policy class"):
        register_policy("mine")(int)
    with pytest.raises(ValueError, match="policy name 'ucb' is already taken by UCB1"):

        @register_policy("ucb")
        class Mine(Policy):
            pass

    assert POLICIES["ucb"].__name__ == "UCB1"


@pytest.mark.parametrize(
    "name", ["ucb", "ucb-tuned", "kl-ucb", "sw-ucb", "d-ucb", "ucbspec", "follow-the-leader", "ema"]
)
def test_an_arm_that_never_answers_is_asked_ever_more_rarely(name):
    policy = maker(name)(0)
    asked = []
    for step in range(400):
        decision = policy.select()
        if decision.index == 2:
            asked.append(step)  # no feedback: the drafter failed
        else:
            policy.update(decision, Feedback.of_arm(ARMS, decision.index, gain=0.5))
    assert 5 <= len(asked) <= 10
    assert asked[0] == 2
    assert (np.diff(asked)[3:] >= 1.5 * np.diff(asked)[2:-1]).all()


def test_untried_arms_take_turns_while_feedback_is_late():
    policy = make_policy("ucb", n_arms=3)
    waiting = [policy.select() for _ in range(6)]
    assert [decision.index for decision in waiting] == [0, 1, 2, 0, 1, 2]
    policy.update(waiting[1], Feedback.of_arm(3, 1, gain=0.5))
    # Arms 0 and 2 were asked twice, at last in steps 3 and 5: again from steps 5 and 7 on, then arm 1 is played.
    assert [policy.select().index for _ in range(4)] == [0, 2, 1, 1]
