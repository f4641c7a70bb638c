"""The policy under SGLang's own controller and hook registry, from the files of its wheel, without a GPU or a model.

`make test-sglang` fetches the wheel and names its folder in ADAPTSPEC_SGLANG. What the files import of the rest of
SGLang is replaced by stand-ins of the few names that they use.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from adaptspec.serving import sglang as adapter

WHEEL = Path(os.environ["ADAPTSPEC_SGLANG"])
STEPS = [0, 1, 3]


def stand_in(name: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        if parent not in sys.modules:
            stand_in(parent, __path__=[])
        setattr(sys.modules[parent], last, module)
    return module


def read_file(name: str) -> ModuleType:
    """A module of the wheel, by itself."""
    path = WHEEL / (name.replace(".", "/") + ".py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = stand_in(name)
    module.__spec__ = spec
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def files() -> Iterator[SimpleNamespace]:
    before = set(sys.modules)
    nothing = SimpleNamespace()
    stand_in("sglang.srt.arg_groups.overrides", resolved_view=nothing, resolving_view=nothing)
    stand_in("sglang.srt.runtime_context", attn_dp_enabled_of=nothing)
    stand_in("sglang.srt.speculative.spec_info", SpeculativeAlgorithm=nothing)
    stand_in("sglang.srt.utils", log_info_on_rank0=lambda logger, text: None)
    stand_in("sglang.srt.distributed.parallel_state", model_parallel_is_initialized=lambda: False, get_tp_group=nothing)
    registry = read_file("sglang.srt.plugins.hook_registry")
    runtime = read_file("sglang.srt.speculative.adaptive_runtime_state")
    params = read_file("sglang.srt.speculative.adaptive_spec_params")
    worker = stand_in(
        "sglang.srt.speculative.eagle_worker_v2", AdaptiveSpeculativeParams=params.AdaptiveSpeculativeParams
    )
    yield SimpleNamespace(registry=registry.HookRegistry, runtime=runtime, params=params, worker=worker)
    registry.HookRegistry.reset()
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "sglang":
            del sys.modules[name]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "adaptive.json"
    path.write_text(json.dumps({"1": {"candidate_steps": STEPS}, "16": {"candidate_steps": [0, 1]}, "adaptspec": {}}))
    return path


class Worker:
    """SGLang's protocol of a worker: it is told which of its states to use."""

    def __init__(self, steps: int) -> None:
        self.speculative_num_steps = steps
        self.built: list[tuple[int, int, list[int] | None]] = []

    def build_adaptive_runtime_state(
        self,
        speculative_num_steps: int,
        speculative_num_draft_tokens: int,
        cuda_graph_bs: list[int] | None = None,
    ) -> Any:
        self.built.append((speculative_num_steps, speculative_num_draft_tokens, cuda_graph_bs))
        return SimpleNamespace(speculative_num_steps=speculative_num_steps)

    def apply_runtime_state(self, state: Any) -> None:
        self.speculative_num_steps = state.speculative_num_steps


def test_what_is_replaced_has_not_changed(files: SimpleNamespace) -> None:
    assert adapter.protocol_problem(files.params.AdaptiveSpeculativeParams, files.runtime.AdaptiveSpecPolicy) is None


def test_the_hook_takes_over_where_the_config_says_so(files: SimpleNamespace, config: Path, tmp_path: Path) -> None:
    original = files.params.AdaptiveSpeculativeParams
    adapter.register()
    files.registry.apply_hooks()
    made = files.worker.AdaptiveSpeculativeParams(initial_steps=3, cfg_path=str(config))
    assert isinstance(made, adapter.AdaptiveSpecPolicy)
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps({"1": {"candidate_steps": STEPS}}))
    for path in (None, str(plain)):
        theirs = files.worker.AdaptiveSpeculativeParams(initial_steps=3, cfg_path=path)
        assert isinstance(theirs, original)


def test_sglang_reads_the_same_file(files: SimpleNamespace, config: Path) -> None:
    """It sizes its buffers by the candidate steps, and must not stumble over the section."""
    assert files.params.resolve_candidate_steps_from_config(str(config)) == STEPS
    theirs = files.params.AdaptiveSpeculativeParams(3, str(config))
    ours = adapter.AdaptiveSpecPolicy(3, config)
    assert ours.candidate_steps == theirs.candidate_steps
    for policy in (ours, theirs):
        policy.set_cuda_graph_bs([1, 8, 16, 32])
    for steps in STEPS:
        assert ours.cuda_graph_bs_for_step(steps) == theirs.cuda_graph_bs_for_step(steps)


def test_the_real_controller_switches_the_worker(files: SimpleNamespace, config: Path, monkeypatch: Any) -> None:
    now = [0.0]
    monkeypatch.setattr(adapter, "perf_counter", lambda: now[0])
    worker = Worker(3)
    controller = files.runtime.AdaptiveController(worker, adapter.AdaptiveSpecPolicy(3, config))
    controller.init_states([1, 8, 16])
    assert worker.built == [(0, 1, [1, 8, 16]), (1, 2, [1, 8, 16]), (3, 4, [1, 8])]
    played: list[int] = []
    for batch in range(240):
        rows, right = (2, 3) if batch < 120 else (20, 0)
        controller.activate_step_by_batch(rows)
        steps = worker.speculative_num_steps
        played.append(steps)
        now[0] += 0.010 + 0.0004 * steps * rows
        controller.on_verify_complete([min(right, steps)] * rows, rows)
    assert played[80:120].count(3) > 30
    assert set(played[120:]) <= {0, 1}
    assert played[200:].count(0) > 30
