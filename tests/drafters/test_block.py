"""DFlash, DDTree, TreeFlash and TAPS on the tiny Llama: context, trees, and what they are made of."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adaptspec.drafters import make_drafter
from adaptspec.drafters.block import BackboneConfig, BlockContext
from adaptspec.drafters.block.scorer import edge_log_probs
from adaptspec.drafters.block.weights import load_backbone, save_backbone, save_small
from adaptspec.drafters.cell_weights import target_fingerprint
from adaptspec.drafters.treeflash import TreeFlash
from adaptspec.pretrained import read_card
from adaptspec.target.hf import HFTarget
from adaptspec.trees import lattice_trie
from adaptspec.types import DraftTree, Sampling
from adaptspec.vocab import count_tokens, save_frequencies
from tests.contracts.cases import BLOCK_DRAFTERS
from tests.drafters.block_cases import BLOCK, tiny_backbone, tiny_block
from tests.drafters.cell_cases import Request, same_proposal, tiny_llama
from tests.trees.tree_strategies import token_paths

TEXT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


def states(count: int, *, seed: int = 0) -> dict[int, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {tap: torch.randn((count, 32), generator=draw) for tap in (1, 2, 4)}


def drafted(backbone: Any, parts: list[int], *, window: int | None = None, embed: Any = None) -> torch.Tensor:
    """A block behind `sum(parts)` positions that came in parts."""
    context = BlockContext(backbone, embed or torch.nn.Embedding(64, 32, _weight=torch.eye(64, 32)), window=window)
    features, begin = states(sum(parts)), 0
    for count in parts:
        context.push({tap: rows[begin : begin + count] for tap, rows in features.items()}, count=count)
        if count % 2:
            context.settle()
        begin += count
    context.settle()
    assert context.lag == 0 and context.rows == sum(parts)
    first = context.draft(7)
    assert torch.equal(first, context.draft(7)), "a block left something behind"
    return first


def by_definition(backbone: Any, count: int, *, window: int | None = None) -> torch.Tensor:
    """The un-normed block in one pass over everything, with no cache, head by head."""
    config = backbone.config
    features = states(count)
    if backbone.tap_norms is not None:
        features = {tap: norm(features[tap]) for tap, norm in zip(config.taps, backbone.tap_norms, strict=True)}
    context = backbone.hidden_norm(torch.cat([features[tap] for tap in config.taps], dim=1) @ backbone.fc.weight.T)
    embeddings = torch.eye(64, 32)
    masks = (
        embeddings[config.mask_token_id].expand(BLOCK - 1, -1)
        if backbone.mask_embeddings is None
        else backbone.mask_embeddings.weight
    )
    x = torch.cat([embeddings[7:8], masks])
    places = torch.arange(count + BLOCK)
    turns = places[:, None] * 10_000.0 ** -(torch.arange(0, 8, 2) / 8)

    def turned(v: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        a, b = v[:, :4], v[:, 4:]
        return torch.cat([a * at.cos() - b * at.sin(), b * at.cos() + a * at.sin()], dim=1)

    for layer in backbone.layers:
        attention, normed = layer.self_attn, layer.input_layernorm(x)
        both = torch.cat([context, normed])
        outputs = []
        for head in range(4):
            rows, shared = slice(8 * head, 8 * head + 8), slice(8 * (head // 2), 8 * (head // 2) + 8)
            q, k = normed @ attention.q_proj.weight[rows].T, both @ attention.k_proj.weight[shared].T
            if config.qk_norm:
                q, k = attention.q_norm(q), attention.k_norm(k)
            scores = turned(q, turns[count:]) @ turned(k, turns).T / 8**0.5
            if window is not None:
                scores[places[count:, None] - places[None, :] >= window] = -torch.inf
            outputs.append(scores.softmax(-1) @ (both @ attention.v_proj.weight[shared].T))
        x = x + torch.cat(outputs, dim=1) @ attention.o_proj.weight.T
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return x[1:]


@pytest.mark.parametrize(
    ("changes", "window"),
    [({}, None), ({"mask_token_id": 5, "qk_norm": True, "tap_norm": True}, None), ({}, 4), ({"sliding_window": 4}, 9)],
)
@torch.no_grad()
def test_incremental_context_is_recomputation(changes: dict[str, Any], window: int | None) -> None:
    backbone = tiny_backbone(**changes)
    seen = min(filter(None, (window, changes.get("sliding_window"))), default=None)
    expected = by_definition(backbone, 150, window=seen)
    for parts in ([150], [1, 2, 70, 3, 74], [90, 1, 1, 1, 50, 7]):
        assert torch.allclose(drafted(backbone, parts, window=window), expected, atol=3e-4), parts
    if seen is not None:  # and one position more or less would show
        assert not torch.allclose(by_definition(backbone, 150, window=seen + 1), expected, atol=3e-3)


@torch.no_grad()
def test_a_window_bounds_what_is_kept() -> None:
    context = BlockContext(tiny_backbone(), torch.nn.Embedding(64, 32), window=8)
    for _ in range(60):
        context.push(states(5), count=5)
        context.settle()
    assert context.rows == 300 and context.cache.length() <= 2 * 8 + 64 + 5
    layers = BlockContext(tiny_backbone(sliding_window=8, sliding_layers=(1,)), torch.nn.Embedding(64, 32))
    layers.push(states(300), count=300)
    layers.settle()
    assert layers.windows == (None, 8) and layers.cache.length() == 300


def play(request: Request) -> None:
    """Commits of one and of several tokens, with proposals left out now and then."""
    for accepted, asked in ((0, True), (2, True), (1, False), (0, True), (3, True)):
        tree = request.ask(16) if asked else DraftTree.chain(np.array([1, 2, 3]))
        path = [0] if accepted else []
        while path and len(path) < accepted:
            below = np.flatnonzero(tree.parents == path[-1])
            if not len(below):
                break
            path.append(int(below[0]))
        request.commit(tree, path, bonus=11)


@pytest.mark.parametrize("name", BLOCK_DRAFTERS)
def test_a_proposal_depends_on_the_committed_text_alone(name: str, model: Any) -> None:
    request = Request(model, make_drafter(name, path=tiny_block(name)), TEXT)
    play(request)
    fresh = Request(model, make_drafter(name, path=tiny_block(name)), request.tokens)
    ours, theirs = request.ask(20), fresh.ask(20)
    assert len(ours) > 4 and same_proposal(ours, theirs)
    if name != "dflash":
        assert len(ours) == 20
        for budget in (1, 7, 13):
            small = fresh.ask(budget)
            assert small.token_ids.tolist() == theirs.token_ids[:budget].tolist()
            assert small.parents.tolist() == theirs.parents[:budget].tolist()
    assert fresh.ask(20, max_depth=2).depths().max() == 2
    sampled = fresh.ask(20, sampling=Sampling(temperature=1.0))
    assert sampled.siblings == ("iid" if name == "dflash" else "deterministic")


def test_lag_is_worked_off_in_one_go(model: Any) -> None:
    request = Request(model, make_drafter("ddtree", path=tiny_block("ddtree")), TEXT)
    for _ in range(3):
        request.commit(DraftTree.chain(np.array([1, 2, 3])), [0, 1], bonus=11)
    assert request.drafter.lag == 6
    request.drafter.catch_up()
    assert request.drafter.lag == 0
    fresh = Request(model, make_drafter("ddtree", path=tiny_block("ddtree")), request.tokens)
    assert same_proposal(request.ask(20), fresh.ask(20))


# Chain and best-first tree -------------------------------------------------------------------------------------------


def test_chain_and_tree_follow_the_marginals(model: Any) -> None:
    chain = Request(model, make_drafter("dflash", path=tiny_block("dflash")), TEXT)
    tree = Request(model, make_drafter("ddtree", path=tiny_block("ddtree")), TEXT)
    q = chain.drafter.draft_probs_along(chain.context(), np.zeros(BLOCK - 1, np.int64))
    assert q.shape == (BLOCK - 1, 64) and np.allclose(q.sum(1), 1.0, atol=1e-5)
    found = chain.ask(32)
    assert found.token_ids.tolist() == q.argmax(1).tolist()
    assert np.exp(found.scores) == pytest.approx(np.cumprod(q.max(1)), rel=1e-4)
    # Every tree of depth 2: all paths, so that closure under ancestors is no restriction.
    first, second = q[0].astype(float), q[1].astype(float)
    every = [*first, *(a * b for a, b in product(first, second))]
    for budget in (1, 6, 20, 40):  # 40: more than the fused kernel gives
        best = tree.ask(budget, max_depth=2)
        assert np.exp(best.scores).sum() == pytest.approx(sum(sorted(every)[::-1][:budget]), rel=1e-4)
        probability = [np.prod([q[i, t] for i, t in enumerate(path)]) for path in token_paths(best)]
        assert np.exp(best.scores) == pytest.approx(probability, rel=1e-4)
    with pytest.raises(ValueError, match="token_ids must be at most 5, the places of a block, got 6"):
        chain.drafter.draft_probs_along(chain.context(), np.zeros(BLOCK, np.int64))


def test_a_tree_stops_where_it_no_longer_pays(model: Any) -> None:
    whole = Request(model, make_drafter("ddtree", path=tiny_block("ddtree")), TEXT).ask(24)

    def size(seconds: Callable[[int], float], draft: float = 0.0) -> int:
        drafter = make_drafter("ddtree", path=tiny_block("ddtree"), verify_seconds=seconds, draft_seconds=draft)
        tree = Request(model, drafter, TEXT).ask(24)
        assert tree.token_ids.tolist() == whole.token_ids[: len(tree)].tolist()
        return len(tree)

    gains = np.exp(whole.scores)
    expected = 0
    while expected < 24 and (1 + gains[: expected + 1].sum()) * (1 + 0.1 * expected) >= (1 + gains[:expected].sum()) * (
        1 + 0.1 * (expected + 1)
    ):
        expected += 1
    assert 0 < expected < 24 and size(lambda nodes: 1 + 0.1 * nodes) == expected
    assert size(lambda nodes: 1.0) == 24 and size(lambda nodes: 1 + 0.1 * nodes, 5.0) > expected


# TreeFlash -----------------------------------------------------------------------------------------------------------


def test_treeflash_without_a_correction_is_ddtree(model: Any) -> None:
    corrected = tiny_block("treeflash")
    ddtree = Request(model, make_drafter("ddtree", path=corrected.model), TEXT).ask(14)
    assert not same_proposal(Request(model, TreeFlash(corrected, width=14), TEXT).ask(14), ddtree)
    with torch.no_grad():
        corrected.ar_approximation.d.weight.zero_()
    assert same_proposal(Request(model, TreeFlash(corrected, width=14), TEXT).ask(14), ddtree)
    assert TreeFlash.budget_of(64) == 63


@torch.no_grad()
def test_treeflash_conditions_on_the_token_before(model: Any) -> None:
    """Probabilities of a tree's edges, from the block's hidden states by the published formula."""
    module = tiny_block("treeflash")
    request = Request(model, TreeFlash(module, width=6, successors=8), TEXT)
    tree = request.ask(30)
    block, correction, backbone = request.drafter._block, module.ar_approximation, module.model
    hidden, embed = block.draft(TEXT[-1]), model.get_input_embeddings()
    marginals = backbone.norm(hidden) @ model.get_output_embeddings().weight.T
    deep = 0
    for node, path in enumerate(token_paths(tree)):
        before, place = (path[-2] if len(path) > 1 else TEXT[-1]), len(path) - 1
        e, normed = embed(torch.tensor(before)), backbone.norm(hidden[place])
        e = e / (e.pow(2).mean() + 1e-6).sqrt() * correction.norm.weight
        u, g = (correction.ug.weight @ torch.cat([e, normed]) + correction.ug.bias).chunk(2)
        state = backbone.norm(hidden[place] + correction.d.weight @ (g * g.sigmoid() * u))
        step = torch.log_softmax(model.get_output_embeddings().weight @ state, -1)[path[-1]]
        assert tree.evidence["log_prob"][node] == pytest.approx(float(step), abs=2e-4)
        if len(path) > 1:
            deep += 1
            assert before in marginals[place - 1].topk(6).indices  # only those have successors
    assert deep > 5


# TAPS ----------------------------------------------------------------------------------------------------------------


def test_taps_without_a_scorer_is_ddtree(model: Any) -> None:
    module = tiny_block("taps")
    ddtree = Request(model, make_drafter("ddtree", path=module.model), TEXT).ask(14)

    def ask(**options: Any) -> list[tuple[int, ...]]:
        return sorted(token_paths(Request(model, make_drafter("taps", path=module, **options), TEXT).ask(14)))

    assert ask(depth_penalty=0.0) != sorted(token_paths(ddtree))
    with torch.no_grad():
        for zero in (module.scorer.score.weight, module.scorer.score.bias, module.scorer.other.weight):
            zero.zero_()
    assert ask(depth_penalty=0.0) == sorted(token_paths(ddtree))
    assert max(map(len, ask(depth_penalty=50.0))) < max(map(len, token_paths(ddtree)))
    assert len(ask(candidates=2, beam=2)) == 2 * (BLOCK - 1)


@torch.no_grad()
def test_an_edge_is_a_share_among_siblings_and_other() -> None:
    """q by hand: p exp(s) over the siblings' and the rest's times exp(o)."""
    scorer = tiny_block("taps").scorer
    draw = torch.Generator().manual_seed(1)
    log_probs = torch.log_softmax(2.0 * torch.randn((3, 6), generator=draw), -1).sort(descending=True).values.double()
    ids = np.arange(18).reshape(3, 6)
    trie = lattice_trie(log_probs.numpy(), ids, beam=5)
    embeddings, hidden = torch.randn((20, 32), generator=draw), torch.randn((3, 32), generator=draw)
    above = np.concatenate([[19], trie.token_ids])[trie.parents + 1]
    entropy = np.array([1.0, 1.5, 0.5])
    arguments = {
        "children": embeddings[trie.token_ids],
        "parents": embeddings[above],
        "hidden": hidden,
        "best": log_probs[:, 0].numpy(),
        "entropy": entropy,
    }
    found = edge_log_probs(scorer, trie, **arguments)
    for parent in (-1, *range(len(trie))):
        siblings = np.flatnonzero(trie.parents == parent)
        if not len(siblings):
            continue
        depth = 0 if parent < 0 else int(trie.depths()[parent])
        masses = {}
        for node in siblings.tolist():
            p, rank = trie.evidence["log_prob"][node], trie.evidence["rank"][node]
            path = 0.0 if parent < 0 else trie.scores[parent]
            last = 0.0 if parent < 0 else trie.evidence["log_prob"][parent]
            numbers = [
                0.2 * p, 0.2 * (p - log_probs[depth, 0]), 0.5 * np.log1p(rank), 0.1 * path, 0.2 * path / max(depth, 1),
                0.2 * last, 0.2 * entropy[depth],
            ]  # fmt: skip
            parts = [
                scorer.child.weight @ scorer.token_norm(embeddings[trie.token_ids[node]]),
                scorer.parent.weight @ scorer.token_norm(embeddings[above[node]]),
                scorer.hidden.weight @ hidden[depth],
                scorer.depth.weight[depth],
                torch.tensor(np.array(numbers, dtype=np.float32)),
            ]
            inner = scorer.inner(torch.cat(parts))
            masses[node] = np.exp(p + float(scorer.score.weight @ (inner * inner.sigmoid()) + scorer.score.bias))
        rest = 1.0 - np.exp(trie.evidence["log_prob"][siblings]).sum()
        total = sum(masses.values()) + rest * np.exp(float(scorer.other.weight[depth, 0]))
        for node, mass in masses.items():
            assert np.exp(found[node]) == pytest.approx(mass / total, rel=1e-4)


@pytest.mark.parametrize("name", BLOCK_DRAFTERS)
def test_half_precision(name: str) -> None:
    drafter = make_drafter(name, path=tiny_block(name))
    request = Request(tiny_llama().to(torch.bfloat16), drafter, TEXT)
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        tree = request.ask(12, sampling=sampling)
        assert len(tree) >= BLOCK - 1 and np.isfinite(tree.scores).all()


# Weights and options -------------------------------------------------------------------------------------------------


def test_folders_hold_all_of_it(model: Any, tmp_path: Path) -> None:
    target = target_fingerprint(model)
    backbone = tiny_backbone(tap_norm=True, sliding_window=40, sliding_layers=(1,))
    save_backbone(tmp_path / "dflash", backbone, target=target, card={"steps": 3}, bits=32)
    again, card = load_backbone(tmp_path / "dflash")
    assert again.config == backbone.config and card["steps"] == 3
    assert all(torch.equal(again.state_dict()[name], value) for name, value in backbone.state_dict().items())
    fingerprint = read_card(tmp_path / "dflash")["sha256"]
    for kind in ("treeflash", "taps"):
        whole = tiny_block(kind, tap_norm=True, sliding_window=40, sliding_layers=(1,))
        small = whole.ar_approximation if kind == "treeflash" else whole.scorer
        save_small(tmp_path / kind, small, backbone=fingerprint, target=target, card={}, bits=32)
        expected = Request(model, make_drafter(kind, path=whole), TEXT).ask(12)
        assert same_proposal(Request(model, make_drafter(f"{kind}:{tmp_path / kind}"), TEXT).ask(12), expected)
    for name, folder, message in (
        ("dflash", "taps", "holds weights of kind 'taps', drafter 'dflash' needs 'dflash'"),
        ("taps", "treeflash", "holds weights of kind 'treeflash', drafter 'taps' needs 'taps'"),
        ("treeflash", "none", "lacks|neither|no local|holds no"),
    ):
        with pytest.raises(ValueError, match=message):
            make_drafter(f"{name}:{tmp_path / folder}").bind(HFTarget(model))
    with pytest.raises(ValueError, match="module must be one of TransitionCorrection, PrefixScorer"):
        save_small(tmp_path / "x", backbone, backbone="", target=target, card={})


@pytest.mark.parametrize("name", BLOCK_DRAFTERS)
def test_without_weights_it_says_how_to_get_some(name: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaptspec.drafters.cell_weights.shipped_folder", lambda name: None)
    kind = "dflash" if name == "ddtree" else name
    message = f"{name} has no weights for this target: none are shipped; train some with `adaptspec train {kind}`"
    with pytest.raises(ValueError, match=message):
        make_drafter(name).bind(HFTarget(model))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dflash", {"tree": "chian"}, "unknown tree 'chian'; did you mean 'chain'"),
        ("dflash", {"max_depth": 0}, "max_depth must be >= 1, got 0"),
        ("dflash", {"window": 1.5}, "window must be a whole number >= 1, got 1.5"),
        ("dflash", {"siblings": "without-replacement"}, "unknown siblings 'without-replacement'"),
        ("dflash", {"verify_seconds": [1.0]}, "verify_seconds is an option of tree='best-first'"),
        ("dflash", {"backbone": "x"}, "unknown option of drafter 'dflash': 'backbone'"),
        ("ddtree", {"siblings": "iid"}, "siblings of a tree must be 'deterministic', got 'iid'"),
        ("ddtree", {"draft_seconds": -1.0}, "draft_seconds must be a number in"),
        ("treeflash", {"width": 33}, r"width must be in \[1, 32\], got 33"),
        ("treeflash", {"successors": 0}, "successors must be in"),
        ("taps", {"beam": 0}, "beam must be >= 1, got 0"),
        ("taps", {"candidates": True}, "candidates must be a whole number >= 1, got True"),
        ("taps", {"depth_penalty": -0.1}, "depth_penalty must be a number in .*, got -0.1"),
        ("taps", {"depth_penalty": "x"}, "depth_penalty must be a number in .*, got 'x'"),
    ],
)
def test_bad_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_drafter(name, **options)


@pytest.mark.parametrize("name", BLOCK_DRAFTERS)
def test_weights_that_are_no_numbers_are_refused(name: str, model: Any) -> None:
    module = tiny_block(name)
    with torch.no_grad():
        next(iter(module.parameters())).view(-1)[0] = np.nan
    with pytest.raises(ValueError, match="has NaN or infinite values in the tensors"):
        make_drafter(name, path=module).bind(HFTarget(model))


def test_modules_that_do_not_fit(model: Any) -> None:
    for name, module, message in (
        ("dflash", tiny_block("taps"), "dflash needs Backbone, got TapsModel"),
        ("treeflash", tiny_block("dflash"), "treeflash needs TreeFlashModel, got Backbone"),
        ("ddtree", tiny_backbone(taps=(1, 5)), r"taps the layers \[1, 5\], the target has 4"),
        ("ddtree", tiny_backbone(mask_token_id=64), "has mask_token_id 64, the target's embedding 64 rows"),
        ("ddtree", tiny_backbone(hidden_size=16), "has hidden_size 16, the target 32"),
    ):
        with pytest.raises(ValueError, match=message):
            make_drafter(name, path=module).bind(HFTarget(model))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, "block_size must be a whole number >= 2, got 1"),
        ({"taps": ()}, "taps must name at least one layer"),
        ({"head_dim": 7}, "head_dim must be even, got 7"),
        ({"num_key_value_heads": 3}, "num_attention_heads must be a multiple"),
        ({"sliding_layers": (0,)}, "sliding_layers need a sliding_window"),
        ({"sliding_window": 4, "sliding_layers": (2,)}, r"sliding_layers must be in \[0, 2\), got 2"),
        ({"rope_theta": 0.0}, "rms_norm_eps and rope_theta must be > 0"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps and rope_theta must be > 0 and finite, got 'x'"),
        ({"rope_scaling": 2}, "rope_scaling must be a mapping or None, got 2"),
        ({"taps": None}, "taps must be a list of layers, got None"),
    ],
)
def test_impossible_backbones(changes: dict[str, Any], message: str) -> None:
    config = tiny_backbone().config
    assert BackboneConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match=message):
        BackboneConfig.from_dict({**config.to_dict(), **changes})
    for values, problem in (({"tapz": 1}, "did you mean 'taps'"), ({}, "lacks hidden_size")):
        with pytest.raises(ValueError, match=problem):
            BackboneConfig.from_dict(values)


@pytest.mark.parametrize("name", BLOCK_DRAFTERS)
def test_reduced_vocabularies(name: str, model: Any, tmp_path: Path) -> None:
    """Only tokens of the list are drafted, with probabilities over these alone."""
    counts = tmp_path / "counts.safetensors"
    save_frequencies(counts, count_tokens([np.repeat(np.arange(40, 60), 3)], vocab_size=64))
    drafter = make_drafter(name, path=tiny_block(name))
    vocab = f"fr:10:{counts}"
    drafter.use_vocab(("full", vocab))
    request = Request(model, drafter, TEXT)
    tree = request.ask(12, vocab=vocab)
    kept = set(drafter._head(vocab).logits(torch.zeros(1, 32), depth=1)[0].tolist())
    assert len(kept) < 20 and set(tree.token_ids.tolist()) <= kept
    assert not set(request.ask(12).token_ids.tolist()) <= kept
    if name == "dflash":
        drawn = request.ask(12, vocab=vocab, sampling=Sampling(temperature=1.0))
        assert set(np.flatnonzero(drawn.draft_probs.sum(0))) == kept
