"""What was learnt, as a file: JSON with compressed arrays, written whole or not at all."""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from adaptspec.files import whole_file

FORMAT = "adaptspec-state"
VERSION = 1
_DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint32", "uint64", "float32", "float64")


def save_state(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write `content` (plain values, arrays, nested mappings with text keys and sequences) atomically.

    Raises:
        TypeError: a value that cannot be saved.
        OSError: the file cannot be written; an older one is then still there.
    """
    text = json.dumps({"format": FORMAT, "version": VERSION, **{key: _plain(value) for key, value in content.items()}})
    with whole_file(path) as file:
        file.write(text.encode())


def load_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what `save_state` wrote.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a state file, of another version, or damaged.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a state file of adaptspec, or damaged: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is not a state file of adaptspec")
    if content.get("version") != VERSION:
        raise ValueError(f"{path}: version must be {VERSION}, got {content.get('version')!r}")
    try:
        return {key: _restored(value) for key, value in content.items() if key not in ("format", "version")}
    except (ValueError, TypeError, KeyError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        if value.dtype.name not in _DTYPES:
            raise TypeError(f"cannot save an array of {value.dtype}")
        data = base64.b64encode(zlib.compress(np.ascontiguousarray(value).tobytes())).decode()
        return {"array": data, "dtype": value.dtype.name, "shape": list(value.shape)}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"cannot save a mapping with keys that are not text: {list(value)[:3]}")
        return {"mapping": {key: _plain(item) for key, item in value.items()}}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise TypeError(f"cannot save a {type(value).__name__}")


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "mapping" in value:
        return {key: _restored(item) for key, item in value["mapping"].items()}
    if value.get("dtype") not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {value.get('dtype')!r}")
    data = zlib.decompress(base64.b64decode(value["array"], validate=True))
    return np.frombuffer(data, dtype=value["dtype"]).reshape(value["shape"]).copy()
