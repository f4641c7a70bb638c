"""The processor: its name, and the one setting that its matrix library needs before torch starts."""

from __future__ import annotations

import os
import platform
from collections.abc import MutableMapping
from pathlib import Path

_INFORMATION = Path("/proc/cpuinfo")
_SETTINGS = (
    "MKL_CBWR",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "GOMP_SPINCOUNT",
    "KMP_BLOCKTIME",
    "CUDA_VISIBLE_DEVICES",
)


def processor_name() -> str:
    """For example "AMD EPYC"."""
    return _field("model name") or platform.processor() or platform.machine()


def prefer_fast_kernels(environment: MutableMapping[str, str] = os.environ) -> None:
    """On AMD processors let MKL take its AVX2 code path, unless MKL_CBWR is set already.

    By default MKL multiplies the few rows of a verify pass about 1.5 times slower there. It reads the variable when
    torch is imported, so this comes first.
    """
    if _field("vendor_id") == "AuthenticAMD":
        environment.setdefault("MKL_CBWR", "AVX2")


def speed_settings(environment: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """The variables in force that change how fast the same code runs."""
    return {name: environment[name] for name in _SETTINGS if name in environment}


def _field(name: str) -> str:
    if not _INFORMATION.is_file():
        return ""
    for line in _INFORMATION.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
