"""Same seed and outcomes, same decisions; saved and restored, the same again; late feedback, requests that die."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest

from adaptspec.bandits import POLICIES, Feedback, make_policy
from adaptspec.control.controller import Controller
from adaptspec.control.strategies import strategy_names
from tests.control.world import Drafter, Step, World, constantly, rate, share

OPTIONS = ("hedge+request", "exp3+context", "fixed-share+lazy", "exp3-ix+blocks", "fixed:head@auto", "fixed:lookup@4")
GUARDED = ("hedge", "exp3", "ucb", "thompson")
CASES = [
    *((name, None) for name in (*strategy_names(), *OPTIONS)),
    *((name, 0.05) for name in GUARDED),
]
every_strategy = pytest.mark.parametrize(("strategy", "guard"), CASES)


def world() -> World:
    """A lookup and a head, so that evidence, trees, costs and refusals all play a part."""
    lookup = Drafter(
        lambda position: 0.85 if position // 30 % 2 else 0.2,
        evidence="lookup",
        declines=lambda position: position % 7 == 0,
    )
    head = Drafter(constantly(0.6), others=(0.5,), fall=0.95, seconds=constantly(0.001))
    return World({"lookup": lookup, "head": head}, request_tokens=60)


@dataclass(frozen=True)
class Seen:
    """What a step shows of a decision."""

    position: int
    arm: str
    asked: tuple[str, ...]
    tree: tuple[int, ...]
    digest: str


def seen(steps: list[Step]) -> list[Seen]:
    return [
        Seen(step.position, step.arm, step.asked, tuple(step.tree.token_ids.tolist()), step.notes.digest)
        for step in steps
    ]


def controller_of(of: World, strategy: str, guard: float | None, *, seed: int = 3) -> Controller:
    return of.controller(strategy, budgets=(2, 6), guard=guard, seed=seed)


def through_json(state: object) -> object:
    return json.loads(json.dumps(state, allow_nan=False))


@every_strategy
def test_same_seed_and_same_outcomes_same_decisions(strategy: str, guard: float | None) -> None:
    runs = []
    for _ in range(2):
        of = world()
        controller = controller_of(of, strategy, guard)
        runs.append((seen(of.run(controller, steps=80)), through_json(controller.state_dict())))
    assert runs[0] == runs[1]


@every_strategy
def test_saved_between_requests_and_restored_all_later_decisions_are_the_same(
    strategy: str, guard: float | None
) -> None:
    first = world()
    controller = controller_of(first, strategy, guard)
    first.run(controller, tokens=150)
    first.finish_request(controller)
    state = through_json(controller.state_dict())
    second = world()
    second.position = first.position
    restored = controller_of(second, strategy, guard)
    restored.load_state_dict(state)  # type: ignore[arg-type]
    assert through_json(restored.state_dict()) == state
    assert seen(second.run(restored, steps=80)) == seen(first.run(controller, steps=80))
    for of, either in ((first, controller), (second, restored)):
        of.finish_request(either)
    assert through_json(restored.state_dict()) == through_json(controller.state_dict())


@every_strategy
def test_a_state_is_not_changed_by_what_comes_after(strategy: str, guard: float | None) -> None:
    of = world()
    controller = controller_of(of, strategy, guard)
    of.run(controller, tokens=60)
    of.finish_request(controller)
    state = controller.state_dict()
    kept = through_json(state)
    of.run(controller, steps=30)
    assert through_json(state) == kept


@pytest.mark.parametrize("strategy", ["exp3", "hedge", "thompson", "mixture"])
def test_another_seed_is_another_run(strategy: str) -> None:
    """Else the tests above would prove nothing about randomness."""
    runs = []
    for seed in (3, 4):
        of = world()
        runs.append(seen(of.run(controller_of(of, strategy, None, seed=seed), steps=150)))
    assert runs[0] != runs[1]


class TestOrder:
    """Feedback may come late and in any order. `Delayed` makes every policy indifferent to it; these are so already."""

    SUMS = [
        name for name, policy in POLICIES.items() if policy.additive and name not in ("ema", "lookup-else", "linucb")
    ]

    @pytest.mark.parametrize("name", SUMS)
    def test_policies_that_add_up_learn_the_same_in_any_order(self, name: str) -> None:
        rng = np.random.default_rng(0)
        ordered, shuffled = make_policy(name, n_arms=4, seed=1), make_policy(name, n_arms=4, seed=1)
        for _ in range(5):
            decisions, same = ([policy.select() for _ in range(12)] for policy in (ordered, shuffled))
            assert [decision.index for decision in same] == [decision.index for decision in decisions]
            feedback = [Feedback.from_gains(rng.random(4)) for _ in decisions]
            for place in range(12):
                ordered.update(decisions[place], feedback[place])
            for place in rng.permutation(12).tolist():
                shuffled.update(same[place], feedback[place])
        for key in type(ordered).additive:
            learned = (policy.state_dict()["learned"][key] for policy in (ordered, shuffled))
            np.testing.assert_allclose(*learned, rtol=1e-9)  # sums are rounded in the order in which they are made
        assert ordered.rounds == shuffled.rounds

    @pytest.mark.parametrize("name", ["fixed-share", "exp3-s", "d-ucb"])
    def test_policies_that_forget_do_not(self, name: str) -> None:
        """The other side of it: what came last counts most."""
        states = []
        for order in ((0, 1, 2, 3), (3, 2, 1, 0)):
            policy = make_policy(name, n_arms=4, seed=1)
            decisions = [policy.select() for _ in range(4)]
            for place in order:
                policy.update(decisions[place], Feedback.from_gains(np.roll([0.9, 0.1, 0.4, 0.2], place)))
            states.append(policy.state_dict()["learned"])
        assert states[0] != states[1]


class TestRequestsThatDie:
    """A request may end by an error, with proposals that were never judged and a decision that was never told of."""

    def play(self, strategy: str, *, dying: bool, guard: float | None = None) -> tuple[World, Controller]:
        of = World({"good": Drafter(constantly(0.75)), "bad": Drafter(constantly(0.3))}, request_tokens=40)
        controller = of.controller(strategy, guard=guard)
        rng = np.random.default_rng(0)
        for _ in range(60):
            of.run(controller, tokens=int(rng.integers(1, 35)) if dying else 30)
            if dying:
                of.abandon_request()
            else:
                of.finish_request(controller)
        return of, controller

    @pytest.mark.parametrize("strategy", ["hedge", "ucb", "exp3", "mixture", "draft-then-choose", "hedge+request"])
    def test_what_is_learnt_from_the_rest_stays_right(self, strategy: str) -> None:
        of, controller = self.play(strategy, dying=True)
        whole, other = self.play(strategy, dying=False)
        dying, living = of.run(controller, steps=150), whole.run(other, steps=150)
        assert rate(dying) > 0.85 * rate(living)
        if strategy == "hedge":
            assert share(dying, "good@8") > 0.8

    def test_nothing_of_a_dead_request_is_judged_by_the_text_of_the_next(self) -> None:
        """The drafter is never right at the first positions of a request, and dead requests leave long drafts open."""
        of = World({"late": Drafter(lambda position: 1.0)}, request_tokens=1000)
        controller = of.controller("hedge", budgets=(8,))
        of.run(controller, steps=1)
        before = through_json(controller.state_dict()["policy"]["learned"])  # type: ignore[index]
        of.abandon_request()
        controller.begin()
        after = through_json(controller.state_dict()["policy"]["learned"])  # type: ignore[index]
        assert before == after
