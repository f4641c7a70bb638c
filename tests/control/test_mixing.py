"""Mixing: hand-computed mixtures and gradients, what is learnt about agreement, per-request parts, state, cost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import numpy as np
import pytest

from adaptspec.control.mixing import Mixer
from adaptspec.trees import merge
from adaptspec.types import DraftTree


def flat(tokens: list[int]) -> DraftTree:
    """Siblings below the root."""
    return DraftTree(np.array(tokens, np.int64), np.full(len(tokens), -1), np.zeros(len(tokens)))


def merged(children: list[dict[int, float]]) -> tuple[DraftTree, np.ndarray, np.ndarray]:
    """What experts say about the next token: tree, origins and conditionals."""
    tree, origins = merge([flat(list(opinion)) for opinion in children])
    conditionals = np.full(origins.shape, np.nan)  # what an expert did not propose must not be looked at
    for row, opinion in zip(conditionals, children, strict=True):
        for node, token in enumerate(tree.token_ids.tolist()):
            if token in opinion:
                row[node] = opinion[token]
    return tree, origins, conditionals


def test_one_expert_is_believed() -> None:
    tree, origins, conditionals = merged([{5: 0.6, 6: 0.3}, {}])
    assert Mixer(["a", "b"]).mix(tree, origins, conditionals) == pytest.approx([0.6, 0.3])


def test_experts_that_say_the_same_share_a_vote() -> None:
    assert Mixer(["a", "b"]).mix(*merged([{5: 0.6}, {5: 0.6}])) == pytest.approx([0.6])
    odds = np.sqrt(0.9 * 0.5), np.sqrt(0.1 * 0.5)
    assert Mixer(["a", "b"]).mix(*merged([{5: 0.9}, {5: 0.5}])) == pytest.approx([odds[0] / sum(odds)])


def test_experts_that_disagree_are_multiplied() -> None:
    odds = np.array([0.9 * 0.8, 0.1 * 0.2, 0.1 * 0.8])  # a's token, b's token, neither
    mixed = Mixer(["a", "b"]).mix(*merged([{5: 0.9}, {6: 0.2}]))
    assert mixed == pytest.approx(odds[:2] / odds.sum())


def test_partly_shared_votes() -> None:
    """a: 5 (0.5), 6 (0.25). b: 5 (0.8). a's vote: (0.5 / 2 + 0.25) / 0.75 = 2/3, b's: 1/2."""
    first = 0.5 ** (2 / 3) * 0.8**0.5
    second = 0.25 ** (2 / 3) * 0.2**0.5
    other = 0.25 ** (2 / 3) * 0.2**0.5
    mixed = Mixer(["a", "b"]).mix(*merged([{5: 0.5, 6: 0.25}, {5: 0.8}]))
    assert mixed == pytest.approx(np.array([first, second]) / (first + second + other))


def test_nodes_below_different_parents_do_not_compete() -> None:
    trees = [DraftTree.chain([3, 4]), DraftTree.chain([5, 4])]
    tree, origins = merge(trees)
    conditionals = np.array([[0.7, 0.4, 0, 0], [0, 0, 0.2, 0.9]])
    mixed = Mixer(["a", "b"]).mix(tree, origins, conditionals)
    assert mixed[[1, 3]] == pytest.approx([0.4, 0.9])
    assert mixed[0] + mixed[2] < 1.0


def test_one_step_of_the_gradient() -> None:
    mixer = Mixer(["a", "b"], rate=0.5, boost=0.0)
    tree, origins, conditionals = merged([{5: 0.8}, {6: 0.5}])
    before = np.array([0.8 * 0.5, 0.2 * 0.5, 0.2 * 0.5])
    before /= before.sum()
    mixer.update(tree, origins, conditionals, [6])
    weights = np.ones((8, 3)) * [1, 1, 0]
    a, rest_a, b, rest_b = np.log([0.8, 0.2, 0.5, 0.5])
    errors = before - [0, 1, 0]
    weights[1] -= 0.5 * errors[0] * np.array([a, rest_b, 1])  # proposed by {a}
    weights[2] -= 0.5 * errors[1] * np.array([rest_a, b, 1])  # proposed by {b}
    weights[4 + 3] -= 0.5 * errors[2] * np.array([rest_a, rest_b, 1])  # neither, where {a, b} speak
    assert np.array(mixer.state_dict()["weights"]) == pytest.approx(weights)


def test_the_gradient_is_that_of_the_log_loss() -> None:
    """Finite differences of -log P through a per-request part, on a tree of two depths."""
    rng = np.random.default_rng(0)
    trees = [
        DraftTree(np.array([1, 2, 3, 4]), np.array([-1, -1, 0, 0]), np.zeros(4)),
        DraftTree(np.array([2, 1, 4, 5]), np.array([-1, -1, 1, 1]), np.zeros(4)),
        DraftTree.chain([1, 4, 9]),
    ]
    tree, origins = merge(trees)
    conditionals = rng.uniform(0.1, 0.4, origins.shape)
    mixer = Mixer(["a", "b", "c"], local_rate=1e-6)
    for tokens in ([1, 4, 8], [2, 7], [6]):
        rows = {tuple(path): row for row, path in enumerate(_paths(tree))}

        def loss(local: np.ndarray, tokens: list[int] = tokens, rows: dict = rows) -> float:
            mixed = mixer.mix(tree, origins, conditionals, local=local)
            total = 0.0
            for depth in range(len(tokens)):
                siblings = [
                    row for path, row in rows.items() if list(path[:-1]) == tokens[:depth] and len(path) == depth + 1
                ]
                if not siblings:
                    break
                right = rows.get(tuple(tokens[: depth + 1]))
                total -= np.log(mixed[right] if right is not None else 1.0 - mixed[siblings].sum())
                if right is None:
                    break
            return total

        local = mixer.new_local()
        fresh = Mixer(["a", "b", "c"], local_rate=1e-6)
        fresh.update(tree, origins, conditionals, tokens, local=local)
        gradient = -local / 1e-6
        numeric = np.zeros_like(local)
        for place in np.ndindex(local.shape):
            shift = np.zeros_like(local)
            shift[place] = 1e-5
            numeric[place] = (loss(shift) - loss(-shift)) / 2e-5
        assert gradient == pytest.approx(numeric, abs=1e-5)
        assert np.abs(gradient).max() > 0.1


def _paths(tree: DraftTree) -> list[list[int]]:
    paths: list[list[int]] = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return paths


def test_nothing_is_learnt_from_unknown_outcomes() -> None:
    mixer = Mixer(["a"])
    tree, origins = merge([DraftTree.chain([3, 4])])
    conditionals = np.full(origins.shape, 0.5)
    before = mixer.state_dict()
    mixer.update(tree, origins, conditionals, [])
    assert mixer.state_dict() == before
    mixer.update(tree, origins, conditionals, [3])  # 4 is deeper than what is known
    assert mixer.state_dict()["predictions"] == 1
    assert mixer.mix(DraftTree.empty(), np.zeros((1, 0), np.int64), np.zeros((1, 0))).tolist() == []


def opinions(rng: np.random.Generator, *, copies: bool) -> tuple[list[dict[int, float]], int]:
    """Two calibrated experts about one of 20 tokens: copies of each other, or with independent evidence."""
    truth = int(rng.integers(20))
    said = []
    for _ in range(1 if copies else 2):
        reliability = rng.choice([0.5, 0.8])
        guess = truth if rng.random() < reliability else int(truth + rng.integers(1, 20)) % 20
        said.append({guess: reliability})
    return said * 2 if copies else said, truth


def log_loss(predict: Callable[..., np.ndarray], *, copies: bool, learn: Mixer | None = None) -> float:
    """Mean over nodes of the log loss of "accepted" and "not accepted", in the second half of 1,600 rounds."""
    rng = np.random.default_rng(5)
    losses: list[float] = []
    for turn in range(1600):
        said, truth = opinions(rng, copies=copies)
        tree, origins, conditionals = merged(said)
        if turn >= 800:
            chances = np.clip(predict(tree, origins, conditionals), 1e-3, 1 - 1e-3)
            losses += (-np.log(np.where(tree.token_ids == truth, chances, 1.0 - chances))).tolist()
        if learn is not None:
            learn.update(tree, origins, conditionals, [truth])
    return float(np.mean(losses))


def maximum(tree: DraftTree, origins: np.ndarray, conditionals: np.ndarray) -> np.ndarray:
    return np.nanmax(conditionals, axis=0)


def noisy_or(tree: DraftTree, origins: np.ndarray, conditionals: np.ndarray) -> np.ndarray:
    return 1.0 - np.nanprod(1.0 - conditionals, axis=0)


@pytest.mark.parametrize("copies", [True, False])
def test_learns_whether_agreement_means_anything(copies: bool) -> None:
    """Agreement of copies is worth nothing, that of independent experts nearly proves the token."""
    mixer = Mixer(["a", "b"])
    learnt = log_loss(mixer.mix, copies=copies, learn=mixer)
    untaught = log_loss(Mixer(["a", "b"]).mix, copies=copies)
    agreed = mixer.mix(*merged([{1: 0.8}, {1: 0.8}]))[0]
    if copies:
        assert learnt < log_loss(noisy_or, copies=True) - 0.05
        assert learnt == pytest.approx(untaught, abs=0.01)
        assert agreed == pytest.approx(0.8, abs=0.04)
    else:
        assert learnt < log_loss(maximum, copies=False) - 0.05
        assert learnt < log_loss(noisy_or, copies=False) - 0.02
        assert learnt < untaught - 0.02
        assert agreed > 0.95


def test_siblings_and_other_add_up_to_one_whatever_was_learnt() -> None:
    rng = np.random.default_rng(1)
    mixer = Mixer(["a", "b", "c"], rate=1.0)
    for _ in range(200):
        said = [
            {int(token): 0.9 / 3 for token in rng.choice(6, size=rng.integers(0, 4), replace=False)} for _ in range(3)
        ]
        tree, origins, conditionals = merged(said)
        mixed = mixer.mix(tree, origins, conditionals)
        assert (mixed > 0.0).all()
        assert mixed.sum() < 1.0
        mixer.update(tree, origins, conditionals, [int(rng.integers(6))])
    weights = np.array(mixer.state_dict()["weights"])
    assert np.abs(weights).max() <= 4.0


def test_rate_decays_to_its_floor() -> None:
    """The same surprise moves an old mixer less than a young one, and no less than `rate` says."""
    said = merged([{5: 0.5}])
    moves = []
    for rounds in (0, 100, 5000):
        mixer = Mixer(["a"], rate=0.02, boost=4.0, warmup=100.0)
        state = mixer.state_dict()
        state["predictions"] = float(rounds)
        mixer.load_state_dict(state)
        mixer.update(*said, [6])
        moves.append(-mixer.state_dict()["weights"][1][1])
    assert moves == pytest.approx([0.5 * 0.02 * 5, 0.5 * 0.02 * 3, 0.5 * 0.02 * (1 + 4 / 51)])


def test_a_request_learns_for_itself() -> None:
    mixer = Mixer(["a", "b"], rate=1e-6, local_rate=0.1)
    said = merged([{5: 0.5}, {6: 0.5}])
    local, other_request = mixer.new_local(), mixer.new_local()
    for _ in range(60):
        mixer.update(*said, [5], local=local)
    assert mixer.mix(*said, local=local)[0] > 0.8
    assert mixer.mix(*said, local=other_request)[0] == pytest.approx(1 / 3, abs=1e-3)


def test_restored_state_gives_identical_results() -> None:
    rng = np.random.default_rng(2)
    mixer = Mixer(["a", "b"])
    rounds = [opinions(rng, copies=False) for _ in range(120)]
    for said, truth in rounds[:80]:
        mixer.update(*merged(said), [truth])
    restored = Mixer(["a", "b"])
    restored.load_state_dict(json.loads(json.dumps(mixer.state_dict())))
    for said, truth in rounds[80:]:
        assert (mixer.mix(*merged(said)) == restored.mix(*merged(said))).all()
        mixer.update(*merged(said), [truth])
        restored.update(*merged(said), [truth])
    assert mixer.state_dict() == restored.state_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"names": ["b", "a"]}, "names must be"),
        ({"rate": 0.1}, "rate must be 0.02, got 0.1"),
        ({"weights": [[1.0]]}, "weights must be numbers of shape"),
        ({"predictions": -1.0}, "predictions must be in"),
        ({"weights": [[9.0] * 3] * 8}, "weights must be finite and in"),
    ],
)
def test_damaged_state_is_refused_and_changes_nothing(change: dict[str, object], message: str) -> None:
    mixer = Mixer(["a", "b"])
    before = mixer.state_dict()
    with pytest.raises(ValueError, match=message):
        mixer.load_state_dict({**before, **change})
    assert mixer.state_dict() == before


@pytest.mark.parametrize("names", [[], ["a", "a"], list("abcdefghi")])
def test_names_that_do_not_fit(names: list[str]) -> None:
    with pytest.raises(ValueError, match="names must be 1 to 8 different names"):
        Mixer(names)


def test_arrays_of_another_shape() -> None:
    tree, origins, conditionals = merged([{5: 0.5}])
    with pytest.raises(ValueError, match=r"origins must have shape \[2, 1\], got \[1, 1\]"):
        Mixer(["a", "b"]).mix(tree, origins, conditionals)
    with pytest.raises(ValueError, match=r"local must have shape \[4, 2\], got \[2\]"):
        Mixer(["a"]).update(tree, origins, conditionals, [5], local=np.zeros(2))


def test_is_fast() -> None:
    """Best of many: about 0.09 ms and 0.14 ms for 4 experts and 128 nodes on one core of an old server."""
    trees = [DraftTree.chain([100 * m + i if i else m % 2 for i in range(32)]) for m in range(4)]
    tree, origins = merge(trees)
    conditionals = np.where(origins >= 0, 0.5, 0.0)
    mixer = Mixer(list("abcd"))
    mixing, learning = [], []
    for _ in range(50):
        begin = time.perf_counter()
        mixer.mix(tree, origins, conditionals)
        middle = time.perf_counter()
        mixer.update(tree, origins, conditionals, [0, 1, 2, 3, 50])
        mixing.append(middle - begin)
        learning.append(time.perf_counter() - middle)
    assert min(mixing) < 0.7e-3
    assert min(learning) < 1e-3
