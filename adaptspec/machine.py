"""Which machine, model and libraries costs belong to, and where costs are kept."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch
import transformers

from adaptspec import __version__
from adaptspec.control.cost import fingerprint
from adaptspec.processor import processor_name
from adaptspec.target.embedded import cache_folder
from adaptspec.target.hf import HFTarget


def machine_fingerprint(target: HFTarget) -> str:
    """What the costs of this target depend on: device, dtype, the model's architecture and sizes, library versions.

    On a CPU the number of threads counts, and the matrix library's code path if the environment sets it.
    """
    return fingerprint(
        device=_device_name(target),
        dtype=str(target.dtype).removeprefix("torch."),
        model=_model_name(target),
        versions={"adaptspec": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
    )


def profile_path(fingerprint: str) -> Path:
    """Where a profile is kept if nobody names a file: in the user's cache folder, by a digest of its fingerprint."""
    return cache_folder() / "costs" / f"{hashlib.sha256(fingerprint.encode()).hexdigest()[:16]}.json"


def _device_name(target: HFTarget) -> str:
    kind = target.device.type
    if kind == "cuda":
        names = [torch.cuda.get_device_name(device) for device in {p.device for p in target.model.parameters()}]
        return _plain(" + ".join(sorted(names)))
    parts = [kind, processor_name(), f"threads {torch.get_num_threads()}"]
    if setting := os.environ.get("MKL_CBWR"):
        parts.append(f"MKL_CBWR {setting}")
    return _plain(", ".join(parts))


def _model_name(target: HFTarget) -> str:
    model = target.model
    parameters = list(model.parameters())
    count, size = sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in parameters)
    return (
        f"{type(model).__name__}, {len(target.layout.layers)} layers, "
        f"hidden {model.get_input_embeddings().weight.shape[1]}, vocabulary {target.vocab_size}, "
        f"{count} parameters in {size} bytes, attention {target.layout.attention}"
    )


def _plain(text: str) -> str:
    """Fit for one part of a fingerprint."""
    return text.replace("; ", ", ")
