"""Medusa and Hydra: which hidden state is read, which token it predicts, and what the tree holds."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adaptspec import AdaptiveSpec
from adaptspec.drafters import make_drafter
from adaptspec.drafters.head_weights import heads_from
from adaptspec.drafters.hydra import Hydra
from adaptspec.drafters.hydra_heads import HydraConfig, HydraHeads
from adaptspec.drafters.medusa import Medusa
from adaptspec.drafters.medusa_heads import MedusaConfig, MedusaHeads
from adaptspec.target.hf import HFTarget
from adaptspec.types import DraftContext, DraftTree, Observation, Sampling, Verdict
from adaptspec.vocab import count_tokens, save_frequencies
from tests import tiny_models
from tests.drafters.even_head import even_head

TOKENS = 16
"""Tokens with a code of their own in the hidden states that these tests make."""
LAYERS = 2
PREFIX = {"prefix": True, "attention_heads": 4, "key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}


@pytest.fixture(scope="module")
def coded() -> HFTarget:
    """A target whose embedding, which is its head too, gives token t < 16 the t-th unit vector; norms do nothing."""
    model = tiny_models.make_llama(layers=LAYERS)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight.zero_()
        weight[:TOKENS, :TOKENS] = torch.eye(TOKENS)
    return HFTarget(model)


def turned(by: int, *, parts: int, part: int, size: int = 32) -> torch.Tensor:
    """[size, parts * size]: takes one of the parts of its input and turns the code of t into that of t + by."""
    matrix = torch.zeros(size, parts * size)
    for token in range(TOKENS):
        matrix[(token + by) % TOKENS, part * size + token] = 20.0
    return matrix


def counting_medusa(heads: int = 3) -> MedusaHeads:
    """Head i takes the code of a token for that of the token i + 2 places on, in a text that counts."""
    module = MedusaHeads(MedusaConfig(32, heads=heads))
    with torch.no_grad():
        for i, (block,) in enumerate(module.blocks):
            block.linear.weight.copy_(turned(i + 2, parts=1, part=0))
    return module


def counting_hydra(heads: int = 3, *, read: str) -> HydraHeads:
    """Reads the hidden state, or only the last drafted token, whose successor it gives."""
    module = HydraHeads(HydraConfig(32, heads=heads))
    with torch.no_grad():
        for i, (block,) in enumerate(module.blocks):
            block.res_connection.weight.copy_(
                turned(i + 2, parts=i + 2, part=0) if read == "hidden state" else turned(1, parts=i + 2, part=i + 1)
            )
            block.res_connection.bias.zero_()
    return module


def codes(tokens: list[int]) -> dict[int, torch.Tensor]:
    """Hidden states that are the codes of their own tokens, a little longer than the norm makes them."""
    return {LAYERS: 3.0 * torch.eye(32)[torch.tensor(tokens) % TOKENS]}


def ask(drafter: Any, tokens: list[int], budget: int = 3, *, max_depth: int = 9) -> DraftTree:
    context = DraftContext(tokens[-1], len(tokens), max_depth, Sampling(), np.random.default_rng(0))
    tree = drafter.propose(context, budget)
    tree.validate(vocab_size=64, budget=budget)
    return tree


@pytest.mark.parametrize("read", ["medusa", "hidden state", "drafted tokens"])
def test_the_newest_state_belongs_to_the_token_before_the_root(read: str, coded: HFTarget) -> None:
    drafter: Any = Medusa(counting_medusa()) if read == "medusa" else Hydra(counting_hydra(read=read))
    drafter.bind(coded)
    assert drafter.needs.taps == (LAYERS,)
    text = list(range(5))
    drafter.prefill(np.array(text), codes(text[:-1]))
    for accepted in (2, 0, 3, 1):
        root = text[-1]
        tree = ask(drafter, text)
        assert tree.token_ids.tolist() == [(root + k) % TOKENS for k in (1, 2, 3)]
        assert tree.parents.tolist() == [-1, 0, 1]
        new = [(root + k) % TOKENS for k in range(1, accepted + 2)]
        verdict = Verdict(np.arange(accepted), np.array(new))
        drafter.observe(Observation(tree, verdict, verdict.token_ids, None, codes([root, *new[:-1]])))
        text += new
    assert ask(drafter, text, max_depth=2).depths().max() == 2
    assert len(ask(drafter, text, budget=1)) == 1


def test_states_read_one_place_late_would_be_noticed(coded: HFTarget) -> None:
    """The root's own state is not there yet; with it every head would be one token ahead."""
    drafter = Medusa(counting_medusa())
    drafter.bind(coded)
    drafter.prefill(np.arange(5), codes([1, 2, 3, 4]))  # shifted by one
    assert ask(drafter, list(range(5))).token_ids.tolist() == [6, 7, 8]


@pytest.mark.parametrize("tree", ["best-first", "template"])
def test_smaller_budgets_are_part_of_larger_ones(tree: str, coded: HFTarget) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module = counting_medusa(4)
        for block in module.parameters():
            block.data += 0.5 * torch.randn_like(block)
    drafter = Medusa(module, tree=tree)
    drafter.bind(coded)
    drafter.prefill(np.arange(5), codes([0, 1, 2, 3]))
    large = ask(drafter, list(range(5)), 48)
    assert len(large) > 40
    for budget in (1, 5, 17):
        small = ask(drafter, list(range(5)), budget)
        assert len(small) == budget
        assert small.token_ids.tolist() == large.token_ids[:budget].tolist()
        assert small.parents.tolist() == large.parents[:budget].tolist()


def test_best_first_expects_no_less_than_the_template(coded: HFTarget) -> None:
    """The sum of path probabilities is what the heads expect to be accepted."""
    torch.manual_seed(5)
    for _ in range(5):
        module = MedusaHeads(MedusaConfig(32, heads=4))
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=1.0)
        totals = []
        for tree in ("best-first", "template"):
            drafter = Medusa(module, tree=tree)
            drafter.bind(coded)
            drafter.prefill(np.arange(5), codes([0, 1, 2, 3]))
            totals.append(float(np.exp(ask(drafter, list(range(5)), 24).scores).sum()))
        assert totals[0] >= totals[1] > 0


def test_own_output_matrices_are_used_per_head(coded: HFTarget) -> None:
    module = MedusaHeads(MedusaConfig(32, heads=3, vocab_size=64))
    with torch.no_grad():
        for i, output in enumerate(module.outputs):
            output.weight.zero_()
            output.weight[:TOKENS, :TOKENS] = turned(i + 2, parts=1, part=0)[:TOKENS, :TOKENS]
    drafter = Medusa(module)
    drafter.bind(coded)
    drafter.prefill(np.arange(5), codes([0, 1, 2, 3]))
    assert ask(drafter, list(range(5))).token_ids.tolist() == [5, 6, 7]


def test_biases_of_own_output_matrices_count(coded: HFTarget) -> None:
    module = HydraHeads(HydraConfig(32, heads=1, vocab_size=64, output_bias=True))
    with torch.no_grad():
        module.outputs[0].bias[40] = 1000.0
    drafter = Hydra(module)
    drafter.bind(coded)
    drafter.prefill(np.arange(5), codes([0, 1, 2, 3]))
    assert ask(drafter, list(range(5)), 1).token_ids.tolist() == [40]


def test_hydra_sees_its_own_drafts(coded: HFTarget) -> None:
    """Siblings have different children where heads read drafted tokens: each is followed by its successor."""
    module = counting_hydra(2, read="drafted tokens")
    with torch.no_grad():  # the root may be followed by two tokens
        module.blocks[0][0].res_connection.weight += 0.9 * turned(5, parts=2, part=1)
    drafter = Hydra(module)
    drafter.bind(coded)
    drafter.prefill(np.arange(4), codes([0, 1, 2]))
    tree = ask(drafter, list(range(4)), 4)
    paths = {
        (int(t), int(tree.token_ids[p]) if p >= 0 else None) for t, p in zip(tree.token_ids, tree.parents, strict=True)
    }
    assert {(4, None), (8, None), (5, 4), (9, 8)} == paths


def test_the_prefix_layer_sees_all_committed_states() -> None:
    """Proposals with a cache, after steps in which it was not asked, caught up or not, are those of a fresh start."""
    target = HFTarget(tiny_models.make_llama(layers=LAYERS))
    torch.manual_seed(2)
    module = HydraHeads(HydraConfig(32, heads=3, **PREFIX))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    tokens = [int(t) for t in torch.randint(0, 64, (40,))]
    states = torch.randn(40, 32)
    drafter = Hydra(module)
    drafter.bind(target)
    drafter.prefill(np.array(tokens[:10]), {LAYERS: states[:9]})
    at = 10
    lags = []
    for step, count in enumerate((3, 1, 4, 2, 5)):
        verdict = Verdict(np.arange(count - 1), np.array(tokens[at : at + count]))
        features = {LAYERS: states[at - 1 : at - 1 + count]}
        drafter.observe(Observation(DraftTree.empty(), verdict, verdict.token_ids, None, features))
        at += count
        lags.append(drafter.lag)
        if step == 2:
            drafter.catch_up()
            assert drafter.lag == 0
        if step in (0, 4):
            fresh = Hydra(module)
            fresh.bind(target)
            fresh.prefill(np.array(tokens[:at]), {LAYERS: states[: at - 1]})
            mine, theirs = ask(drafter, tokens[:at], 12), ask(fresh, tokens[:at], 12)
            assert mine.token_ids.tolist() == theirs.token_ids.tolist()
            assert np.allclose(mine.scores, theirs.scores, atol=1e-4)
    assert lags == [0, 0, 1, 4, 6]
    drafter.finish()
    assert drafter.lag == 0


def test_teacher_forced_heads_are_the_drafting_ones() -> None:
    """Row p of head i of a whole text is what drafting computes from position p."""
    torch.manual_seed(4)
    module = HydraHeads(HydraConfig(32, heads=3, layers=2, **PREFIX)).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    features, embeddings = torch.randn(2, 7, 32), torch.randn(2, 7, 32)
    whole = module(features, embeddings)
    assert [tuple(out.shape) for out in whole] == [(2, 6, 32), (2, 5, 32), (2, 4, 32)]
    prefix = module.prefix(features, positions=torch.arange(7).expand(2, -1))
    for i, out in enumerate(whole):
        for p in range(out.shape[1]):
            joined = torch.cat([prefix[:, p], *(embeddings[:, p + 1 + k] for k in range(i + 1))], dim=-1)
            assert torch.allclose(out[:, p], module.blocks[i](joined), atol=1e-5)
    start = HydraHeads(HydraConfig(32, heads=2))(features[:, :1], embeddings[:, :1])
    assert [tuple(out.shape) for out in start] == [(2, 0, 32), (2, 0, 32)]
    assert [tuple(out.shape) for out in MedusaHeads(MedusaConfig(32, heads=2))(features)] == [(2, 7, 32)] * 2


def test_reduced_vocabularies_draft_their_tokens_only(coded: HFTarget) -> None:
    with even_head() as name:
        for drafter in (Medusa(counting_medusa()), Hydra(counting_hydra(read="hidden state"))):
            drafter.use_vocab(("full", name))
            drafter.bind(coded)
            drafter.prefill(np.arange(5), codes([0, 1, 2, 3]))
            context = DraftContext(4, 5, 9, Sampling(), np.random.default_rng(0), vocab=name)
            tree = drafter.propose(context, 12)
            assert len(tree) == 12 and not (tree.token_ids % 2).any()
            assert ask(drafter, list(range(5))).token_ids.tolist() == [5, 6, 7]
            assert drafter.state_dict() == {}
            drafter.use_vocab(("full",))  # told otherwise, it meets the same target anew
            drafter.bind(coded)
            drafter.prefill(np.arange(5), codes([0, 1, 2, 3]))
            assert ask(drafter, list(range(5))).token_ids.tolist() == [5, 6, 7]


def test_the_module_that_was_handed_in_stays_as_it_is() -> None:
    module = counting_medusa()
    model = tiny_models.make_llama(layers=LAYERS).to(torch.bfloat16)
    before = copy.deepcopy(module.state_dict())
    AdaptiveSpec([Medusa(module)], "fixed:medusa@4").generate(model, torch.tensor([[3, 4, 5]]), max_new_tokens=6)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("medusa", {"tree": "best"}, "best-first"),
        ("medusa", {"max_depth": 0}, "max_depth must be >= 1, got 0"),
        ("hydra", {"width": 0}, "width must be >= 1, got 0"),
    ],
)
def test_bad_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_drafter(name, **options)


def test_weights_that_do_not_fit_are_refused(coded: HFTarget, tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="hidden_size of medusa must be the target's 32, got 16"):
        Medusa(MedusaHeads(MedusaConfig(16))).bind(coded)
    with pytest.raises(ValueError, match="vocab_size of medusa must be at most the target's 64, got 65"):
        Medusa(MedusaHeads(MedusaConfig(32, vocab_size=65))).bind(coded)
    with pytest.raises(ValueError, match="medusa needs MedusaHeads, got HydraHeads"):
        Medusa(HydraHeads(HydraConfig(32))).bind(coded)
    with pytest.raises(ValueError, match="heads must be >= 1, got 0"):
        MedusaConfig(32, heads=0)
    with pytest.raises(RuntimeError, match="medusa has no target yet"):
        ask(Medusa(counting_medusa()), [1, 2])
    with pytest.raises(ValueError, match=r"holds weights of kind 'hydra', drafter 'medusa' was asked for"):
        heads_from({}, {"kind": "hydra"}, kind="medusa", where="there")


def test_a_trained_folder_is_loaded(coded: HFTarget, tmp_path: Any) -> None:
    from adaptspec.drafters.head_weights import head_card
    from adaptspec.pretrained import save_weights

    module = counting_medusa()
    card = head_card(module, target=coded.model)
    save_weights(tmp_path, module.state_dict(), card, bits=32)
    drafter = make_drafter(f"medusa:{tmp_path}")
    drafter.bind(coded)
    drafter.prefill(np.arange(5), codes([0, 1, 2, 3]))
    assert ask(drafter, list(range(5))).token_ids.tolist() == [5, 6, 7]
    other = HFTarget(tiny_models.make_llama(layers=LAYERS, seed=8))
    with pytest.raises(ValueError, match="was not trained for this target"):
        make_drafter(f"medusa:{tmp_path}").bind(other)
    save_weights(tmp_path, {**module.state_dict(), "more": torch.ones(3)}, card, bits=32)
    with pytest.raises(ValueError, match="weights do not fit their config at more"):
        make_drafter(f"medusa:{tmp_path}").bind(coded)


@pytest.mark.parametrize(("drafter", "rows"), [("medusa", None), ("medusa", 64), ("hydra", None)])
def test_what_vocabularies_learnt_is_restored_before_a_target_is_met(
    drafter: str, rows: int | None, tmp_path: Path
) -> None:
    model = tiny_models.make_llama()
    save_frequencies(tmp_path / "counts.safetensors", count_tokens([np.arange(64)], vocab_size=64))
    vocab = f"evospec:16+8:{tmp_path / 'counts.safetensors'}"
    torch.manual_seed(0)
    module = (
        HydraHeads(HydraConfig(32, heads=3))
        if drafter == "hydra"
        else MedusaHeads(MedusaConfig(32, 3, vocab_size=rows))
    )

    def make() -> AdaptiveSpec:
        own = make_drafter(drafter, path=module)
        return AdaptiveSpec([own], f"fixed:{drafter}@12/{vocab}", vocab=(vocab,), budgets=(12,))

    def run(spec: AdaptiveSpec, text: list[int]) -> list[int]:
        result = spec.generate(model, torch.tensor([text]), max_new_tokens=24, eos_token_id=64)
        assert result.stats.set_aside == {}
        return [record.accepted for record in result.trace]

    spec, again = make(), make()
    run(spec, [3, 60, 9, 3, 61])
    state = spec.drafters[drafter].state_dict()
    assert len(state["vocab"]) == (3 if rows else 1)
    again.drafters[drafter].load_state_dict(state)
    assert again.drafters[drafter].state_dict() == state
    assert run(spec, [9, 60, 3]) == run(again, [9, 60, 3])
    with pytest.raises(ValueError, match="no key but 'vocab', got other"):
        make().drafters[drafter].load_state_dict({"other": 1})
    with pytest.raises(ValueError, match="must be a list of"):
        again.drafters[drafter].load_state_dict({"vocab": [{}] * 7})
