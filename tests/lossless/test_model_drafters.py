"""Drafters that run a model accept everything when the model is the target: then position, mask and cache are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adaptspec import AdaptiveSpec
from adaptspec.drafters import Drafter
from adaptspec.drafters.draft_model import DraftModel
from adaptspec.drafters.layer_skip import LayerSkip
from tests.lossless.test_greedy import prompt, reference
from tests.target.families import FAMILIES, VOCAB


@pytest.fixture(scope="module")
def model() -> Any:
    return FAMILIES["llama"]("sdpa")


def accepted_length(model: Any, drafter: Drafter, budget: int) -> float:
    spec = AdaptiveSpec([drafter], f"fixed:{drafter.name}@{budget}")
    result = spec.generate(model, prompt(), max_new_tokens=41, eos_token_id=VOCAB + 1)
    assert torch.equal(result.sequences, reference(model, prompt(), max_new_tokens=41, eos_token_id=None))
    return result.stats.mean_accepted_length


@pytest.mark.parametrize("branching", [1, 3])
def test_a_draft_model_that_is_the_target_is_accepted_whole(branching: int, model: Any) -> None:
    twin = FAMILIES["llama"]("eager")
    drafter = DraftModel(twin, max_depth=4, branching=branching)
    assert accepted_length(model, drafter, 4 if branching == 1 else 60) == 5.0


def test_skipping_no_layer_is_the_target_itself(model: Any) -> None:
    assert accepted_length(model, LayerSkip(skip=[], min_confidence=0.0, max_depth=4), 4) == 5.0


def test_skipping_most_layers_is_not(model: Any) -> None:
    assert accepted_length(model, LayerSkip(skip=[0, 1, 2], min_confidence=0.0, max_depth=4), 4) < 4.0
