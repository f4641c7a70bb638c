"""CUDA graphs without a GPU: what a run does to tensors is written down and done again, on the same memory.

As with a real graph, numbers that Python knew at the capture stay what they were, results go where they went, and a
look at a tensor's values from the host is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from adaptspec.target.graphs import Outputs

_LOOKS = ("_local_scalar_dense", "item", "nonzero", "equal", "masked_select")


class _Writing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _LOOKS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


@dataclass
class Tape:
    """A captured run."""

    calls: list[tuple[Any, Any, Any, Any]]
    outputs: Outputs
    replays: int = 0

    @torch.inference_mode()
    def replay(self) -> Outputs:
        self.replays += 1
        for values in self.outputs.values():
            values.fill_(float("nan"))
        for func, args, kwargs, before in self.calls:
            for old, new in zip(tree_leaves(before), tree_leaves(func(*args, **kwargs)), strict=True):
                if (
                    isinstance(old, torch.Tensor)
                    and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr()
                ):
                    old.copy_(new)
        return self.outputs


class TapeCapture:
    """A `Capture` for any device."""

    def __init__(self) -> None:
        self.available = True
        self.tapes: list[Tape] = []

    @torch.inference_mode()
    def capture(self, run: Callable[[], Outputs]) -> Tape:
        run()
        with _Writing() as writing:
            outputs = run()
        self.tapes.append(Tape(writing.calls, outputs))
        return self.tapes[-1]
