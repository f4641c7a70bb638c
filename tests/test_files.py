"""Whole files: readers see the old one or the new one, and failures leave nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from adaptspec.files import whole_file


def test_the_old_file_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"old")
    with whole_file(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["state"]


@pytest.mark.parametrize("before", [None, b"old"])
def test_a_failure_leaves_what_was_there(tmp_path: Path, before: bytes | None) -> None:
    path = tmp_path / "state"
    if before is not None:
        path.write_bytes(before)
    with pytest.raises(KeyboardInterrupt), whole_file(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ([] if before is None else ["state"])
    assert before is None or path.read_bytes() == before


def test_writers_do_not_meet_and_the_umask_is_kept(tmp_path: Path) -> None:
    path, umask = tmp_path / "state", os.umask(0o027)
    try:
        with whole_file(path) as first:
            with whole_file(path) as second:
                second.write(b"second")
            first.write(b"first")
    finally:
        os.umask(umask)
    assert path.read_bytes() == b"first" and path.stat().st_mode & 0o777 == 0o640
    with pytest.raises(FileNotFoundError), whole_file(tmp_path / "no" / "state"):
        pass
