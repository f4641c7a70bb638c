"""The transformers way: what a generation config asks for is what comes, with speculation as without."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from adaptspec import AdaptiveSpec
from adaptspec.drafters import make_drafter
from adaptspec.serving import StepContext, StepOutcome
from tests import tiny_models


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_folder)


@pytest.fixture
def model() -> Any:
    """One of its own, whose generation config may be changed."""
    return tiny_models.make_llama()


def prompt() -> torch.Tensor:
    return torch.tensor([[3, 4, 5, 6] * 5])


def spec() -> AdaptiveSpec:
    return AdaptiveSpec(["suffix", "prompt-lookup"], "mixture")


def generate(model: Any, **options: Any) -> Any:
    return model.generate(prompt(), attention_mask=torch.ones_like(prompt()), **options)


CONFIGS: list[dict[str, Any]] = [
    {"max_new_tokens": 1},
    {"max_length": 37},
    {"max_new_tokens": 16, "min_new_tokens": 12, "eos_token_id": list(range(30))},
    {"max_new_tokens": 16, "min_length": 30, "eos_token_id": list(range(0, 64, 3))},
    {"max_new_tokens": 16, "eos_token_id": [5, 9, 11, 40]},
    {"max_new_tokens": 16, "repetition_penalty": 1.3},
    {"max_new_tokens": 16, "no_repeat_ngram_size": 2},
    {"max_new_tokens": 16, "bad_words_ids": [[7], [8, 9]], "suppress_tokens": [10, 11]},
    {"max_new_tokens": 16, "begin_suppress_tokens": [3, 4], "forced_eos_token_id": 2},
    {"max_new_tokens": 16, "encoder_repetition_penalty": 1.2, "sequence_bias": {(12,): 2.0, (13, 14): -3.0}},
    {"max_new_tokens": 16, "exponential_decay_length_penalty": (5, 1.2)},
]


@pytest.mark.parametrize("options", CONFIGS, ids=lambda options: "-".join(options))
def test_a_config_is_honoured_token_by_token(options: dict[str, Any], model: Any) -> None:
    config = GenerationConfig(do_sample=False, pad_token_id=2, **options)
    expected = generate(model, generation_config=config)
    assert torch.equal(generate(model, generation_config=config, custom_generate=spec()), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "top_k": 10},
        {"temperature": 1.3, "top_p": 0.8, "repetition_penalty": 1.2},
        {"min_p": 0.05, "top_k": 0},
        {"typical_p": 0.7},
        {"epsilon_cutoff": 0.01, "eta_cutoff": 0.01},
    ],
    ids=lambda options: "-".join(options),
)
def test_samples_follow_the_seed_whatever_is_drafted(options: dict[str, Any], model: Any) -> None:
    config = GenerationConfig(do_sample=True, max_new_tokens=14, pad_token_id=2, eos_token_id=None, **options)
    outputs = []
    for strategy in ("fixed:ar", "fixed:suffix@16", "mixture"):
        torch.manual_seed(11)
        way = AdaptiveSpec(["suffix"], strategy)
        outputs.append(generate(model, generation_config=config, custom_generate=way).tolist())
    assert outputs[0] == outputs[1] == outputs[2]
    torch.manual_seed(12)
    assert generate(model, generation_config=config, custom_generate=spec()).tolist() != outputs[0]


def test_a_dict_is_returned_on_request(model: Any) -> None:
    plain = generate(model, max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
    ours = generate(model, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, custom_generate=spec())
    assert type(ours) is type(plain)
    assert torch.equal(ours.sequences, plain.sequences)


def stop_of(model: Any, tokenizer: Any) -> str:
    """Three letters from the middle of the model's own answer."""
    text = tokenizer.decode(generate(model, max_new_tokens=30, do_sample=False)[0, 20:])
    return text[12:15]


def test_stop_strings_of_the_models_own_config(model: Any, tokenizer: Any) -> None:
    stop = stop_of(model, tokenizer)
    model.generation_config.stop_strings = [stop]
    expected = generate(model, max_new_tokens=30, do_sample=False, tokenizer=tokenizer)
    assert expected.shape[1] < 50
    result = spec().generate(model, prompt(), max_new_tokens=30, tokenizer=tokenizer)
    assert torch.equal(result.sequences, expected)
    assert result.finish_reason == "stop"
    with pytest.raises(ValueError, match="stop_strings .* needs the tokenizer"):
        spec().generate(model, prompt(), max_new_tokens=30)
    free = spec().generate(model, prompt(), max_new_tokens=30, stop_strings=[])
    assert free.sequences.shape[1] == 50


def test_stop_strings_the_transformers_way_are_bound(model: Any, tokenizer: Any) -> None:
    stop = stop_of(model, tokenizer)
    expected = generate(model, max_new_tokens=30, do_sample=False, tokenizer=tokenizer, stop_strings=stop)
    way = spec().hf(tokenizer=tokenizer, stop_strings=stop)
    assert torch.equal(generate(model, max_new_tokens=30, do_sample=False, custom_generate=way), expected)
    with pytest.raises(ValueError, match="needs the tokenizer"):
        spec().hf(stop_strings=stop)
    with pytest.raises(ValueError, match="text that is not empty, got ''"):
        spec().hf(tokenizer=tokenizer, stop_strings=["a", ""])


def test_a_deep_copy_goes_on_as_the_original_and_apart_from_it(model: Any) -> None:
    original = AdaptiveSpec(["suffix", "token-recycling"], "mixture", seed=3)
    original.generate(model, prompt(), max_new_tokens=20)
    twin = copy.deepcopy(original)
    assert twin.drafters["suffix"] is not original.drafters["suffix"]
    assert twin.engine.controller.state_dict() == original.engine.controller.state_dict()
    both = [way.generate(model, prompt(), max_new_tokens=20, temperature=0.9).sequences for way in (original, twin)]
    assert torch.equal(*both)


def test_a_deep_copy_of_objects_is_refused_in_one_sentence() -> None:
    with pytest.raises(TypeError, match="with objects in pool cannot be copied"):
        copy.deepcopy(AdaptiveSpec([make_drafter("suffix")]))


def test_the_policy_layer_of_an_object(model: Any, tmp_path: Path) -> None:
    """`decide` and `observe` are there without a model, and are saved with the rest."""
    way = AdaptiveSpec(["suffix", "prompt-lookup@4"], "hedge", budgets=(2, 8))
    for _ in range(8):
        decision = way.decide(StepContext(["a", "b"], [10, 20]))
        assert set(decision.names) == {"ar", "suffix@2", "suffix@8", "prompt-lookup@4"}
        way.observe(decision, StepOutcome(decision.lengths, decision.lengths, decision.lengths, seconds=0.02))
    way.save(tmp_path / "state.json")
    restored = AdaptiveSpec.load(tmp_path / "state.json")
    first, second = (w.decide(StepContext(["a", "b"], [30, 40])) for w in (way, restored))
    assert first.lengths.tolist() == second.lengths.tolist() and first.digest == second.digest
    assert AdaptiveSpec(["suffix"], "mixture", budgets=("auto",)).serving.strategy == "greedy"
    assert AdaptiveSpec(["suffix"], "fixed:suffix@3").serving.strategy == "fixed:suffix@3"
    assert AdaptiveSpec(["suffix"], "hedge+request").serving.strategy == "hedge"
