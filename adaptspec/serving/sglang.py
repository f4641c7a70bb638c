"""SGLang: the number of draft steps of its adaptive EAGLE worker, decided by a `ServingPolicy`.

SGLang (0.5.23) sizes buffers and captures graphs for the "candidate_steps" of `--speculative-adaptive-config`. A
section "adaptspec" in that file hands the choice among them to this module; without it SGLang's own rule stays:

    {"1": {"candidate_steps": [0, 1, 3, 5]}, "16": {"candidate_steps": [0, 1]}, "adaptspec": {"strategy": "hedge"}}

Not tested end to end on a GPU: the policy is driven by SGLang's own controller in tests, without a model.
"""

from __future__ import annotations

import bisect
import inspect
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from adaptspec.names import unknown_name
from adaptspec.serving.policy import ServingPolicy
from adaptspec.serving.types import Decision, StepContext, StepOutcome

logger = logging.getLogger("adaptspec")

SECTION = "adaptspec"
TARGET = "sglang.srt.speculative.eagle_worker_v2.AdaptiveSpeculativeParams"
_SETTINGS = {"strategy", "objective", "guard", "seed"}
_MOST_IN_FLIGHT = 8
_PROTOCOL = {
    "set_cuda_graph_bs": ("self", "cuda_graph_bs"),
    "get_steps_for_batch": ("self", "batch_size"),
    "on_verify_complete": ("self", "num_correct_drafts_per_req", "batch_size"),
    "cuda_graph_bs_for_step": ("self", "step"),
}
_MADE_WITH = ("self", "initial_steps", "cfg_path")

Agree = Callable[[int | None], int]
"""Takes this rank's number of steps, None on ranks that do not decide, and returns what all ranks do."""


class AdaptiveSpecPolicy:
    """SGLang's protocol of the same name. One number of steps for the whole batch.

    SGLang names no requests: a row is known by its place, and acceptance is learnt by batch size and in all.

    Args:
        initial_steps: `--speculative-num-steps`.
        cfg_path: `--speculative-adaptive-config`, a JSON file with "candidate_steps" by batch size, from which on they
            hold, and the section "adaptspec": strategy, objective, guard, seed, as of `ServingPolicy`.
        agree: makes all ranks do the same; None for a single rank.
        decides: whether this rank decides; only with `agree`.

    Raises:
        ValueError: a file without candidate steps, or settings that do not fit.
        OSError: the file cannot be read.
    """

    def __init__(
        self,
        initial_steps: int,
        cfg_path: str | os.PathLike[str] | None = None,
        *,
        agree: Agree | None = None,
        decides: bool = True,
    ) -> None:
        slots, settings = _read_config(cfg_path)
        self._from = sorted(slots)
        self._slots = slots
        self._steps = sorted(set().union(*slots.values()))
        self._initial = initial_steps
        self._agree = agree
        self._decides = decides
        self._graph_sizes: list[int] | None = None
        self._open: deque[tuple[Decision, int, float]] = deque(maxlen=_MOST_IN_FLIGHT)
        self._came_back: float | None = None
        arms = [f"eagle@{steps}" for steps in self._steps if steps]
        self.policy = ServingPolicy(arms, **{"strategy": "hedge", **settings}, uniform=True)

    @property
    def candidate_steps(self) -> list[int]:
        """All numbers of steps, for which SGLang builds its states."""
        return list(self._steps)

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        """Batch sizes for which SGLang captures graphs; None where it captures none."""
        self._graph_sizes = sorted(cuda_graph_bs) if cuda_graph_bs else None

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        """Of these, the ones at which a number of steps may be chosen."""
        if self._graph_sizes is None:
            return None
        return [size for size in self._graph_sizes if step in self._slot(size)]

    def get_steps_for_batch(self, batch_size: int) -> int:
        """The number of steps of the batch about to run."""
        steps = self._decide(batch_size) if self._decides else None
        if self._agree is not None:
            return self._agree(steps)
        assert steps is not None
        return steps

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> int | None:
        """Learn from a batch that came back. Never asks for a switch: the next batch decides for itself."""
        while self._open:
            decision, steps, started = self._open.popleft()
            if len(decision) == batch_size == len(num_correct_drafts_per_req):
                self._observe(decision, steps, started, num_correct_drafts_per_req)
                break
        return None

    def _decide(self, batch_size: int) -> int:
        if batch_size < 1:
            return self._initial
        allowed = self._slot(self._padded(batch_size))
        decision = self.policy.decide(
            StepContext(
                request_ids=range(batch_size),
                context_lengths=np.zeros(batch_size, np.int64),
                max_lengths=np.full(batch_size, max(allowed)),
            )
        )
        wanted = int(decision.lengths.max(initial=0))
        steps = max((one for one in allowed if one <= wanted), default=min(allowed))
        self._open.append((decision, steps, perf_counter()))
        return steps

    def _observe(self, decision: Decision, steps: int, started: float, correct: list[int]) -> None:
        now = perf_counter()
        # Batches overlap: what a step takes is what lies between two results, unless the worker stood still between.
        since = started if self._came_back is None else max(self._came_back, started)
        steady = self._came_back is not None and self._came_back >= started
        begun = self._came_back if steady else since
        self._came_back = now
        verified = np.full(len(correct), steps)
        self.policy.observe(
            decision,
            StepOutcome(
                proposed=verified,
                verified=verified,
                accepted=np.minimum(np.asarray(correct, dtype=np.int64), steps),
                seconds=max(0.0, now - begun),
            ),
        )

    def _slot(self, batch_size: int) -> list[int]:
        place = bisect.bisect_right(self._from, batch_size) - 1
        return self._slots[self._from[max(0, place)]]

    def _padded(self, batch_size: int) -> int:
        """The size at which SGLang runs the batch."""
        if self._graph_sizes is None:
            return batch_size
        place = bisect.bisect_left(self._graph_sizes, batch_size)
        return self._graph_sizes[place] if place < len(self._graph_sizes) else batch_size


def register() -> None:
    """Entry point `sglang.srt.plugins`: replace SGLang's rule where its config file has a section "adaptspec"."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.adaptive_runtime_state import AdaptiveSpecPolicy as Protocol
    from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams

    if problem := protocol_problem(AdaptiveSpeculativeParams, Protocol):
        logger.warning("adaptspec leaves SGLang's adaptive speculation as it is: %s", problem)
        return

    def make(initial_steps: int, cfg_path: str | None = None) -> Any:
        if not has_section(cfg_path):
            return AdaptiveSpeculativeParams(initial_steps, cfg_path)
        agree, decides = _tensor_parallel()
        return AdaptiveSpecPolicy(initial_steps, cfg_path, agree=agree, decides=decides)

    HookRegistry.register(TARGET, make, HookType.REPLACE)


def protocol_problem(params_class: type, protocol: type) -> str | None:
    """What has changed in SGLang since this module was written for it; None if nothing has."""
    found = tuple(inspect.signature(params_class.__init__).parameters)
    if found != _MADE_WITH:
        return f"{params_class.__name__} is made with ({', '.join(found)}), expected is ({', '.join(_MADE_WITH)})"
    public = {name for name in vars(protocol) if not name.startswith("_")}
    expected = {*_PROTOCOL, "candidate_steps"}
    if public != expected:
        return f"the protocol has {', '.join(sorted(public))}, expected is {', '.join(sorted(expected))}"
    for name, parameters in _PROTOCOL.items():
        found = tuple(inspect.signature(getattr(protocol, name)).parameters)
        if found != parameters:
            return f"{name} takes ({', '.join(found)}), expected is ({', '.join(parameters)})"
    return None


def has_section(cfg_path: str | os.PathLike[str] | None) -> bool:
    """Whether a config file hands the choice to this module."""
    return cfg_path is not None and SECTION in json.loads(Path(cfg_path).read_text(encoding="utf-8"))


def _read_config(cfg_path: str | os.PathLike[str] | None) -> tuple[dict[int, list[int]], dict[str, Any]]:
    """Candidate steps by the batch size from which on they hold, and the settings of the section."""
    if cfg_path is None:
        raise ValueError('cfg_path must name a file with "candidate_steps" and a section "adaptspec", got None')
    config = json.loads(Path(cfg_path).read_text(encoding="utf-8"))
    if not isinstance(config, Mapping):
        raise ValueError(f"{cfg_path} must hold an object, got {type(config).__name__}")
    slots: dict[int, list[int]] = {}
    for key, entry in config.items():
        if not key.isdigit():
            continue
        steps = entry.get("candidate_steps") if isinstance(entry, Mapping) else None
        if not isinstance(steps, list) or not steps or not all(type(one) is int and one >= 0 for one in steps):
            raise ValueError(f"candidate_steps of batch size {key} must be whole numbers >= 0, got {steps!r}")
        slots[int(key)] = sorted(set(steps))
    if not any(max(steps) for steps in slots.values()):
        raise ValueError(f'{cfg_path} must hold steps > 0, like {{"1": {{"candidate_steps": [0, 1, 3]}}}}')
    settings = config.get(SECTION, {})
    if not isinstance(settings, Mapping):
        raise ValueError(f'section "{SECTION}" of {cfg_path} must be an object, got {settings!r}')
    for name in settings:
        if name not in _SETTINGS:
            raise unknown_name(f'setting in section "{SECTION}":', name, _SETTINGS)
    return slots, dict(settings)


def _tensor_parallel() -> tuple[Agree | None, bool]:
    """How ranks agree: the first of the group decides, since clocks differ, and the others follow."""
    from sglang.srt.distributed.parallel_state import get_tp_group, model_parallel_is_initialized

    if not model_parallel_is_initialized() or get_tp_group().world_size == 1:
        return None, True
    group = get_tp_group()
    return (lambda steps: int(group.broadcast_object(steps, src=0))), group.rank_in_group == 0
