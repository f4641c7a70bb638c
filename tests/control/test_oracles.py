"""Best plays in hindsight against trying out everything, and against each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptspec.control.controller import FixedController
from adaptspec.control.cost_worlds import CostPhases, Costs, StepCosts
from adaptspec.control.counterfactual import Follower
from adaptspec.control.oracles import Hindsight, arm_table
from adaptspec.control.replay import ReplayRun, accepted_nodes, replay
from adaptspec.control.trace import Trace
from adaptspec.trees import truncate
from adaptspec.types import Arm, DraftTree
from tests.control.replay_cases import random_costs, random_trace, request
from tests.control.replay_cases import trace as make_trace

ARMS = (Arm.autoregressive(), Arm("a", 1), Arm("a", 4), Arm("b", 2))


@st.composite
def worlds(draw: st.DrawFn, *, longest: int = 6) -> tuple[Trace, Costs, list[int]]:
    """A tiny trace, costs that may change midway, and an order."""
    seed = draw(st.integers(0, 10_000))
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=3))
    costs: Costs = random_costs(seed)
    if draw(st.booleans()):
        costs = CostPhases(((0, random_costs(seed)), (draw(st.integers(1, 6)), random_costs(seed + 1))))
    limit = draw(st.sampled_from([max(lengths), longest + 9]))  # where it is reached, the last token is not drafted
    trace = random_trace(seed, lengths=lengths, max_new_tokens=limit)
    return trace, costs, draw(st.permutations(range(len(lengths))))


def all_plays(trace: Trace, costs: Costs, order: Sequence[int]) -> Iterator[tuple[float, int]]:
    """Seconds and switches of every possible sequence of arms, step by step from trees and text."""

    def go(
        number: int, position: int, token: int, arm: int, seconds: float, switches: int
    ) -> Iterator[tuple[float, int]]:
        if number == len(order):
            yield seconds, switches
            return
        request = trace.requests[order[number]]
        if position == len(request.tokens) - 1:
            yield from go(number + 1, 0, token, arm, seconds, switches)
            return
        now = costs.at(token)
        for index, choice in enumerate(ARMS):
            nodes = gained = 0
            drafted = choice.drafter != "ar" and trace.max_new_tokens - position - 1 > 1
            if drafted:
                tree = truncate(request.proposals[choice.drafter].tree(position), int(choice.budget))
                nodes, gained = len(tree), accepted_nodes(tree, [*request.tokens.tolist(), -1], position + 1)
            step = now.verify_seconds(nodes, context=request.prompt_length + position + 1) + now.overhead
            step += now.draft_seconds(choice.drafter, int(choice.budget)) if drafted else 0.0
            gained = min(gained + 1, len(request.tokens) - 1 - position)
            changed = switches + (arm >= 0 and index != arm)
            yield from go(number, position + gained, token + gained, index, seconds + step, changed)

    return go(0, 0, 0, -1, 0.0, 0)


@settings(max_examples=60, deadline=None)
@given(worlds(longest=4))
def test_against_every_sequence(world: tuple[Trace, Costs, list[int]]) -> None:
    trace, costs, order = world
    hindsight = Hindsight(trace, ARMS, costs=costs, order=order)
    plays = list(all_plays(trace, costs, order))
    assert hindsight.best_per_step().total_seconds == pytest.approx(min(seconds for seconds, _ in plays))
    for most in range(4):
        fewest = min(seconds for seconds, switches in plays if switches <= most)
        assert hindsight.best_switching(most).total_seconds == pytest.approx(fewest)
    assert hindsight.best_fixed().total_seconds == pytest.approx(min(s for s, switches in plays if switches == 0))


@settings(max_examples=60, deadline=None)
@given(worlds(longest=40))
def test_who_may_do_more_does_better(world: tuple[Trace, Costs, list[int]]) -> None:
    trace, costs, order = world
    hindsight = Hindsight(trace, ARMS, costs=costs, order=order)
    fixed, step = hindsight.best_fixed(), hindsight.best_per_step()
    domain, prompt = hindsight.best_per_domain(), hindsight.best_per_prompt()
    switching = [hindsight.best_switching(most) for most in range(5)]

    def no_slower(*runs: ReplayRun) -> None:
        seconds = [run.total_seconds for run in runs]
        assert all(left <= right + 1e-9 for left, right in pairwise(seconds)), seconds

    no_slower(step, *reversed(switching), fixed)
    no_slower(fixed, switching[0])
    no_slower(step, prompt, domain, fixed)
    requests = len(order)
    no_slower(hindsight.best_switching(requests - 1), prompt)
    no_slower(hindsight.best_switching(sum(a != b for a, b in pairwise(hindsight.domains))), domain)
    for most, run in enumerate(switching):
        assert (np.diff(run.arm) != 0).sum() <= most
    for run in (fixed, step, domain, prompt, *switching):
        assert run.tokens == sum(request.positions for request in trace.requests)
        assert run.order.tolist() == list(order)
        assert np.diff(run.starts).sum() == len(run.seconds)


@settings(max_examples=30, deadline=None)
@given(worlds(longest=30))
def test_fixed_arms_are_their_replays(world: tuple[Trace, Costs, list[int]]) -> None:
    trace, costs, order = world
    hindsight = Hindsight(trace, ARMS, costs=costs, order=order)
    for index, arm in enumerate(ARMS):
        played, computed = replay(trace, FixedController(arm), costs=costs, order=order), hindsight.fixed(arm)
        for field in ("order", "starts", "position", "verified", "emitted"):
            assert getattr(played, field).tolist() == getattr(computed, field).tolist(), field
        assert played.seconds == pytest.approx(computed.seconds)
        assert hindsight.totals[:, index].sum() == pytest.approx(computed.total_seconds)


def test_a_table_agrees_with_walking_every_tree() -> None:
    trace = random_trace(5, lengths=[60], nodes=4)
    request = trace.requests[0]
    table = arm_table(request, ARMS, max_new_tokens=trace.max_new_tokens)
    assert (table.gains > 2).any()  # drafts are accepted in this trace
    for position in range(request.positions):
        for index, arm in enumerate(ARMS[1:], start=1):
            tree = request.proposals[arm.drafter].tree(position)
            follower = Follower(tree)
            follower.extend(request.tokens[position + 1 :].tolist())
            taken = sum(rank < int(arm.budget) for rank in follower.close().ranks)
            assert table.gains[position, index] == min(1 + taken, request.positions - position)
            assert table.nodes[position, index] == min(len(tree), int(arm.budget))


def test_each_prompt_and_domain_has_its_own_arm() -> None:
    """Drafter a is right in one domain, b in the other, so that knowing the domain is worth much."""
    tokens = [1] * 21
    right, wrong = [DraftTree.chain([1, 1])] * 20, [DraftTree.chain([0, 0])] * 20
    requests = [
        request(tokens, {"a": right, "b": wrong}, name="0", domain="law"),
        request(tokens, {"a": wrong, "b": right}, name="1", domain="code"),
        request(tokens, {"a": right, "b": wrong}, name="2", domain="law"),
    ]
    costs = StepCosts(np.array([1.0, 1.1, 1.2]), draft={"a": 0.0, "b": 0.0})
    arms = (ARMS[0], Arm("a", 2), Arm("b", 2))
    hindsight = Hindsight(make_trace(requests, nodes=2), arms, costs=costs)
    # A drafter that is right takes 7 steps of 1.2 seconds for 20 tokens, one that is wrong takes 20.
    assert hindsight.best_fixed().arms == tuple(map(str, arms))
    assert hindsight.best_fixed().arm_shares() == {"a@2": 1.0}
    assert hindsight.best_fixed().total_seconds == pytest.approx(34 * 1.2)
    for run in (hindsight.best_per_domain(), hindsight.best_per_prompt(), hindsight.best_switching(2)):
        assert run.total_seconds == pytest.approx(21 * 1.2)
        assert run.arm_shares() == {"a@2": 14 / 21, "b@2": 7 / 21}


def test_misuse_is_refused() -> None:
    trace, costs = random_trace(1, lengths=[5]), random_costs(1)
    for arms, message in (
        (ARMS[1:], "arms must start with the arm 'ar'"),
        ((*ARMS, ARMS[0]), "arms must hold 'ar' once"),
        ((ARMS[0], Arm("c", 1)), "unknown drafter in the trace 'c'"),
        ((ARMS[0], Arm("a", 5)), "budget of a@5 must be a number <= 4, which was recorded"),
        ((ARMS[0], Arm("a", "auto")), "budget of a@auto must be a number <= 4"),
    ):
        with pytest.raises(ValueError, match=message):
            Hindsight(trace, arms, costs=costs)
    hindsight = Hindsight(trace, ARMS, costs=costs)
    with pytest.raises(ValueError, match="unknown arm 'b@3'"):
        hindsight.fixed(Arm("b", 3))
    with pytest.raises(ValueError, match="switches must be a whole number >= 0, got -1"):
        hindsight.best_switching(-1)
    with pytest.raises(ValueError, match="unknown drafter in costs 'a'"):
        Hindsight(trace, ARMS, costs=StepCosts(np.ones(5)))
