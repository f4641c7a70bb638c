"""Writing result files: all or nothing, and never over somebody else's results."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path


def check_output(path: str | Path, *, force: bool) -> Path:
    """Refuse early, before minutes of work, what `write_output` could not write.

    Raises:
        FileExistsError: there is such a file and `force` is off.
        FileNotFoundError: the folder to write into does not exist.
        IsADirectoryError: `path` is a folder.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, name a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {path.parent} to write {path.name} into does not exist")
    if path.exists() and not force:
        raise FileExistsError(f"{path} already exists; use --force to overwrite it")
    return path


def free_path(path: str | Path) -> Path:
    """`path`, or the first of `name-2.ext`, `name-3.ext`, ... that does not exist."""
    return next(candidate for candidate in _numbered(Path(path)) if not candidate.exists())


def write_output(path: str | Path, content: str | bytes, *, force: bool) -> Path:
    """Write through a temporary file in the same folder, so that readers see the whole file or none.

    If the file has come into being since `check_output` and `force` is off, the next free numbered name is used
    instead, because the results are worth keeping.

    Returns:
        The path that was written.
    """
    path = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        if not force:
            path = _claim(path)
        return temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _claim(path: Path) -> Path:
    """Create the first free numbered name as an empty file, which fails for all but one of several writers."""
    for candidate in _numbered(path):
        try:
            candidate.open("xb").close()
        except FileExistsError:
            continue
        return candidate
    raise AssertionError("unreachable: numbered names never end")


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    for number in count(2):
        yield path.with_name(f"{path.stem}-{number}{path.suffix}")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
