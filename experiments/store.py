"""A run's folder: a manifest, and one file per finished configuration, each written whole or not at all.

    runs/regret-20260101-120000/
        manifest.json           what is run, with which settings, and by which commands
        results/<id>.json       rows, curves, provenance; that it exists means that the configuration is finished
        files/<id>/<name>       what a configuration leaves besides: traces, answers

Configurations that failed or could not be computed leave `problems/<id>.json`; resuming tries them again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaptspec.cli.outputs import write_output
from experiments.folder_lock import folder_lock
from experiments.tasks import Outcome

if TYPE_CHECKING:
    import pandas

FORMAT = "adaptspec-experiment"
VERSION = 1

PROVENANCE_COLUMNS = ("git_sha", "git_dirty", "date", "host", "device", "dtype", "model", "threads", "versions", "argv")
"""What of the provenance every row of a frame carries."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run on disk."""

    path: Path

    @classmethod
    def create(cls, path: Path, manifest: Mapping[str, Any]) -> RunFolder:
        """A new run.

        Raises:
            FileExistsError: there is something in the folder already.
        """
        if path.exists() and any(path.iterdir()):
            raise FileExistsError(f"{path} already holds something; give another --out, or go on with it by --resume")
        for part in ("results", "files", "problems"):
            (path / part).mkdir(parents=True, exist_ok=True)
        folder = cls(path)
        folder._write("manifest.json", {"format": FORMAT, "version": VERSION, **manifest})
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """A run that is there.

        Raises:
            FileNotFoundError: no run in the folder.
            ValueError: its manifest cannot be read, or is of another version.
        """
        folder = cls(path)
        try:
            manifest = folder.manifest()
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no run in {path}: manifest.json is missing") from None
        if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
            raise ValueError(f"{path} is not a run of version {VERSION}, got {manifest.get('version')!r}")
        return folder

    def locked(self) -> AbstractContextManager[None]:
        """Keeps other processes out, see `folder_lock`."""
        return folder_lock(self.path)

    def manifest(self) -> dict[str, Any]:
        """What was asked for."""
        return _read(self.path / "manifest.json")

    def add_session(self, session: Mapping[str, Any], **changed: Any) -> None:
        """Note that the run goes on, by which command and with what changed."""
        manifest = self.manifest()
        self._write("manifest.json", {**manifest, **changed, "sessions": [*manifest["sessions"], session]})

    def finished(self) -> set[str]:
        """Ids of the configurations whose results are there."""
        return {path.stem for path in (self.path / "results").glob("*.json")}

    def save(self, name: str, outcome: Outcome, *, provenance: Mapping[str, Any], seconds: float) -> None:
        """A finished configuration: its files, then its result.

        Raises:
            OSError: the disk is full, or the folder cannot be written. Nothing half-written stays.
        """
        for file, content in outcome.files.items():
            (self.path / "files" / name).mkdir(parents=True, exist_ok=True)
            write_output(self.path / "files" / name / file, content, force=True)
        result = {
            "id": name,
            "rows": [dict(row) for row in outcome.rows],
            "curves": dict(outcome.curves),
            "files": sorted(outcome.files),
            "provenance": dict(provenance) | dict(outcome.facts),
            "seconds": round(seconds, 3),
        }
        self._write(f"results/{name}.json", result)
        (self.path / "problems" / f"{name}.json").unlink(missing_ok=True)

    def save_problem(self, name: str, problem: Mapping[str, Any]) -> None:
        """Why a configuration has no result."""
        self._write(f"problems/{name}.json", {"id": name, **problem})

    def results(self) -> list[dict[str, Any]]:
        """What is finished, by id."""
        return [_read(path) for path in sorted((self.path / "results").glob("*.json"))]

    def problems(self) -> list[dict[str, Any]]:
        """What has no result and why, by id."""
        return [_read(path) for path in sorted((self.path / "problems").glob("*.json"))]

    def files_of(self, name: str) -> dict[str, bytes]:
        """What a configuration left, by name."""
        folder = self.path / "files" / name
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir())} if folder.is_dir() else {}

    def frame(self) -> pandas.DataFrame:
        """One row per row of every result, with its configuration and provenance."""
        return frame_of(self.results())

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, default=_plain)
        write_output(self.path / name, text + "\n", force=True)


def frame_of(results: list[dict[str, Any]]) -> pandas.DataFrame:
    """One row per row of these results. Columns of the provenance begin with "from_"."""
    import pandas

    rows = []
    for result in results:
        origin = result["provenance"]
        known = {f"from_{key}": _cell(origin[key]) for key in PROVENANCE_COLUMNS if key in origin}
        for row in result["rows"]:
            rows.append({"configuration": result["id"], **row, "computed_in": result["seconds"], **known})
    return pandas.DataFrame(rows)


def latest_run(parent: Path, experiment: str) -> Path:
    """The youngest run of an experiment below a folder.

    Raises:
        FileNotFoundError: there is none.
    """
    found = sorted(parent.glob(f"{experiment}-*/manifest.json"), key=lambda path: path.parent.name)
    if not found:
        raise FileNotFoundError(f"there is no run of {experiment!r} in {parent} to resume; name it with --out")
    return found[-1].parent


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value


def _plain(value: Any) -> Any:
    """numpy numbers and arrays as JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"results must be plain values, got {type(value).__name__}")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object")
    return content
