"""Fixtures that several suites share. Nothing here imports torch before a test asks for a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

# Set before torch and the hub client are imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: more threads cost more than they bring
os.environ["HF_HUB_OFFLINE"] = "1"

from tests import tiny_models  # noqa: E402


@pytest.fixture(scope="session")
def embedded_model() -> tuple[Any, Any]:
    """The embedded target in float32 on the CPU, and its tokenizer. Shared: do not change it."""
    from adaptspec.target.loading import load_target

    return load_target("embedded", device="cpu")


@pytest.fixture(scope="session")
def tiny_llama() -> Any:
    """A random Llama on the CPU: 2 layers, hidden size 32, vocabulary 64, float32. Shared: do not change it."""
    return tiny_models.make_llama()


@pytest.fixture(scope="session")
def tiny_folder(tiny_llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_llama` with a tokenizer as a model folder. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama.save_pretrained(folder)
    tiny_models.save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_gguf(tiny_llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_llama` with a tokenizer as a GGUF file. Copy it before changing it."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tiny_models.write_gguf(path, tiny_llama)
    return path
