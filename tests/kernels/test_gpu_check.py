"""The GPU check as far as it goes without a GPU: command line, table of bandwidths, isolation of sections, the file,
and a rehearsal of every section in tiny sizes with the references in the kernels' place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptspec.kernels.vocab_head import TopTokens
from adaptspec.target import graphed, hf
from adaptspec.target.graphed import VARIABLE
from benchmarks import gpu_check, gpu_check_values
from benchmarks.gpu_check_model import check_generation, check_graphs
from benchmarks.gpu_check_setting import Setting, peak_bandwidth
from benchmarks.gpu_check_speed import check_speed
from tests.target.tape import TapeCapture

REHEARSAL = Setting(torch.device("cpu"), "reference", 1e10, rehearsal=True)
DEVICE = {"name": "Some GPU", "bandwidth": 2e12, "bandwidth_is": "that of a copy"}


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("NVIDIA H100 80GB HBM3", 3350),
        ("NVIDIA H100 PCIe", 2039),
        ("NVIDIA H200", 4800),
        ("NVIDIA A100-SXM4-80GB", 2039),
        ("NVIDIA A100-SXM4-40GB", 1555),
        ("NVIDIA A100 80GB PCIe", 1935),
        ("NVIDIA A10G", 600),
        ("NVIDIA L4", 300),
        ("NVIDIA L40S", 864),
        ("NVIDIA GeForce RTX 4090", 1008),
        ("AMD Instinct MI300X", 5300),
        ("NVIDIA H1000", None),
        ("Some GPU", None),
    ],
)
def test_peak_bandwidth_by_name(name: str, gigabytes: int | None) -> None:
    assert peak_bandwidth(name) == (None if gigabytes is None else gigabytes * 1e9)


def test_without_cuda_one_line_and_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--out", str(tmp_path / "result.json")]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == "gpu_check: no CUDA device; nothing was checked\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--sections", "values,sped"], "unknown section 'sped'; valid: values, speed, graphs, generation"),
        (["--out", "there.json"], "there.json exists already; results are never overwritten"),
        (["--rounds", "3"], "unrecognized arguments"),
    ],
)
def test_bad_arguments(
    arguments: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.json").write_text("kept", encoding="utf-8")
    with pytest.raises(SystemExit) as exit_status:
        gpu_check.main(arguments)
    assert exit_status.value.code == 2
    assert problem in capsys.readouterr().err
    assert Path("there.json").read_text(encoding="utf-8") == "kept"


@pytest.fixture
def pretended_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gpu_check, "describe_device", lambda device: DEVICE)
    monkeypatch.setattr(gpu_check, "describe_run", lambda arguments, device: {"argv": arguments})


@pytest.mark.usefixtures("pretended_cuda")
def test_one_file_with_everything_is_written_and_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, float]] = []

    def run(name: str, *, peak: float) -> dict[str, Any]:
        asked.append((name, peak))
        return {"ok": False, "error": "it broke"} if name == "speed" else {"ok": True, "cases": []}

    monkeypatch.setattr(gpu_check, "run_child", run)
    path = tmp_path / "result.json"
    assert gpu_check.main(["--out", str(path)]) == 1
    assert asked == [(name, 2e12) for name in ("values", "speed", "graphs", "generation")]
    captured = capsys.readouterr()
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result == json.loads(captured.out)
    assert list(result) == ["provenance", "ok", "device", "sections", "seconds"]
    assert result["ok"] is False and result["sections"]["speed"]["error"] == "it broke"
    assert [section["ok"] for section in result["sections"].values()] == [True, False, True, True]
    assert "it broke" in captured.err and str(path) in captured.err
    monkeypatch.chdir(tmp_path)
    assert gpu_check.main(["--sections", "values"]) == 0
    (written,) = tmp_path.glob("gpu_check_some-gpu_*.json")
    assert list(json.loads(written.read_text(encoding="utf-8"))["sections"]) == ["values"]


@pytest.mark.usefixtures("pretended_cuda")
def test_a_child_writes_its_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def section(setting: Setting) -> dict[str, Any]:
        return {"ok": True, "setting": [str(setting.device), setting.backend, setting.peak, setting.rehearsal]}

    monkeypatch.setitem(gpu_check.SECTIONS, "values", section)
    path = tmp_path / "section.json"
    assert gpu_check.main(["--child", "values", "--peak", "5.0", "--out", str(path)]) == 0
    assert json.loads(path.read_text(encoding="utf-8"))["setting"] == ["cuda:0", "triton", 5.0, False]


def test_sections_run_apart(tmp_path: Path) -> None:
    """What a child's end means: a result, an error with its last line, a hang."""
    script = tmp_path / "script.py"

    def run(code: str, seconds: float = 20.0) -> dict[str, Any]:
        script.write_text(f"import sys, time, pathlib\nout = pathlib.Path(sys.argv[-1])\n{code}\n", encoding="utf-8")
        return gpu_check.run_child("values", peak=1.5, script=script, seconds=seconds)

    assert run("out.write_text('{\"ok\": true, \"argv\": \"' + ' '.join(sys.argv[1:5]) + '\"}')") == {
        "ok": True,
        "argv": "--child values --peak 1.5",
    }
    broken = run("raise RuntimeError('an illegal memory access was encountered')")
    assert broken["ok"] is False
    assert broken["error"] == "exit status 1: RuntimeError: an illegal memory access was encountered"
    assert any("Traceback" in line for line in broken["stderr"])
    assert run("pass")["error"] == "exit status 0: no message"
    assert run("time.sleep(60)", seconds=0.5) == {"ok": False, "error": "took longer than 0.5 seconds"}


def test_the_summary_names_what_is_wrong_and_how_fast_the_rest_is() -> None:
    sections: dict[str, dict[str, Any]] = {
        "values": {"ok": False, "cases": [{"op": "vocab_head", "case": "ties", "error": 2.5, "ok": False}]},
        "speed": {
            "ok": True,
            "lines": [
                {"op": "kv_compact", "shape": "six rows", "cold_us": 4.25, "share_of_peak": 0.81, "times_torch": 3.0},
                {"op": "vocab_head", "shape": "update of 64 rows", "wall_us": 50.0},
            ],
        },
    }
    result = gpu_check.collect(["values", "speed"], DEVICE, run=sections.__getitem__)
    text = gpu_check.summary(result)
    assert "Some GPU, 2000 GB/s (that of a copy)" in text
    assert "wrong: vocab_head, ties: 2.5 of what is tolerated" in text
    assert "4.2 us,  81 % of peak, 3.00 times torch  (six rows)" in text


# Rehearsals ----------------------------------------------------------------------------------------------------------


def test_rehearsal_of_values() -> None:
    result = gpu_check_values.check_values(REHEARSAL)
    assert result["ok"], [case for case in result["cases"] if not case["ok"]]
    assert {case["op"] for case in result["cases"]} == {"tree_attention", "vocab_head", "verify_tree", "kv_compact"}
    assert len(result["cases"]) == len({(case["op"], case["case"]) for case in result["cases"]}) >= 30


def test_wrong_values_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each op with a small fault of its own on what stands for the device."""
    ops: dict[str, Callable[..., Any]] = {
        name: getattr(gpu_check_values, name) for name in ("tree_attention", "vocab_head", "kv_compact")
    }
    seen = {"tree_attention": 0, "kv_compact": 0}

    def attention(*arguments: Any, **options: Any) -> torch.Tensor:
        seen["tree_attention"] += 1
        output = ops["tree_attention"](*arguments, **options)
        return output * 1.05 if seen["tree_attention"] % 2 else output  # found, then wanted

    def head(*arguments: Any, **options: Any) -> TopTokens:
        top = ops["vocab_head"](*arguments, **options)
        return TopTokens(top.ids.roll(1, dims=1), top.log_probs, top.log_sum_exp)

    def compact(*arguments: Any, **options: Any) -> None:
        seen["kv_compact"] += 1
        if seen["kv_compact"] % 2:
            ops["kv_compact"](*arguments, **options)

    for name, function in (("tree_attention", attention), ("vocab_head", head), ("kv_compact", compact)):
        monkeypatch.setattr(gpu_check_values, name, function)
    walk = gpu_check_values.verify_tree.target_walk
    calls = iter(range(100))

    def target_walk(*arguments: Any, **options: Any) -> Any:
        result = walk(*arguments, **options)
        if next(calls) % 2 == 0:
            result.uniforms_used[0] += 1
        return result

    monkeypatch.setattr(gpu_check_values.verify_tree, "target_walk", target_walk)
    result = gpu_check_values.check_values(REHEARSAL)
    assert not result["ok"]
    wrong = [(case["op"], case["case"]) for case in result["cases"] if not case["ok"]]
    assert {op for op, _ in wrong} == {"tree_attention", "vocab_head", "verify_tree", "kv_compact"}
    assert all("target walk" in case for op, case in wrong if op == "verify_tree")


def test_rehearsal_of_speed() -> None:
    lines = check_speed(REHEARSAL)["lines"]
    assert {line["op"] for line in lines} == {"tree_attention", "vocab_head", "verify_tree", "kv_compact"}
    for line in lines:
        assert all(value > 0.0 for name, value in line.items() if name not in ("op", "shape")), line
        if "share_of_peak" in line:
            assert line["share_of_peak"] == pytest.approx(line["gigabytes_per_second"] / 10.0)
    walk = next(line for line in lines if line["op"] == "verify_tree")
    assert walk["verifier_us"] > 0.0 and walk["ordinary_verifier_us"] > 0.0


def test_rehearsal_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed, "FIRST_CAPACITY", 256)  # the reference looks at all of it
    result = check_graphs(REHEARSAL, capture=TapeCapture())
    assert result["ok"] and result["captured"] == len(result["tiers"]) == 6
    assert all(tier["difference"] < 1e-4 for tier in result["tiers"])


def test_rehearsal_of_generation() -> None:
    result = check_generation(REHEARSAL)
    assert result["ok"] and result["float32"]["identical"] and result["float32"]["first_difference"] is None
    assert result["float32"]["adaptive_mean_accepted_length"] > 1.0
    assert result["bfloat16"]["ar_mean_accepted_length"] == 1.0
    assert result["float32"]["graphs"] is None


def test_rehearsal_of_generation_with_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but for what captures."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(graphed, "FIRST_CAPACITY", 128)
    monkeypatch.setattr(graphed, "ROOM", 64)
    capture = TapeCapture()

    def choose(model: Any, layout: Any, wish: Any) -> Any:
        return None if os.environ.get(VARIABLE) == "off" else capture

    monkeypatch.setattr(hf, "choose_capture", choose)
    result = check_generation(REHEARSAL)
    assert result["ok"] and VARIABLE not in os.environ
    for dtype in ("float32", "bfloat16"):
        line = result[dtype]
        assert line["graphs"]["captured"] == 6 and line["graphs"]["replayed"] > 30
        assert line["without_graphs"]["identical"] == line["identical"] or dtype == "bfloat16"
    assert sum(tape.replays for tape in capture.tapes) > 60
