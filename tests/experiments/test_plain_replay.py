"""The short way through a trace gives the very steps of the controllers."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from adaptspec.bandits import POLICIES, make_policy
from adaptspec.control.arms import make_arms
from adaptspec.control.cost import CostModel
from adaptspec.control.cost_worlds import CostPhases, StepCosts
from adaptspec.control.learning import PolicyController
from adaptspec.control.replay import ReplayRun, replay
from adaptspec.control.strategies import make_controller
from adaptspec.control.trace import Trace
from adaptspec.trees import budget_order
from experiments import plain_replay
from experiments.plain_replay import CONTEXT_FREE, plain_policy, replay_plain
from experiments.position_table import PositionTable, node_ranks
from tests.control import replay_cases

COSTS = StepCosts(0.03 + 0.004 * np.arange(7.0), draft={"a": 0.0002, "b": 0.002}, overhead=0.0003)
BANDITS = sorted(name for name in CONTEXT_FREE if not POLICIES[name].full_information)
EXPERTS = sorted(name for name in CONTEXT_FREE if POLICIES[name].full_information)


class KnownCosts(CostModel):
    """Knows what the world costs from the start."""

    def __init__(self, world: StepCosts) -> None:
        super().__init__()
        self.world = world

    def verify_curve(self, nodes: int, *, context: int = 0, batch: int = 1) -> np.ndarray:
        return self.world.verify_seconds_of(np.arange(nodes + 1)[:, None], np.array([context]))[:, 0]

    def verify_seconds(self, nodes: int, *, context: int = 0, batch: int = 1) -> float:
        return self.world.verify_seconds(nodes, context=context)

    def draft_seconds(self, drafter: str, budget: int, *, vocab: str = "full") -> float:
        return self.world.draft_seconds(drafter, budget)

    def overhead_seconds(self) -> float:
        return self.world.overhead

    def observe_verify(self, *args: Any, **options: Any) -> None: ...
    def observe_draft(self, *args: Any, **options: Any) -> None: ...
    def observe_overhead(self, *args: Any, **options: Any) -> None: ...


@pytest.fixture(scope="module")
def trace() -> Trace:
    found = replay_cases.random_trace(5, lengths=(60, 1, 45, 33, 52), nodes=6, words=2)
    # One request ends by length, where the last step drafts nothing.
    return replace(found, max_new_tokens=60)


ARMS = make_arms(["a", "b"], budgets=(1, 2, 3, 6), vocab=("full",))


@pytest.fixture(scope="module")
def table(trace: Trace) -> PositionTable:
    return PositionTable.of(trace, ARMS, costs=COSTS)


def assert_same(plain: ReplayRun, exact: ReplayRun) -> None:
    assert [plain.arms[arm] for arm in plain.arm] == [exact.arms[arm] for arm in exact.arm]
    for field in ("order", "starts", "position", "verified", "emitted", "seconds"):
        assert np.array_equal(getattr(plain, field), getattr(exact, field)), field
    assert plain.prefill_seconds == exact.prefill_seconds


@pytest.mark.parametrize("guard", [None, 0.05])
@pytest.mark.parametrize("name", BANDITS)
def test_bandits_play_as_their_controllers_do(
    name: str, guard: float | None, trace: Trace, table: PositionTable
) -> None:
    order = [3, 0, 2, 4, 1, 0]
    controller = make_controller(name, arms=ARMS, drafters=["a", "b"], guard=guard, seed=2)
    exact = replay(trace, controller, costs=COSTS, order=order)
    policy = plain_policy(name, COSTS, n_arms=len(ARMS), guard=guard, seed=2)
    assert policy is not None
    assert_same(replay_plain(table, policy, order=order), exact)
    assert len(set(exact.arm.tolist())) > 2


def exact_experts(name: str, trace: Trace) -> ReplayRun:
    policy = make_policy(name, n_arms=len(ARMS), seed=2)
    return replay(trace, PolicyController(ARMS, policy, cost=KnownCosts(COSTS), seed=2), costs=COSTS)


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_play_as_controllers_that_know_the_costs(name: str, trace: Trace, table: PositionTable) -> None:
    exact = exact_experts(name, trace)
    assert_same(replay_plain(table, make_policy(name, n_arms=len(ARMS), seed=2), seed=2), exact)


def test_the_comparison_would_notice_a_wrong_rule(
    trace: Trace, table: PositionTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = exact_experts("hedge", trace)

    def differs(**changed: Any) -> bool:
        policy = make_policy("hedge", n_arms=len(ARMS), seed=2)
        run = replay_plain(replace(table, **changed), policy, seed=2)
        return len(run.arm) != len(exact.arm) or not np.array_equal(run.seconds, exact.seconds)

    assert not differs()
    assert differs(judged_at=np.maximum(table.judged_at, np.arange(len(table.judged_at))[:, None] + 3))
    assert differs(lengths=np.maximum(table.lengths - 1, 1))
    assert differs(expected=table.expected + 0.02 * (table.drafter == 1))
    monkeypatch.setattr(plain_replay, "GAIN_TOKENS", 8.0)
    assert differs()


def test_other_strategies_have_no_short_way() -> None:
    changing = CostPhases(((0, COSTS), (50, COSTS.scaled(2.0))))
    for name, costs in (("hedge", COSTS), ("mixture", COSTS), ("linucb", COSTS), ("ucb", changing)):
        assert plain_policy(name, costs, n_arms=9, guard=None, seed=0) is None
    assert plain_policy("ucb", replace(COSTS, noise=0.1), n_arms=9, guard=None, seed=0) is None


def test_ranks_are_those_of_the_budget_order(trace: Trace) -> None:
    for request in trace.requests:
        for proposals in request.proposals.values():
            ranks = node_ranks(proposals)
            for position in range(request.positions):
                part = slice(proposals.offsets[position], proposals.offsets[position + 1])
                assert np.argsort(ranks[part]).tolist() == budget_order(proposals.tree(position)).tolist()


def test_impossible_input(trace: Trace, table: PositionTable) -> None:
    with pytest.raises(ValueError, match="the policy must have 9 arms, got 3"):
        replay_plain(table, make_policy("ucb", n_arms=3))
    with pytest.raises(ValueError, match=r"order must hold requests in \[0, 5\), got 5"):
        replay_plain(table, make_policy("ucb", n_arms=9), order=[5])
    with pytest.raises(ValueError, match="costs must be constant"):
        PositionTable.of(trace, ARMS, costs=replace(COSTS, noise=0.1))


def test_an_empty_stream_has_no_steps(table: PositionTable) -> None:
    run = replay_plain(table, make_policy("hedge", n_arms=9), order=[])
    assert run.tokens == 0 and len(run.arm) == 0


@pytest.mark.parametrize("name", ["ucb", "exp3", "hedge"])
def test_five_thousand_positions_of_64_arms_take_a_fraction_of_a_second(name: str) -> None:
    """5 s for 100,000 on an ordinary core; four times that is allowed here, for what else the machine does."""
    drafters = tuple("abcdefgh")
    trace = replay_cases.random_trace(1, lengths=(60, 60), drafters=drafters, nodes=8, words=2)
    arms = make_arms(drafters, budgets=range(1, 9), vocab=("full",))
    costs = replace(COSTS, verify=np.linspace(0.03, 0.05, 9), draft=dict.fromkeys(drafters, 0.0001))
    table = PositionTable.of(trace, arms, costs=costs)
    order = np.tile([0, 1], 42)
    begun = time.process_time()
    run = replay_plain(table, make_policy(name, n_arms=65, seed=0), order=order)
    assert time.process_time() - begun < 4 * 5.0 * run.tokens / 100_000
    assert run.tokens == 42 * 118
