from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from adaptspec.cli.outputs import check_output, free_path, write_output


def test_writes_the_whole_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert write_output(path, "täxt", force=False) == path
    assert path.read_text(encoding="utf-8") == "täxt"
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_never_overwrites_without_force(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("precious")
    with pytest.raises(FileExistsError, match="already exists; use --force"):
        check_output(path, force=False)
    assert write_output(path, "late", force=False) == tmp_path / "out-2.json"
    assert write_output(path, "later", force=False) == tmp_path / "out-3.json"
    assert path.read_text() == "precious"
    assert (tmp_path / "out-2.json").read_text() == "late"


def test_force_overwrites(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    assert check_output(path, force=True) == path
    assert write_output(path, b"new", force=True) == path
    assert path.read_bytes() == b"new"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_failed_write_leaves_neither_file_nor_fragment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    path = tmp_path / "out.json"
    path.write_text("old")
    with pytest.raises(OSError, match="No space left"):
        write_output(path, "new", force=True)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_files_get_ordinary_permissions(tmp_path: Path) -> None:
    written = write_output(tmp_path / "out.json", "x", force=False)
    plain = tmp_path / "plain"
    plain.write_text("x")
    assert stat.S_IMODE(written.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_impossible_places_are_refused_early(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        check_output(tmp_path / "no" / "out.json", force=False)
    with pytest.raises(IsADirectoryError, match="is a folder"):
        check_output(tmp_path, force=True)


def test_free_path_counts_up(tmp_path: Path) -> None:
    path = tmp_path / "demo.png"
    assert free_path(path) == path
    path.touch()
    (tmp_path / "demo-2.png").touch()
    assert free_path(path) == tmp_path / "demo-3.png"
