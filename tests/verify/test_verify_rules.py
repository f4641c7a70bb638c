"""What the rules promise beyond their law: well-formed verdicts, lazy rows, refusals, edges, seeds, speed."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptspec.types import ROOT, SIBLINGS, DraftTree
from adaptspec.verify import VERIFIERS, make_verifier, verify_deterministic, verify_greedy

LAST = np.nextafter(1.0, 0.0)
EXTREMES = [0.0, LAST, None]
SAMPLING = [name for name, info in VERIFIERS.items() if info.reads == "probabilities"]


class Always:
    def __init__(self, u: float) -> None:
        self.u = u

    def random(self) -> float:
        return self.u


class Recording:
    """Target rows that note who was read."""

    def __init__(self, values) -> None:
        self.values, self.read = values, []

    def __getitem__(self, row):
        self.read.append(row)
        return self.values[row]


def random_tree(rng: np.random.Generator, siblings: str, *, size: int, nodes: int, chain: bool = False) -> DraftTree:
    """A tree of random shape whose tokens are honest draws; q has zeros, as after top-p or in a reduced vocabulary."""
    q = rng.dirichlet(np.full(size, 0.5), size=nodes + 1) * (rng.random((nodes + 1, size)) < 0.7)
    q[:, 0] += 0.1
    q /= q.sum(axis=1, keepdims=True)
    parents, tokens, left = [], [], q.copy()
    for i in range(nodes):
        parent = i - 1 if chain else int(rng.integers(-1, i))
        law = left[parent + 1]
        if siblings == "deterministic":  # Any token not yet taken will do.
            taken = [t for t, other in zip(tokens, parents, strict=True) if other == parent]
            law = law + 1e-3 * ~np.isin(np.arange(size), taken)
        if law.sum() <= 0:
            break
        token = int(rng.choice(size, p=law / law.sum()))
        parents.append(parent)
        tokens.append(token)
        if siblings != "iid":
            left[parent + 1, token] = 0.0
    n = len(tokens)
    drawn = {} if siblings == "deterministic" else {"draft_probs": q, "draft_rows": np.arange(n + 1)}
    tree = DraftTree(np.array(tokens, int), np.array(parents, int), np.zeros(n), siblings, **drawn)
    tree.validate(vocab_size=size)
    return tree


def random_rows(rng: np.random.Generator, n: int, size: int) -> np.ndarray:
    p = rng.dirichlet(np.full(size, 0.5), size=n) * (rng.random((n, size)) < 0.7)
    p[np.arange(n), rng.integers(0, size, n)] += 0.1
    return p / p.sum(axis=1, keepdims=True)


def check_verdict(tree: DraftTree, p, verdict) -> None:
    path, tokens = verdict.path.tolist(), verdict.token_ids.tolist()
    assert verdict.path.dtype == verdict.token_ids.dtype == np.int64
    assert path == sorted(set(path))
    assert [tree.parents[i] for i in path] == [ROOT, *path][: len(path)]
    assert tokens[:-1] == tree.token_ids[verdict.path].tolist()
    assert len(tokens) == len(path) + 1 == verdict.accepted_length
    for row, token in zip([0, *(i + 1 for i in path)], tokens, strict=True):
        assert p[row][token] > 0


@given(
    st.integers(0, 2**32),
    st.sampled_from(SIBLINGS),
    st.booleans(),
    st.integers(0, 9),
    st.sampled_from([0.0, LAST, None]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_verdicts_are_paths_of_possible_tokens(seed, siblings, chain, nodes, extreme):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 9))
    tree = random_tree(rng, siblings, size=size, nodes=nodes, chain=chain)
    p = random_rows(rng, len(tree) + 1, size)
    for name in SAMPLING:
        if VERIFIERS[name].objection(tree) is not None:
            continue
        rows = Recording(p)
        verdict = make_verifier(name)(tree, rows, rng if extreme is None else Always(extreme))
        check_verdict(tree, p, verdict)
        assert len(rows.read) == len(set(rows.read)), f"{name} read a row twice"
        tensors = tree
        if tree.draft_probs is not None:
            tensors = DraftTree(
                tree.token_ids, tree.parents, tree.scores, siblings, torch.from_numpy(tree.draft_probs), tree.draft_rows
            )
        verdicts = [
            make_verifier(name)(t, rows, np.random.default_rng(seed))
            for t, rows in ((tree, p), (tensors, torch.from_numpy(p)))
        ]
        assert verdicts[0].token_ids.tolist() == verdicts[1].token_ids.tolist()


@given(st.integers(0, 2**32), st.sampled_from(SIBLINGS), st.integers(0, 12))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_greedy_follows_the_argmax(seed, siblings, nodes):
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, siblings, size=3, nodes=nodes)
    argmax = rng.integers(0, 3, len(tree) + 1)
    verdict = verify_greedy(tree, argmax)
    check_verdict(tree, np.eye(3)[argmax], verdict)
    last = verdict.path[-1] if len(verdict.path) else ROOT
    assert not ((tree.parents == last) & (tree.token_ids == verdict.bonus)).any()


@given(st.integers(0, 2**32), st.sampled_from(SIBLINGS), st.booleans())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_lossless_rule_is_greedy_for_a_one_hot_target(seed, siblings, chain):
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, siblings, size=4, nodes=7, chain=chain)
    argmax = rng.integers(0, 4, len(tree) + 1)
    wanted = verify_greedy(tree, argmax).token_ids.tolist()
    for name in SAMPLING:
        info = VERIFIERS[name]
        if info.lossless and info.objection(tree) is None:
            assert info.verify(tree, np.eye(4)[argmax], rng).token_ids.tolist() == wanted, name


def test_the_walks_read_only_the_rows_on_the_path():
    tree = DraftTree(np.array([1, 2, 3, 1]), np.array([ROOT, ROOT, 0, 1]), np.zeros(4))
    p = np.full((5, 4), 0.0)
    p[[0, 1, 3], [1, 3, 0]] = 1.0
    p[[2, 4]] = np.nan
    for name in ("deterministic", "multi-round", "recursive", "traversal", "typical"):
        rows = Recording(p)
        assert make_verifier(name)(tree, rows, Always(0.5)).token_ids.tolist() == [1, 3, 0]
        assert rows.read == [0, 1, 3]


# Seeds ---------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_seeded_run_of_the_target_walk_emits_the_same_tokens_whatever_is_drafted(seed):
    size, wanted = 5, 30
    p = random_rows(np.random.default_rng(seed), size, size)  # The next token's law depends on the last token.

    def run(drafting: np.random.Generator | None) -> list[int]:
        rng, tokens = np.random.default_rng(seed), [0]
        while len(tokens) <= wanted:
            tree = DraftTree.empty()
            if drafting is not None:
                siblings = SIBLINGS[drafting.integers(3)]
                tree = random_tree(drafting, siblings, size=size, nodes=int(drafting.integers(0, 8)))
            rows = p[np.concatenate([[tokens[-1]], tree.token_ids])]
            tokens += verify_deterministic(tree, rows, rng).token_ids.tolist()
        return tokens[: wanted + 1]

    alone = run(None)
    assert run(np.random.default_rng(seed + 1)) == run(np.random.default_rng(seed + 2)) == alone


@pytest.mark.parametrize("name", SAMPLING)
def test_the_empty_tree_costs_one_uniform_and_one_row(name):
    p = np.array([[0.2, 0.5, 0.3]])
    rng, reference, rows = np.random.default_rng(5), np.random.default_rng(5), Recording(p)
    verdict = make_verifier(name)(DraftTree.empty(), rows, rng)
    assert verdict.path.tolist() == []
    assert (
        verdict.token_ids.tolist() == make_verifier("deterministic")(DraftTree.empty(), p, reference).token_ids.tolist()
    )
    assert rng.random() == reference.random()
    assert rows.read == [0]


# Edges ---------------------------------------------------------------------------------------------------------------

DRAWN = [(name, siblings) for name in SAMPLING for siblings in VERIFIERS[name].siblings if siblings != "deterministic"]
LOSSLESS_Q = [(n, s) for n, s in DRAWN if VERIFIERS[n].lossless and n != "deterministic"]


def drawn_chain(tokens, q, siblings) -> DraftTree:
    rows = np.append(np.arange(len(tokens)), -1)
    return DraftTree.chain(tokens, siblings=siblings, draft_probs=np.asarray(q), draft_rows=rows)


@pytest.mark.parametrize(("name", "siblings"), LOSSLESS_Q)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_distributions_accept_everything(name, siblings, dtype):
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(50), size=4).astype(dtype)
    tree = drawn_chain([3, 1, 4], p[:3], siblings)
    for u in (0.0, 0.5, LAST):
        assert make_verifier(name)(tree, p, Always(u)).path.tolist() == [0, 1, 2]
    assert make_verifier(name)(tree, torch.from_numpy(p), Always(LAST)).path.tolist() == [0, 1, 2]


@pytest.mark.parametrize(("name", "siblings"), LOSSLESS_Q)
def test_nearly_equal_distributions_stay_possible(name, siblings):
    # q is p after a round trip through float32: every residual is made of rounding errors.
    rng = np.random.default_rng(0)
    for _ in range(50):
        p = random_rows(rng, 3, 6)
        q = p[:2].astype(np.float32)
        tree = drawn_chain([int(rng.choice(6, p=row)) for row in p[:2]], q, siblings)
        for u in (0.0, 0.5, LAST):
            check_verdict(tree, p, make_verifier(name)(tree, p, Always(u)))


@pytest.mark.parametrize(("name", "siblings"), LOSSLESS_Q)
def test_disjoint_supports_accept_nothing_and_sample_from_the_target(name, siblings):
    p = np.array([[0.5, 0.5, 0.0, 0.0]] * 3)
    tree = drawn_chain([2, 3], [[0.0, 0.0, 0.5, 0.5]] * 2, siblings)
    assert make_verifier(name)(tree, p, Always(0.0)).token_ids.tolist() == [0]
    assert make_verifier(name)(tree, p, Always(LAST)).token_ids.tolist() == [1]


@pytest.mark.parametrize(("name", "siblings"), LOSSLESS_Q)
def test_tokens_outside_a_reduced_vocabulary_come_from_the_residual(name, siblings):
    p, q = np.array([[0.25, 0.25, 0.5]] * 2), [[0.5, 0.5, 0.0]]
    tree = drawn_chain([0], q, siblings)
    assert make_verifier(name)(tree, p, Always(0.75)).token_ids.tolist() == [2]


@pytest.mark.parametrize(("name", "siblings"), LOSSLESS_Q)
def test_nodes_that_q_cannot_have_drawn_are_ignored(name, siblings):
    # Half-precision q can underflow to 0 at a token that was drawn; p = 1 must not let it through, nor divide by 0.
    tree = drawn_chain([2, 0], [[0.5, 0.5, 0.0]] * 2, siblings)
    for u in (0.0, 0.3, LAST):
        verdict = make_verifier(name)(tree, np.array([[0.2, 0.2, 0.6]] * 3), Always(u))
        assert verdict.path.tolist() == []
        assert verdict.bonus == (0 if u == 0.0 else 1 if u == 0.3 else 2)


def test_without_replacement_survives_an_exhausted_q():
    tree = DraftTree(
        np.array([0, 1, 2]),
        np.full(3, ROOT),
        np.zeros(3),
        "without-replacement",
        np.array([[0.5, 0.5, 0.0]]),
        np.array([0, -1, -1, -1]),
    )
    p = np.array([[0.0, 0.0, 1.0]] * 4)
    for name in ("recursive", "traversal"):
        verdict = make_verifier(name)(tree, p, Always(0.0))
        assert verdict.path.tolist() == []
        assert verdict.bonus == 2


def test_typical_takes_the_deepest_then_the_likeliest_path():
    tree = DraftTree(np.array([0, 1, 0, 1, 0]), np.array([ROOT, ROOT, 0, 1, 1]), np.zeros(5))
    p = np.array([[0.5, 0.5], [0.5, 0.5], [0.3, 0.7], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    typical = make_verifier("typical")
    assert typical(tree, p, Always(0.0)).path.tolist() == [1, 3]
    strict = make_verifier("typical", tau=1.0, alpha=1.05)  # Threshold 0.525 at even odds.
    assert strict(tree, p, Always(0.0)).path.tolist() == []


def test_typical_threshold_is_the_smaller_of_the_two():
    p = np.array([[0.9, 0.1], [1.0, 0.0]])
    h = -(0.9 * np.log(0.9) + 0.1 * np.log(0.1))
    tree = DraftTree.chain([1])
    for alpha, accepted in ((0.1 / np.exp(-h) * 0.99, 1), (0.1 / np.exp(-h) * 1.01, 0)):
        assert len(make_verifier("typical", tau=1.0, alpha=alpha)(tree, p, Always(0.0)).path) == accepted
    assert len(make_verifier("typical", tau=0.09, alpha=100.0)(tree, p, Always(0.0)).path) == 1
    # The defaults, in the right order: tau 0.3 caps, alpha 0.09 scales.
    assert len(make_verifier("typical")(tree, p, Always(0.0)).path) == 1
    assert len(make_verifier("typical", tau=0.09, alpha=0.3)(tree, p, Always(0.0)).path) == 1
    assert (
        len(make_verifier("typical")(DraftTree.chain([1]), np.array([[0.95, 0.05], [1.0, 0.0]]), Always(0.0)).path) == 0
    )


# Speed ---------------------------------------------------------------------------------------------------------------


def test_greedy_takes_well_under_100_microseconds_for_64_nodes():
    tree, argmax = DraftTree.chain(np.arange(64)), np.arange(65)

    def once() -> float:
        start = time.perf_counter()
        verify_greedy(tree, argmax)
        return time.perf_counter() - start

    assert min(once() for _ in range(300)) < 100e-6
