"""Levels of a tree are drafted as long as they bring what their time is worth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from adaptspec.drafters import make_drafter
from adaptspec.drafters.draft_model import DraftModel
from adaptspec.drafters.paying_levels import TRY_ALL, PayingLevels
from adaptspec.target.hf import HFTarget
from adaptspec.trees import beam_rerank
from adaptspec.types import DraftContext, DraftTree, Sampling
from tests import tiny_models
from tests.drafters.cell_cases import Request, same_proposal, tiny_cell, tiny_llama

PROMPT = [11, 3, 50, 7, 7, 29, 40, 3]


class Clock:
    """Stands still until a level is drafted."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def context(rate: float, **options: Any) -> DraftContext:
    return DraftContext(5, 9, 64, Sampling(), np.random.default_rng(0), rate=rate, **options)


class Text:
    """A drafter that gives token 1 the probability `promised` at every depth, a text in which it is right as often as
    `true`, and a level that takes `seconds`."""

    def __init__(self, promised: float, true: float, seconds: float = 0.01) -> None:
        self.promised, self.seconds, self.true = promised, seconds, true
        self.clock, self.rng = Clock(), np.random.default_rng(0)
        self.levels = PayingLevels(self.clock)

    def step(self, rate: float) -> int:
        """Levels drafted."""
        depth = 0

        def expand(token_ids: np.ndarray, parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            nonlocal depth
            depth += 1
            self.clock.now += self.seconds
            return np.full((len(token_ids), 1), 1), np.full((len(token_ids), 1), np.log(self.promised))

        stop = self.levels.stop(context(rate), budget=8, width=4)
        tree = beam_rerank(expand, root=5, budget=8, width=4, max_depth=8, stop=stop)
        self.levels.proposed(tree)
        right = int(np.cumprod(self.rng.random(len(tree)) < self.true).sum())
        self.levels.observe(np.array([1] * right + [2]), verified=len(tree))
        return depth

    def typical(self, rate: float, steps: int = 300) -> int:
        found = [self.step(rate) for _ in range(steps)]
        return int(np.median(found[-100:]))


@pytest.mark.parametrize(
    ("promised", "true", "rate", "depths"),
    [
        (0.5, 0.5, 0.0, range(8, 9)),  # time has no price
        (0.5, 0.5, 1.0, range(5, 8)),  # a level must bring 0.01 tokens: 0.5^6 does, 0.5^7 does not
        (0.5, 0.5, 10.0, range(2, 5)),
        (0.5, 0.5, 90.0, range(1, 2)),
        (0.9, 0.9, 10.0, range(8, 9)),
        (0.9, 0.1, 10.0, range(1, 3)),  # it promises what does not come true
        (0.3, 0.9, 10.0, range(3, 9)),  # and the other way round: 0.3^3 is less than a level must bring
    ],
)
def test_depth_follows_what_levels_bring(promised: float, true: float, rate: float, depths: range) -> None:
    assert Text(promised, true).typical(rate) in depths


def test_all_levels_are_tried_now_and_then_and_come_back() -> None:
    text = Text(0.9, 0.05)
    assert text.typical(20.0) == 1
    assert max(text.step(20.0) for _ in range(TRY_ALL)) == 8
    text.true = 0.95
    assert text.typical(20.0, steps=1200) == 8


def test_one_outlier_decides_nothing() -> None:
    text = Text(0.8, 0.8)
    usual = text.typical(10.0)
    text.seconds = 60.0
    text.step(10.0)
    text.seconds = 0.01
    assert abs(text.typical(10.0, steps=100) - usual) <= 1


def test_what_was_not_revealed_is_not_held_against_a_level() -> None:
    """The target took all of a smaller tree that was verified: deeper nodes of the proposal are neither hits nor
    misses."""

    def taught(tokens: list[int]) -> PayingLevels:
        levels = PayingLevels(Clock())
        for _ in range(50):
            stop = levels.stop(context(1.0), budget=8, width=1)
            assert stop is not None
            for depth in range(1, 5):
                assert not stop(depth, np.array([-0.5 * depth]))
            levels.proposed(DraftTree.chain([1, 1, 1, 1], [-0.5, -1.0, -1.5, -2.0]))
            levels.observe(np.array(tokens), verified=4)
            levels.observe(np.array([7]), verified=4)  # judged already
        return levels

    whole = taught([1, 1])._came_true
    assert whole.share(1) > 1.2 and whole.share(2) > 1.2 and whole.share(3) == whole.share(4) == 1.0
    missed = taught([1, 2])._came_true
    assert missed.share(1) > 1.2 and max(missed.share(depth) for depth in (2, 3, 4)) < 0.3


def test_a_level_whose_nodes_crowd_out_others_brings_less() -> None:
    """Where few nodes are verified, none of a second level is among them."""

    def depth(verified: int) -> int:
        levels = PayingLevels(clock := Clock())
        depths = []
        for _ in range(100):
            stop = levels.stop(context(10.0), budget=16, width=4)
            assert stop is not None
            for level, scores in enumerate(([0.3, 0.2, 0.2, 0.2], [0.19] * 4), start=1):
                clock.now += 0.03
                if stop(level, np.log(scores)):
                    break
            depths.append(level)
            levels.proposed(DraftTree.chain([1], [np.log(0.3)]))
            levels.observe(np.array([1, 9]), verified=verified)
        return int(np.median(depths[-50:]))

    assert depth(verified=1) == 1 and depth(verified=8) == 2


@pytest.mark.parametrize("name", ["eagle3-own", "griffin", "mtp"])
def test_feature_recursive_trees_keep_their_levels_and_lose_the_deep_ones(name: str) -> None:
    model = tiny_llama()
    kind = {"eagle3-own": "eagle3", "mtp": "mtp1"}.get(name, name)
    drafter = make_drafter(kind, path=tiny_cell(name), max_depth=5)
    whole = Request(model, drafter, PROMPT).ask(24)
    request = Request(model, drafter, PROMPT)
    for _ in range(3):
        tree = request.ask(24, rate=1e-9)  # every level pays
    assert same_proposal(tree, whole) and whole.depths().max() >= 3
    shallow = request.ask(24, rate=1e9)  # none does, once its seconds are known
    expected = Request(model, make_drafter(kind, path=tiny_cell(name), max_depth=1), PROMPT).ask(24)
    assert same_proposal(shallow, expected)
    assert same_proposal(request.ask(24), whole)  # without a price as before


@pytest.mark.parametrize("branching", [1, 4])
def test_draft_models_stop_as_well(branching: int) -> None:
    target, small = tiny_models.make_llama(), tiny_models.make_llama(layers=1, seed=3)
    drafter = DraftModel(small, branching=branching, max_depth=6)
    drafter.bind(HFTarget(target))
    depths = []
    for rate in (0.0, 1e-9, 1e9, 0.0):
        drafter.prefill(np.array(PROMPT))
        asked = DraftContext(PROMPT[-1], len(PROMPT), 64, Sampling(), np.random.default_rng(0), rate=rate)
        tree = drafter.propose(asked, 32)
        depths.append(int(tree.depths().max()))
        drafter.finish()
    assert depths[0] >= 3 and depths == [depths[0], depths[0], 1, depths[0]]
