"""Choosing rules by name, and the trees that a rule refuses."""

from __future__ import annotations

import numpy as np
import pytest

from adaptspec.types import ROOT, DraftTree
from adaptspec.verify import VERIFIERS, choose_verifier, make_verifier, verify_greedy

SAMPLING = [name for name, info in VERIFIERS.items() if info.reads == "probabilities"]


def tree_of(siblings: str, parents: list[int]) -> DraftTree:
    n = len(parents)
    drawn = (
        {}
        if siblings == "deterministic"
        else {"draft_probs": np.full((1, 4), 0.25), "draft_rows": np.zeros(n + 1, int)}
    )
    return DraftTree(np.arange(n), np.array(parents), np.zeros(n), siblings, **drawn)


FORKED, CHAIN = [ROOT, ROOT], [ROOT, 0]


@pytest.mark.parametrize(
    ("name", "siblings", "parents"),
    [
        ("multi-round", "without-replacement", FORKED),
        ("recursive", "iid", FORKED),
        ("spectr", "without-replacement", FORKED),
        ("spectr", "deterministic", FORKED),
        ("token-wise", "iid", FORKED),
        ("block", "without-replacement", FORKED),
        ("hsd", "deterministic", FORKED),
    ],
)
def test_trees_that_a_rule_is_not_right_for_are_refused(name, siblings, parents):
    tree, p = tree_of(siblings, parents), np.full((3, 4), 0.25)
    with pytest.raises(ValueError, match=f"verifier '{name}' (is right only for|takes only chains)"):
        make_verifier(name)(tree, p, np.random.default_rng(0))
    with pytest.raises(ValueError, match="For this tree: .*traversal"):
        choose_verifier(tree, False, name)


def test_drawn_trees_need_their_q():
    bare = DraftTree(np.array([0]), np.array([ROOT]), np.zeros(1), "iid")
    with pytest.raises(ValueError, match="needs draft_probs and draft_rows"):
        make_verifier("traversal")(bare, np.full((2, 4), 0.25), np.random.default_rng(0))
    missing = DraftTree(np.array([0]), np.array([ROOT]), np.zeros(1), "iid", np.full((1, 4), 0.25), np.array([-1, -1]))
    with pytest.raises(ValueError, match="draft_rows must name a row"):
        make_verifier("traversal")(missing, np.full((2, 4), 0.25), np.random.default_rng(0))
    narrow = DraftTree(np.array([0]), np.array([ROOT]), np.zeros(1), "iid", np.full((1, 3), 1 / 3), np.array([0, -1]))
    with pytest.raises(ValueError, match=r"draft_probs\[0\] must have shape \[4\], got \[3\]"):
        make_verifier("block")(narrow, np.full((2, 4), 0.25), np.random.default_rng(0))


@pytest.mark.parametrize("name", SAMPLING)
def test_broken_target_rows_are_named(name):
    p = np.full((3, 4), 0.25)
    p[0, 1] = np.nan
    with pytest.raises(ValueError, match=r"target_probs\[0\]"):
        make_verifier(name)(tree_of(VERIFIERS[name].siblings[0], CHAIN), p, np.random.default_rng(0))


def test_greedy_checks_the_shape_of_the_argmax():
    with pytest.raises(ValueError, match=r"target_argmax must have shape \[3\], got \[2\]"):
        verify_greedy(tree_of("iid", CHAIN), np.zeros(2, int))


@pytest.mark.parametrize(
    ("siblings", "parents", "auto"),
    [
        ("deterministic", FORKED, "deterministic"),
        ("deterministic", CHAIN, "deterministic"),
        ("deterministic", [], "deterministic"),
        ("iid", [], "deterministic"),
        ("iid", CHAIN, "block"),
        ("without-replacement", CHAIN, "block"),
        ("iid", FORKED, "traversal"),
        ("without-replacement", FORKED, "traversal"),
    ],
)
def test_automatic_choice(siblings, parents, auto):
    tree = tree_of(siblings, parents)
    assert choose_verifier(tree, False).name == auto
    assert choose_verifier(tree, True).name == "greedy"
    assert choose_verifier(tree, True, "typical").name == "greedy"


def test_choosing_by_name():
    tree = tree_of("iid", FORKED)
    assert choose_verifier(tree, False, "multi-round") is VERIFIERS["multi-round"]
    with pytest.raises(ValueError, match="right only at temperature 0"):
        choose_verifier(tree, False, "greedy")
    for choose in (lambda name: choose_verifier(tree, False, name), make_verifier):
        with pytest.raises(ValueError, match="unknown verifier 'blok'; did you mean 'block'"):
            choose("blok")


def test_options_belong_to_typical():
    with pytest.raises(ValueError, match="only the verifier 'typical' takes tau"):
        make_verifier("block", tau=0.3)
    for option in ({"tau": 0.0}, {"tau": 1.5}, {"alpha": 0.0}, {"alpha": float("nan")}):
        with pytest.raises(ValueError, match=f"{next(iter(option))} must be"):
            make_verifier("typical", **option)


def test_only_typical_is_lossy_and_says_so():
    assert set(VERIFIERS) == {
        *("greedy", "deterministic", "token-wise", "multi-round", "recursive"),
        *("block", "traversal", "spectr", "hsd", "typical"),
    }
    assert [name for name, info in VERIFIERS.items() if not info.lossless] == ["typical"]
    assert VERIFIERS["typical"].label == "typical (lossy)"
    assert VERIFIERS["block"].label == "block"
