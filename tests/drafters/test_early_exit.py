"""Early-exit drafters where it is known what they ought to say: on models whose later layers change nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adaptspec import AdaptiveSpec
from adaptspec.drafters import Drafter, make_drafter
from adaptspec.drafters.cell_weights import target_fingerprint
from adaptspec.drafters.early_exit.adapter import AdapterConfig, Adapters
from adaptspec.drafters.early_exit.adapter_rows import AdapterRows
from adaptspec.drafters.early_exit.adapter_weights import load_adapters, save_adapters
from adaptspec.drafters.early_exit.skipped import SkippedLayers, load_skipped, save_skipped
from adaptspec.target.hf import HFTarget
from adaptspec.types import DraftContext, DraftTree, Observation, Sampling, Verdict
from tests.drafters.cell_cases import tiny_cell
from tests.drafters.exit_cases import tiny_adapters
from tests.lossless.test_greedy import prompt, reference
from tests.target.families import FAMILIES, VOCAB


def exiting(layers: int, family: str = "llama") -> Any:
    """A model whose output is decided after so many layers: the others add nothing to the residual stream."""
    model = FAMILIES[family]("sdpa")
    with torch.no_grad():
        for layer in model.model.layers[layers:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def faithful(model: Any, kind: str, *exact: bool, exits: tuple[int, ...]) -> Adapters:
    """Adapters of which some do nothing but the model's own final norm."""
    adapters = tiny_adapters(kind, exits=exits)
    with torch.no_grad():
        for adapter, plain in zip(adapters.exits, exact, strict=True):
            if plain:
                adapter.self_attn.o_proj.weight.zero_()
                adapter.norm.weight.copy_(model.model.norm.weight)
    return adapters


def play(model: Any, drafter: Drafter, budget: int, **options: Any) -> Any:
    """A greedy request that equals the target's own answer."""
    spec = AdaptiveSpec([drafter], f"fixed:{drafter.name}@{budget}", **options)
    result = spec.generate(model, prompt(), max_new_tokens=31, eos_token_id=VOCAB + 1)
    assert torch.equal(result.sequences, reference(model, prompt(), max_new_tokens=31, eos_token_id=None))
    assert result.stats.set_aside == {}
    return result


def test_an_exit_behind_the_last_layer_that_matters_is_the_target_itself() -> None:
    model = exiting(2)
    drafter = make_drafter("layer-skip", exit=2, min_confidence=0.0, max_depth=4)
    assert play(model, drafter, 4).stats.mean_accepted_length == 5.0
    assert play(model, make_drafter("layer-skip", exit=1, min_confidence=0.0), 4).stats.mean_accepted_length < 4.0


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_kangaroo_with_a_faithful_adapter_is_accepted_whole(family: str) -> None:
    model = exiting(2, family)
    adapters = faithful(model, "kangaroo", True, exits=(2,))
    if family == "gemma3":  # whose norm multiplies by 1 + weight
        with torch.no_grad():
            adapters.exits[0].norm.weight.add_(1.0)
    drafter = make_drafter("kangaroo", path=adapters, min_confidence=0.0, max_depth=5)
    assert play(model, drafter, 5).stats.mean_accepted_length == 6.0


def test_kangaroo_ends_with_the_first_token_it_is_unsure_of() -> None:
    model = exiting(2)
    adapters = faithful(model, "kangaroo", True, exits=(2,))
    whole = [asked(model, make_drafter("kangaroo", path=adapters, min_confidence=0.0), length=n) for n in (4, 7, 9)]
    assert [len(tree) for tree in whole] == [6, 6, 6]
    least = float(np.median(np.exp(np.concatenate([tree.evidence["log_prob"] for tree in whole]))))
    ends = set()
    for tree, length in zip(whole, (4, 7, 9), strict=True):
        sure = (np.exp(tree.evidence["log_prob"]) >= least).tolist()
        expected = min(6, sure.index(False) + 1 if False in sure else 6)
        cut = asked(model, make_drafter("kangaroo", path=adapters, min_confidence=least), length=length)
        assert cut.token_ids.tolist() == tree.token_ids[:expected].tolist()
        ends.add(expected)
    assert min(ends) < 6


def asked(model: Any, drafter: Drafter, *, length: int = 9, budget: int = 40, **options: Any) -> DraftTree:
    """The proposal after a prompt and the target's first token."""
    target = HFTarget(model)
    drafter.bind(target)
    target.tap(drafter.needs.taps)
    ids = (torch.arange(length) * 29 + 7) % VOCAB
    scored = target.prefill(ids)
    committed = np.append(ids.numpy(), int(scored.logits[-1].argmax()))
    drafter.prefill(committed, scored.features)
    values = {"max_depth": 64, "sampling": Sampling(), "rng": np.random.default_rng(0), **options}
    return drafter.propose(DraftContext(int(committed[-1]), len(committed), **values), budget)


def test_cats_corrects_what_its_second_adapter_knows_better() -> None:
    """The first adapter is random, the second says what the target says: each step gains the correction at least, and
    the tree holds the correction of every token of the chain."""
    model = exiting(3)
    adapters = faithful(model, "cats", False, True, exits=(1, 3))
    chain = play(model, make_drafter("cats-chain", path=adapters), 8)
    assert min(record.accepted for record in chain.trace if record.arm != "prefill" and record.drafted > 1) >= 1
    tree = play(model, make_drafter("cats", path=adapters, branching=4), 40)
    assert tree.stats.mean_accepted_length >= chain.stats.mean_accepted_length >= 2.0
    proposal = asked(model, make_drafter("cats", path=adapters, branching=4))
    depths = proposal.depths()
    assert depths.max() == 6 and len(proposal) <= 40
    assert proposal.parents[:5].tolist() == [-1, 0, 1, 2, 3], "the chain comes first"
    for row in range(5):
        children = proposal.token_ids[proposal.parents == row - 1].tolist()
        assert len(children) == len(set(children)) >= 4
    followers = [parent for parent in proposal.parents.tolist() if parent >= 5]
    assert followers, "corrections are followed by more tokens"


def test_cats_chains_are_chains_and_stay_in_their_limits() -> None:
    model = FAMILIES["llama"]("sdpa")
    drafter = make_drafter("cats-chain", path=tiny_adapters("cats"))
    for budget in (1, 3, 5, 9):
        for depth in (1, 2, 64):
            tree = asked(model, drafter, budget=budget, max_depth=depth)
            assert tree.parents.tolist() == list(range(-1, len(tree) - 1))
            assert 1 <= len(tree) <= min(budget, depth, 6)


def test_cats_takes_likely_branches_of_eagle() -> None:
    model = exiting(3)
    adapters = faithful(model, "cats", False, True, exits=(1, 3))
    eagle = make_drafter("eagle3", path=tiny_cell("eagle3"))
    plain = asked(model, make_drafter("cats", path=adapters))
    mixed = asked(model, make_drafter("cats-eagle", path=adapters, eagle=eagle, min_probability=0.02))
    alone = asked(model, make_drafter("cats-eagle", path=adapters, eagle=eagle, min_probability=1.0))

    def paths(tree: DraftTree) -> set[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
            found.append((*(found[parent] if parent >= 0 else ()), token))
        return set(found)

    assert paths(alone) == paths(plain)
    assert paths(mixed) - paths(plain), "EAGLE's branches are among them"
    assert len(mixed) <= 40 and np.isfinite(mixed.evidence["log_prob"]).all()
    with pytest.raises(ValueError, match="eagle must be another kind of drafter, got 'cats'"):
        make_drafter("cats-eagle", eagle=make_drafter("cats"))


def test_early_exits_in_one_pool() -> None:
    model = FAMILIES["llama"]("sdpa")
    pool = [
        make_drafter("kangaroo", path=tiny_adapters("kangaroo"), min_confidence=0.0),
        make_drafter("cats", path=tiny_adapters("cats"), branching=3),
        make_drafter("layer-skip", exit=2, min_confidence=0.0),
        "draft-verify",
        "suffix",
        "lookahead",
    ]
    spec = AdaptiveSpec(pool, "mixture", budgets=(3, 12), seed=2)
    for options in ({}, {"temperature": 0.8}):
        result = spec.generate(model, prompt(), max_new_tokens=24, **options)
        assert result.stats.set_aside == {}
        if not options:
            assert torch.equal(result.sequences, reference(model, prompt(), max_new_tokens=24))


def test_reduced_vocabularies() -> None:
    model = exiting(2)
    adapters = faithful(model, "kangaroo", True, exits=(2,))
    for drafter in (
        make_drafter("kangaroo", path=adapters, min_confidence=0.0),
        make_drafter("layer-skip", skip=[2, 3], min_confidence=0.0),
    ):
        result = play(model, drafter, 6, vocab=("full", "microspec:64"))
        reduced = AdaptiveSpec([drafter], f"fixed:{drafter.name}@6/microspec:64", vocab=("full", "microspec:64"))
        output = reduced.generate(model, prompt(), max_new_tokens=31, eos_token_id=VOCAB + 1)
        assert torch.equal(output.sequences, result.sequences) and output.stats.set_aside == {}
        assert any("/microspec:64" in record.arm for record in output.trace)


def test_rows_of_an_adapter_are_those_of_its_whole_text() -> None:
    adapter = tiny_adapters("kangaroo").exits[0]
    states = torch.randn((9, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = adapter(states[None], positions=torch.arange(9)[None])[0]
    rows = AdapterRows(adapter)
    for first, last in ((0, 3), (3, 4), (4, 6)):
        rows.push(states[first:last])
    assert rows.lag == 4
    rows.settle(but_last=True)
    assert rows.lag == 0
    assert torch.allclose(rows.begin(states[6:7]), whole[6:7], atol=1e-5)
    other = rows.draft(torch.cat([states[7:8], -states[7:8]]), np.array([0, 0]))
    assert torch.allclose(other[0], whole[7], atol=1e-5) and not torch.allclose(other[1], whole[7], atol=1e-2)
    assert torch.allclose(rows.draft(states[8:9], np.array([1]))[0], whole[8], atol=1e-5)
    assert torch.allclose(rows.begin(states[6:]), whole[6:], atol=1e-5)


def test_weights_are_saved_and_checked(tmp_path: Path) -> None:
    model = FAMILIES["llama"]("sdpa")
    target = HFTarget(model)
    adapters = tiny_adapters("cats")
    save_adapters(tmp_path / "w", adapters, target=target_fingerprint(model), card={"note": "tiny"}, bits=32)

    def load(source: Any, kind: str = "cats", target: HFTarget = target) -> Adapters:
        return load_adapters(source, name=kind, kind=kind, shipped=kind, target=target)

    found = load(str(tmp_path / "w"))
    assert found.config == adapters.config
    assert all(torch.equal(found.state_dict()[name], tensor) for name, tensor in adapters.state_dict().items())
    with pytest.raises(ValueError, match="was not trained for this target"):
        load(tmp_path / "w", target=HFTarget(FAMILIES["mistral"]("sdpa")))
    with pytest.raises(ValueError, match="holds adapters of kind 'cats', kangaroo needs 'kangaroo'"):
        load(tmp_path / "w", "kangaroo")
    with pytest.raises(ValueError, match="cats has no weights for this target.*adaptspec train cats"):
        load(None)
    with pytest.raises(ValueError, match="holds no trained weights"):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"exits after the layers \[1, 4\], the target has 4"):
        load(tiny_adapters("cats", exits=(1, 4)))
    with pytest.raises(ValueError, match="has hidden_size 16, the target 32"):
        load(tiny_adapters("cats", hidden_size=16))
    broken = tiny_adapters("cats")
    with torch.no_grad():
        broken.exits[1].norm.weight[0] = math.inf
    with pytest.raises(ValueError, match="has NaN or infinite values in the tensors exits.1.norm.weight"):
        load(broken)
    for change, message in (
        ({"exits": (1, "3")}, "exits must be a whole number >= 1, got '3'"),
        ({"exits": (1, 2.5)}, "exits must be a whole number >= 1, got 2.5"),
        ({"kind": ["cats"]}, "unknown kind of adapter"),
        ({"rope_theta": "x"}, "rope_theta must be > 0 and finite, got 1e-06 and 'x'"),
        ({"rope_scaling": [1]}, r"rope_scaling must be a mapping or None, got \[1\]"),
        ({"exits": (3, 1)}, r"exits of 'cats' must be 2 ascending layers, got \[3, 1\]"),
        ({"kind": "cat"}, "unknown kind of adapter 'cat'; did you mean 'cats'"),
        ({"head_dim": 0}, "head_dim must be a whole number >= 1"),
    ):
        with pytest.raises(ValueError, match=message):
            AdapterConfig(**{**adapters.config.to_dict(), **change})
    with pytest.raises(ValueError, match="rope_scaling of type 'linear' is damaged: .*factor"):
        tiny_adapters("cats", rope_scaling={"rope_type": "linear"})
    with pytest.raises(ValueError, match="lacks head_dim"):
        AdapterConfig.from_dict({k: v for k, v in adapters.config.to_dict().items() if k != "head_dim"})


def test_kangaroos_published_adapters(tmp_path: Path) -> None:
    adapters = tiny_adapters("kangaroo")
    names = {
        name: name.removeprefix("exits.0.") if ".norm." in name else name.replace("exits.0.", "layers.0.")
        for name in adapters.state_dict()
    }
    tensors = {names[name]: tensor for name, tensor in adapters.state_dict().items()}
    torch.save({**tensors, "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, tmp_path / "pytorch_model.bin")
    config = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = FAMILIES["llama"]("sdpa")
    published = make_drafter("kangaroo", path=str(tmp_path), exit=2, min_confidence=0.0)
    own = make_drafter("kangaroo", path=adapters, min_confidence=0.0)
    assert asked(model, published).token_ids.tolist() == asked(model, own).token_ids.tolist()
    torch.save({"norm.weight": torch.ones(32)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="lacks the tensors layers.0.input_layernorm.weight"):
        asked(model, make_drafter("kangaroo", path=str(tmp_path)))


def zeroed(attention: tuple[int, ...], mlp: tuple[int, ...], family: str = "llama") -> Any:
    """A model in which some sub-layers add nothing."""
    model = FAMILIES[family]("sdpa")
    with torch.no_grad():
        for layer in attention:
            model.model.layers[layer].self_attn.o_proj.weight.zero_()
        for layer in mlp:
            model.model.layers[layer].mlp.down_proj.weight.zero_()
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2-mixed-window", "gemma3"])
def test_leaving_out_what_adds_nothing_is_the_target_itself(family: str) -> None:
    model = zeroed((0, 2), (1, 2), family)
    drafter = make_drafter("draft-verify", path=SkippedLayers((0, 2), (1, 2)), threshold=0.0, max_depth=4)
    assert play(model, drafter, 4).stats.mean_accepted_length == 5.0
    wrong = make_drafter("draft-verify", path=SkippedLayers((1,), (0, 3)), threshold=0.0, max_depth=4)
    assert play(model, wrong, 4).stats.mean_accepted_length < 4.0


def test_other_names_of_sub_layers() -> None:
    for family in ("gpt2", "phi"):
        model = FAMILIES[family]("sdpa")
        drafter = make_drafter("draft-verify", path=SkippedLayers((1,), (2,)), threshold=0.0)
        play(model, drafter, 4)


def test_a_file_of_skipped_layers(tmp_path: Path) -> None:
    model = zeroed((1,), (3,))
    target, path = HFTarget(model), tmp_path / "layers.json"
    save_skipped(path, SkippedLayers((1,), (3,)), {"target": target_fingerprint(model), "agreement": 1.0})
    assert load_skipped(path, target) == SkippedLayers((1,), (3,))
    drafter = make_drafter(f"draft-verify:{path}", threshold=0.0, max_depth=4)
    assert play(model, drafter, 4).stats.mean_accepted_length == 5.0
    with pytest.raises(ValueError, match="was not trained for this target"):
        load_skipped(path, HFTarget(FAMILIES["mistral"]("sdpa")))
    with pytest.raises(FileNotFoundError, match="adaptspec train layers"):
        load_skipped(tmp_path / "no.json", target)
    for text, message in (
        ("{", "is damaged"),
        ("{}", "is no file of skipped layers"),
        (path.read_text().replace('"version": 1', '"version": 9'), "version must be 1, got 9"),
        (path.read_text().replace('"mlp"', '"lmp"'), "mlp must be lists of layers"),
        (edited(path, mlp=["a"]), "bad.json is damaged: mlp must hold whole numbers >= 0, got 'a'"),
        (edited(path, target={**target_fingerprint(model), "weights": [["a"] * 16]}), "must be lists of numbers"),
        (edited(path, target={**target_fingerprint(model), "weights": None}), "must be lists of numbers"),
    ):
        (tmp_path / "bad.json").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            load_skipped(tmp_path / "bad.json", target)
    with pytest.raises(ValueError, match="card must hold the target's fingerprint"):
        save_skipped(path, SkippedLayers(), {})
    with pytest.raises(ValueError, match=r"attention must hold layers in \[0, 4\), got \[4\]"):
        SkippedLayers((4,)).view(target)
    with pytest.raises(ValueError, match="at least one of the 4 layers must be left"):
        SkippedLayers(tuple(range(4)), tuple(range(4))).view(target)
    with pytest.raises(ValueError, match="mlp must hold whole numbers >= 0, got -1"):
        SkippedLayers((), (-1,))


def edited(path: Path, **changes: Any) -> str:
    return json.dumps({**json.loads(path.read_text()), **changes})


def test_what_is_bound_is_kept_from_request_to_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = zeroed((1,), (3,)), FAMILIES["llama"]("sdpa")
    path = tmp_path / "layers.json"
    save_skipped(path, SkippedLayers((1,), (3,)), {"target": target_fingerprint(model)})
    drafter = make_drafter(f"draft-verify:{path}")
    for vocab in (("full",), ("full", "microspec:64")):
        drafter.use_vocab(vocab)
        drafter.bind(HFTarget(model))
        view = drafter._view
        drafter.bind(target := HFTarget(model))
        assert drafter._view is view and drafter._target is target
    path.unlink()
    drafter.bind(HFTarget(model))
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            drafter.bind(HFTarget(other))
    with pytest.raises(FileNotFoundError):  # of what was bound before the failure nothing is trusted
        drafter.bind(HFTarget(model))


def observe(drafter: Drafter, tree: DraftTree, accepted: int) -> None:
    tokens = np.append(tree.token_ids[:accepted], 1)
    drafter.observe(Observation(tree, Verdict(np.arange(accepted), tokens), tokens))


def test_the_threshold_follows_acceptance() -> None:
    """By hand: a <- 0.5 a + 0.5 r; t <- 0.9 t + 0.1 (t +- 0.01)."""
    model = FAMILIES["llama"]("sdpa")
    drafter = make_drafter("draft-verify", threshold=0.3, max_depth=4, acceptance=0.7)
    drafter._threshold = 0.0
    tree = asked(model, drafter)
    assert len(tree) == 4
    drafter._threshold = 0.3
    observe(drafter, tree, 4)
    assert drafter.threshold == 0.3, "all accepted, but the draft was as long as it may be"
    observe(drafter, tree, 0)
    assert drafter.threshold == 0.3, "a tree of someone else says nothing"
    for accepted, expected in ((0, 0.301), (2, 0.302), (4, 0.303), (4, 0.303)):  # a: 0.5, 0.5, 0.75 and the rest
        drafter._drafts = {tuple(tree.token_ids.tolist()): False}
        observe(drafter, tree, accepted)
        if accepted < 4:
            assert drafter.threshold == pytest.approx(expected, abs=1e-9)
    before = drafter.threshold
    for _ in range(3):
        drafter._drafts = {tuple(tree.token_ids.tolist()): True}  # ended by the threshold
        observe(drafter, tree, 4)
    assert before - 0.0031 < drafter.threshold < before
    drafter._threshold = 0.9895
    for _ in range(3):
        drafter._drafts = {tuple(tree.token_ids.tolist()): True}
        observe(drafter, tree, 0)
    assert drafter.threshold == 0.99, "at 1 nothing would be drafted any more"
    state = drafter.state_dict()
    other = make_drafter("draft-verify")
    other.load_state_dict(state)
    assert other.threshold == drafter.threshold and other.state_dict() == state
    drafter.reset()
    assert drafter.threshold == 0.3


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("layer-skip", {"exit": 0}, "exit must be >= 1, got 0"),
        ("layer-skip", {"exit": 2, "skip": [1]}, "give either skip or exit"),
        ("layer-skip", {"max_depth": 0}, "max_depth must be >= 1, got 0"),
        ("kangaroo", {"min_confidence": 1.0}, r"min_confidence must be in \[0, 1\), got 1.0"),
        ("kangaroo", {"max_depth": 0}, "max_depth must be >= 1, got 0"),
        ("cats", {"branching": 0}, r"branching must be in \[1, 32\], got 0"),
        ("cats", {"bonus": -1.0}, "bonus must be a number in .*, got -1.0"),
        ("cats-chain", {"branching": 2}, "branching of a chain must be 1, got 2"),
        ("cats-eagle", {"min_probability": 0.0}, r"min_probability must be in \(0, 1\], got 0.0"),
        ("kangaroo", {"max_depth": 2.5}, "max_depth must be a whole number >= 1, got 2.5"),
        ("kangaroo", {"exit": "3"}, "exit must be a whole number >= 1, got '3'"),
        ("kangaroo", {"min_confidence": "0.5"}, r"min_confidence must be in \[0, 1\), got '0.5'"),
        ("cats", {"max_depth": math.nan}, "max_depth must be a whole number >= 1, got nan"),
        ("cats", {"branching": 2.5}, r"branching must be a whole number in \[1, 32\], got 2.5"),
        ("cats", {"bonus": None}, "bonus must be a number in .*, got None"),
        ("layer-skip", {"skip": 2}, "skip must be 'auto' or layer numbers, got 2"),
        ("draft-verify", {"threshold": None}, r"threshold must be in \[0, 1\), got None"),
        ("draft-verify", {"step": 1.0}, r"step must be in \[0, 1\), got 1.0"),
    ],
)
def test_bad_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_drafter(name, **options)


def test_misuse_is_named() -> None:
    model = FAMILIES["llama"]("sdpa")
    with pytest.raises(ValueError, match=r"exit must be in \[1, 3\], got 4"):
        make_drafter("layer-skip", exit=4).bind(HFTarget(model))
    for name in ("kangaroo", "draft-verify"):
        with pytest.raises(RuntimeError, match="call bind first"):
            make_drafter(name).propose(DraftContext(1, 3, 5, Sampling(), np.random.default_rng(0)), 4)
    drafter = make_drafter("kangaroo", path=tiny_adapters("kangaroo"))
    drafter.bind(HFTarget(model))
    with pytest.raises(ValueError, match=r"needs the hidden states after the layers \[2\]"):
        drafter.prefill(np.array([1, 2, 3]))
