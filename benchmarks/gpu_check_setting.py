"""What the sections of the GPU check share: where they run, how they measure, what the device could do at best."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch

from adaptspec.kernels.backend import Backend

T = TypeVar("T")

PEAK_BANDWIDTH = {
    "A10": 600e9,
    "A10G": 600e9,
    "A100": 1555e9,
    "A100 80GB": 1935e9,
    "A100-SXM4-80GB": 2039e9,
    "A100-PCIE-40GB": 1555e9,
    "A40": 696e9,
    "B200": 8000e9,
    "GH200": 4000e9,
    "H100": 3350e9,
    "H100 NVL": 3938e9,
    "H100 PCIe": 2039e9,
    "H200": 4800e9,
    "L4": 300e9,
    "L40": 864e9,
    "L40S": 864e9,
    "MI300X": 5300e9,
    "RTX 3090": 936e9,
    "RTX 4090": 1008e9,
    "RTX 5090": 1792e9,
    "RTX A6000": 768e9,
}
"""Bytes per second of device memory as the vendors name them, by a part of the device's name; the longest counts."""


def peak_bandwidth(device_name: str) -> float | None:
    """The vendor's figure, None for a device that is not in the table.

    >>> peak_bandwidth("NVIDIA H100 PCIe"), peak_bandwidth("NVIDIA L40S"), peak_bandwidth("NVIDIA T1000")
    (2039000000000.0, 864000000000.0, None)
    """
    words = f" {device_name} "
    found = [name for name in PEAK_BANDWIDTH if f" {name} " in words or f" {name}-" in words]
    return PEAK_BANDWIDTH[max(found, key=len)] if found else None


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a section runs.

    Attributes:
        device: the CUDA device; a CPU to rehearse.
        backend: the implementation that is checked; on a CPU the reference stands in.
        peak: bytes per second that figures are compared with.
        rehearsal: tiny sizes, and each call measured once.
    """

    device: torch.device
    backend: Backend
    peak: float
    rehearsal: bool = False

    def pick(self, real: T, tiny: T) -> T:
        """`tiny` in a rehearsal."""
        return tiny if self.rehearsal else real

    def normal(self, *shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Standard normal numbers."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.device).to(dtype)

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def cold_microseconds(self, call: Callable[[], Any]) -> float:
        """Device time between two events, median of many calls, the caches emptied before each."""
        if self.device.type != "cuda":
            return self.wall_microseconds(call)
        from triton.testing import do_bench

        return 1e3 * do_bench(call, warmup=20, rep=60, return_mode="median")

    def graph_microseconds(self, call: Callable[[], Any]) -> float:
        """Device time in a CUDA graph, so without launching from the host; caches are warm."""
        if self.device.type != "cuda":
            return self.wall_microseconds(call)
        from triton.testing import do_bench_cudagraph

        with torch.cuda.stream(torch.cuda.Stream()):
            return 1e3 * do_bench_cudagraph(call, rep=20, return_mode="median")

    def wall_microseconds(self, call: Callable[[], Any]) -> float:
        """Wall time until the device is done, median."""
        seconds = []
        for _ in range(self.pick(30, 1) + 1):
            self.synchronize()
            started = perf_counter()
            call()
            self.synchronize()
            seconds.append(perf_counter() - started)
        return 1e6 * float(np.median(seconds[1:]))


def measure_copy_bandwidth(device: torch.device, size: int = 1 << 30) -> float:
    """Bytes read and written per second by a large copy, the fastest of several."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(6):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        best = min(best, 1e-3 * start.elapsed_time(end))
    return 2 * size / best


def random_parents(rng: np.random.Generator, nodes: int) -> np.ndarray:
    """int64 [N] of a random tree."""
    return np.array([rng.integers(-1, i) for i in range(nodes)], dtype=np.int64)


def visibility(parents: Iterable[int]) -> np.ndarray:
    """bool [N + 1, N + 1] of the root and the nodes."""
    parents = list(parents)
    visible = np.eye(len(parents) + 1, dtype=bool)
    for node, parent in enumerate(parents):
        visible[node + 1] |= visible[parent + 1]
    return visible
