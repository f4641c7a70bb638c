"""Arms that differ in their vocabulary only: every strategy tells them apart, learns of each, and finds the best."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from adaptspec.control.arms import make_arms
from adaptspec.control.controller import FixedController, InTurnController, StepContext
from adaptspec.control.cost import CostModel
from adaptspec.control.learning import PolicyController
from adaptspec.control.merging import merge_controllers
from adaptspec.control.mixture import EvidenceController
from adaptspec.control.step_costs import cheap_together
from adaptspec.control.strategies import make_controller
from adaptspec.types import Arm, Decision, DraftTree
from tests.control.world import Drafter, World, constantly, rate

VOCAB = ("full", "fr:8", "microspec")


class VocabWorld(World):
    """Its drafters are named as `Arm.source` says, so that one may draft differently with each vocabulary."""

    def arms(self, budgets: Sequence[int]) -> tuple[Arm, ...]:
        return make_arms(["head"], budgets=budgets, vocab=VOCAB)

    def _propose(self, decision: Decision, max_depth: int) -> tuple[dict[str, DraftTree], dict[str, float]]:
        trees: dict[str, DraftTree] = {}
        seconds: dict[str, float] = {}
        for arm in decision.asked if max_depth >= 1 else ():
            assert isinstance(arm.budget, int) and arm.source not in trees
            index = list(self.drafters).index(arm.source)
            trees[arm.source] = self.drafters[arm.source].propose(
                self.position, arm.budget, max_depth=max_depth, text=self._text, index=index
            )
            seconds[arm.source] = self.drafters[arm.source].seconds(self.position) * self._jitter(1 + index)
        return trees, seconds


def vocab_world(seed: int = 0) -> VocabWorld:
    """The full head is dear, one list is nearly as good and cheap, the other is cheap and misses."""
    return VocabWorld(
        {
            "head": Drafter(constantly(0.80), seconds=constantly(0.012)),
            "head/fr:8": Drafter(constantly(0.78), seconds=constantly(0.001)),
            "head/microspec": Drafter(constantly(0.20), seconds=constantly(0.001)),
        },
        seed=seed,
    )


@pytest.mark.parametrize("strategy", ["ucb", "exp3", "hedge", "draft-then-choose", "mixture"])
def test_every_strategy_finds_the_best_vocabulary(strategy: str) -> None:
    world = vocab_world()
    controller = make_controller(strategy, arms=world.arms((4,)), drafters=["head"], seed=1)
    world.run(controller, steps=1000)
    fixed = {vocab: world.rate(Arm("head", 4, vocab), tokens=700) for vocab in VOCAB}
    late = rate(world.run(controller, steps=300))
    assert max(fixed, key=lambda vocab: fixed[vocab]) == "fr:8"
    assert fixed["full"] < 0.8 * fixed["fr:8"]
    # exp3 learns of one arm at a time, and goes on trying the others.
    assert late > (0.75 if strategy == "exp3" else 0.81) * fixed["fr:8"]


@pytest.mark.parametrize("strategy", ["draft-then-choose", "mixture"])
def test_a_vocabulary_far_too_dear_hides_no_other(strategy: str) -> None:
    """It is judged after a few steps already; the others still get their turns."""
    world = vocab_world()
    world.drafters["head"] = Drafter(constantly(0.80), seconds=constantly(0.200))
    controller = make_controller(strategy, arms=world.arms((4,)), drafters=["head"], seed=1)
    steps = world.run(controller, steps=600)
    asked = [name for step in steps for name in step.asked]
    assert asked.count("head") < 0.05 * len(steps) + 5
    assert asked.count("head/fr:8") > 0.7 * len(steps)
    assert rate(steps[-300:]) > 0.8 * world.rate(Arm("head", 4, "fr:8"), tokens=700)


def test_learning_is_apart_by_vocabulary() -> None:
    world = vocab_world()
    controller = make_controller("hedge", arms=world.arms((4,)), drafters=["head"], seed=1)
    assert isinstance(controller, PolicyController)
    world.run(controller, steps=600)
    expected = dict(zip(map(str, controller.arms), controller.expected_lengths, strict=True))
    assert expected["head@4/fr:8"] > expected["head@4/microspec"] + 0.7
    seconds = [controller.cost.draft_seconds("head", 4, vocab=vocab) for vocab in VOCAB]
    assert seconds[0] == pytest.approx(0.012, rel=0.1) and seconds[1:] == pytest.approx([0.001, 0.001], rel=0.1)


@pytest.mark.parametrize("strategy", ["hedge", "mixture", "draft-then-choose"])
def test_asked_carries_the_vocabulary_and_each_is_asked(strategy: str) -> None:
    world = vocab_world()
    controller = make_controller(strategy, arms=world.arms((4,)), drafters=["head"], seed=1)
    asked = [source for step in world.run(controller, steps=800) for source in step.asked]
    assert set(asked) == {"head", "head/fr:8", "head/microspec"}
    assert min(map(asked.count, set(asked))) >= 10


def test_a_full_information_policy_asks_other_vocabularies_of_the_played_drafter() -> None:
    controller = make_controller("hedge", arms=make_arms(["head"], budgets=(4,), vocab=VOCAB), drafters=["head"])
    for _ in range(200):
        decision = controller.select(StepContext(100, 100))
        sources = [arm.source for arm in decision.asked]
        assert len(set(sources)) == len(sources) == 3  # nothing is known of their costs yet, so all are asked
        assert decision.arm.drafter == "ar" or decision.arm.source == sources[0]


def test_auto_budgets_are_calibrated_apart() -> None:
    world = vocab_world()
    for drafter in world.drafters.values():
        drafter.claim = constantly(0.5)  # each says the same of itself: only its own calibrator knows better
    arms = make_arms(["head"], budgets=("auto",), vocab=("fr:8", "microspec"))
    controller = make_controller("hedge", arms=arms, drafters=["head"], seed=1)
    assert isinstance(controller, PolicyController)
    assert set(controller.calibrators) == {"head/fr:8", "head/microspec"}
    world.run(controller, steps=300)
    tree = DraftTree.chain([1], [np.log(0.5)], evidence={"log_prob": np.log([0.5]), "rank": np.zeros(1)})
    good, bad = (calibrator.conditional(tree).item() for calibrator in controller.calibrators.values())
    assert good > bad + 0.2


def test_fixed_and_in_turn_take_the_tree_of_their_vocabulary() -> None:
    arm = Arm("head", 4, "fr:8")
    trees = {"head": DraftTree.chain([1]), "head/fr:8": DraftTree.chain([2])}
    for controller in (FixedController(arm), InTurnController([arm])):
        decision = controller.select(StepContext(10, 10))
        assert decision.asked == (arm,)
        assembly = controller.assemble(decision, trees)
        assert assembly.tree.token_ids.tolist() == [2] and "head/fr:8" in assembly.used


def test_a_fixed_arm_that_sizes_itself_asks_with_its_vocabulary() -> None:
    controller = make_controller("fixed:head@auto/fr:8", arms=[Arm.autoregressive()], drafters=["head"])
    assert [str(arm) for arm in controller.select(StepContext(10, 10)).asked] == ["head@64/fr:8"]
    assert controller.drafters_in_play(["head", "other"]) == ["head"]


def test_the_evidence_controller_asks_one_vocabulary_of_a_drafter_at_a_time() -> None:
    controller = EvidenceController(["head", "lookup"], cost=CostModel(), vocab={"head": VOCAB})
    assert controller.names == ("head", "head/fr:8", "head/microspec", "lookup")
    assert controller.drafters_in_play(["lookup", "head"]) == ["head", "lookup"]
    for _ in range(50):
        asked = controller.select(StepContext(10, 10)).asked
        assert [arm.drafter for arm in asked] == ["head", "lookup"]
    unavailable = controller.select(StepContext(10, 10, unavailable=["head"])).asked
    assert [arm.source for arm in unavailable] == ["lookup"]


@pytest.mark.parametrize("strategy", ["hedge", "mixture"])
def test_state_restores_and_belongs_to_the_vocabularies(strategy: str) -> None:
    world, other = vocab_world(), vocab_world()
    one, two = (make_controller(strategy, arms=world.arms((4,)), drafters=["head"], seed=s) for s in (1, 2))
    world.run(one, steps=200)
    world.finish_request(one)
    two.load_state_dict(one.state_dict())
    other.position = world.position
    assert [step.arm for step in world.run(one, steps=80)] == [step.arm for step in other.run(two, steps=80)]
    fewer = make_controller(
        strategy, arms=make_arms(["head"], budgets=(4,), vocab=VOCAB[:2]), drafters=["head"], seed=1
    )
    with pytest.raises(ValueError, match="head"):
        fewer.load_state_dict(one.state_dict())
    assert merge_controllers([one.state_dict(), two.state_dict()])["cost"]


def test_a_drafter_is_cheap_with_its_dearest_vocabulary() -> None:
    cost = CostModel()
    for _ in range(3):
        cost.observe_verify(0, 0.100)
        cost.observe_draft("head", 4, 0.010)
        cost.observe_draft("head", 4, 0.0005, vocab="fr:8")
        cost.observe_draft("lookup", 4, 0.0005)
    arms = [Arm("head", 4), Arm("head", 4, "fr:8"), Arm("lookup", 4)]
    assert cheap_together(cost, arms) == {"lookup"}
    assert cheap_together(cost, arms[1:]) == {"head/fr:8", "lookup"}


def test_vocabularies_by_drafter() -> None:
    arms = make_arms(["head", "lookup"], budgets=(0, 4), vocab={"head": ("full", "fr:8"), "lookup": ("full",)})
    assert [str(arm) for arm in arms] == ["ar", "head@4", "head@4/fr:8", "lookup@4"]
