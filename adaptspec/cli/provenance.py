"""Where a result comes from: enough to run it again."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from adaptspec.processor import processor_name, speed_settings

LIBRARIES = ("adaptspec", "torch", "transformers", "tokenizers", "numpy")


def provenance(*, argv: Sequence[str], model: str, device: Any, dtype: str, seed: int) -> dict[str, Any]:
    """What to store with every measured result.

    Args:
        argv: the command line without the program's name.
        model: as the user named it.
        device: a torch device.
        dtype: the dtype in which the weights were loaded.
    """
    import torch

    return {
        **run_provenance(argv=argv, seed=seed),
        "model": model,
        "device": device_name(device),
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "environment": speed_settings(),
    }


def run_provenance(*, argv: Sequence[str], seed: int) -> dict[str, Any]:
    """The part that holds without a model: command, code, versions, seed, time and platform."""
    sha, dirty = git_state(Path(__file__).resolve().parent)
    return {
        "argv": ["adaptspec", *argv],
        "git_sha": sha,
        "git_dirty": dirty,
        "versions": {"python": platform.python_version(), **library_versions()},
        "seed": seed,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
    }


def library_versions() -> dict[str, str]:
    """Installed versions of the libraries that decide speed and output; what is not installed is left out."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def device_name(device: Any) -> str:
    """For example "cuda:0 NVIDIA H200" or "cpu AMD EPYC (2 cores)"."""
    if device.type == "cuda":
        import torch

        return f"{device} {torch.cuda.get_device_name(device)}"
    return f"{device} {processor_name()} ({os.cpu_count()} cores)"


def git_state(folder: Path) -> tuple[str, bool | None]:
    """Commit of the work tree that tracks `folder`, and whether it has uncommitted changes; ("", None) without one."""
    # An installed package may lie inside somebody else's repository, which says nothing about this code.
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return "", None
    sha = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return (sha or "", bool(changes)) if sha else ("", None)


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
