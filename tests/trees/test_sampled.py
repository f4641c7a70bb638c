from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from adaptspec.trees import (
    Template,
    _sampling,
    dyspec,
    keep_first,
    limit_depth,
    sampled_chain,
    sampled_tree,
)
from adaptspec.trees.algebra import select_rows
from adaptspec.types import DraftTree
from tests.trees.sampled_specification import (
    ROOT_TOKEN,
    VOCAB,
    DraftModel,
    Script,
    draft_law,
    draft_outcomes,
    emitted_joint,
    multi_round,
    recursive_rejection,
    target_joint,
    total_variation,
    traversal,
)
from tests.trees.tree_strategies import check_scores_fall, property_test, token_paths


@pytest.fixture
def enumerated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draw asks the script instead of a generator."""
    monkeypatch.setattr(_sampling, "_pick_index", lambda weights, script: script.pick(weights))


def grown(budget: int, max_depth: int = 3, min_value: float = 0.0) -> object:
    def build(expand: DraftModel, rng: Script) -> DraftTree:
        return dyspec(expand, root=ROOT_TOKEN, budget=budget, max_depth=max_depth, rng=rng, min_value=min_value)

    return build


def shaped(template: Template | list[int], siblings: str, budget: int | None = None) -> object:
    def build(expand: DraftModel, rng: Script) -> DraftTree:
        return sampled_tree(expand, template, root=ROOT_TOKEN, siblings=siblings, rng=rng, budget=budget)

    return build


def chained(length: int, min_confidence: float = 0.0) -> object:
    def build(expand: DraftModel, rng: Script) -> DraftTree:
        return sampled_chain(expand, root=ROOT_TOKEN, length=length, rng=rng, min_confidence=min_confidence)

    return build


BUSHY = Template.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)], np.array([0.4, 0.2]))
UNEVEN = Template.from_paths([(0,), (1,), (0, 0), (1, 0), (1, 0, 0)], np.array([0.4, 0.2]))

# Lossless, exactly ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("enumerated")
@pytest.mark.parametrize("rule", [recursive_rejection, traversal])
@pytest.mark.parametrize(
    "build",
    [
        *(grown(budget) for budget in range(1, 6)),
        grown(5, max_depth=2),
        grown(4, max_depth=1),
        grown(5, min_value=0.15),
        shaped([2], "without-replacement"),
        shaped([3], "without-replacement"),
        shaped(BUSHY, "without-replacement"),
        shaped(BUSHY, "without-replacement", budget=4),
        shaped(UNEVEN, "without-replacement"),
        chained(3),
        chained(3, min_confidence=0.6),
        lambda expand, rng: keep_first(grown(5)(expand, rng), 4),
        lambda expand, rng: limit_depth(grown(5)(expand, rng), 1),
        lambda expand, rng: keep_first(shaped(BUSHY, "without-replacement")(expand, rng), 3),
    ],
)
def test_emitted_tokens_have_the_targets_joint_law(build: object, rule: object) -> None:
    assert total_variation(emitted_joint(build, rule, 4), target_joint(4)) == 0


@pytest.mark.usefixtures("enumerated")
@pytest.mark.parametrize(
    "build", [shaped([3], "iid"), shaped([2, 1], "iid"), shaped([2, 1, 1], "iid", budget=4), chained(3)]
)
def test_iid_siblings_under_the_multi_round_rule(build: object) -> None:
    assert total_variation(emitted_joint(build, multi_round, 4), target_joint(4)) == 0


# What the enumeration would catch ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("enumerated")
def test_keeping_q_after_a_rejection_is_noticed() -> None:
    assert total_variation(emitted_joint(grown(4), multi_round, 4), target_joint(4)) > Fraction(1, 1000)
    build = shaped([2], "without-replacement")
    assert total_variation(emitted_joint(build, multi_round, 2), target_joint(2)) > Fraction(1, 1000)


@pytest.mark.usefixtures("enumerated")
def test_pruning_a_sampled_tree_by_score_is_biased() -> None:
    """Why `truncate` refuses sampled trees: the best three of five drawn nodes, and the target's law is lost."""

    def build(expand: DraftModel, rng: Script) -> DraftTree:
        tree = grown(5)(expand, rng)
        return select_rows(tree, np.sort(np.argsort(-tree.scores, kind="stable")[:3]))

    assert total_variation(emitted_joint(build, recursive_rejection, 4), target_joint(4)) > Fraction(1, 1000)


@pytest.mark.usefixtures("enumerated")
def test_choosing_among_drawn_tokens_by_their_own_value_is_biased() -> None:
    """The slip DySpec must not make: draw two chains' worth first, keep the child only if its own q is large."""

    def build(expand: DraftModel, rng: Script) -> DraftTree:
        tree = sampled_tree(expand, [2], root=ROOT_TOKEN, siblings="without-replacement", rng=rng)
        keep = np.exp(tree.scores) >= 0.3
        return select_rows(tree, np.flatnonzero(keep))

    assert total_variation(emitted_joint(build, recursive_rejection, 2), target_joint(2)) > Fraction(1, 1000)


@pytest.mark.usefixtures("enumerated")
def test_dropping_the_draw_one_is_unsure_of_is_biased() -> None:
    """The slip `sampled_chain` must not make."""

    def build(expand: DraftModel, rng: Script) -> DraftTree:
        tree = chained(3)(expand, rng)
        unsure = np.exp(np.diff(tree.scores, prepend=0.0)) < 0.4
        return keep_first(tree, int(unsure.argmax()) if unsure.any() else 3)

    assert total_variation(emitted_joint(build, recursive_rejection, 4), target_joint(4)) > Fraction(1, 1000)


# Shape, rows and scores ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("enumerated")
@pytest.mark.parametrize(
    "build",
    [grown(5), grown(5, max_depth=2), shaped(UNEVEN, "without-replacement"), shaped([2, 1], "iid"), chained(3)],
)
def test_every_drawn_tree_keeps_its_promises(build: object) -> None:
    for tree, _ in draft_outcomes(build):
        tree.validate(vocab_size=VOCAB)
        check_scores_fall(tree)
        paths = token_paths(tree)
        for node in (-1, *range(len(tree))):
            row = tree.draft_rows[node + 1]
            has_children = bool((tree.parents == node).any())
            assert (row >= 0) == has_children
            if has_children:
                path = paths[node] if node >= 0 else ()
                assert tree.draft_probs[row].tolist() == [float(q) for q in draft_law(path)]


@pytest.mark.usefixtures("enumerated")
def test_dyspec_serves_the_most_valuable_slot() -> None:
    """Replays each drawn tree: every node sits in the slot of largest value among those open at its time."""
    for tree, _ in draft_outcomes(grown(5)):
        paths = token_paths(tree)
        slots: dict[int, Fraction] = {-1: Fraction(1)}
        drawn: dict[int, set[int]] = {}
        for node, (token, parent) in enumerate(zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True)):
            law = draft_law(paths[parent] if parent >= 0 else ())
            value = slots.pop(parent)
            assert all(value >= other for other in slots.values())
            left = 1 - sum(law[t] for t in drawn.setdefault(parent, set()))
            share = law[token] / left
            drawn[parent].add(token)
            assert np.exp(tree.scores[node]) == pytest.approx(float(value * share))
            if len(paths[node]) < 3:
                slots[node] = value * share
            if sum(law[t] for t in drawn[parent]) < 1:
                slots[parent] = value * (1 - share)


@pytest.mark.usefixtures("enumerated")
def test_smaller_budgets_are_prefixes_of_the_draw() -> None:
    def by_tokens(build: object) -> dict[tuple, Fraction]:
        law: dict[tuple, Fraction] = {}
        for tree, probability in draft_outcomes(build):
            key = (tuple(tree.token_ids.tolist()), tuple(tree.parents.tolist()), tuple(tree.draft_rows.tolist()))
            law[key] = law.get(key, Fraction(0)) + probability
        return law

    for budget in range(1, 4):
        assert by_tokens(grown(budget)) == by_tokens(lambda e, r, b=budget: keep_first(grown(4)(e, r), b))
        small = shaped(BUSHY, "without-replacement", budget=budget)
        whole = shaped(BUSHY, "without-replacement")
        assert by_tokens(small) == by_tokens(lambda e, r, b=budget, w=whole: keep_first(w(e, r), b))


@pytest.mark.usefixtures("enumerated")
def test_repeated_iid_siblings_stay_but_get_no_children() -> None:
    seen_repeat = False
    for tree, _ in draft_outcomes(shaped([2, 1], "iid")):
        first, second = tree.token_ids[:2].tolist()
        seen_repeat |= first == second
        assert np.count_nonzero(tree.parents == 0) == 1
        assert np.count_nonzero(tree.parents == 1) == (0 if first == second else 1)
    assert seen_repeat


@pytest.mark.usefixtures("enumerated")
def test_template_ranks_follow_the_order_of_drawing() -> None:
    """The first draw gets rank 0's subtree even if the template lists another child first."""
    template = Template(np.array([-1, -1, 1]), np.array([1, 0, 0]), np.zeros(3))
    for tree, _ in draft_outcomes(shaped(template, "without-replacement")):
        assert tree.parents.tolist() == [-1, -1, 0]


def test_confidence_stops_the_chain_before_the_draw() -> None:
    laws = np.array([[0.9, 0.1], [0.5, 0.5]])

    def expand(token_ids: np.ndarray, parents: np.ndarray) -> np.ndarray:
        return laws[[min(int(parents[0]) + 1, 1)]]

    rng = np.random.default_rng(0)
    assert len(sampled_chain(expand, root=0, length=4, rng=rng, min_confidence=0.8)) == 1
    assert len(sampled_chain(expand, root=0, length=4, rng=rng, min_confidence=0.95)) == 0
    assert len(sampled_chain(expand, root=0, length=4, rng=rng)) == 4
    assert len(sampled_chain(expand, root=0, length=0, rng=rng)) == 0
    assert len(sampled_tree(expand, [], root=0, siblings="iid", rng=rng)) == 0
    assert len(sampled_tree(expand, [2], root=0, siblings="iid", rng=rng, budget=0)) == 0
    assert len(dyspec(expand, root=0, budget=0, max_depth=2, rng=rng)) == 0
    assert len(dyspec(expand, root=0, budget=3, max_depth=0, rng=rng)) == 0


def test_an_exhausted_distribution_ends_the_siblings() -> None:
    def one_hot(token_ids: np.ndarray, parents: np.ndarray) -> np.ndarray:
        return np.tile([0.0, 1.0, 0.0], (len(token_ids), 1))

    rng = np.random.default_rng(0)
    tree = sampled_tree(one_hot, [3, 2], root=0, siblings="without-replacement", rng=rng)
    assert token_paths(tree) == [(1,), (1, 1)]
    assert token_paths(dyspec(one_hot, root=0, budget=9, max_depth=3, rng=rng)) == [(1,), (1, 1), (1, 1, 1)]


# The draws themselves ------------------------------------------------------------------------------------------------


def test_edges_of_the_unit_interval_never_hit_an_impossible_token() -> None:
    class Given:
        def __init__(self, *values: float) -> None:
            self.values = list(values)

        def random(self) -> float:
            return self.values.pop(0)

    weights = np.array([0.0, 0.25, 0.0, 0.75, 0.0])
    assert _sampling._pick_index(weights, Given(0.0)) == 1
    assert _sampling._pick_index(weights, Given(0.25)) == 3
    assert _sampling._pick_index(weights, Given(1.0, 0.125)) == 1  # rounded up to the very end: drawn again


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_draws_with_replacement_follow_q(dtype: type) -> None:
    rng = np.random.default_rng(7)
    weights = rng.gamma(0.5, size=600)  # more than two blocks
    weights[rng.random(600) < 0.9] = 0.0
    q = (weights / weights.sum()).astype(dtype)
    urn = _sampling.Urn(q)
    counts = np.bincount([urn.draw(rng, replace=True) for _ in range(10_000)], minlength=600)
    support = q > 0
    assert counts[~support].sum() == 0
    expected = q[support].astype(np.float64) / q[support].sum(dtype=np.float64) * counts.sum()
    assert chisquare(counts[support], expected).pvalue > 1e-3


def test_draws_without_replacement_follow_the_renormalised_law() -> None:
    rng = np.random.default_rng(11)
    q = np.zeros(600)
    tokens = [3, 255, 256, 599]  # both sides of block borders
    q[tokens] = [0.4, 0.3, 0.2, 0.1]
    trials = 6_000
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(trials):
        urn = _sampling.Urn(q)
        order = tuple(urn.draw(rng, replace=False) for _ in range(4))
        assert urn.exhausted()
        counts[order] += 1
    orders = list(permutations(tokens))
    expected = []
    for order in orders:
        probability, left = 1.0, 1.0
        for token in order:
            probability *= q[token] / left
            left -= q[token]
        expected.append(probability * trials)
    assert chisquare([counts[order] for order in orders], expected).pvalue > 1e-3
    assert q[tokens].tolist() == [0.4, 0.3, 0.2, 0.1]  # the row itself is not touched


@property_test
@given(st.integers(0, 2**32 - 1), st.integers(0, 20), st.integers(0, 4), st.sampled_from(["float32", "float64"]))
def test_real_generators(seed: int, budget: int, max_depth: int, dtype: str) -> None:
    laws = np.random.default_rng(seed).dirichlet(np.full(7, 0.2), size=50).astype(dtype)

    def expand(token_ids: np.ndarray, parents: np.ndarray) -> np.ndarray:
        return laws[(5 * token_ids + parents + 1) % 50]

    for build in (
        lambda rng: dyspec(expand, root=0, budget=budget, max_depth=max_depth, rng=rng),
        lambda rng: sampled_chain(expand, root=0, length=min(budget, max_depth), rng=rng),
        lambda rng: sampled_tree(
            expand, [3, 2, 1, 1][:max_depth], root=0, siblings="without-replacement", rng=rng, budget=budget
        ),
        lambda rng: sampled_tree(expand, [3, 2, 1, 1][:max_depth], root=0, siblings="iid", rng=rng, budget=budget),
    ):
        tree = build(np.random.default_rng(seed))
        tree.validate(vocab_size=7, budget=budget)
        check_scores_fall(tree)
        assert tree.depths().max(initial=0) <= max_depth
        again = build(np.random.default_rng(seed))
        assert again.state_bytes() == tree.state_bytes()
        if len(tree):
            assert tree.draft_probs.dtype == dtype
            assert tree.draft_probs.sum(axis=1) == pytest.approx(np.ones(len(tree.draft_probs)), abs=1e-5)
            rows = tree.draft_rows[tree.parents + 1]
            assert (tree.draft_probs[rows, tree.token_ids] > 0).all()


def test_refusals() -> None:
    rng = np.random.default_rng(0)

    def even(token_ids: np.ndarray, parents: np.ndarray) -> np.ndarray:
        return np.full((len(token_ids), 2), 0.5)

    with pytest.raises(ValueError, match="siblings must be one of iid, without-replacement, got 'deterministic'"):
        sampled_tree(even, [2], root=0, siblings="deterministic", rng=rng)
    with pytest.raises(ValueError, match="budget must be >= 0, got -1"):
        dyspec(even, root=0, budget=-1, max_depth=1, rng=rng)
    with pytest.raises(ValueError, match="min_value must be >= 0, got -1"):
        dyspec(even, root=0, budget=1, max_depth=1, rng=rng, min_value=-1.0)
    with pytest.raises(ValueError, match=r"min_confidence must be in \[0, 1\], got 2"):
        sampled_chain(even, root=0, length=1, rng=rng, min_confidence=2.0)
    for bad in ([[0.5, 0.4]], [[1.5, -0.5]], [[np.nan, 1.0]]):
        with pytest.raises(ValueError, match="probabilities that sum to 1"):
            sampled_chain(lambda ids, parents, bad=bad: np.array(bad), root=0, length=1, rng=rng)
    with pytest.raises(ValueError, match=r"q of shape \[1, V\], got \[2, 2\]"):
        dyspec(lambda ids, parents: np.full((2, 2), 0.5), root=0, budget=1, max_depth=1, rng=rng)
