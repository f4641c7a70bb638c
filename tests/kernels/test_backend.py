"""Who runs: chosen once per device, forced by name, and never silently something else than was asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton  # noqa: F401 - now, because it reads TRITON_INTERPRET once and a test here sets it

from adaptspec.kernels import backend
from adaptspec.kernels.backend import VARIABLE, choose, implementation, operations, triton_problem

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def nothing_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    backend._choose.cache_clear()


def test_every_folder_is_an_op_with_both_backends() -> None:
    assert {"tree_attention", "kv_compact"} <= set(operations())
    for op in operations():
        for name in ("__init__", "reference", "triton"):
            assert (ROOT / "adaptspec" / "kernels" / op / f"{name}.py").is_file()


def test_the_cpu_takes_the_reference_and_a_gpu_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose("tree_attention", "cpu") == "reference"
    monkeypatch.setattr(backend, "triton_problem", lambda device: None)
    assert choose("tree_attention", "cuda") == "triton"
    assert choose("tree_attention", "cuda", backend="reference") == "reference"


def test_the_interpreter_is_never_chosen_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose("tree_attention", "cpu") == "reference"
    assert choose("tree_attention", "cpu", backend="triton") == "triton"


def test_it_is_decided_once_per_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(backend, "triton_problem", lambda device: asked.append(device))
    for device in ("cuda:0", "cuda:1", "cuda:0", "cuda:1"):
        assert choose("kv_compact", device) == "triton"
    assert asked == [torch.device("cuda:0"), torch.device("cuda:1")]


def test_the_variable_forces_and_the_argument_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "triton_problem", lambda device: None)
    monkeypatch.setenv(VARIABLE, "triton")
    assert choose("kv_compact", "cpu") == "triton"
    assert choose("kv_compact", "cpu", backend="reference") == "reference"
    monkeypatch.setenv(VARIABLE, "reference")
    assert choose("kv_compact", "cuda") == "reference"
    monkeypatch.setenv(VARIABLE, "")
    assert choose("kv_compact", "cuda") == "triton"


def test_what_is_not_there_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for environment in (False, True):
        if environment:
            monkeypatch.setenv(VARIABLE, "triton")
        with pytest.raises(
            RuntimeError, match="triton was asked for kv_compact on cpu: it runs on CUDA and HIP devices"
        ):
            choose("kv_compact", "cpu", backend=None if environment else "triton")
    monkeypatch.setitem(sys.modules, "triton", None)
    backend._choose.cache_clear()
    with pytest.raises(RuntimeError, match="triton was asked for kv_compact on cuda: triton cannot be imported"):
        choose("kv_compact", "cuda", backend="triton")
    monkeypatch.delenv(VARIABLE)
    assert choose("kv_compact", "cuda") == "reference"


def test_old_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert triton_problem(torch.device("cuda:0")) == "it needs compute capability 8.0, cuda:0 has 7.5"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert triton_problem(torch.device("cuda:0")) is None


def test_unknown_names_list_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="unknown kernel 'tree_atention'; did you mean 'tree_attention'"):
        choose("tree_atention", "cpu")
    with pytest.raises(ValueError, match="unknown kernel backend 'tritn'; did you mean 'triton'.*reference, triton"):
        choose("tree_attention", "cpu", backend="tritn")  # type: ignore[arg-type]


def test_calls_are_counted() -> None:
    before = backend.calls["kv_compact", "reference"]
    assert implementation("kv_compact", "cpu").__name__ == "adaptspec.kernels.kv_compact.reference"
    assert backend.calls["kv_compact", "reference"] == before + 1


def test_everything_but_the_kernels_works_without_triton() -> None:
    """Triton is installed where there are wheels for it; the rest must not notice its absence."""
    imports = "\n".join(f"import adaptspec.kernels.{op}, adaptspec.kernels.{op}.reference" for op in operations())
    code = f"""
import sys
sys.modules["triton"] = None
import adaptspec.kernels, adaptspec.kernels.backend, adaptspec.kernels.ahead_of_time, adaptspec.target.hf
{imports}
import torch
from adaptspec.kernels.kv_compact import kv_compact
kv_compact(torch.zeros(1, 1, 1, 4, 2), torch.tensor([[1]]), torch.tensor([0]))
print(adaptspec.kernels.backend.choose("kv_compact", "cuda"))
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout == "reference\n", result.stderr


def test_every_interpreted_file_is_started_by_a_test() -> None:
    here = Path(__file__).parent
    started = "".join(path.read_text(encoding="utf-8") for path in here.glob("test_*.py"))
    files = sorted(path.name for path in (here / "interpreter").glob("test_*.py"))
    assert files
    for file in files:
        assert f'run_interpreted("{file}"' in started
