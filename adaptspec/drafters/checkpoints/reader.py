"""Opening published checkpoints: which tensors there are, and reading only those that are wanted.

Safetensors or `torch.save` files, one or sharded with an index, as a folder, a single file or a hub id. `torch.save`
files are read with `weights_only=True`: pickled code is never run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

_GENERAL = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin")
_BLOCK = 128
_FLOAT8 = {dtype for name in ("float8_e4m3fn", "float8_e5m2") if (dtype := getattr(torch, name, None)) is not None}


class Checkpoint:
    """The tensors of a checkpoint by name, and its `config.json`.

    Args:
        path: a folder, a `.safetensors`, `.pt`, `.pth` or `.bin` file, or a hub id.
        files: names of weight files that are looked for before the usual ones.

    Raises:
        ValueError: nothing is found, or a file is damaged or no checkpoint.
    """

    def __init__(self, path: str | Path, *, files: Sequence[str] = ()) -> None:
        self.where = str(path)
        self._loaded: dict[str, Mapping[str, Any]] = {}
        self._opened: dict[str, Any] = {}
        local = Path(path).expanduser()
        self._repo = None if local.exists() else str(path)
        self._folder = local if local.is_dir() else local.parent
        wanted = [local.name] if local.is_file() else [*files, *_GENERAL]
        self.config: dict[str, Any] = self._read_json("config.json") or {}
        for name in wanted:
            if (found := self._index(name)) is not None:
                self._file_of = found
                return
        raise ValueError(f"{self.where} holds no weights; looked for {', '.join(wanted)}")

    @property
    def names(self) -> list[str]:
        """All tensors, in the order of the files."""
        return list(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it where the format allows."""
        file = self._file_of[name]
        if file.endswith(".safetensors"):
            return tuple(self._safetensors(file).get_slice(name).get_shape())
        return tuple(self._pickled(file)[name].shape)

    def read(self, name: str) -> torch.Tensor:
        """One tensor on the CPU; 8-bit floats with block scales (`..._scale_inv`) become float32.

        Raises:
            ValueError: 8-bit floats without scales.
        """
        file = self._file_of[name]
        tensor = (
            self._safetensors(file).get_tensor(name) if file.endswith(".safetensors") else self._pickled(file)[name]
        )
        if tensor.dtype not in _FLOAT8:
            return tensor
        if f"{name}_scale_inv" not in self:
            raise ValueError(f"{self.where}: {name} is {tensor.dtype} and {name}_scale_inv is missing")
        return _dequantised(tensor, self.read(f"{name}_scale_inv"))

    def _index(self, name: str) -> dict[str, str] | None:
        """File by tensor name if weight file or index `name` is there."""
        if name.endswith(".index.json"):
            index = self._read_json(name)
            if index is None:
                return None
            shards = index.get("weight_map")
            if not isinstance(shards, Mapping) or not all(isinstance(file, str) for file in shards.values()):
                raise ValueError(f"{self.where}: {name} has no weight_map")
            if stray := sorted({file for file in shards.values() if Path(file).name != file}):
                raise ValueError(f"{self.where}: {name} points outside the checkpoint: {', '.join(stray)}")
            return dict(shards)
        if self._find(name) is None:
            return None
        if name.endswith(".safetensors"):
            return dict.fromkeys(self._safetensors(name).keys(), name)
        return dict.fromkeys(self._pickled(name), name)

    def _safetensors(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._opened:
            path = self._existing(file)
            try:
                self._opened[file] = safe_open(path, framework="pt", device="cpu")
            except SafetensorError as error:
                raise ValueError(f"{path} is no safetensors file: {error}") from error
        return self._opened[file]

    def _pickled(self, file: str) -> Mapping[str, Any]:
        if file not in self._loaded:
            path = self._existing(file)
            try:
                state = torch.load(path, map_location="cpu", weights_only=True)
            except (UnpicklingError, RuntimeError, EOFError, ValueError) as error:
                raise ValueError(f"{path} holds more than tensors, or is damaged; it is not loaded: {error}") from error
            if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
                raise ValueError(f"{path} must hold tensors by name, got {type(state).__name__}")
            self._loaded[file] = state
        return self._loaded[file]

    def _read_json(self, name: str) -> dict[str, Any] | None:
        path = self._find(name)
        if path is None:
            return None
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold an object, got {type(values).__name__}")
        return values

    def _existing(self, name: str) -> Path:
        path = self._find(name)
        if path is None:
            raise ValueError(f"{self.where} lacks the file {name}")
        return path

    def _find(self, name: str) -> Path | None:
        if self._repo is None:
            path = self._folder / name
            return path if path.is_file() else None
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import (
            EntryNotFoundError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )

        try:
            return Path(hf_hub_download(self._repo, name))
        except LocalEntryNotFoundError as error:  # before its base class: the hub could not be asked
            raise ValueError(
                f"{self._repo} is no local path, and {name} cannot be had from the hub: {error}"
            ) from error
        except EntryNotFoundError:
            return None
        except (RepositoryNotFoundError, HFValidationError) as error:
            raise ValueError(f"{self._repo} is neither a local path nor a hub id that can be read") from error


def take(
    checkpoint: Checkpoint, wanted: Mapping[str, tuple[str, Sequence[int]]], *, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Read tensors and check their shapes.

    Args:
        wanted: own name -> name in the checkpoint, and shape.
        dtype: what they are turned into.

    Raises:
        ValueError: names all tensors that are missing or of another shape.
    """
    if missing := [theirs for theirs, _ in wanted.values() if theirs not in checkpoint]:
        raise ValueError(f"{checkpoint.where} lacks the tensors {_some(missing)}")
    wrong = [
        f"{theirs} {list(checkpoint.shape(theirs))} instead of {list(shape)}"
        for theirs, shape in wanted.values()
        if checkpoint.shape(theirs) != tuple(shape)
    ]
    if wrong:
        raise ValueError(f"{checkpoint.where} has tensors of other shapes: {_some(wrong)}")
    return {ours: checkpoint.read(theirs).to(dtype) for ours, (theirs, _) in wanted.items()}


def refuse_others(checkpoint: Checkpoint, names: Iterable[str], *, known: Iterable[str], what: str) -> None:
    """Raise ValueError if `names` hold tensors beyond `known`: they would change what is computed."""
    known = set(known)
    if others := [name for name in names if name not in known]:
        raise ValueError(f"{checkpoint.where} has tensors that {what} does not know: {_some(others)}")


def _some(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _dequantised(tensor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 of an 8-bit matrix [R, C] with one scale per block of 128 by 128, as DeepSeek-V3 stores them."""
    blocks = tuple(-(-size // _BLOCK) for size in tensor.shape)
    if tensor.dim() != 2 or tuple(scale.shape) != blocks:
        raise ValueError(
            f"an 8-bit matrix {list(tensor.shape)} must have scales per {_BLOCK} by {_BLOCK} block, "
            f"{list(blocks)}, got {list(scale.shape)}"
        )
    rows, columns = tensor.shape
    wide = scale.float().repeat_interleave(_BLOCK, 0)[:rows].repeat_interleave(_BLOCK, 1)[:, :columns]
    return tensor.float() * wide
