"""A folder of trained weights: `weights.safetensors`, matrices in 8 or 4 bits with scales, and `card.json`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaptspec.files import whole_file

if TYPE_CHECKING:
    import torch

WEIGHTS_FILE = "weights.safetensors"
CARD_FILE = "card.json"
FORMAT = "adaptspec-weights"
VERSION = 1
_SCALE = ".scale"
_BITS = (4, 8, 16, 32)
_GROUP = 32  # columns that share a scale in 4 bits
_SHARES = tuple(share / 20 for share in range(20, 11, -1))  # of the scale that spares the largest number
_BASE = "base"
_OWN_KEYS = ("format", "version", "bits", "sha256", "tensors")


def shipped_folder(name: str) -> Path | None:
    """The folder of this package with the weights called `name`, None if none are shipped."""
    return Path(__file__).parent / name if name in shipped_names() else None


def shipped_rule(name: str) -> Path | None:
    """The file of this package with the rule for sizes of trees called `name`, None if none is shipped."""
    return next((Path(__file__).parent / "rules").glob(f"{name}.*"), None)


def shipped_names() -> tuple[str, ...]:
    """Names of all shipped weights."""
    return tuple(sorted(path.name for path in Path(__file__).parent.iterdir() if is_weights_folder(path)))


def is_weights_folder(path: str | os.PathLike[str]) -> bool:
    """Whether `save_weights` wrote this folder."""
    return (Path(path) / CARD_FILE).is_file()


def save_weights(
    folder: str | os.PathLike[str],
    state_dict: Mapping[str, torch.Tensor],
    card: Mapping[str, Any],
    *,
    bits: int = 8,
) -> None:
    """Write tensors and what is to be known about them. Each file is written whole or not at all; the card, which
    names the checksum of the weights, comes last.

    Args:
        folder: made if it does not exist; older weights in it are replaced.
        state_dict: floating-point tensors of any shape and whole-number tensors; names must not end in ".scale".
        card: plain values for JSON.
        bits: of floating-point tensors with two dimensions. 8: round(w / s) with one scale s = max|w| / 127 per row;
            4: round(w / s), cut off at 7, with a scale s in float16 per row and 32 columns, of max|w| / 7 and smaller
            ones the one with the least squared error; 16: bfloat16; 32: float32.
            Other floating-point tensors are kept in float32, whole numbers as they are.

    Raises:
        ValueError: no tensors, a bad name, `bits` or value (NaN, infinite), or a card that JSON cannot hold.
    """
    import torch
    from safetensors.torch import save

    if bits not in _BITS:
        raise ValueError(f"bits must be one of {', '.join(map(str, _BITS))}, got {bits!r}")
    if not state_dict:
        raise ValueError("state_dict must hold at least one tensor, got none")
    if taken := sorted(set(card) & set(_OWN_KEYS)):
        raise ValueError(f"card must not hold {', '.join(taken)}, which are written by save_weights")
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in state_dict.items():
        if name.endswith(_SCALE):
            raise ValueError(f"tensor names must not end in {_SCALE!r}, got {name!r}")
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
        tensor = tensor.detach().cpu()
        if not tensor.is_floating_point():
            packed[name] = tensor.clone().contiguous()
            continue
        tensor = tensor.float()
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} must be finite, got NaN or infinite values")
        if tensor.dim() != 2 or bits == 32:
            packed[name] = tensor.clone().contiguous()
        elif bits == 16:
            packed[name] = tensor.bfloat16().contiguous()
        elif bits == 4:
            packed[name], packed[name + _SCALE] = _to_nibbles(name, tensor)
        else:
            scale = tensor.abs().amax(dim=1) / 127.0
            safe = torch.where(scale > 0.0, scale, 1.0)
            packed[name] = (tensor / safe[:, None]).round().to(torch.int8)
            packed[name + _SCALE] = safe
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {name: list(tensor.shape) for name, tensor in state_dict.items()}
    own = {"format": FORMAT, "version": VERSION, "bits": bits, "sha256": "", "tensors": shapes}
    try:
        json.dumps({**card, **own})
    except (TypeError, ValueError) as error:
        raise ValueError(f"card must hold plain values for JSON: {error}") from error
    data = save(packed)
    text = json.dumps({**card, **own, "sha256": hashlib.sha256(data).hexdigest()}, indent=2) + "\n"
    for name, content in ((WEIGHTS_FILE, data), (CARD_FILE, text.encode())):
        with whole_file(folder / name) as file:
            file.write(content)


def read_card(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What is known about the weights in a folder.

    Raises:
        FileNotFoundError: no such folder, or no card in it.
        ValueError: the card is damaged, or of another format or version.
    """
    path = Path(folder) / CARD_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no {CARD_FILE}: it is no folder of trained weights")
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(card, dict) or card.get("format") != FORMAT:
        raise ValueError(f"{path} is no card of adaptspec weights")
    if card.get("version") != VERSION:
        raise ValueError(f"{path}: version must be {VERSION}, got {card.get('version')!r}")
    if not isinstance(card.get("tensors"), dict) or not isinstance(card.get("sha256"), str):
        raise ValueError(f"{path} is damaged: it must list tensors and sha256")
    return card


def without_base(
    state_dict: Mapping[str, torch.Tensor], card: Mapping[str, Any], name: str
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors that shipped weights do not hold, and a card by which `load_weights` adds those that they do: the same
    numbers but for the rounding to 8 bits that training writes.

    Raises:
        ValueError: no such weights are shipped, or none or all of these tensors are among them.
    """
    if (folder := shipped_folder(name)) is None:
        raise ValueError(f"base must be the name of shipped weights ({', '.join(shipped_names())}), got {name!r}")
    base, _ = load_weights(folder)
    own = {key: value for key, value in state_dict.items() if key not in base or not _alike(value, base[key])}
    if not own or len(own) + len(base) != len(state_dict):
        raise ValueError(f"the weights must hold all {len(base)} tensors of {name!r} as they are, and others")
    return own, {**card, _BASE: {"name": name, "sha256": read_card(folder)["sha256"]}}


def load_weights(folder: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What `save_weights` wrote: tensors (floating-point ones in float32) and the card; with those of the shipped
    weights that the card may name as its base.

    Raises:
        FileNotFoundError: no such folder, or a file of it is missing.
        ValueError: a damaged file, one that does not hold the tensors that the card lists, or another base.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    card = read_card(folder)
    path = Path(folder) / WEIGHTS_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no {WEIGHTS_FILE}")
    if _sha256(path) != card["sha256"]:
        raise ValueError(f"{path} is damaged, or not the file that its card describes: the checksum differs")
    try:
        packed = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    found: dict[str, torch.Tensor] = {}
    for name, shape in card["tensors"].items():
        if name not in packed:
            raise ValueError(f"{path} lacks the tensor {name!r}")
        tensor, scale = packed[name], packed.get(name + _SCALE)
        if tensor.dtype == torch.uint8 and scale is not None:
            tensor, scale = _from_nibbles(tensor, scale, shape, name=f"{name} in {path}"), None
        if list(tensor.shape) != shape:
            raise ValueError(f"{name} in {path} must have shape {shape}, got {list(tensor.shape)}")
        if scale is not None:
            if tensor.dtype != torch.int8 or scale.shape != tensor.shape[:1]:
                raise ValueError(f"{name}{_SCALE} in {path} must be one scale per row of an int8 matrix")
            tensor = tensor.float() * scale.float()[:, None]
        found[name] = tensor.float() if tensor.is_floating_point() else tensor
    if (base := card.get(_BASE)) is not None:
        found = {**_load_base(base, where=path), **found}
    return found, {key: value for key, value in card.items() if key not in _OWN_KEYS}


def _alike(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if tensor.shape != other.shape:
        return False
    largest = other.abs().amax(dim=-1, keepdim=True) if other.dim() else other.abs()
    return bool(((tensor.float() - other.float()).abs() <= largest.float() / 250.0).all())


def _load_base(base: Any, *, where: Path) -> dict[str, torch.Tensor]:
    """The tensors that weights share with shipped ones."""
    name, digest = (base.get("name"), base.get("sha256")) if isinstance(base, dict) else (None, None)
    folder = shipped_folder(str(name))
    if folder is None or read_card(folder)["sha256"] != digest:
        raise ValueError(f"{where} belongs on the weights {name!r} of another version (sha256 {digest})")
    return load_weights(folder)[0]


def _to_nibbles(name: str, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [R, ceil(C / 2)], the even column in the low half, and float16 scales [R, ceil(C / 32)]."""
    import torch

    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, -columns % _GROUP)).view(rows, -1, _GROUP)
    largest = padded.abs().amax(dim=2) / 7.0
    if not torch.isfinite(largest.half()).all():
        raise ValueError(f"{name} must be at most {7 * 65504} in size to be kept in 4 bits")
    whole, scale, least = padded, largest.half(), torch.full_like(largest, torch.inf)
    for share in _SHARES:
        tried = (share * largest).half()
        safe = torch.where(tried > 0.0, tried.float(), 1.0)[:, :, None]
        rounded = (padded / safe).round().clamp(-7, 7)
        error = (rounded * safe - padded).square().sum(dim=2)
        better = error < least
        whole = torch.where(better[:, :, None], rounded, whole)
        scale, least = torch.where(better, tried, scale), torch.where(better, error, least)
    whole = whole.to(torch.int16).view(rows, -1) + 8
    return (whole[:, ::2] | whole[:, 1::2] << 4).to(torch.uint8)[:, : (columns + 1) // 2].contiguous(), scale


def _from_nibbles(packed: torch.Tensor, scale: torch.Tensor, shape: list[int], *, name: str) -> torch.Tensor:
    import torch

    if len(shape) != 2 or list(packed.shape) != [shape[0], -(-shape[1] // 2)]:
        raise ValueError(f"{name} must hold {shape} numbers of 4 bits, got bytes of shape {list(packed.shape)}")
    if list(scale.shape) != [shape[0], -(-shape[1] // _GROUP)]:
        raise ValueError(f"{name} must have one scale per row and {_GROUP} columns, got shape {list(scale.shape)}")
    whole = torch.stack([packed & 15, packed >> 4], dim=2).flatten(1)[:, : shape[1]].float() - 8.0
    return whole * scale.float().repeat_interleave(_GROUP, dim=1)[:, : shape[1]]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
