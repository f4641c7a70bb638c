"""The rules as specified are lossless: exact enumeration over all drafts and all outcomes, in fractions."""

from __future__ import annotations

from fractions import Fraction
from functools import cache, partial

import pytest
from verify_cases import CHAINS, TREES, by_depth, cases, models, picked
from verify_enumeration import Law, Model, emitted_law, expected_length, total_variation
from verify_specification import (
    RULES,
    block_rule,
    greedy_walk,
    hierarchical_rule,
    k_seq_walk,
    rejection_walk,
    traversal_rule,
)

CASES = {f"{name} {siblings} {label}": (name, *rest) for name in RULES for label, *rest, siblings in cases(name)}
SIBLINGS_OF = {key: key.removeprefix(name).split()[0] for key, (name, *_) in CASES.items()}


@cache
def laws(case: str) -> list[tuple[Model, Law]]:
    name, size, branching = CASES[case]
    return [(model, emitted_law(RULES[name], branching, model, SIBLINGS_OF[case])) for model in models(size)]


@pytest.mark.parametrize("case", CASES)
def test_joint_law_of_emitted_tokens_is_the_targets(case):
    for model, law in laws(case):
        assert total_variation(law, model) == 0, model.name


def test_greedy_is_exact_for_a_one_hot_target():
    for model in models(3):
        best = Model(
            "argmax", 3, lambda s, m=model: tuple(Fraction(x == m.p(s).index(max(m.p(s)))) for x in range(3)), model.q
        )
        assert total_variation(emitted_law(greedy_walk, picked(2, 2, 1, size=3), model, "deterministic"), best) == 0


MISTAKES = {
    "hsd with the last position uncapped": (partial(hierarchical_rule, cap_last=False), by_depth(1, 1, 1), "iid"),
    "recursive with fixed q": (rejection_walk, by_depth(3), "without-replacement"),
    "traversal with fixed q": (partial(traversal_rule, remove=False), by_depth(3), "without-replacement"),
    "token-wise without positive part": (partial(rejection_walk, positive_part=False), by_depth(1), "iid"),
    "multi-round without positive part": (partial(rejection_walk, positive_part=False), by_depth(2), "iid"),
    "block without positive part": (partial(block_rule, positive_part=False), by_depth(1, 1), "iid"),
    "traversal without positive part": (partial(traversal_rule, positive_part=False), by_depth(2), "iid"),
    "k-SEQ with an unscaled residual": (partial(k_seq_walk, share=False), by_depth(2), "iid"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_enumeration_sees_the_known_mistakes(mistake):
    rule, branching, siblings = MISTAKES[mistake]
    distances = [
        total_variation(emitted_law(rule, branching, models(3, seed)[0], siblings), models(3, seed)[0])
        for seed in range(4)
    ]
    assert max(distances) > Fraction(1, 100)


@pytest.mark.parametrize("name", [name for name in RULES if name != "deterministic"])
def test_enumeration_sees_a_reused_uniform(name):
    _, size, branching, siblings = next(cases(name))
    distances = [
        total_variation(emitted_law(RULES[name], branching, model, siblings, reuse=True), model)
        for model in models(size)
        if model.name in ("generic", "peaked")
    ]
    assert max(distances) > Fraction(1, 100)


def test_target_walk_needs_a_uniform_per_token():
    model = models(3)[0]
    law = emitted_law(RULES["deterministic"], picked(2, 2, size=3), model, "deterministic", reuse=True)
    assert total_variation(law, model) > Fraction(1, 100)


# What "auto" rests on ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", CHAINS)
def test_block_accepts_at_least_token_wise_and_equals_hsd(label):
    gained = Fraction(0)
    for (model, block), (_, hsd), (_, token_wise) in zip(
        laws(f"block iid {label}"), laws(f"hsd iid {label}"), laws(f"token-wise iid {label}"), strict=True
    ):
        assert block == hsd
        assert expected_length(block) >= expected_length(token_wise), model.name
        gained += expected_length(block) - expected_length(token_wise)
    assert gained > 0 or label == "1"


@pytest.mark.parametrize("label", TREES)
@pytest.mark.parametrize(("walk", "siblings"), [("multi-round", "iid"), ("recursive", "without-replacement")])
def test_traversal_accepts_at_least_the_walks(label, walk, siblings):
    for (model, traversal), (_, other) in zip(
        laws(f"traversal {siblings} {label}"), laws(f"{walk} {siblings} {label}"), strict=True
    ):
        assert expected_length(traversal) >= expected_length(other), model.name
