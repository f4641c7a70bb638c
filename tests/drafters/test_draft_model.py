"""Draft models with reduced vocabularies, and the small model that is built beside its target."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from adaptspec import AdaptiveSpec
from adaptspec.drafters import make_drafter
from adaptspec.drafters.draft_model import DraftModel
from adaptspec.drafters.model_rows import without_head
from adaptspec.drafters.small_model import (
    SmallModelConfig,
    build_small_model,
    config_like,
    load_small_model,
    save_small_model,
)
from adaptspec.target.hf import HFTarget
from adaptspec.types import DraftContext, DraftTree, Sampling
from tests import tiny_models
from tests.drafters.even_head import even_head
from tests.lossless.test_sampled import SMALL_VOCAB, exact_law, p_value, small_pair
from tests.target.families import FAMILIES

__all__ = ["small_pair"]
RUNS = 100


@pytest.fixture(scope="module")
def model() -> Any:
    return FAMILIES["llama"]("sdpa")


def ask(drafter: DraftModel, tokens: list[int], *, vocab: str, temperature: float = 0.0) -> DraftTree:
    context = DraftContext(tokens[-1], len(tokens), 9, Sampling(temperature), np.random.default_rng(3), vocab=vocab)
    return drafter.propose(context, 5)


@pytest.mark.parametrize("branching", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_some_rows_of_the_head(branching: int, temperature: float, model: Any) -> None:
    """The whole head gives what it gives without others beside it; a reduced one the same logits over its rows."""
    tokens = [5, 9, 33, 4, 17, 2]
    plain = DraftModel(model, branching=branching)
    plain.bind(HFTarget(model))
    plain.prefill(np.array(tokens))
    expected = ask(plain, tokens, vocab="full", temperature=temperature)
    with even_head() as name:
        drafter = DraftModel(model, branching=branching)
        drafter.use_vocab(("full", name))
        drafter.bind(HFTarget(model))
        drafter.prefill(np.array(tokens))
        for vocab in ("full", name, "full"):
            tree = ask(drafter, tokens, vocab=vocab, temperature=temperature)
            if vocab == "full":
                assert tree.token_ids.tolist() == expected.token_ids.tolist()
                assert np.allclose(tree.scores, expected.scores, atol=1e-5)
            else:
                assert not (tree.token_ids % 2).any()
                drawn = tree.siblings == "iid"  # trees are picked, without regard to the temperature
                with torch.no_grad():
                    logits = model(torch.tensor([tokens])).logits[0, -1, ::2].double()
                best = torch.log_softmax(logits / (temperature if drawn else 1.0), -1)
                if drawn:
                    q = np.asarray(tree.draft_probs)
                    assert not q[:, 1::2].any()
                    assert np.allclose(q[0, ::2], best.exp(), atol=1e-5)
                else:
                    assert tree.scores[0] == pytest.approx(float(best.max()), abs=1e-4)


def test_a_sampled_draft_over_some_rows_keeps_the_targets_law(small_pair: tuple[Any, Any]) -> None:
    """The target also emits tokens that the draft never proposes."""
    target, draft = small_pair
    input_ids = torch.tensor([[1, 4, 2, 5]])
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    with even_head() as name:
        spec = AdaptiveSpec(
            [DraftModel(draft, max_depth=3)], f"fixed:draft-model@3/{name}", vocab=("full", name), seed=17
        )
        for _ in range(RUNS):
            result = spec.generate(target, input_ids, max_new_tokens=3, temperature=1.0, eos_token_id=SMALL_VOCAB + 50)
            assert result.stats.set_aside == {}
            counts[tuple(result.sequences[0, 4:6].tolist())] += 1
            accepted += sum(record.accepted for record in result.trace)
    assert accepted > RUNS // 4, "the draft is never accepted, so nothing is tested"
    law = exact_law(target, input_ids, length=2, temperature=1.0, top_k=0)
    assert p_value(counts, law, RUNS) > 0.001


def test_heads_that_are_more_than_a_matrix_are_refused() -> None:
    for family in ("gemma2", "phi"):
        with pytest.raises(ValueError, match="cannot be reduced: its logits have (final_logit_softcapping|a bias)"):
            without_head(FAMILIES[family]("eager"))


def test_a_view_without_its_head_leaves_the_model_alone(model: Any) -> None:
    ids = torch.tensor([[3, 4, 5]])
    before = model(ids).logits
    hidden = without_head(model)(ids).logits
    assert hidden.shape == (1, 3, 32)
    assert torch.allclose(hidden @ model.lm_head.weight.T, before, atol=1e-4)
    assert torch.equal(model(ids).logits, before)


def test_a_small_model_shares_the_targets_matrices() -> None:
    target = tiny_models.make_llama(layers=3)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    small = build_small_model(config_like(target, layers=2), target, copy_layers=[0, 2])
    assert small.lm_head.weight.data_ptr() == target.lm_head.weight.data_ptr()
    assert small.model.embed_tokens.weight.data_ptr() == target.model.embed_tokens.weight.data_ptr()
    assert torch.equal(small.model.layers[1].mlp.up_proj.weight, target.model.layers[2].mlp.up_proj.weight)
    ids = torch.arange(6)[None]
    optimiser = torch.optim.AdamW(small.parameters(), lr=0.1, weight_decay=0.5)
    small(ids, labels=ids).loss.backward()
    optimiser.step()
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())
    assert not torch.equal(small.model.layers[1].mlp.up_proj.weight, target.model.layers[2].mlp.up_proj.weight)


def test_a_small_model_of_its_own_matrices() -> None:
    target = tiny_models.make_llama(layers=3)
    config = SmallModelConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        layers=1,
        attention_heads=2,
        key_value_heads=1,
        shared=False,
    )
    small = build_small_model(config, target)
    assert small.lm_head.weight is small.model.embed_tokens.weight and small.lm_head.weight.requires_grad
    assert small(torch.arange(4)[None]).logits.shape == (1, 4, 64)


@pytest.mark.parametrize("shared", [True, False])
def test_a_folder_of_weights_drafts(shared: bool, tmp_path: Any) -> None:
    """With all layers of its target it is the target, and everything it drafts is accepted."""
    target = tiny_models.make_llama(layers=2)
    if shared:
        small = build_small_model(config_like(target, layers=2), target, copy_layers=[0, 1])
        config = config_like(target, layers=2)
    else:
        config = config_like(target, layers=2, shared=False)
        small = build_small_model(config, target, copy_layers=[0, 1])
        small.model.embed_tokens.weight.data.copy_(target.model.embed_tokens.weight)
    save_small_model(tmp_path, small, config, target=target, card={"data": "none"}, bits=32)
    loaded = load_small_model(tmp_path, HFTarget(target))
    assert (loaded.lm_head.weight.data_ptr() == target.lm_head.weight.data_ptr()) is shared
    drafter = make_drafter(f"draft-model:{tmp_path}", max_depth=4)
    spec = AdaptiveSpec([drafter], "fixed:draft-model@4")
    result = spec.generate(target, torch.tensor([[5, 9, 4]]), max_new_tokens=21, eos_token_id=99)
    assert result.stats.set_aside == {}
    assert result.stats.mean_accepted_length == 5.0
    other = tiny_models.make_llama(layers=2, seed=4)
    with pytest.raises(ValueError, match="was not trained for this target"):
        drafter.bind(HFTarget(other))


def test_what_does_not_fit_is_refused(tmp_path: Any) -> None:
    target = tiny_models.make_llama(layers=2)
    like = config_like(target, layers=2)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 8}
    with pytest.raises(ValueError, match="hidden_size must be the target's 32 to share its embedding, got 16"):
        build_small_model(SmallModelConfig(**sizes), target)
    with pytest.raises(ValueError, match="vocab_size must be the target's 64, got 65"):
        build_small_model(SmallModelConfig(**{**sizes, "vocab_size": 65}), target)
    with pytest.raises(ValueError, match="attention_heads must be a multiple of key_value_heads, got 4 and 3"):
        SmallModelConfig(**sizes, key_value_heads=3)
    with pytest.raises(ValueError, match=r"layers must be in \[1, 2\], got 3"):
        config_like(target, layers=3)
    with pytest.raises(ValueError, match=r"copy_layers must be 2 layers in \[0, 2\), got \[0, 2\]"):
        build_small_model(like, target, copy_layers=[0, 2])
    with pytest.raises(ValueError, match="layer 0 of GPT2LMHeadModel has other tensors than a Llama"):
        gpt = FAMILIES["gpt2"]("eager")
        build_small_model(SmallModelConfig(96, 32, 64, layers=1), gpt, copy_layers=[0])
    small = build_small_model(like, target)
    save_small_model(tmp_path, small, config_like(target, layers=1), target=target, card={}, bits=32)
    with pytest.raises(ValueError, match=r"weights do not fit their config at model\.layers\.1"):
        load_small_model(tmp_path, HFTarget(target))
    with pytest.raises(ValueError, match="state of drafter 'draft-model' must have no key but 'vocab', got other"):
        DraftModel(target).load_state_dict({"other": 1})
