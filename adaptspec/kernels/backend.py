"""Which implementation of an op runs: Triton on GPUs, the reference elsewhere, unless somebody asks for one.

`ADAPTSPEC_KERNELS=reference|triton` asks for the whole process, `backend=` for one call and takes precedence. What is
asked for and not there raises; nothing falls back silently. With `TRITON_INTERPRET=1`, set before triton is imported,
Triton kernels run on CPU tensors, slowly: that is for tests.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from types import ModuleType
from typing import Literal

import torch

from adaptspec.names import unknown_name

Backend = Literal["reference", "triton"]
BACKENDS: tuple[Backend, ...] = ("reference", "triton")
VARIABLE = "ADAPTSPEC_KERNELS"

calls: Counter[tuple[str, Backend]] = Counter()
"""How often each (op, backend) was taken in this process, so that tests can assert that the fast path ran."""


def choose(op: str, device: torch.device | str, *, backend: Backend | None = None) -> Backend:
    """The backend of `op` on `device`, decided once per device.

    Args:
        op: name of a package below `adaptspec.kernels`.
        device: where the tensors are.
        backend: what to take instead of the automatic choice and of `ADAPTSPEC_KERNELS`.

    Raises:
        ValueError: unknown op or backend.
        RuntimeError: Triton was asked for and cannot run there, with the reason.

    >>> choose("tree_attention", "cpu")
    'reference'
    """
    return _choose(op, torch.device(device), backend or os.environ.get(VARIABLE) or None)


def implementation(op: str, device: torch.device | str, *, backend: Backend | None = None) -> ModuleType:
    """The module `adaptspec.kernels.<op>.<chosen backend>`; counts the call in `calls`. Raises like `choose`."""
    chosen = choose(op, device, backend=backend)
    calls[op, chosen] += 1
    return _module(op, chosen)


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Inside the block Triton launches on `device`: it takes the current device, not the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@lru_cache(maxsize=1)
def operations() -> tuple[str, ...]:
    """The names of all ops: the packages next to this file."""
    return tuple(info.name for info in pkgutil.iter_modules([os.path.dirname(__file__)]) if info.ispkg)


def triton_problem(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on `device`, None if they can."""
    if device.type != "cuda" and not interpreting():  # HIP devices are called cuda too
        return f"it runs on CUDA and HIP devices, not on {device.type} (only in its interpreter: TRITON_INTERPRET=1)"
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    if device.type == "cuda" and torch.version.cuda and torch.cuda.get_device_capability(device) < (8, 0):
        major, minor = torch.cuda.get_device_capability(device)
        return f"it needs compute capability 8.0, {device} has {major}.{minor}"
    return None


@lru_cache(maxsize=256)
def _choose(op: str, device: torch.device, wish: str | None) -> Backend:
    if op not in operations():
        raise unknown_name("kernel", op, operations())
    if wish is not None and wish not in BACKENDS:
        raise unknown_name("kernel backend", wish, BACKENDS)
    if wish == "reference":
        return "reference"
    problem = triton_problem(device)
    if problem is not None and wish == "triton":
        raise RuntimeError(f"triton was asked for {op} on {device}: {problem}")
    # The interpreter makes Triton possible on a CPU, never desirable.
    return "triton" if problem is None and (wish == "triton" or device.type == "cuda") else "reference"


@lru_cache(maxsize=64)
def _module(op: str, backend: Backend) -> ModuleType:
    return importlib.import_module(f"adaptspec.kernels.{op}.{backend}")
