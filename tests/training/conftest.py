"""A small target, prompts for it, and what it answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import tiny_models


@pytest.fixture(scope="session")
def target() -> Any:
    """A random Llama of 4 layers whose answers vary: with a head of its own it does not repeat its last token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tiny_models.TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = LlamaForCausalLM(config).eval()
        with torch.no_grad():
            model.lm_head.weight.mul_(20.0)  # decided answers, not nearly uniform ones
    return model


@pytest.fixture(scope="session")
def prompts() -> list[Any]:
    """Twelve prompts of 3 to 10 tokens in two domains, one of nine and one of three."""
    from adaptspec.training.jobs import PromptTokens

    generator = np.random.default_rng(0)
    return [
        PromptTokens(generator.integers(3, 60, generator.integers(3, 11)), "rare" if i % 4 == 3 else "common")
        for i in range(12)
    ]


@pytest.fixture(scope="session")
def answers_folder(target: Any, prompts: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three answers and more per prompt, up to 14 tokens. Do not change it."""
    from adaptspec.training.answers import write_answers

    folder = tmp_path_factory.mktemp("answers")
    write_answers(target, prompts, folder, origin={"model": "tiny"}, samples=3, max_new_tokens=14, batch=5)
    return folder


@pytest.fixture(scope="session")
def corpus(answers_folder: Path) -> list[Any]:
    """The answers in `answers_folder`."""
    from adaptspec.training.corpus import read_answers

    return read_answers(answers_folder)


@pytest.fixture(scope="session")
def store(target: Any, corpus: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Features after layers 1 to 4 with a head of 48 rows."""
    from adaptspec.training.features import prepare_features

    folder = tmp_path_factory.mktemp("features")
    return prepare_features(target, corpus, folder, taps=(1, 2, 3, 4), rows=48, keep=(2,), top_k=8, most_tokens=40)


@pytest.fixture(scope="session")
def circle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A target that always says the same circle of ten tokens, and its answers: something that can be learnt fully.
    Features may be added to the folder, nothing else changed."""
    import torch

    from adaptspec.training.answers import write_answers
    from adaptspec.training.jobs import PromptTokens

    model = tiny_models.make_llama(layers=3)
    circle = list(range(10, 20))
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    ids = torch.tensor([[circle[(i + j) % 10] for j in range(24)] for i in range(10)])
    with torch.enable_grad():
        for _ in range(60):
            optimiser.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimiser.step()
    model.eval().requires_grad_(False)
    prompts = [PromptTokens(np.array([circle[(i + j) % 10] for j in range(3 + i % 3)])) for i in range(20)]
    folder = tmp_path_factory.mktemp("circle") / "answers"
    write_answers(model, prompts, folder, origin={"model": "circle"}, samples=1, max_new_tokens=16, batch=20)
    return model, folder
