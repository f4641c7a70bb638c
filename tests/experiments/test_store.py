"""A run's folder: nothing is overwritten, nothing half-written is believed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from adaptspec.cli.prompts import Prompt
from experiments import run
from experiments.store import RunFolder, frame_of, latest_run
from experiments.tasks import Outcome, Settings

MANIFEST = {"experiment": "regret", "sessions": [{"argv": ["a"]}]}


def test_a_result_is_whole_and_carries_its_provenance(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", MANIFEST)
    rows = [{"policy": "hedge", "value": np.float64(1.5)}, {"policy": "ucb", "value": np.int64(2)}]
    outcome = Outcome(rows=rows, curves={"c": np.arange(2)}, files={"x.bin": b"\0"}, facts={"device": "cpu"})
    folder.save_problem("a-s0", {"kind": "failed", "reason": "no"})
    folder.save("a-s0", outcome, provenance={"git_sha": "f00", "seed": 0}, seconds=1.0)
    assert folder.finished() == {"a-s0"} and folder.problems() == []
    assert folder.files_of("a-s0") == {"x.bin": b"\0"} and folder.files_of("b") == {}
    frame = folder.frame()
    assert frame["value"].tolist() == [1.5, 2.0] and set(frame["from_git_sha"]) == {"f00"}
    assert set(frame["from_device"]) == {"cpu"} and set(frame["configuration"]) == {"a-s0"}
    assert frame_of([]).empty


def test_a_run_never_overwrites_another(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", MANIFEST)
    with pytest.raises(FileExistsError, match="already holds something; give another --out"):
        RunFolder.create(tmp_path / "run", MANIFEST)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("x")
    with pytest.raises(FileExistsError):
        RunFolder.create(tmp_path / "notes", MANIFEST)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no run in"):
        RunFolder.open(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"format": "other"}))
    with pytest.raises(ValueError, match="is not a run of version 1"):
        RunFolder.open(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        RunFolder.open(tmp_path)


def test_two_drivers_do_not_share_a_run(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", MANIFEST)
    with folder.locked(), pytest.raises(RuntimeError, match="another process is at work"), folder.locked():
        pass
    with folder.locked():
        pass


def test_resuming_takes_the_latest_run_with_the_same_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "RUNS", tmp_path)
    asked = {"experiment": "regret", "quick": True, **run.described(Settings())}
    for name in ("regret-20250101-000000", "regret-20260101-000000", "trees-20270101-000000"):
        RunFolder.create(tmp_path / name, {**asked, "sessions": []})
    assert latest_run(tmp_path, "regret").name == "regret-20260101-000000"
    folder = run._folder("regret", None, resume=True, asked=asked, session={"argv": ["again"]})
    assert folder.path.name == "regret-20260101-000000" and folder.manifest()["sessions"] == [{"argv": ["again"]}]
    other = {**asked, **run.described(Settings(prompts=(Prompt(1, "law", ("Hello",)),)))}
    with pytest.raises(ValueError, match=r"prompts must be \{'count': 0, .* as in the run to resume"):
        run._folder("regret", None, resume=True, asked=other, session={})
    with pytest.raises(FileNotFoundError, match="no run of 'drift'"):
        run._folder("drift", None, resume=True, asked=asked, session={})


def test_options_that_are_wrong() -> None:
    with pytest.raises(ValueError, match="weights must be NAME=PATH, got 'eagle3'"):
        run._pairs(["eagle3"])
    assert run._pairs(["eagle3=some/where=else"]) == {"eagle3": "some/where=else"}


def test_experts_are_made_of_what_is_not_asked() -> None:
    prompts = [Prompt(n, domain, (f"{domain} {n}", "and?")) for n, domain in enumerate(("law", "law", "code"))]
    asked = [Prompt(9, "law", ("law 0",))]
    assert run._experts(prompts, asked=asked) == {"law": ["law 1\n\nand?"], "code": ["code 2\n\nand?"]}
