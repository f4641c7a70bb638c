"""The shipped rules on 2e5 draws each: the joint law of the emitted tokens is the target's, by a chi-square test."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats
from verify_specification import RULES

from adaptspec.types import DraftTree
from adaptspec.verify import VERIFIERS, block, make_verifier, rows, sampling, traversal, typical

DRAWS = 200_000
SIGNIFICANCE = 0.01


@dataclass(frozen=True)
class Case:
    """A fixed shape over random models in which every prefix has its own p and q.

    Prefixes are numbered as in a heap: the root is 0, the child by token x of prefix i is i V + x + 1.
    """

    siblings: str
    parents: tuple[int, ...]
    size: int
    seed: int = 0

    @property
    def depth(self) -> int:
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent + 1] + 1)
        return max(depths)

    def table(self, rng: np.random.Generator) -> np.ndarray:
        """A row per prefix that can have a successor; a third of the entries are zero, as after top-p."""
        n = sum(self.size**d for d in range(self.depth + 1))
        table = rng.dirichlet(np.full(self.size, 0.8), size=n)
        keep = rng.random((n, self.size)) > 1 / 3
        keep[np.arange(n), table.argmax(axis=1)] = True
        table *= keep
        return table / table.sum(axis=1, keepdims=True)


CHAIN, TREE = (-1, 0, 1), (-1, -1, 0, 1)
MAIN = {
    "deterministic": Case("deterministic", TREE, 6),
    "token-wise": Case("iid", CHAIN, 5),
    "multi-round": Case("iid", TREE, 6),
    "recursive": Case("without-replacement", TREE, 6),
    "spectr": Case("iid", TREE, 6),
    "block": Case("iid", CHAIN, 5),
    "hsd": Case("iid", CHAIN, 5),
    "traversal": Case("without-replacement", TREE, 6),
}


def draw(table: np.ndarray, u: np.ndarray) -> np.ndarray:
    """One token per row of `table`, vectorised."""
    cumulative = table.cumsum(axis=1)
    return (cumulative <= (u * cumulative[:, -1])[:, None]).sum(axis=1)


class Group:
    """A source of uniforms for many draws at once, which all have the same draft.

    The rule runs once for all of them. Where it compares a uniform or samples with one, the draws part by their
    answers: the run goes on with those that answered alike, the others are noted in `rest` for runs of their own.
    """

    def __init__(self, uniforms: np.ndarray, members: np.ndarray, answers: tuple[int, ...], repeat: int) -> None:
        self.uniforms, self.members, self.answers, self.repeat = uniforms, members, list(answers), repeat
        self.calls = self.decided = 0
        self.rest: list[tuple[np.ndarray, tuple[int, ...]]] = []

    def random(self) -> Uniform:
        self.calls += 1
        return Uniform(self, self.uniforms[self.members, (self.calls - 1) // self.repeat])

    def decide(self, answers: np.ndarray) -> int:
        self.decided += 1
        if self.decided > len(self.answers):
            first, *others = np.unique(answers).tolist()
            self.rest += [(self.members[answers == other], (*self.answers, other)) for other in others]
            self.members = self.members[answers == first]
            self.answers.append(first)
        else:
            assert (answers == self.answers[self.decided - 1]).all()
        return self.answers[self.decided - 1]


class Uniform:
    """The uniforms of a `Group`, in the place of one float."""

    def __init__(self, group: Group, values: np.ndarray) -> None:
        self.group, self.values = group, values

    def __mul__(self, factor: float) -> Uniform:
        return Uniform(self.group, self.values * factor)

    def __lt__(self, threshold: float) -> bool:
        return bool(self.group.decide(self.values < threshold))


def for_groups(function):
    """`sample` or `draw`, taking a `Uniform`: each of its values on its own."""

    def sampling_for_each(row, u, **name):
        return u.group.decide(np.array([function(row, x, **name) for x in u.values.tolist()]))

    return sampling_for_each


def emit_in_groups(
    verify, trees, which: np.ndarray, uniforms: np.ndarray, *, length: int, repeat: int = 1
) -> np.ndarray:
    """int64 [draws, length], the tokens emitted by each draw, then -1. `trees[which[i]]` is the draft of draw i."""
    emitted = np.full((len(which), length), -1)
    with pytest.MonkeyPatch.context() as patch:
        for module, attribute in ((sampling, "sample"), (sampling, "draw"), (block, "draw"), (traversal, "draw")):
            patch.setattr(module, attribute, for_groups(getattr(rows, attribute)))
        patch.setattr(typical, "draw", for_groups(rows.draw))
        for i, (tree, target_probs) in enumerate(trees):
            waiting = [(np.flatnonzero(which == i), ())]
            while waiting:
                group = Group(uniforms, *waiting.pop(), repeat)
                ids = verify(tree, target_probs, group).token_ids
                emitted[group.members, : len(ids)] = ids
                waiting += group.rest
    return emitted


@dataclass(frozen=True)
class Draws:
    """Drafts drawn by the drafting law, and the random models behind them."""

    p: np.ndarray
    trees: list[tuple[DraftTree, np.ndarray]]
    which: np.ndarray
    rng: np.random.Generator


def make_draws(case: Case, draws: int) -> Draws:
    rng = np.random.default_rng(case.seed)
    size, n = case.size, len(case.parents)
    p, q = case.table(rng), case.table(rng)
    if case.siblings == "without-replacement":
        q = 0.9 * q + 0.1 / size  # So that siblings never run out.
    tokens, prefixes = np.empty((draws, n), np.int64), np.zeros((draws, n + 1), np.int64)
    for node, parent in enumerate(case.parents):
        law = q[prefixes[:, parent + 1]]
        if case.siblings != "iid":
            for earlier in (i for i in range(node) if case.parents[i] == parent):
                law[np.arange(draws), tokens[:, earlier]] = 0.0
        tokens[:, node] = law.argmax(axis=1) if case.siblings == "deterministic" else draw(law, rng.random(draws))
        prefixes[:, node + 1] = prefixes[:, parent + 1] * size + tokens[:, node] + 1
    _, first, which = np.unique(tokens, axis=0, return_index=True, return_inverse=True)
    trees = []
    for i in first:
        drawn = {} if case.siblings == "deterministic" else {"draft_probs": q, "draft_rows": prefixes[i]}
        tree = DraftTree(tokens[i], np.array(case.parents), np.zeros(n), case.siblings, **drawn)
        trees.append((tree, p[prefixes[i]]))
    return Draws(p, trees, which.ravel(), rng)


def p_value(name: str, case: Case, draws: int, *, repeat: int = 1) -> float:
    """Of the hypothesis that tokens emitted by the rule, continued by the target, follow the target's joint law."""
    made, size, length = make_draws(case, draws), case.size, case.depth + 1
    p, rng = made.p, made.rng
    uniforms = rng.random((draws, 2 * len(case.parents) + 2))
    emitted = emit_in_groups(make_verifier(name), made.trees, made.which, uniforms, length=length, repeat=repeat)
    prefix, cell, mass = np.zeros(draws, np.int64), np.zeros(draws, np.int64), np.ones(1)
    for step in range(length):
        missing = emitted[:, step] < 0
        emitted[missing, step] = draw(p[prefix[missing]], rng.random(missing.sum()))
        cell = cell * size + emitted[:, step]
        first = (size**step - 1) // (size - 1)
        mass = (mass[:, None] * p[first : first + size**step]).ravel()
        prefix = prefix * size + emitted[:, step] + 1
    return chi_square(np.bincount(cell, minlength=len(mass)), mass * draws)


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """p-value; cells that expect fewer than 5 are pooled, and an impossible token gives 0."""
    if observed[expected == 0].any():
        return 0.0
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    keep = expected > 0
    statistic = ((observed - expected)[keep] ** 2 / expected[keep]).sum()
    return float(stats.chi2.sf(statistic, keep.sum() - 1))


def test_main_cases_cover_every_lossless_sampling_rule():
    assert set(MAIN) == set(RULES) == {i.name for i in VERIFIERS.values() if i.lossless and i.reads == "probabilities"}


@pytest.mark.parametrize("name", MAIN)
def test_joint_counts_follow_the_target(name):
    assert p_value(name, MAIN[name], DRAWS) > SIGNIFICANCE / len(MAIN)


@pytest.mark.parametrize("name", MAIN)
def test_groups_emit_what_single_draws_emit(name):
    made = make_draws(MAIN[name], 300)
    uniforms = made.rng.random((300, 12))
    emitted = emit_in_groups(make_verifier(name), made.trees, made.which, uniforms, length=4)
    for i, values in enumerate(uniforms.tolist()):
        ids = make_verifier(name)(*made.trees[made.which[i]], SimpleNamespace(random=iter(values).__next__)).token_ids
        assert emitted[i].tolist() == [*ids, *[-1] * (4 - len(ids))]


# The test must see the known mistakes --------------------------------------------------------------------------------


def _uncapped_last(ratios):
    joint, largest, weights = 1.0, 1.0, [1.0]
    for ratio in ratios:
        joint *= ratio
        weights.append(joint / largest)
        largest = max(largest, joint)
    return weights


def _without_positive_part(p, q, token, *, weight=1.0):
    row = abs(p * weight - q)
    return row, float(row.sum())


DRAWN_IN_TURN = Case("without-replacement", (-1, -1, -1), 6)
MISTAKES = {
    "uncapped hsd": (block, "_capped_joint_ratio", _uncapped_last, "hsd", Case("iid", (-1, 0), 5, seed=1), 120_000),
    "fixed q in recursive": (sampling, "without", lambda q, token: q, "recursive", DRAWN_IN_TURN, 20_000),
    "fixed q in traversal": (traversal, "without", lambda q, token: q, "traversal", DRAWN_IN_TURN, 20_000),
    "no positive part in walks": (rows, "excess", _without_positive_part, "token-wise", MAIN["token-wise"], 20_000),
    "no positive part in block": (block, "excess", _without_positive_part, "block", MAIN["block"], 20_000),
    "no positive part in traversal": (
        traversal,
        "excess",
        _without_positive_part,
        "traversal",
        MAIN["traversal"],
        20_000,
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_counts_see_mistakes_in_shipped_code(mistake, monkeypatch):
    module, attribute, replacement, name, case, draws = MISTAKES[mistake]
    assert p_value(name, case, draws) > 1e-3
    monkeypatch.setattr(module, attribute, replacement)
    assert p_value(name, case, draws) < 1e-12


@pytest.mark.parametrize("name", MAIN)
def test_counts_see_a_reused_uniform(name):
    assert p_value(name, MAIN[name], 20_000, repeat=2) < 1e-12


def test_counts_see_that_typical_acceptance_is_lossy():
    assert p_value("typical", MAIN["deterministic"], 20_000) < 1e-12
