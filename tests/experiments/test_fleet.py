"""Fleets: a fleet of one is a replay, and sharing is adding up."""

from __future__ import annotations

import time

import numpy as np
import pytest

from adaptspec.bandits import make_policy, merge
from adaptspec.bandits.feedback import Feedback
from adaptspec.control.arms import make_arms
from adaptspec.control.cost_worlds import StepCosts
from adaptspec.control.trace import Trace
from experiments.fleet import FleetTable, Stream, play
from experiments.hardware import batch_costs, find_hardware
from experiments.learners import Hedge, make_learner, merge_interval
from experiments.plain_replay import replay_plain
from experiments.position_table import PositionTable

ARMS = make_arms(["a", "b"], budgets=(1, 2, 4), vocab=("full",))
A40 = find_hardware("a40")


@pytest.fixture(scope="module")
def table(small_trace: Trace) -> FleetTable:
    return FleetTable.unpack(FleetTable.of(small_trace, ARMS).pack())


def costs(small_trace: Trace, batch: int) -> StepCosts:
    from adaptspec.control.cost_worlds import recorded_costs

    return batch_costs(A40, batch, recorded_costs(small_trace.costs))


@pytest.mark.parametrize("policy", ["ucb", "fixed:a@2", "fixed:ar"])
def test_a_fleet_of_one_is_a_replay(policy: str, table: FleetTable, small_trace: Trace) -> None:
    stream = Stream.draw(table, replicas=1, batch=1, each=30, seed=4)
    run = play(table, stream, A40, policy=policy, seed=4)
    positions = PositionTable.of(small_trace, ARMS, costs=costs(small_trace, 1))
    other = make_policy("ucb", n_arms=7) if policy == "ucb" else make_policy("fixed", n_arms=7, index=_index(policy))
    exact = replay_plain(positions, other, order=stream.texts[0, 0])
    assert run.tokens == exact.tokens and run.steps == len(exact.seconds)
    assert run.seconds == pytest.approx(exact.total_seconds, rel=1e-9)
    assert run.plays.tolist() == np.bincount(exact.arm, minlength=7).tolist()


def _index(policy: str) -> int:
    return [str(arm) for arm in ARMS].index(policy.removeprefix("fixed:"))


def test_a_batch_shares_its_forward_pass(table: FleetTable) -> None:
    stream = Stream.draw(table, replicas=1, batch=4, each=1, seed=0)
    run = play(table, stream, A40, policy="fixed:ar")
    lengths = np.diff(table.starts)[stream.texts.ravel()]
    assert run.tokens == run.request_steps == lengths.sum()
    assert run.steps == lengths.max()  # the longest request decides how often the machine steps
    running = [(lengths > step).sum() for step in range(lengths.max())]
    assert run.seconds == pytest.approx(sum(float(A40.seconds(np.array(n), batch=n)) for n in running))


@pytest.mark.parametrize("policy", ["hedge", "ucb", "exp3"])
def test_learners_beat_no_speculation_and_sharing_pays(policy: str, table: FleetTable) -> None:
    stream = Stream.draw(table, replicas=32, batch=1, each=12, seed=1)
    speeds = {}
    for sharing in ("isolated", "merged:16", "shared"):
        run = play(table, stream, A40, policy=policy, sharing=sharing, seed=1)
        speeds[sharing] = run.tokens / run.seconds
        assert run.curve_tokens[-1] == pytest.approx(run.tokens / 32)
        assert run.curve_seconds[-1] == pytest.approx(run.seconds / 32)
    base = play(table, stream, A40, policy="fixed:ar")
    assert speeds["isolated"] > 1.05 * base.tokens / base.seconds
    assert speeds["isolated"] < speeds["shared"]


@pytest.mark.parametrize("name", ["hedge", "ucb", "exp3"])
def test_merging_adds_up_as_the_policies_do(name: str) -> None:
    rng = np.random.default_rng(0)
    learner = make_learner(name, ["ar", "x", "y"], replicas=2, seed=0)
    policies = [make_policy(name, n_arms=3, seed=seed) for seed in range(2)]
    base = None
    for _ in range(2):
        for _ in range(20):
            gains = rng.random((2, 3))
            arms = learner.select()
            if learner.full_information:
                learner.learn_all(gains, np.ones((2, 3), dtype=bool))
            else:
                learner.learn_played(gains[[0, 1], arms], np.ones(2, dtype=bool))
            for number, policy in enumerate(policies):
                decision = policy.select()
                if not policy.full_information:
                    chance = learner._probabilities[number, arms[number]] if name == "exp3" else 1.0
                    decision = _played(decision, int(arms[number]), float(chance))
                policy.update(decision, Feedback.from_gains(gains[number]))
        learner.merge(shared=False)
        states = [policy.state_dict() for policy in policies]
        together = merge(states, base=base)
        again = merge(states[::-1], base=base)
        policies[0].load_state_dict(together)
        policies[1].load_state_dict(again)
        base = together
        for key, field in (("gains", "gains"), ("estimates", "estimates"), ("counts", "counts"), ("sums", "gains")):
            if key in together["learned"] and field in learner.sums:
                assert learner.sums[field][1] == pytest.approx(together["learned"][key]), key
        assert learner.sums["rounds"][0, 0] == pytest.approx(together["rounds"])


def _played(decision, index: int, propensity: float):  # type: ignore[no-untyped-def]
    from dataclasses import replace

    return replace(decision, index=index, propensity=propensity)


def test_hedge_weighs_as_the_library_does() -> None:
    learner, policy = Hedge(1, 4, 0), make_policy("hedge", n_arms=4)
    rng = np.random.default_rng(3)
    for _ in range(30):
        gains, observed = rng.random(4), rng.random(4) < 0.7
        observed[0] = True
        learner.select()
        assert learner._probabilities[0] == pytest.approx(policy.probabilities())
        learner.learn_all(np.where(observed, gains, 0.0)[None], observed[None])
        policy.update(policy.select(), Feedback.from_gains(gains, observed))


def test_the_size_that_is_promised(table: FleetTable) -> None:
    """A hundred thousand requests of some 27 tokens in seconds."""
    stream = Stream.draw(table, replicas=64, batch=64, each=8, seed=0)
    begun = time.process_time()
    run = play(table, stream, find_hardware("h200"), policy="ucb", sharing="merged:32")
    assert run.tokens > 700_000
    assert time.process_time() - begun < 6.0


def test_impossible_input(table: FleetTable) -> None:
    stream = Stream.draw(table, replicas=1, batch=1, each=1, seed=0)
    with pytest.raises(ValueError, match="unknown policy 'hedgehog'; did you mean 'hedge'"):
        play(table, stream, A40, policy="hedgehog")
    with pytest.raises(ValueError, match="unknown arm 'c@4'"):
        play(table, stream, A40, policy="fixed:c@4")
    with pytest.raises(ValueError, match="sharing must be 'isolated', 'shared' or 'merged:N'"):
        play(table, stream, A40, policy="ucb", sharing="merged:0")
    assert [merge_interval(name) for name in ("isolated", "shared", "merged:8")] == [0, 1, 8]
