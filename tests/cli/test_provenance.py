from __future__ import annotations

import json
import subprocess
from datetime import datetime
from pathlib import Path

import torch

from adaptspec.cli.provenance import git_state, provenance


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_everything_needed_to_run_it_again() -> None:
    record = provenance(argv=["bench"], model="tiny", device=torch.device("cpu"), dtype="float32", seed=3)
    json.dumps(record)
    assert record["argv"] == ["adaptspec", "bench"]
    assert record["dtype"] == "float32" and record["seed"] == 3 and record["model"] == "tiny"
    assert record["threads"] == torch.get_num_threads()
    assert record["versions"]["torch"] == torch.__version__
    assert record["device"].startswith("cpu ") and "cores)" in record["device"]
    assert datetime.fromisoformat(record["date"]).tzinfo is not None
    assert {"git_sha", "git_dirty"} <= record.keys()


def test_git_state_is_of_the_tree_that_tracks_the_folder(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    git(tmp_path, "init", "-q")
    assert git_state(package) == ("", None)  # somebody else's repository
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    sha = git(tmp_path, "rev-parse", "HEAD")
    assert git_state(package) == (sha, False)
    (package / "__init__.py").write_text("changed = True")
    assert git_state(package) == (sha, True)
