"""Which request each row belongs to, which vLLM does not tell a proposer: taken from the model runner, or recognised.

The entry point `vllm.general_plugins` (`register`) only permits the capture. The hook goes in when a proposer is made,
inside the worker: processes that never draft are left as they are.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import zlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_EXECUTE = ("self", "scheduler_output", "intermediate_tensors")
_SCHEDULED = ("num_scheduled_tokens", "scheduled_spec_decode_tokens", "finished_req_ids", "total_num_scheduled_tokens")


@dataclass(frozen=True, slots=True)
class PassFacts:
    """What the model runner was told to do in one pass.

    Attributes:
        scheduled: by request, tokens computed in the pass.
        total: their sum.
        drafts: by request, the draft tokens that the pass verifies, -1 where a grammar struck one out.
        runner: the model runner, whose rows are in order once the pass has begun.
        started: `perf_counter()` at the beginning.
    """

    scheduled: Mapping[str, int]
    total: int
    drafts: Mapping[str, Sequence[int]]
    runner: Any
    started: float


class PassListener(ABC):
    """A drafter that wants to know of every pass before it begins."""

    @abstractmethod
    def begin_pass(self, scheduler_output: Any, runner: Any) -> None:
        """Called by the hook."""


_permitted = False


def register() -> None:
    """Entry point `vllm.general_plugins`: allow proposers of this process to hook the model runner."""
    global _permitted
    _permitted = True


def permitted() -> bool:
    """Whether vLLM loaded the plugin in this process."""
    return _permitted


def install(runner_class: type, output_class: type) -> str | None:
    """Hook `execute_model` of vLLM's model runner, once per class.

    Args:
        runner_class: `GPUModelRunner`.
        output_class: `SchedulerOutput`.

    Returns:
        None, or the reason why not: what the hook relies on has changed.
    """
    original = runner_class.__dict__.get("execute_model")
    if getattr(original, "adaptspec_hook", False):
        return None
    if original is None:
        return f"{runner_class.__name__} has no execute_model"
    if problem := signature_problem(original, _EXECUTE):
        return problem
    if problem := fields_problem(output_class, _SCHEDULED):
        return problem

    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        drafter = getattr(self, "drafter", None)
        if isinstance(drafter, PassListener):
            drafter.begin_pass(scheduler_output, self)
        return original(self, scheduler_output, intermediate_tensors)

    execute_model.adaptspec_hook = True  # type: ignore[attr-defined]
    runner_class.execute_model = execute_model  # type: ignore[attr-defined]
    return None


def signature_problem(function: Callable[..., Any], expected: Sequence[str]) -> str | None:
    """What is wrong with a function's parameters, None if they are those expected, in this order."""
    found = tuple(inspect.signature(function).parameters)
    if found == tuple(expected):
        return None
    name = getattr(function, "__qualname__", repr(function))
    return f"{name} takes ({', '.join(found)}), expected is ({', '.join(expected)})"


def fields_problem(data_class: type, expected: Sequence[str]) -> str | None:
    """Which of the expected fields a dataclass lacks, None if it has them all."""
    found = {field.name for field in dataclasses.fields(data_class)} if dataclasses.is_dataclass(data_class) else set()
    missing = [name for name in expected if name not in found]
    return f"{data_class.__name__} has no field {', '.join(missing)}" if missing else None


def runner_problem(runner: Any) -> str | None:
    """What a model runner lacks that rows are read from, None if it has all."""
    batch = getattr(runner, "input_batch", None)
    for owner, name in (
        (runner, "requests"),
        (runner, "input_batch"),
        (batch, "req_ids"),
        (batch, "num_prompt_tokens"),
    ):
        if not hasattr(owner, name):
            return f"{type(owner).__name__} has no {name}"
    return None


class Fingerprints:
    """Names for rows by their content: a row that goes on where one ended is that one.

    Rows of equal content are interchangeable, so it does not matter which of them is taken for which.

    Args:
        most: names remembered; the one seen longest ago makes room.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._named: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._places: dict[tuple[int, int], list[int]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._named)

    def name(self, rows: Sequence[tuple[np.ndarray, int]]) -> tuple[list[int], list[int]]:
        """Names of the rows of one step, and the names that were forgotten for want of room.

        Args:
            rows: per row its text, a contiguous int32 [T], and how many tokens of it are new.
        """
        names, keys = [], []
        for text, new in rows:
            before = len(text) - new
            checksum = zlib.crc32(text[:before])
            waiting = self._places.get((before, checksum))
            name = self._take(waiting[0]) if waiting else None
            if name is None:
                self._count += 1
                name = self._count
            names.append(name)
            keys.append((len(text), zlib.crc32(text[before:], checksum)))
        for name, key in zip(names, keys, strict=True):
            self._named[name] = key
            self._places.setdefault(key, []).append(name)
        forgotten = []
        while len(self._named) > max(self._most, len(rows)):
            oldest = next(iter(self._named))
            forgotten.append(self._take(oldest))
        return names, forgotten

    def _take(self, name: int) -> int:
        key = self._named.pop(name)
        self._places[key].remove(name)
        if not self._places[key]:
            del self._places[key]
        return name
