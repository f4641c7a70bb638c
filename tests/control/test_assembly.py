"""Assembly: merged values by hand, the best size by brute force, zero nodes, learning, state, a simulated stream."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptspec.control.assembly import Candidates, assemble, fit_to_cost, learn, leave_out, value_candidates
from adaptspec.control.calibration import Calibrator
from adaptspec.control.mixing import Mixer
from adaptspec.types import DraftTree
from tests.control.replay_cases import random_tree
from tests.trees.tree_strategies import (
    check_scores_fall,
    closed_sets,
    deterministic_trees,
    path_scores_by_path,
    property_test,
    token_paths,
)

FLAT = np.ones(100)


def fresh(names: Sequence[str]) -> dict[str, Calibrator]:
    return {name: Calibrator() for name in names}


def test_values_are_products_of_mixed_conditionals() -> None:
    trees = [DraftTree.chain([5, 6], np.log([0.9, 0.45])), DraftTree.chain([7], np.log([0.2]))]
    candidates = value_candidates(trees, ["a", "b"], calibrators=fresh("ab"), mixer=Mixer(["a", "b"]))
    odds = np.array([0.9 * 0.8, 0.1 * 0.2, 0.1 * 0.8])
    first, second = odds[:2] / odds.sum()
    assert candidates.tree.token_ids.tolist() == [5, 6, 7]
    assert np.exp(candidates.tree.scores) == pytest.approx([first, first * 0.5, second])
    assert candidates.tree.evidence["conditional"] == pytest.approx([first, 0.5, second])
    assert candidates.tree.evidence["proposers"].tolist() == [1, 1, 1]
    assert candidates.origins.tolist() == [[0, 1, -1], [-1, -1, 0]]
    assert candidates.conditionals == pytest.approx(np.array([[0.9, 0.5, 0], [0, 0, 0.2]]))


def test_the_order_of_the_drafters_is_not_that_of_the_experts() -> None:
    """Absent and permuted drafters find their own experts."""
    trees = {"a": DraftTree.chain([5]), "c": DraftTree.chain([6])}
    mixer = Mixer(["a", "b", "c"], rate=0.5)
    calibrators = fresh("abc")
    for _ in range(20):
        candidates = value_candidates([trees["a"]], ["a"], calibrators=calibrators, mixer=mixer)
        learn(candidates, [9], calibrators={"a": Calibrator()}, mixer=mixer)
    values = {}
    for names in (["a", "c"], ["c", "a"]):
        candidates = value_candidates([trees[n] for n in names], names, calibrators=calibrators, mixer=mixer)
        values[names[0]] = path_scores_by_path(candidates.tree)
    assert values["a"] == pytest.approx(values["c"])
    assert values["a"][(5,)] < values["a"][(6,)]


def test_learning_reaches_every_part_once() -> None:
    trees = [DraftTree.chain([5, 6], np.log([0.9, 0.45])), DraftTree.chain([7], np.log([0.2]))]
    calibrators, mixer = fresh("ab"), Mixer(["a", "b"])
    candidates = value_candidates(trees, ["a", "b"], calibrators=calibrators, mixer=mixer)
    learn(candidates, [5, 9], calibrators=calibrators, mixer=mixer)
    for name, tree in zip("ab", trees, strict=True):
        alone = Calibrator()
        alone.update(tree, [5, 9])
        assert calibrators[name].state_dict() == alone.state_dict()
    assert mixer.state_dict()["predictions"] == 2  # what follows the root, and what follows 5


def some_candidates(seed: int) -> tuple[Candidates, dict[str, Calibrator], Mixer, np.ndarray]:
    """Proposals of three drafters that share prefixes, calibrated and mixed with what a few steps taught."""
    rng = np.random.default_rng(seed)
    calibrators, mixer = fresh("abc"), Mixer(["c", "a", "b"])
    local = mixer.new_local()
    for _ in range(6):
        text = rng.integers(4, size=5)
        trees = [random_tree(rng, nodes=9, truth=text, words=4) for _ in "abc"]
        candidates = value_candidates(trees, ["a", "b", "c"], calibrators=calibrators, mixer=mixer, local=local)
        learn(candidates, text, calibrators=calibrators, mixer=mixer, local=local)
    trees = [random_tree(rng, nodes=9, truth=rng.integers(4, size=5), words=4) for _ in "abc"]
    candidates = value_candidates(trees, ["a", "b", "c"], calibrators=calibrators, mixer=mixer, local=local)
    return candidates, calibrators, mixer, local


@pytest.mark.parametrize("seed", range(12))
def test_leaving_a_drafter_out_is_never_having_asked_it(seed: int) -> None:
    """Bit by bit, order of the rows included."""
    candidates, calibrators, mixer, local = some_candidates(seed)
    for name in "abc":
        rest = [(n, tree) for n, tree in zip("abc", candidates.trees, strict=True) if n != name]
        wanted = value_candidates(
            [tree for _, tree in rest], [n for n, _ in rest], calibrators=calibrators, mixer=mixer, local=local
        ).tree
        found = leave_out(candidates, name, mixer=mixer, local=local)
        for field in ("token_ids", "parents", "scores"):
            assert getattr(found, field).tolist() == getattr(wanted, field).tolist()
        assert found.evidence["proposers"].tolist() == wanted.evidence["proposers"].tolist()
    with pytest.raises(ValueError, match="drafter 'x'"):
        leave_out(candidates, "x", mixer=mixer)


@pytest.mark.parametrize("seed", range(6))
def test_what_was_computed_for_the_decision_teaches_the_same(seed: int) -> None:
    """`learn` takes placements, votes and the judgement of the merged tree over; computing all of it anew gives the
    same state, bit by bit."""
    text = np.random.default_rng(100 + seed).integers(4, size=6)
    candidates, calibrators, mixer, local = some_candidates(seed)
    learn(candidates, text, calibrators=calibrators, mixer=mixer, local=local)
    candidates, other_calibrators, other_mixer, other_local = some_candidates(seed)
    rows = [candidates.names.index(name) for name in other_mixer.names]
    other_mixer.update(
        candidates.tree, candidates.origins[rows], candidates.conditionals[rows], text, local=other_local
    )
    for name, tree in zip(candidates.names, candidates.trees, strict=True):
        other_calibrators[name].update(tree, text)
        assert calibrators[name].state_dict() == other_calibrators[name].state_dict()
    assert mixer.state_dict() == other_mixer.state_dict()
    assert local.tolist() == other_local.tolist()


def test_a_placement_from_before_another_update_is_not_used() -> None:
    tree = DraftTree.chain([5, 6], np.log([0.5, 0.25]))
    left, right = Calibrator(), Calibrator()
    for calibrator in (left, right):
        calibrator.update(tree, [5, 6, 7])
    _, placed = left.place(tree)
    for calibrator in (left, right):
        calibrator.update(tree, [9])
    left.update(tree, [5, 9], placed=placed)
    right.update(tree, [5, 9])
    assert left.state_dict() == right.state_dict()


def test_one_drafter_needs_no_mixer() -> None:
    tree, expected = assemble(
        [DraftTree.chain([5, 6, 7], np.log([0.8, 0.4, 0.04]))],
        ["a"],
        calibrators=fresh("a"),
        verify_curve=[1.0, 1.1, 1.2, 1.3],
        rate=2.0,
    )
    assert tree.token_ids.tolist() == [5, 6]
    assert np.exp(tree.scores) == pytest.approx([0.8, 0.4])
    assert expected == pytest.approx([1.0, 1.8, 2.2, 2.24])


def test_nothing_proposed() -> None:
    for mixer, trees in ((None, []), (None, [DraftTree.empty()]), (Mixer(["a", "b"]), [DraftTree.empty()] * 2)):
        names = ["a", "b"][: len(trees)]
        tree, expected = assemble(trees, names, calibrators=fresh("ab"), mixer=mixer, verify_curve=FLAT, rate=1.0)
        assert len(tree) == 0
        assert expected.tolist() == [1.0]


def test_zero_nodes_when_verification_is_expensive() -> None:
    for rate, nodes in ((1.0, 8), (5.0, 0)):
        tree, _ = assemble(
            [DraftTree.chain(range(8), np.log(0.9) * np.arange(1, 9))],
            ["a"],
            calibrators=fresh("a"),
            verify_curve=lambda nodes: 1.0 + 0.3 * nodes,
            rate=rate,
        )
        assert len(tree) == nodes


def test_a_step_in_the_cost_is_looked_past() -> None:
    """The second node costs more than it brings, the third to fifth are nearly free."""
    tree, _ = fit_to_cost(
        DraftTree.chain(range(5), np.log([0.9, 0.8, 0.75, 0.7, 0.65])),
        verify_curve=[1.0, 1.1, 2.0, 2.01, 2.02, 2.03],
        rate=1.2,
    )
    assert len(tree) == 5


@st.composite
def priced_trees(draw: st.DrawFn) -> tuple[DraftTree, np.ndarray, float, int]:
    tree = draw(deterministic_trees(max_nodes=8))
    steps = draw(st.lists(st.sampled_from([0.0, 0.05, 0.2, 0.6]), min_size=len(tree), max_size=len(tree)))
    rate = draw(st.sampled_from([0.0, 0.5, 1.0, 2.0, 6.0]))
    return tree, 1.0 + np.cumsum([0.0, *steps]), rate, draw(st.integers(0, 9))


@property_test
@given(priced_trees())
def test_no_other_tree_is_worth_more(case: tuple[DraftTree, np.ndarray, float, int]) -> None:
    """Brute force over all trees of all sizes, whatever the shape of the cost; result closed under ancestors."""
    tree, seconds, rate, max_nodes = case
    kept, expected = fit_to_cost(tree, verify_curve=seconds, rate=rate, max_nodes=max_nodes)
    kept.validate(vocab_size=5, budget=max_nodes)
    check_scores_fall(kept)
    values = {path: float(np.exp(score)) for path, score in path_scores_by_path(tree).items()}
    chosen = set(token_paths(kept))
    assert all(len(path) == 1 or path[:-1] in chosen for path in chosen)
    surplus = []
    for size in range(min(len(tree), max_nodes) + 1):
        best = max(1.0 + sum(values[path] for path in paths) for paths in closed_sets(set(values), size))
        assert expected[size] == pytest.approx(best)
        surplus.append(best - rate * seconds[size])
    assert len(expected) == len(surplus)
    own = 1.0 + sum(values[path] for path in chosen) - rate * seconds[len(kept)]
    assert own == pytest.approx(max(surplus))


@property_test
@given(st.lists(deterministic_trees(max_nodes=8), min_size=1, max_size=3), st.lists(st.integers(0, 4), max_size=5))
def test_merged_and_taught_trees_stay_valid(trees: list[DraftTree], continuation: list[int]) -> None:
    names = list("abc")[: len(trees)]
    calibrators, mixer = fresh(names), Mixer(list("abc"))
    for _ in range(3):
        candidates = value_candidates(trees, names, calibrators=calibrators, mixer=mixer)
        candidates.tree.validate(vocab_size=5)
        check_scores_fall(candidates.tree)
        assert set(token_paths(candidates.tree)) == set().union(*(token_paths(tree) for tree in trees))
        conditional = candidates.tree.evidence["conditional"]
        assert (np.bincount(candidates.tree.parents + 1, conditional) < 1.0).all()
        learn(candidates, continuation, calibrators=calibrators, mixer=mixer)


def test_without_a_rate_the_step_pays_for_its_own_drafting() -> None:
    tree = DraftTree.chain([5, 6], np.log([0.5, 0.25]))
    sizes = [
        len(fit_to_cost(tree, verify_curve=[1.0, 1.6, 2.2], draft_seconds=seconds, rate=None)[0])
        for seconds in (0.0, 0.5, 5.0)
    ]
    assert sizes == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"names": ["a"]}, "names must be 2 different names"),
        ({"names": ["a", "a"]}, "names must be 2 different names"),
        ({"names": ["a", "bb"]}, "unknown drafter 'bb'; did you mean 'b'"),
        ({"mixer": Mixer(["a", "c"])}, "unknown expert 'b'"),
        ({"mixer": None}, "mixer must be given for more than one tree, got 2 trees"),
        ({"rate": -1.0}, "rate must be in"),
        ({"max_nodes": -1}, "max_nodes must be a whole number >= 0, got -1"),
        ({"verify_curve": [1.0, 1.0]}, "verify_seconds must have at least 3 entries, got 2"),
    ],
)
def test_errors_say_what_is_allowed(change: dict[str, object], message: str) -> None:
    arguments = {
        "trees": [DraftTree.chain([5]), DraftTree.chain([6])],
        "names": ["a", "b"],
        "calibrators": fresh("ab"),
        "mixer": Mixer(["a", "b"]),
        "verify_curve": FLAT,
        "rate": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        assemble(**{**arguments, **change})


class World:
    """Three drafters of chains over one text; each is good in one phase, all are too sure of themselves."""

    names = ("a", "b", "c")
    depth = 4
    phase = 300
    seconds = 1.0 + 0.06 * np.arange(13)

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.length = self.phase * len(self.names)
        self.text = rng.integers(0, 1000, self.length + self.depth + 2)
        self.proposals: dict[str, list[DraftTree]] = {}
        for good_phase, name in enumerate(self.names):
            self.proposals[name] = []
            for position in range(self.length):
                good = position // self.phase == good_phase
                chance = rng.beta(8.0, 2.0, self.depth) if good else rng.beta(1.2, 4.0, self.depth)
                right = self.text[position + 1 : position + 1 + self.depth]
                tokens = np.where(rng.random(self.depth) < chance, right, rng.integers(1000, 2000, self.depth))
                said = np.log(np.clip(chance**0.4, 0.01, 0.99))
                self.proposals[name].append(DraftTree.chain(tokens, said.cumsum(), evidence={"log_prob": said}))

    def propose(self, names: Sequence[str], position: int) -> list[DraftTree]:
        return [self.proposals[name][position] for name in names]

    def verify(self, tree: DraftTree, position: int) -> list[int]:
        """Accepted tokens and the bonus token."""
        node, tokens = -1, [int(self.text[position + 1])]
        for row, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True)):
            if parent == node and token == tokens[-1]:
                node = row
                tokens.append(int(self.text[position + 1 + len(tokens)]))
        return tokens

    def play(self, names: Sequence[str]) -> np.ndarray:
        """Tokens per cost in each phase and, last, over the whole stream, by drafting at every position of the text:
        whatever a policy accepts, it is compared with others at the same places."""
        calibrators = fresh(names)
        mixer = Mixer(names) if len(names) > 1 else None
        tokens, cost = np.zeros(len(self.names)), np.zeros(len(self.names))
        for position in range(self.length):
            rate = (tokens.sum() + 20) / (cost.sum() + 20)
            candidates = value_candidates(self.propose(names, position), names, calibrators=calibrators, mixer=mixer)
            tree, _ = fit_to_cost(candidates.tree, verify_curve=self.seconds, rate=rate)
            emitted = self.verify(tree, position)
            learn(candidates, emitted, calibrators=calibrators, mixer=mixer)
            now = position // self.phase
            tokens[now] += len(emitted)
            cost[now] += self.seconds[len(tree)]
        return np.append(tokens / cost, tokens.sum() / cost.sum())


@pytest.mark.parametrize("seed", [0, 1])
def test_a_mixture_keeps_up_with_the_best_expert_of_every_phase(seed: int) -> None:
    world = World(seed)
    alone = np.array([world.play([name]) for name in world.names])
    together = world.play(world.names)
    assert (together[:-1] >= 0.97 * alone[:, :-1].max(axis=0)).all()
    assert together[-1] > 1.5 * alone[:, -1].max()


def played(steps: range, world: World, calibrators: dict[str, Calibrator], mixer: Mixer) -> list[Candidates]:
    found = []
    for position in steps:
        candidates = value_candidates(
            world.propose(world.names, position), world.names, calibrators=calibrators, mixer=mixer
        )
        found.append(candidates)
        tree, _ = fit_to_cost(candidates.tree, verify_curve=world.seconds, rate=1.5)
        learn(candidates, world.verify(tree, position), calibrators=calibrators, mixer=mixer)
    return found


def test_restored_state_gives_identical_trees() -> None:
    world = World(3)
    calibrators, mixer = fresh(world.names), Mixer(world.names)
    played(range(100), world, calibrators, mixer)
    restored, restored_mixer = fresh(world.names), Mixer(world.names)
    for name in world.names:
        restored[name].load_state_dict(json.loads(json.dumps(calibrators[name].state_dict())))
    restored_mixer.load_state_dict(json.loads(json.dumps(mixer.state_dict())))
    first = played(range(100, 150), world, calibrators, mixer)
    second = played(range(100, 150), world, restored, restored_mixer)
    for one, other in zip(first, second, strict=True):
        assert one.tree.state_bytes() == other.tree.state_bytes()
        assert (one.tree.scores == other.tree.scores).all()


def bushy(seed: int, count: int, columns: Sequence[str]) -> DraftTree:
    rng = np.random.default_rng(seed)
    placed: list[tuple[int, int]] = []
    while len(placed) < count:
        node = (int(rng.integers(max(-1, len(placed) - 6), len(placed))) if placed else -1, int(rng.integers(4)))
        if node not in placed:
            placed.append(node)
    parents, tokens = np.array(placed).T
    tree = DraftTree(tokens, parents, np.zeros(count))
    evidence = {column: rng.integers(1, 6, count).astype(np.float64) for column in columns}
    return DraftTree(tokens, parents, -0.3 * tree.depths(), evidence=evidence)


def test_is_fast() -> None:
    """Best of many, on one core of an old server: about 0.6 ms for 4 trees of 32 nodes, 0.2 ms for one of 64, 0.3 ms
    to learn from 4."""
    columns = ("match_length", "count", "parent_count")
    names = ["suffix", "prompt-lookup", "rest", "token-recycling"]
    kinds = [columns, ("match_length",), columns, ("rank",)]
    trees = [bushy(seed, 32, kind) for seed, kind in enumerate(kinds)]
    single = bushy(9, 64, columns)
    calibrators, mixer = fresh(names), Mixer(names)
    curve = np.linspace(0.03, 0.06, 200)
    spent: list[list[float]] = []
    for _ in range(40):
        times = [time.perf_counter()]
        assemble(trees, names, calibrators=calibrators, mixer=mixer, verify_curve=curve, rate=30.0, max_nodes=64)
        times.append(time.perf_counter())
        assemble([single], names[:1], calibrators=calibrators, verify_curve=curve, rate=30.0, max_nodes=64)
        times.append(time.perf_counter())
        candidates = value_candidates(trees, names, calibrators=calibrators, mixer=mixer)
        begin = time.perf_counter()
        learn(candidates, [1, 2, 3, 0, 1], calibrators=calibrators, mixer=mixer)
        spent.append([times[1] - times[0], times[2] - times[1], time.perf_counter() - begin])
    mixture, auto, learning = np.min(spent, axis=0)
    assert mixture < 3e-3
    assert auto < 1e-3
    assert learning < 2e-3
