"""Greedy output is token-identical to the target alone, for every registered drafter and every way of asking."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from adaptspec import AdaptiveSpec
from adaptspec.drafters import Drafter
from adaptspec.types import Arm
from tests.contracts.cases import ModelWorld, case_for, names
from tests.target.families import FAMILIES, VOCAB


@pytest.fixture(scope="module")
def model() -> Any:
    return FAMILIES["llama"]("sdpa")


def drafter_for(name: str) -> Drafter:
    """The drafter that the contract suite tests, for a vocabulary of this model's size."""
    return case_for(name).build(ModelWorld(VOCAB))


def prompt(length: int = 24) -> torch.Tensor:
    """A text that repeats itself, so that lookup drafters have evidence."""
    return ((torch.arange(length) % 7) * 5 + 3)[None]


def reference(model: Any, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return model.generate(input_ids, attention_mask=torch.ones_like(input_ids), do_sample=False, **options)


@pytest.mark.parametrize("budget", [1, 5, 32])
@pytest.mark.parametrize("name", names(alike=False))
def test_identical_to_generate(name: str, budget: int, model: Any) -> None:
    drafter = drafter_for(name)
    spec = AdaptiveSpec([drafter], f"fixed:{drafter.name}@{budget}")
    for request in range(3):  # drafters that learn over requests have something to say in the later ones
        input_ids = prompt(20 + request)
        result = spec.generate(model, input_ids, max_new_tokens=40)
        assert torch.equal(result.sequences, reference(model, input_ids, max_new_tokens=40)), result.trace
        assert result.stats.set_aside == {}
        assert sum(record.emitted for record in result.trace) + 1 == result.stats.new_tokens


@pytest.mark.parametrize("name", names(alike=True))
def test_drafters_with_other_weights(name: str, model: Any) -> None:
    drafter = drafter_for(name)
    result = AdaptiveSpec([drafter], f"fixed:{drafter.name}@32").generate(model, prompt(), max_new_tokens=20)
    assert torch.equal(result.sequences, reference(model, prompt(), max_new_tokens=20)), result.trace
    assert result.stats.set_aside == {}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family(family: str) -> None:
    model = FAMILIES[family]("eager" if family == "gemma2" else "sdpa")
    spec = AdaptiveSpec(["suffix"], "fixed:suffix@16")
    for request in range(2):
        input_ids = prompt(20 + request)
        expected = reference(model, input_ids, max_new_tokens=40)
        assert torch.equal(spec.generate(model, input_ids, max_new_tokens=40).sequences, expected)
    assert spec.last_result is not None
    assert spec.last_result.stats.acceptance_rate > 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", names(alike=False))
def test_window_models_with_every_drafter(name: str, attention: str) -> None:
    model = FAMILIES["gemma3"](attention)
    drafter = drafter_for(name)
    spec = AdaptiveSpec([drafter], f"fixed:{drafter.name}@12")
    result = spec.generate(model, prompt(), max_new_tokens=30)
    assert torch.equal(result.sequences, reference(model, prompt(), max_new_tokens=30))


PROCESSED = [
    {"repetition_penalty": 1.5},
    {"no_repeat_ngram_size": 3},
    {"min_new_tokens": 12},
    {"bad_words_ids": [[3], [8, 13]]},
    {"suppress_tokens": [3, 8]},
    {"encoder_repetition_penalty": 1.3},
    {"sequence_bias": [[[8], 4.0], [[13, 18], -5.0]]},
    {"exponential_decay_length_penalty": (5, 1.2)},
    {"forced_eos_token_id": 2},
    {"renormalize_logits": True, "remove_invalid_values": True, "repetition_penalty": 1.2},
    {"guidance_scale": 1.0},
]


@pytest.mark.parametrize("options", PROCESSED, ids=lambda options: "-".join(options))
@pytest.mark.parametrize("name", ["suffix", "token-recycling", "lookahead"])
def test_processors_apply_per_node_along_its_path(name: str, options: dict[str, Any], model: Any) -> None:
    spec = AdaptiveSpec([name], f"fixed:{name}@16")
    for request in range(2):
        input_ids = prompt(20 + request)
        expected = reference(model, input_ids, max_new_tokens=30, **options)
        got = reference(model, input_ids, max_new_tokens=30, custom_generate=spec, **options)
        assert torch.equal(got, expected)


def test_eos_inside_an_accepted_block_truncates(model: Any) -> None:
    free = reference(model, prompt(), max_new_tokens=40, eos_token_id=None)[0, prompt().shape[1] :].tolist()
    spec = AdaptiveSpec(["suffix"], "fixed:suffix@16")
    for token in dict.fromkeys(free):
        for eos in (token, [token, 1]):
            expected = reference(model, prompt(), max_new_tokens=40, eos_token_id=eos, pad_token_id=0)
            result = spec.generate(model, prompt(), max_new_tokens=40, eos_token_id=eos)
            assert torch.equal(result.sequences, expected)
            assert result.finish_reason == "eos"


@pytest.mark.parametrize("count", range(1, 12))
def test_never_beyond_max_new_tokens(count: int, model: Any) -> None:
    spec = AdaptiveSpec(["suffix"], "fixed:suffix@16")
    result = spec.generate(model, prompt(), max_new_tokens=count)
    assert torch.equal(result.sequences, reference(model, prompt(), max_new_tokens=count))
    assert result.stats.new_tokens == count
    assert all(record.emitted <= count for record in result.trace)


def test_the_context_limit_ends_generation_and_caps_drafts(model: Any) -> None:
    limit = model.config.max_position_embeddings
    input_ids = prompt(limit - 10)
    for arm in ("suffix@16", "ar", "lookahead@8"):
        spec = AdaptiveSpec(["suffix", "lookahead"], f"fixed:{arm}")
        result = spec.generate(model, input_ids, max_new_tokens=60)
        assert result.finish_reason == "context"
        assert result.sequences.shape[1] == limit + 1  # the last token needs no position of its own
        assert torch.equal(result.sequences, reference(model, input_ids, max_new_tokens=11))


def test_left_padding_is_kept_and_not_read(model: Any) -> None:
    padded = torch.cat([torch.zeros((1, 5), dtype=torch.long), prompt()], dim=1)
    mask = torch.cat([torch.zeros((1, 5), dtype=torch.long), torch.ones_like(prompt())], dim=1)
    expected = model.generate(padded, attention_mask=mask, do_sample=False, max_new_tokens=20)
    spec = AdaptiveSpec(["suffix"], "fixed:suffix@16")
    got = model.generate(padded, attention_mask=mask, do_sample=False, max_new_tokens=20, custom_generate=spec)
    assert torch.equal(got, expected)


def test_custom_generate_equals_generate_and_returns_a_dict_on_request(model: Any) -> None:
    spec = AdaptiveSpec(["suffix"], "fixed:suffix@16")
    plain = spec.generate(model, prompt(), max_new_tokens=20).sequences
    assert torch.equal(reference(model, prompt(), max_new_tokens=20, custom_generate=spec), plain)
    output = reference(model, prompt(), max_new_tokens=20, custom_generate=spec, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain)


class OnceWrong(Drafter):
    """Proposes a tree with branches that repeat a token of another branch, and one right path by chance."""

    name = "once-wrong"
    isolate = False

    def prefill(self, token_ids: np.ndarray, features: Any = None) -> None:
        self.tokens = token_ids.tolist()

    def observe(self, observation: Any) -> None:
        self.tokens += observation.tokens.tolist()

    def propose(self, context: Any, budget: int) -> Any:
        from adaptspec.types import DraftTree

        if context.max_depth < 3:
            return DraftTree.empty()
        rng = np.random.default_rng(len(self.tokens))
        first = rng.choice(VOCAB, 6, replace=False)
        second = rng.choice(VOCAB, 6, replace=False)
        tokens = np.concatenate([first, second, second])
        parents = np.array([-1] * 6 + [0] * 6 + [1] * 6)
        return DraftTree(tokens, parents, np.zeros(18))


def test_random_wide_trees(model: Any) -> None:
    spec = AdaptiveSpec([OnceWrong()], "fixed:once-wrong@18")
    for length in range(5, 12):
        result = spec.generate(model, prompt(length), max_new_tokens=30)
        assert torch.equal(result.sequences, reference(model, prompt(length), max_new_tokens=30))


def test_arms_given_whole(model: Any) -> None:
    spec = AdaptiveSpec(["suffix@4", Arm("prompt-lookup", 3)], "fixed:prompt-lookup@3")
    assert [str(arm) for arm in spec.arms] == ["ar", "suffix@4", "prompt-lookup@3"]
    result = spec.generate(model, prompt(), max_new_tokens=20)
    assert torch.equal(result.sequences, reference(model, prompt(), max_new_tokens=20))
