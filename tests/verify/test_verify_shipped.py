"""The shipped rules, fed with chosen uniforms, do what the exact specification does."""

from __future__ import annotations

import random
from fractions import Fraction
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from verify_cases import as_rows, as_tree, cases, models
from verify_enumeration import Given, draft_law, outcomes
from verify_specification import RULES, k_seq_walk

from adaptspec.verify import block, make_verifier, rows, sampling
from adaptspec.verify.sampling import _k_seq_scale

CASES = [pytest.param(name, *case, id=f"{name} {case[3]} {case[0]}") for name in RULES for case in cases(name)]


class Injected:
    """Uniforms from a list; running out of them is an error."""

    def __init__(self, uniforms) -> None:
        self.uniforms = list(uniforms)

    def random(self) -> float:
        return self.uniforms.pop(0)


def shipped_scale(p, q, k):
    """The k-SEQ scale as the shipped code rounds it, so that thresholds can be compared."""
    return Fraction(_k_seq_scale(np.array(p, float), np.array(q, float), k))


SPECIFICATION = RULES | {"spectr": partial(k_seq_walk, scale=shipped_scale)}


def some_drafts(branching, model, siblings, count, seed=0):
    drafts = [draft for _, draft in islice(draft_law(branching, model, siblings), 400)]
    return random.Random(seed).sample(drafts, min(count, len(drafts)))


def disagreements(name, size, branching, siblings, *, drafts=3, convert=lambda x: x) -> list[str]:
    """Outcomes of the specification that the shipped rule misses, when every uniform lies in the middle or near either
    end of the interval that leads there. Also checks that as many uniforms are used."""
    found = []
    verify = make_verifier(name)
    for model in models(size):
        for draft in some_drafts(branching, model, siblings, drafts):
            tree, target_probs = as_tree(draft, model), convert(as_rows(draft, model))
            for outcome in outcomes(SPECIFICATION[name], draft, model):
                if min(b - a for a, b in outcome.intervals) < Fraction(1, 10**6):
                    continue  # Left over from rounding the k-SEQ scale.
                for place in (1e-9, 0.5, 1 - 1e-9):
                    rng = Injected(float(a + (b - a) * Fraction(place)) for a, b in outcome.intervals)
                    verdict = verify(tree, target_probs, rng)
                    got = tuple(verdict.path.tolist()), tuple(verdict.token_ids.tolist())
                    if got != (outcome.path, outcome.tokens) or rng.uniforms:
                        found.append(f"{model.name} {draft}: {outcome} at {place}, got {got}, left {rng.uniforms}")
    return found


@pytest.mark.parametrize(("name", "label", "size", "branching", "siblings"), CASES)
def test_every_branch_is_entered_exactly_in_its_interval(name, label, size, branching, siblings):
    assert disagreements(name, size, branching, siblings) == []


@pytest.mark.parametrize("name", RULES)
def test_random_uniforms_lead_to_the_same_verdict(name):
    generator = np.random.default_rng(3)
    verify = make_verifier(name)
    for _, size, branching, siblings in cases(name):
        for model in models(size, seed=1):
            for draft in some_drafts(branching, model, siblings, 2, seed=1):
                tree, target_probs = as_tree(draft, model), as_rows(draft, model)
                uniforms = generator.random(24).tolist()
                given = Given(uniforms)
                path, tokens = SPECIFICATION[name](draft, model, given)
                rng = Injected(uniforms)
                verdict = verify(tree, target_probs, rng)
                assert verdict.path.tolist() == list(path)
                assert verdict.token_ids.tolist() == list(tokens)
                assert len(uniforms) - len(rng.uniforms) == given.used


@pytest.mark.parametrize("name", RULES)
def test_tensor_arithmetic_equals_the_specification(name, monkeypatch):
    # The path that CUDA rows take, with the device check answered for CPU tensors.
    monkeypatch.setattr(rows, "_stays_on_device", lambda tensor: True)
    for _, size, branching, siblings in islice(cases(name), 0, None, 3):
        assert disagreements(name, size, branching, siblings, drafts=1, convert=torch.from_numpy) == []


# The same comparison must see the known mistakes in the shipped code.


def _uncapped_last(ratios):
    joint, largest, weights = 1.0, 1.0, [1.0]
    for ratio in ratios:
        joint *= ratio
        weights.append(joint / largest)
        largest = max(largest, joint)
    return weights


def _without_positive_part(p, q, token, *, weight=1.0):
    row = abs(p * weight - (q if q is not None else np.eye(len(p))[token]))
    return row, float(row.sum())


MISTAKES = {
    "uncapped hsd": (block, "_capped_joint_ratio", _uncapped_last, "hsd", "iid"),
    "fixed q in recursive": (sampling, "without", lambda q, token: q, "recursive", "without-replacement"),
    "no positive part": (rows, "excess", _without_positive_part, "token-wise", "iid"),
    "no positive part in block": (block, "excess", _without_positive_part, "block", "iid"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_comparison_sees_mistakes_in_shipped_code(mistake, monkeypatch):
    module, attribute, replacement, name, siblings = MISTAKES[mistake]
    affected = [case for case in cases(name) if case[3] == siblings]
    assert all(disagreements(name, *case[1:], drafts=1) == [] for case in affected)
    monkeypatch.setattr(module, attribute, replacement)
    assert any(disagreements(name, *case[1:], drafts=1) for case in affected)


def test_k_seq_scale_solves_its_equation():
    generator = np.random.default_rng(0)
    for k in (2, 3, 8):
        for _ in range(20):
            p, q = generator.dirichlet(np.full(50, 0.3)), generator.dirichlet(np.full(50, 0.3))
            rho = _k_seq_scale(p, q, k)
            b = np.minimum(p / rho, q).sum()
            assert 1.0 <= rho <= k
            assert 1 - (1 - b) ** k == pytest.approx(rho * b, abs=1e-9)
