"""`verify_tree` in Triton's interpreter against the shipped verifiers, and the verifiers that call it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from adaptspec.kernels import verify_tree
from adaptspec.kernels.backend import calls
from adaptspec.types import DraftTree, Verdict
from adaptspec.verify import verify_deterministic, verify_greedy, verify_token_wise
from tests.kernels.mutants import mutated
from tests.kernels.verify_tree_cases import BATCHES, RULES, assert_agrees, run

MODULE = "adaptspec.kernels.verify_tree.triton"

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about entries that are masked out


@pytest.fixture(autouse=True)
def uninitialised_memory_holds_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN, integers with their maximum
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", BATCHES)
def test_the_shipped_verifiers_decide_the_same(name: str, rule: str) -> None:
    batch = BATCHES[name](2)
    before = calls["verify_tree", "triton"]
    walk = run(verify_tree, batch, rule, backend="triton")
    assert calls["verify_tree", "triton"] == before + 1, "the fast path ran"
    assert_agrees(batch, walk, rule)
    if name != "bad rows":
        assert torch.equal(walk.buffer, run(verify_tree, batch, rule, backend="reference").buffer)


def test_rows_with_strides_and_memory_around() -> None:
    """Probabilities cut out of a wider tensor, whose other entries would change every sum; the vocabulary is 3 of 5."""
    batch = BATCHES["few tokens"](1)
    wide = torch.full((*batch.probs.shape[:2], 5), 7.0)
    wide[..., 1:4] = batch["probs"]
    walk = verify_tree.target_walk(
        batch["parents"], batch["token_ids"], wide[..., 1:4], batch["uniforms"], backend="triton"
    )
    same = verify_tree.target_walk(batch["parents"], batch["token_ids"], batch["probs"], batch["uniforms"])
    assert torch.equal(walk.buffer, same.buffer)


def drawn_chain(nodes: int, seed: int) -> tuple[DraftTree, torch.Tensor]:
    rng = np.random.default_rng(seed)
    q, p = rng.dirichlet(np.ones(4), nodes + 1), rng.dirichlet(np.ones(4), nodes + 1)
    tokens = [rng.choice(4, p=row) for row in q[:nodes]]
    tree = DraftTree.chain(
        tokens, siblings="iid", draft_probs=torch.from_numpy(q), draft_rows=np.append(np.arange(nodes)[::-1], -1)
    )
    return tree, torch.from_numpy(p)


class Rows:
    """Rows computed on demand, which can also be had all at once."""

    def __init__(self, probs: torch.Tensor) -> None:
        self.probs = probs

    def __getitem__(self, row: int) -> torch.Tensor:
        raise AssertionError("no row is asked for one by one")

    def tensor(self) -> torch.Tensor:
        return self.probs


@pytest.fixture
def kernels_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the kernel is chosen without being asked for."""
    monkeypatch.setenv("ADAPTSPEC_KERNELS", "triton")


def assert_same_verdict(found: Verdict, wanted: Verdict) -> None:
    for name in ("path", "token_ids"):
        array = getattr(found, name)
        assert array.dtype == np.int64 and array.tolist() == getattr(wanted, name).tolist()


@pytest.mark.parametrize("seed", range(3))
def test_verifiers_use_the_kernel_and_leave_the_generator_alike(kernels_asked_for: None, seed: int) -> None:
    tree, p = drawn_chain(3, seed)
    for verify, rows in ((verify_token_wise, p), (verify_deterministic, p), (verify_deterministic, Rows(p))):
        ours, theirs = np.random.default_rng(seed), np.random.default_rng(seed)
        before = calls["verify_tree", "triton"]
        found = verify(tree, rows, ours)
        assert calls["verify_tree", "triton"] == before + 1
        assert_same_verdict(found, verify(tree, p.numpy(), theirs))
        assert ours.random() == theirs.random()
    argmax = p.argmax(-1)
    assert_same_verdict(verify_greedy(tree, argmax), verify_greedy(tree, argmax.numpy()))
    assert calls["verify_tree", "triton"] == before + 2


def test_verifiers_take_trees_of_any_integer_type_and_chosen_chains(kernels_asked_for: None) -> None:
    p = drawn_chain(2, 7)[1]
    tree = DraftTree(np.array([3, 1], np.int32), np.array([-1, 0], np.int32), np.zeros(2))
    for verify in (verify_token_wise, verify_deterministic):
        found = verify(tree, p, np.random.default_rng(1))
        assert_same_verdict(found, verify(tree, p.numpy(), np.random.default_rng(1)))


def test_what_the_kernel_cannot_do_is_left_to_the_ordinary_rule(kernels_asked_for: None) -> None:
    """Uniforms that cannot be drawn ahead, q elsewhere, rows of q or tokens out of range."""
    tree, p = drawn_chain(2, 0)

    class Counting:
        def random(self) -> float:
            return 0.25

    elsewhere = DraftTree.chain(
        tree.token_ids, siblings="iid", draft_probs=tree.draft_probs.numpy(), draft_rows=tree.draft_rows
    )
    before = calls.total()
    verify_token_wise(tree, p, Counting())
    verify_deterministic(tree, p, Counting())
    verify_token_wise(elsewhere, p, np.random.default_rng(0))
    out_of_range = DraftTree.chain([9], siblings="iid", draft_probs=tree.draft_probs, draft_rows=np.array([0, -1]))
    with pytest.raises(IndexError):
        verify_token_wise(out_of_range, p, np.random.default_rng(0))
    no_row = DraftTree.chain([1], siblings="iid", draft_probs=tree.draft_probs, draft_rows=np.array([5, -1]))
    with pytest.raises(ValueError, match="draft_rows must name a row"):
        verify_token_wise(no_row, p, np.random.default_rng(0))
    assert calls.total() == before


def test_bad_rows_raise_and_are_named(kernels_asked_for: None) -> None:
    tree, p = drawn_chain(1, 0)
    logits = p.clone()
    logits[0] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for verify in (verify_token_wise, verify_deterministic):
        with pytest.raises(ValueError, match=r"target_probs\[0\] must hold .* got minimum 1.0 and sum 10.0"):
            verify(tree, logits, np.random.default_rng(0))
    tree.draft_probs[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"draft_probs\[0\] must hold .* sum nan"):
        verify_token_wise(tree, p, np.random.default_rng(0))


MUTANTS = {
    "sums without a tail mask": (
        "values = tl.load(probs + row * stride + token, mask=inside, other=0.0).to(tl.float64)\n    cell",
        "values = tl.load(probs + row * stride + token).to(tl.float64)\n    cell",
        "few tokens",
        "deterministic",
    ),
    "least entry of the tail": (
        'tl.where(inside, values, float("inf"))',
        "values - 1.0",
        "few tokens",
        "deterministic",
    ),
    "one depth for all rows": ("        depth += 1\n", "        depth = 1\n", "chain", "deterministic"),
    "uniform of the next depth": (
        "tl.minimum(depth, uniform_count - 1)",
        "tl.minimum(depth + 1, uniform_count - 1)",
        "few tokens",
        "deterministic",
    ),
    "block before is not taken off": (
        "threshold - tl.sum(tl.where(block < chosen, sums, 0.0), axis=0)",
        "threshold",
        "several blocks",
        "deterministic",
    ),
    "block itself is taken off": (
        "tl.where(block < chosen, sums",
        "tl.where(block <= chosen, sums",
        "several blocks",
        "deterministic",
    ),
    "not above": ("(running > threshold)", "(running >= threshold)", "uniforms on borders", "deterministic"),
    "last token, with weight or without": (
        "last = tl.max(tl.where(weights > 0.0, index, 0), axis=0)",
        "last = SIZE - 1",
        "nothing left",
        "deterministic",
    ),
    "row of the parent": (
        "want = tl.load(wanted + row + node + 1)",
        "want = tl.load(wanted + row + node)",
        "chain",
        "greedy",
    ),
    "any child": ("(parent == node) & (token == want)", "parent == node", "few tokens", "greedy"),
    "any parent": ("(parent == node) & (token == want)", "(parent >= node) & (token == want)", "chain", "greedy"),
    "bonus left out": ("tokens, mask=slot <= nodes", "tokens, mask=slot < nodes", "no nodes", "greedy"),
    "bad rows pass": ("bad = tl.where(good > 0, bad, node + 1)", "bad = bad", "bad rows", "deterministic"),
    "target not normalised": (
        "mask=node, other=0.0).to(tl.float64) / p_total",
        "mask=node, other=0.0).to(tl.float64)",
        "sums that are not 1",
        "token-wise",
    ),
    "draft not normalised": (
        "mask=node, other=0.0).to(tl.float64) / q_total",
        "mask=node, other=0.0).to(tl.float64)",
        "sums that are not 1",
        "token-wise",
    ),
    "residual not normalised": (
        "mask=inside & rejected, other=0.0).to(tl.float64) / q_total",
        "mask=inside & rejected, other=0.0).to(tl.float64) * 2.0",
        "sums that are not 1",
        "token-wise",
    ),
    "residual without the positive part": ("tl.maximum(p - q, 0.0)", "tl.abs(p - q)", "few tokens", "token-wise"),
    "residual is the target": ("tl.maximum(p - q, 0.0)", "p", "star", "token-wise"),
    "rejected token stays": ("tl.where(rejected & (token == drafted), 0.0, p)", "p", "chosen", "token-wise"),
    "threshold of the whole for the rest": (
        "threshold = u * tl.sum(sums, axis=0)",
        "threshold = u",
        "few tokens",
        "token-wise",
    ),
    "same uniform for test and token": ("slot == stop + rejected, u", "slot == stop, u", "disjoint", "token-wise"),
    "uniforms miscounted": ("stop + 1 + rejected", "stop + 1", "few tokens", "token-wise"),
    "tokens never drawn are tested": ("node & (q_token > 0.0) & (u", "node & (u", "zeros", "token-wise"),
    "tokens never drawn count as rejected": (
        "at_stop & node & (q_token > 0.0)",
        "at_stop & node",
        "disjoint",
        "token-wise",
    ),
    "nothing left": ("if tl.sum(left, axis=0) <= 0.0:", "if tl.sum(left, axis=0) < 0.0:", "nothing left", "token-wise"),
    "bad draft rows pass": (
        "tl.where(bad_p | bad_q, slot, SLOTS)",
        "tl.where(bad_p, slot, SLOTS)",
        "bad rows",
        "token-wise",
    ),
    "bad rows behind the stop": ("is_bad = first_bad <= stop", "is_bad = first_bad < SLOTS", "bad rows", "token-wise"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name: str) -> None:
    old, new, regime, rule = MUTANTS[name]
    batch = BATCHES[regime](2)
    with mutated(MODULE, old, new) as mutant, pytest.raises(AssertionError):
        assert_agrees(batch, run(mutant, batch, rule), rule)
