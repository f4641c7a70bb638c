"""Runs on a cluster of two machines: placement, retries, resuming, and every way to go wrong."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments import runner, store
from experiments.cluster import Node
from experiments.progress import Quiet
from experiments.runner import Summary, check_needs, run_sweep
from experiments.store import RunFolder
from experiments.sweeps import Configuration
from experiments.tasks import Settings

WORKS = "tests.experiments.works"
ROOT = Path(__file__).parents[2]


def configuration(name: str, work: str, **options: Any) -> Configuration:
    known = {key: options.pop(key) for key in ("needs", "cpus", "gpus") if key in options}
    return Configuration(name, f"{WORKS}:{work}", options, **known)


def start(path: Path) -> RunFolder:
    return RunFolder.create(path / "run", {"experiment": "test", "sessions": []})


def go(ray: Any, folder: RunFolder, configurations: Sequence[Configuration], *, retries: int = 2) -> Summary:
    return run_sweep(
        ray, configurations, folder=folder, settings=Settings(), argv=["test"], watcher=Quiet(), retries=retries
    )


def rows(folder: RunFolder) -> dict[str, dict[str, Any]]:
    return {result["id"]: result["rows"][0] for result in folder.results()}


def test_tasks_are_placed_where_their_needs_are_met(ray: Any, tmp_path: Path) -> None:
    folder = start(tmp_path)
    gpu_node = next(node["NodeID"] for node in ray.nodes() if node["Resources"].get("GPU"))
    wanted = [configuration(f"whole-{i}", "place", gpus=1.0, cpus=0.0) for i in range(2)]
    wanted += [configuration("none", "place", cpus=1.0)]
    summary = go(ray, folder, wanted)
    found = rows(folder)
    assert summary.finished == 3 and not summary.failed
    assert {found[f"whole-{i}"]["node"] for i in range(2)} == {gpu_node}
    assert sorted(found[f"whole-{i}"]["gpus"] for i in range(2)) == ["0", "1"]  # one each, at the same time
    assert all(found[f"whole-{i}"]["visible"] == found[f"whole-{i}"]["gpus"] for i in range(2))
    assert found["none"]["gpus"] == "" and found["none"]["visible"] in ("", "unset")


def test_what_no_machine_has_is_refused_before_anything_starts(ray: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    folder = start(tmp_path)
    good, large = configuration("good", "value", log=str(log)), configuration("large", "value", gpus=3.0)
    with pytest.raises(ValueError, match=r"'large' occupies 1 CPUs and 3 GPUs, .* 1 CPUs and 2 GPUs"):
        go(ray, folder, [good, large])
    assert not log.exists()
    with pytest.raises(ValueError, match="work must be 'module:name' of something that exists"):
        check_needs([Configuration("x", f"{WORKS}:nothing")], [])


def test_a_machine_that_goes_is_waited_for_and_then_given_up(
    ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends, and says why, instead of waiting forever for a GPU that nobody has any more."""
    folder, machines = start(tmp_path), runner.nodes_of(ray)
    counted = iter([machines])
    monkeypatch.setattr(runner, "nodes_of", lambda ray: next(counted, [Node(1.0, 0.0)]))
    monkeypatch.setattr(runner, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(runner, "PATIENCE_SECONDS", 0.2)
    wanted = [configuration("gone", "value", gpus=1.0, sleep=20.0), configuration("here", "value")]
    summary = go(ray, folder, wanted)
    assert folder.finished() == {"here"}
    assert "no machine had the CPUs and GPUs that it occupies" in summary.failed["gone"]


def test_files_reach_those_that_need_them_and_finished_ones_are_not_run_again(ray: Any, tmp_path: Path) -> None:
    log, folder = tmp_path / "log", start(tmp_path)
    parts = [configuration(f"part-{i}", "value", value=10**i, log=str(log)) for i in range(3)]
    total = configuration("total", "value", needs=tuple(part.id for part in parts), log=str(log))
    assert go(ray, folder, parts[:2]).finished == 2
    assert go(ray, folder, [*parts, total]).finished == 4
    assert rows(folder)["total"]["value"] == 111
    assert Counter(log.read_text().split()) == {"part-0": 1, "part-1": 1, "part-2": 1, "total": 1}
    origin = folder.results()[0]["provenance"]
    assert {"argv", "git_sha", "versions", "date", "host", "pid", "cpu_seconds", "seed", "parameters"} <= origin.keys()


def test_a_model_is_loaded_once_per_worker(ray: Any, tmp_path: Path) -> None:
    folder = start(tmp_path)
    go(ray, folder, [configuration(f"c{i}", "Loaded", cpus=1.0) for i in range(6)])
    found = rows(folder).values()
    assert len({row["instance"] for row in found}) <= 2  # two machines of one CPU each
    assert sum(row["served"] == 1 for row in found) == len({row["instance"] for row in found})
    assert {row["threads"] for row in found} == {1}


def test_a_killed_worker_costs_one_try(ray: Any, tmp_path: Path) -> None:
    folder = start(tmp_path)
    wanted = [configuration("once", "dies", deaths=1), configuration("once-loaded", "Loaded", deaths=1)]
    wanted += [configuration("always", "dies", deaths=9), configuration("never", "Loaded", deaths=0)]
    summary = go(ray, folder, wanted, retries=1)
    assert folder.finished() == {"once", "once-loaded", "never"}
    assert list(summary.failed) == ["always"] and "its worker died 2 times" in summary.failed["always"]
    assert [problem["kind"] for problem in folder.problems()] == ["failed"]


def test_bad_configurations_are_told_and_stop_nothing(ray: Any, tmp_path: Path) -> None:
    log, folder = tmp_path / "log", start(tmp_path)
    wanted = [
        configuration("wrong", "wrong"),
        configuration("absent", "absent"),
        configuration("unloadable", "Unloadable"),
        configuration("good", "value"),
        configuration("after", "value", needs=("wrong",)),
        configuration("later", "value", needs=("after",), log=str(log)),
    ]
    summary = go(ray, folder, wanted)
    assert folder.finished() == {"good"} and not log.exists()
    assert summary.failed == {
        "wrong": "ValueError: budget must be >= 0, got -3",
        "unloadable": "FileNotFoundError: no such model",
    }
    assert summary.unavailable == {
        "absent": "no weights of 'eagle3' for this target",
        "after": "it needs wrong, which has no result",
        "later": "it needs after, which has no result",
    }
    assert {problem["id"]: problem["kind"] for problem in folder.problems()} == {
        **dict.fromkeys(summary.failed, "failed"),
        **dict.fromkeys(summary.unavailable, "not available"),
    }


def test_a_full_disk_keeps_what_is_finished(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, written = start(tmp_path), []
    real = os.fsync

    def full(descriptor: int) -> None:
        written.append(descriptor)
        if len(written) > 5:  # two results, each with a file, and the file of the third
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    wanted = [configuration(f"c{i}", "value") for i in range(5)]
    with monkeypatch.context() as patch:
        patch.setattr(store.write_output.__globals__["os"], "fsync", full)
        with pytest.raises(OSError, match="No space left on device"):
            go(ray, folder, wanted)
    assert len(folder.finished()) == 2
    assert not list(tmp_path.rglob("*.partial"))
    assert go(ray, folder, wanted).finished == 5


def test_a_killed_driver_loses_what_was_under_way_and_nothing_else(
    address: str, trace_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "experiments.run", "regret", "--quick", "--seeds", "1", "--quiet"]
    command += ["--trace", str(trace_file), "--only", "h100-shuffle", "--address", address, "--out", str(out)]
    driver = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 600.0
    while len(list(out.glob("results/*.json"))) < 2:
        assert driver.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    kept = {path.name: path.read_bytes() for path in out.glob("results/*.json")}
    again = subprocess.run([*command, "--resume"], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert again.returncode == 0, again.stderr
    found = {path.name: path.read_bytes() for path in out.glob("results/*.json")}
    assert 2 <= len(kept) < len(found) == 16
    assert all(found[name] == content for name, content in kept.items())
    assert "mixture" in again.stdout and "best-per-step" in again.stdout
    assert len(json.loads((out / "manifest.json").read_text())["sessions"]) == 2
