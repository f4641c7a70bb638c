"""Calibration: hand-computed tables, what is a trial and what is censored, convergence, drift, state, cost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import numpy as np
import pytest

from adaptspec.control import calibration
from adaptspec.control.calibration import BINNINGS, MOST, Calibrator, binning_of, judge
from adaptspec.types import DraftTree


def fork(**evidence: list[float]) -> DraftTree:
    """Tokens 3 and 4 below the root, 5 and 6 below 3, 7 below 5, 8 below 4."""
    return DraftTree(
        np.array([3, 4, 5, 6, 7, 8]),
        np.array([-1, -1, 0, 0, 2, 1]),
        np.log([0.5, 0.25, 0.25, 0.125, 0.0625, 0.125]),
        evidence={name: np.array(values, dtype=np.float64) for name, values in evidence.items()},
    )


FORK_RANKS = [0.0, 1.0, 0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("continuation", "rows", "hits", "depths"),
    [
        ([3, 5, 7, 9], [0, 1, 2, 3, 4], [True, False, True, False, True], [1, 1, 2, 2, 3]),
        ([3, 5], [0, 1, 2, 3], [True, False, True, False], [1, 1, 2, 2]),  # 7 is deeper than what is known
        ([3, 9], [0, 1, 2, 3], [True, False, False, False], [1, 1, 2, 2]),  # the bonus token judges 5 and 6
        ([4, 8, 1], [0, 1, 5], [False, True, True], [1, 1, 2]),
        ([9, 5], [0, 1], [False, False], [1, 1]),  # 5 stands below a wrong parent
        ([3], [0, 1], [True, False], [1, 1]),
        ([], [], [], []),
    ],
)
def test_what_is_judged(continuation: list[int], rows: list[int], hits: list[bool], depths: list[int]) -> None:
    for tokens in (continuation, np.array(continuation, dtype=np.int64)):
        assert [column.tolist() for column in judge(fork(), tokens)] == [rows, hits, depths]


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        (("match_length", "count", "parent_count", "rank"), "counts"),
        (("match_length",), "match"),
        (("log_prob", "rank"), "ranked-log-prob"),
        (("log_prob",), "log-prob"),
        (("rank",), "rank"),
        ((), "score"),
        (("something",), "score"),
    ],
)
def test_binning_follows_the_evidence(columns: tuple[str, ...], name: str) -> None:
    assert binning_of(fork(**{column: [1.0] * 6 for column in columns})) == name


def test_bins_stay_inside_their_tables() -> None:
    values = np.array([0.0, 1.0, 2.0, 7.0, 40.0, 1e6])
    for columns, scale in (
        (("match_length", "count", "parent_count"), 1.0),
        (("rank",), 1.0),
        (("log_prob", "rank"), -1.0),
    ):
        evidence = {column: values for column in columns}
        if "log_prob" in columns:
            evidence = {"log_prob": scale * values, "rank": values}
        for binning in BINNINGS.values():
            if set(binning.columns) <= set(evidence):
                places = binning.place(evidence, np.exp(-values))
                assert places.min() >= 0
                assert places.max() < binning.cells


def test_untaught_it_repeats_the_drafter() -> None:
    ratios = [0.5, 0.25, 0.5, 0.25, 0.25, 0.5]
    assert Calibrator().conditional(fork(rank=FORK_RANKS)).tolist() == pytest.approx(ratios)
    assert Calibrator().conditional(DraftTree.empty()).tolist() == []


def test_hand_computed_table() -> None:
    calibrator = Calibrator(strength=2.0, memory=4.0)  # a trial fades by 3/4 for each later one in its cell
    calibrator.update(fork(rank=FORK_RANKS), [3, 9])
    # Rank 0: 3 hit at depth 1, 5 missed at depth 2. Rank 1: 4 and 6 missed. Broad cells see both depths, in row order.
    broad_hits, broad_trials = 0.75, 1.75
    first = (broad_hits + 2 * 0.5) / (broad_trials + 2)
    second = 2 * 0.25 / (1.75 + 2)
    deep = (broad_hits + 2 * 0.25) / (broad_trials + 2)  # 7: depth 3 has no trials, the broad cell stands
    expected = [
        (1 + 2 * first) / 3,
        2 * second / 3,
        2 * first / 3,
        2 * second / 3,
        deep,
        2 * first / 3,
    ]
    assert calibrator.conditional(fork(rank=FORK_RANKS)).tolist() == pytest.approx(expected, abs=1e-12)


def test_siblings_never_add_up_to_more_than_one() -> None:
    tree = fork(rank=FORK_RANKS)
    calibrator = Calibrator(strength=0.5)
    for _ in range(50):
        calibrator.update(DraftTree.chain([3], evidence={"rank": np.zeros(1)}), [3])
        calibrator.update(DraftTree.chain([4], evidence={"rank": np.ones(1)}), [4])
    conditional = calibrator.conditional(tree)
    assert conditional[0] + conditional[1] == pytest.approx(MOST)
    assert conditional[0] == pytest.approx(conditional[1], rel=0.02)


def test_impossible_scores_are_no_trouble() -> None:
    tree = DraftTree.chain([3, 4], [-np.inf, -np.inf])
    with np.errstate(all="raise"):
        assert np.isfinite(Calibrator().conditional(tree)).all()


def test_sampled_trees_are_refused() -> None:
    tree = DraftTree.chain([3], siblings="iid", draft_probs=np.ones((1, 5)) / 5, draft_rows=np.array([0, -1]))
    with pytest.raises(ValueError, match="siblings of a calibrated tree must be 'deterministic', got 'iid'"):
        Calibrator().conditional(tree)
    with pytest.raises(ValueError, match="must be 'deterministic'"):
        Calibrator().update(tree, [3])


@pytest.mark.parametrize("options", [{"strength": 0.0}, {"memory": 1.0}, {"strength": float("nan")}])
def test_options_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be in"):
        Calibrator(**options)


class Stream:
    """A drafter with two children per node, three levels deep, whose conditional acceptance is known.

    Cell (rank, depth) is right with `truth[rank, depth]`; the drafter itself believes in 0.5 and 0.4. The verified
    tree has a random number of levels, which is how far the realised text is known.
    """

    truth = np.array([[0.8, 0.6, 0.3], [0.15, 0.1, 0.3]])
    parents = np.array([-1, -1, 0, 0, 1, 1, *np.repeat([2, 3, 4, 5], 2)])
    depths = np.array([1, 1, 2, 2, 2, 2, *[3] * 8])
    ranks = np.tile([0, 1], 7)

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        steps = np.log(np.where(self.ranks == 0, 0.5, 0.4))
        scores = steps * self.depths  # only order and range matter
        self.tree = DraftTree(self.ranks + 10, self.parents, scores, evidence={"rank": self.ranks.astype(np.float64)})
        self.expected = self.truth[self.ranks, self.depths - 1]

    def step(self) -> list[int]:
        known = int(self.rng.integers(1, 4))
        tokens: list[int] = []
        for depth in range(known):
            draw = self.rng.random()
            first, second = self.truth[:, depth]
            tokens.append(10 if draw < first else 11 if draw < first + second else 99)
            if tokens[-1] == 99:
                break  # the bonus token: nothing is known behind it
        return tokens


def reliability_gap(update: Callable[[Calibrator, DraftTree, list[int]], None], steps: int = 1500) -> float:
    """Largest distance of an estimate from the truth after `steps`."""
    stream, calibrator = Stream(0), Calibrator(memory=4000.0)
    for _ in range(steps):
        update(calibrator, stream.tree, stream.step())
    return float(np.abs(calibrator.conditional(stream.tree) - stream.expected).max())


def test_converges_to_the_true_conditionals() -> None:
    assert reliability_gap(lambda calibrator, tree, tokens: calibrator.update(tree, tokens)) < 0.03


def mutant_censored_nodes_count(tree: DraftTree, tokens: list[int]) -> tuple[np.ndarray, ...]:
    """All nodes are trials: below wrong parents and beyond the known text, too."""
    rows, hits, _ = judge(tree, tokens)
    accepted = set(rows[hits].tolist())
    every = np.arange(len(tree))
    return every, np.array([row in accepted for row in every]), tree.depths()


def mutant_deeper_than_known_fails(tree: DraftTree, tokens: list[int]) -> tuple[np.ndarray, ...]:
    """The end of the known text is taken for a miss."""
    return judge(tree, [*tokens, 99])


def mutant_only_hits_count(tree: DraftTree, tokens: list[int]) -> tuple[np.ndarray, ...]:
    """Siblings of a hit are no misses."""
    rows, hits, depths = judge(tree, tokens)
    hit_depths = set(depths[hits].tolist())
    keep = hits | np.array([depth not in hit_depths for depth in depths.tolist()])
    return rows[keep], hits[keep], depths[keep]


def mutant_bonus_is_ignored(tree: DraftTree, tokens: list[int]) -> tuple[np.ndarray, ...]:
    """Children of the last accepted node are not compared with the bonus token."""
    return judge(tree, tokens[:-1])


@pytest.mark.parametrize(
    "mutant",
    [
        mutant_censored_nodes_count,
        mutant_deeper_than_known_fails,
        mutant_only_hits_count,
        mutant_bonus_is_ignored,
    ],
)
def test_wrong_trials_do_not_converge(monkeypatch: pytest.MonkeyPatch, mutant: Callable[..., object]) -> None:
    monkeypatch.setattr(calibration, "judge", mutant)
    assert reliability_gap(lambda calibrator, tree, tokens: calibrator.update(tree, tokens)) > 0.06


def test_path_products_are_not_conditionals() -> None:
    """Trials of whole paths instead of children of accepted parents end far from the conditionals."""

    def whole_paths(calibrator: Calibrator, tree: DraftTree, tokens: list[int]) -> None:
        rows, hits, _ = judge(tree, tokens)
        accepted = set(rows[hits].tolist())
        for row in range(len(tree)):
            alone = DraftTree.chain([1], evidence={"rank": tree.evidence["rank"][row : row + 1]})
            calibrator.update(alone, [1 if row in accepted else 2])

    assert reliability_gap(whole_paths, steps=300) > 0.2


@pytest.mark.parametrize("columns", [("match_length", "count", "parent_count"), ("match_length",), ("log_prob",), ()])
def test_every_binning_learns(columns: tuple[str, ...]) -> None:
    """Two kinds of node whose evidence differs are told apart, whatever the drafter's scores say."""
    rng = np.random.default_rng(3)
    kinds = {
        0.9: ({"match_length": 12.0, "count": 3.0, "parent_count": 3.0, "log_prob": -0.1}, -0.1),
        0.2: ({"match_length": 2.0, "count": 1.0, "parent_count": 5.0, "log_prob": -0.9}, -0.9),
    }
    trees = {
        truth: DraftTree.chain([7], [score], evidence={column: np.array([values[column]]) for column in columns})
        for truth, (values, score) in kinds.items()
    }
    calibrator = Calibrator()
    for _ in range(600):
        for truth, tree in trees.items():
            calibrator.update(tree, [7 if rng.random() < truth else 8])
    for truth, tree in trees.items():
        assert calibrator.conditional(tree)[0] == pytest.approx(truth, abs=0.03)


def test_follows_drift() -> None:
    calibrator = Calibrator(memory=200.0)
    tree = DraftTree.chain([7], [-0.1], evidence={"rank": np.zeros(1)})
    for _ in range(2000):
        calibrator.update(tree, [7])
    assert calibrator.conditional(tree)[0] > 0.98
    for _ in range(600):
        calibrator.update(tree, [8])
    assert calibrator.conditional(tree)[0] < 0.08


def test_restored_state_gives_identical_results() -> None:
    stream, calibrator = Stream(1), Calibrator()
    for _ in range(200):
        calibrator.update(stream.tree, stream.step())
    restored = Calibrator()
    restored.load_state_dict(json.loads(json.dumps(calibrator.state_dict())))
    for _ in range(50):
        tokens = stream.step()
        for each in (calibrator, restored):
            each.update(stream.tree, tokens)
        assert (restored.conditional(stream.tree) == calibrator.conditional(stream.tree)).all()
    assert restored.state_dict() == calibrator.state_dict()


def test_state_does_not_grow() -> None:
    stream, calibrator = Stream(2), Calibrator()
    calibrator.update(stream.tree, [10])
    size = len(json.dumps(calibrator.state_dict()["tables"]["rank"]["trials"]))
    cells = len(calibrator.state_dict()["tables"]["rank"]["trials"])
    for _ in range(300):
        calibrator.update(stream.tree, stream.step())
    assert list(calibrator.state_dict()["tables"]) == ["rank"]
    assert len(calibrator.state_dict()["tables"]["rank"]["trials"]) == cells
    assert size < 10_000


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: state.update(strength=3.0), "strength must be 8.0, got 3.0"),
        (lambda state: state.pop("memory"), "memory is missing"),
        (lambda state: state.update(tables=[1]), "tables must be a mapping"),
        (lambda state: state["tables"].update(ranks={}), "unknown binning 'ranks'; did you mean 'rank'"),
        (lambda state: state["tables"].update(rank=3), "table rank must be a mapping"),
        (lambda state: state["tables"]["rank"].update(hits=[1.0]), "hits must be numbers of shape"),
        (lambda state: state["tables"]["rank"]["trials"].__setitem__(0, -1.0), "trials must be finite and in"),
        (lambda state: state["tables"]["rank"]["hits"].__setitem__(53, 5.0), "hits of table rank must not exceed"),
    ],
)
def test_damaged_state_is_refused_and_changes_nothing(damage: Callable[[dict], None], message: str) -> None:
    stream, calibrator = Stream(1), Calibrator()
    calibrator.update(stream.tree, [10, 10, 10])
    before = calibrator.state_dict()
    state = calibrator.state_dict()
    damage(state)
    with pytest.raises(ValueError, match=message):
        calibrator.load_state_dict(state)
    assert calibrator.state_dict() == before


def test_is_fast() -> None:
    """Best of many: about 0.07 ms and 0.06 ms on one core of an old server."""
    count = 64
    columns = {"match_length": 5.0, "count": 2.0, "parent_count": 3.0}
    tree = DraftTree.chain(
        range(count), -0.1 * np.arange(1, count + 1), evidence={name: np.full(count, v) for name, v in columns.items()}
    )
    calibrator = Calibrator()
    calibrator.update(tree, range(8))
    reading, learning = [], []
    for _ in range(50):
        begin = time.perf_counter()
        calibrator.conditional(tree)
        middle = time.perf_counter()
        calibrator.update(tree, [0, 1, 2, 3, 9])
        reading.append(middle - begin)
        learning.append(time.perf_counter() - middle)
    assert min(reading) < 0.5e-3
    assert min(learning) < 0.5e-3
