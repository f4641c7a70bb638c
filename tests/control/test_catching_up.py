"""What catching up takes is weighed before a switch to a drafter that lags behind: where it does not pay it is left,
and where it pays nothing is locked out."""

from __future__ import annotations

import numpy as np
import pytest

from adaptspec.bandits import Policy
from adaptspec.control.arms import make_arms
from adaptspec.control.catching_up import CATCH_UP_SHARE, CatchUpAllowance
from adaptspec.control.controller import Controller, StepContext
from adaptspec.control.cost_worlds import StepCosts
from adaptspec.control.learning import PolicyController
from adaptspec.control.replay import ReplayRun, replay
from adaptspec.control.strategies import make_controller
from adaptspec.control.trace import Trace
from adaptspec.types import Arm, DraftTree
from tests.control.replay_cases import request, trace

NODES = 4
LENGTH = 300


def stream(*, far: float) -> Trace:
    """Two requests. "near" foresees one token, "far" four, each with the probability `far` if those before were right;
    it costs time and must catch up."""
    rng = np.random.default_rng(0)
    requests = []
    for number in range(2):
        tokens = rng.integers(50, size=LENGTH)
        trees: dict[str, list[DraftTree]] = {"near": [], "far": []}
        for position in range(LENGTH - 1):
            truth = tokens[position + 1 : position + 1 + NODES]
            right = rng.random(len(truth)) < far
            trees["far"].append(DraftTree.chain(np.where(right, truth, 99), np.log(0.8) * np.arange(1, len(truth) + 1)))
            trees["near"].append(DraftTree.chain(truth[:1] if rng.random() < 0.7 else [99], [-0.3]))
        requests.append(request(tokens.tolist(), trees, name=str(number)))
    return trace(requests, nodes=NODES)


def costs(catch_up: float) -> StepCosts:
    return StepCosts(
        np.linspace(1.0, 1.1, NODES + 1),
        draft={"near": 0.01, "far": 0.4},
        overhead=0.01,
        catch_up_per_token={"far": catch_up},
    )


def play(strategy: str, *, far: float, catch_up: float, seed: int = 0) -> tuple[ReplayRun, Controller]:
    found = stream(far=far)
    budgets = (1, NODES)
    arms = make_arms(["near", "far"], budgets=budgets, vocab=("full",))
    controller = make_controller(strategy, arms=arms, drafters=["near", "far"], seed=seed)
    return replay(found, controller, costs=costs(catch_up)), controller


def share(run: ReplayRun, drafter: str) -> float:
    return sum(part for arm, part in run.arm_shares().items() if arm.startswith(drafter))


@pytest.mark.parametrize("strategy", ["ucb", "exp3", "thompson", "hedge", "hedge+request"])
def test_ignoring_it_loses_time(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weighed, ignored = [], []
    for seed in range(2):
        weighed.append(play(strategy, far=0.5, catch_up=0.3, seed=seed)[0].tokens_per_second)
    monkeypatch.setattr(PolicyController, "_pays_to_warm", lambda self, index, warm, cold: True)
    for seed in range(2):
        ignored.append(play(strategy, far=0.5, catch_up=0.3, seed=seed)[0].tokens_per_second)
    assert min(np.array(weighed) / np.array(ignored)) > 1.03, (weighed, ignored)


@pytest.mark.parametrize("strategy", ["ucb", "hedge"])
def test_a_drafter_that_is_worth_it_is_warmed_up(strategy: str) -> None:
    run, controller = play(strategy, far=0.97, catch_up=0.02)
    assert share(run, "far") > 0.5
    assert run.tokens_per_second > 1.1 * play("fixed:near@1", far=0.97, catch_up=0.02)[0].tokens_per_second
    assert isinstance(controller, PolicyController)


def test_the_time_for_trying_is_a_small_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catching up here is never worth it; one attempt is free, the rest must be earned."""
    spent = []
    original = CatchUpAllowance.take

    def take(self: CatchUpAllowance, seconds: float) -> bool:
        given = original(self, seconds)
        if given:
            spent.append(seconds)
        return given

    monkeypatch.setattr(CatchUpAllowance, "take", take)
    run, _ = play("exp3", far=0.3, catch_up=0.5)
    assert spent
    assert sum(spent[:-1]) <= CATCH_UP_SHARE * run.total_seconds, "what was spent before the last time was earned"


def test_without_cold_drafters_nothing_is_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(self: PolicyController, index: int, warm: int, cold: int) -> bool:
        raise AssertionError("no drafter is cold")

    monkeypatch.setattr(PolicyController, "_pays_to_warm", forbidden)
    found = stream(far=0.5)
    arms = make_arms(["near", "far"], budgets=(1, NODES), vocab=("full",))
    controller = make_controller("ucb", arms=arms, drafters=["near", "far"])
    warm = StepCosts(np.linspace(1.0, 1.1, NODES + 1), draft={"near": 0.01, "far": 0.4})
    assert len(replay(found, controller, costs=warm).position) > 100


class Wishing(Policy):
    """Always wants the last arm."""

    name = "wishing"
    full_information = False

    def _choose(self, context: object) -> tuple[int, float, None, None]:
        return self.n_arms - 1, 1.0, None, None

    def _learn(self, decision: object, feedback: object) -> None:
        self.rounds += 1.0

    def _state(self) -> dict[str, object]:
        return {}

    def _load(self, learned: object) -> None:
        """Nothing was learnt."""


def wishing(*, objective: str = "throughput") -> PolicyController:
    from adaptspec.control.cost import CostModel

    cost = CostModel()
    for _ in range(3):
        cost.observe_verify(0, 1.0)
        cost.observe_catch_up("far", 8, 80.0)
    controller = PolicyController(
        make_arms(["near", "far"], budgets=(1,), vocab=("full",)), Wishing(3), cost=cost, objective=objective
    )
    controller.begin()
    controller.rate.add(1.0, 1.0)
    return controller


def test_what_is_played_instead() -> None:
    near, far = Arm("near", 1), Arm("far", 1)
    cold = StepContext(10, 90, cold_tokens={"far": 8})
    controller = wishing()
    assert controller.select(cold).arm == far, "the first time is free"
    controller._chosen, controller._played = None, 1
    assert controller.select(cold).arm == near, "the arm of the step before goes on"
    controller._chosen = None
    assert controller.select(StepContext(10, 90, cold_tokens={"far": 8}, unavailable=["near"])).arm.drafter == "ar"
    controller._chosen, controller._played = None, 1
    assert controller.select(StepContext(10, 90)).arm == far, "warm"
    controller._chosen, controller._played = None, 1
    controller.expected_lengths[2] = 50.0
    assert controller.select(cold).arm == far, "known to be worth it"
    owing = wishing(objective="accepted_length")
    owing._allowance.seconds = -1.0
    assert owing.select(cold).arm == far, "seconds do not count"


def test_the_allowance_is_part_of_the_state() -> None:
    controller, other = wishing(), wishing()
    controller._allowance.seconds = -3.5
    other.load_state_dict(controller.state_dict())
    assert other._allowance.seconds == -3.5
    with pytest.raises(ValueError, match="allowance must be a finite number"):
        other.load_state_dict({**controller.state_dict(), "allowance": None})


def test_an_allowance_is_not_saved_up_for_ever() -> None:
    allowance = CatchUpAllowance()
    for _ in range(20_000):
        allowance.earn(1.0)
    assert 4.0 < allowance.seconds < 6.0
    assert allowance.take(100.0) and not allowance.take(0.001)


def test_probes_of_a_cold_drafter_are_paid_from_the_allowance(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mixture asks a drafter that does not pay now and then: not if catching up takes more than that tells."""
    weighed = play("mixture", far=0.2, catch_up=2.0)[0].tokens_per_second
    monkeypatch.setattr(CatchUpAllowance, "take", lambda self, seconds: True)
    assert weighed > play("mixture", far=0.2, catch_up=2.0)[0].tokens_per_second
