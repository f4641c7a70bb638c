"""`verify_tree`: the reference gives what the shipped verifiers give, what is refused, and its kernels through the
interpreter."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from adaptspec.kernels import verify_tree
from adaptspec.kernels.backend import calls
from adaptspec.types import DraftTree
from adaptspec.verify import device, verify_deterministic, verify_greedy, verify_token_wise
from tests.kernels.mutants import mutated
from tests.kernels.strides import has_strides, narrow_strides
from tests.kernels.verify_tree_cases import BATCHES, RULES, assert_agrees, run

MODULE = "adaptspec.kernels.verify_tree.reference"


def test_kernels_in_the_interpreter(run_interpreted: Callable[..., None]) -> None:
    run_interpreted("test_verify_tree.py", at_least=94)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", BATCHES)
def test_the_shipped_verifiers_decide_the_same(name: str, rule: str) -> None:
    before = calls["verify_tree", "reference"]
    batch = BATCHES[name](40)
    assert_agrees(batch, run(verify_tree, batch, rule), rule)
    assert calls["verify_tree", "reference"] == before + 1


def test_walks_that_go_on_and_walks_that_stop_are_among_the_cases() -> None:
    few, bad = BATCHES["few tokens"](40), BATCHES["bad rows"](40)
    for rule in RULES:
        assert len(set(run(verify_tree, few, rule).accepted.tolist())) >= 3, rule
    for rule in ("deterministic", "token-wise"):
        walk = run(verify_tree, bad, rule)
        assert (walk.bad_target_row > 0).any()
        assert ((walk.bad_draft_row >= 0).any()) == (rule == "token-wise")


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (
            lambda: verify_tree.greedy_walk(torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 2).long(), ONE),
            r"parents must be torch.int64 \[1, 2\] on cpu, got torch.int32 \[1, 2\] on cpu",
        ),
        (
            lambda: verify_tree.greedy_walk(TWO, TWO, TWO),
            r"target_argmax must be torch.int64 \[1, 3\] on cpu, got torch.int64 \[1, 2\]",
        ),
        (
            lambda: verify_tree.greedy_walk(torch.zeros(1, 1024).long(), torch.zeros(1, 1024).long(), ONE),
            r"N <= 1023, got \[1, 1024\]",
        ),
        (lambda: verify_tree.target_walk(TWO, TWO, TWO, ONE), r"target_probs must be .* \[1, 3, 'any'\] on cpu"),
        (
            lambda: verify_tree.target_walk(TWO, TWO, torch.zeros(1, 3, 4).long(), torch.zeros(1, 3).double()),
            "target_probs must hold floating-point numbers, got torch.int64",
        ),
        (
            lambda: verify_tree.target_walk(TWO, TWO, torch.zeros(1, 3, 4), torch.zeros(1, 3)),
            r"uniforms must be torch.float64 \[1, 'any'\] on cpu, got torch.float32 \[1, 3\]",
        ),
        (
            lambda: verify_tree.chain_rejection(
                TWO, ONE[0], torch.zeros(1, 3, 4), torch.zeros(2, 4), None, torch.zeros(1, 3).double()
            ),
            "draft_probs and draft_rows belong together",
        ),
        (
            lambda: verify_tree.chain_rejection(
                TWO, ONE[0], torch.zeros(1, 3, 4), torch.zeros(2, 5), TWO, torch.zeros(1, 3).double()
            ),
            r"draft_probs must be floating point \['any', 4\] on cpu, got torch.float32 \[2, 5\]",
        ),
    ],
)
def test_what_is_refused(call: Callable[[], object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        call()


ONE, TWO = torch.zeros(1, 1).long(), torch.zeros(1, 2).long()


def test_triton_is_not_there_on_a_cpu() -> None:
    with pytest.raises(RuntimeError, match="triton was asked for verify_tree on cpu"):
        verify_tree.greedy_walk(ONE, ONE, TWO, backend="triton")


def test_on_a_cpu_the_ordinary_rules_run() -> None:
    tree, probs, rng = DraftTree.chain([1, 2]), torch.full((3, 4), 0.25), np.random.default_rng(0)
    before = calls.total()
    assert device.greedy_walk(tree, np.array([1, 2, 3])) is None
    assert device.greedy_walk(tree, torch.tensor([1, 2, 3])) is None
    assert device.target_walk(tree, probs, rng) is device.chain_rejection(tree, probs, rng) is None
    verify_greedy(tree, np.array([1, 2, 3]))
    verify_deterministic(tree, probs, rng)
    verify_token_wise(tree, probs, rng)
    assert calls.total() == before


def test_asking_for_triton_on_a_cpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAPTSPEC_KERNELS", "triton")
    with pytest.raises(RuntimeError, match="triton was asked for verify_tree on cpu"):
        verify_deterministic(DraftTree.chain([1]), torch.full((2, 4), 0.25), np.random.default_rng(0))


@pytest.mark.parametrize(
    ("old", "new", "regime", "rule"),
    [
        ("return path, [*tokens, wanted[node + 1]]", "return path, [*tokens, wanted[node]]", "few tokens", "greedy"),
        ("and token == wanted[node + 1]", "and token == wanted[node]", "few tokens", "greedy"),
        ("depth, node = depth + 1, parent_of[node]", "depth, node = 1, parent_of[node]", "chain", "deterministic"),
        ("p = p / total", "p = p * 1.0", "sums that are not 1", "token-wise"),
        ("(p - q).clamp_(min=0.0)", "(p - q).abs()", "few tokens", "token-wise"),
        ("p = rest if float(rest.sum()) > 0.0 else p", "p = p", "few tokens", "token-wise"),
        ("p = rest if float(rest.sum()) > 0.0 else p", "p = rest", "nothing left", "token-wise"),
        ("if q[token] > 0.0:", "if True:", "zeros", "token-wise"),
        ("q[token] = 1.0", "q[token] = 0.5", "chosen", "token-wise"),
        ("minimum >= 0.0 and", "", "bad rows", "deterministic"),
    ],
)
def test_mutants_fail(old: str, new: str, regime: str, rule: str) -> None:
    batch = BATCHES[regime](40)
    with mutated(MODULE, old, new) as mutant, pytest.raises((AssertionError, IndexError)):
        assert_agrees(batch, run(mutant, batch, rule), rule)


def test_strides_are_multiplied_in_64_bits() -> None:
    """A batch of trees has more than 2^31 probabilities soon."""
    from adaptspec.kernels.verify_tree import triton as kernels

    strided = [each for each in kernels.SPECIALISATIONS if has_strides(each)]
    assert len(strided) == 5
    assert [line for each in strided for line in narrow_strides(each)] == []
    old, new = "row = tl.program_id(0).to(tl.int64)\n    token", "row = tl.program_id(0)\n    token"
    with mutated("adaptspec.kernels.verify_tree.triton", old, new) as mutant:
        assert narrow_strides(mutant.SPECIALISATIONS[0])
