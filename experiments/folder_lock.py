"""One process at a time in a folder of results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock
from filelock import Timeout as LockTaken


@contextmanager
def folder_lock(path: Path) -> Iterator[None]:
    """Keeps other processes out of a folder, until this one ends at the latest.

    Raises:
        RuntimeError: another one is at work there.
    """
    lock = FileLock(path / ".lock", timeout=0)
    try:
        lock.acquire()
    except LockTaken:
        raise RuntimeError(f"another process is at work in {path}") from None
    try:
        yield
    finally:
        lock.release()
