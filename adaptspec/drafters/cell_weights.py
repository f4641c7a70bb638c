"""A trained cell with what belongs to it: from a folder of ours, a published checkpoint, or an object."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from adaptspec.drafters.cells import Cell, CellConfig, make_cell
from adaptspec.drafters.target_parts import TargetParts, target_parts
from adaptspec.drafters.tensors import check_finite, fill
from adaptspec.pretrained import is_weights_folder, load_weights, read_card, save_weights, shipped_folder
from adaptspec.target.hf import HFTarget

if TYPE_CHECKING:
    from adaptspec.target.base import Target

_HEAD = "lm_head.weight"
_TOKEN_IDS = "token_ids"
_SAMPLES = 16
_TOLERANCE = 0.02
"""Of the largest sampled weight; what bfloat16 rounds is a tenth of it."""


@dataclass(frozen=True, slots=True)
class CellWeights:
    """A cell and the matrices that it does not borrow from the target.

    Attributes:
        cell: with its weights.
        head: own output matrix [R, H]; None: the target's.
        token_ids: int64 [R], the target's token of each row of `head`; None: row i is token i.
        heads: own output matrices of the steps of a cell with several layers; else empty.
        embeddings: own embedding matrix [V, H]; None: the target's.
        card: what is known about the training.
    """

    cell: Cell
    head: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None
    heads: tuple[torch.Tensor, ...] = ()
    embeddings: torch.Tensor | None = None
    card: Mapping[str, Any] = field(default_factory=dict)


def save_cell(
    folder: str | os.PathLike[str],
    cell: Cell,
    *,
    target: dict[str, Any],
    card: Mapping[str, Any],
    head: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
    bits: int = 8,
) -> None:
    """Write a folder that `load_cell` reads and `NAME:FOLDER` names.

    Args:
        target: `target_fingerprint` of the model it was trained for.
        card: data, steps, loss, what it reached, command.
        head, token_ids: see `CellWeights`.
        bits: see `adaptspec.pretrained.save_weights`.

    Raises:
        ValueError: a head whose rows are not those of the config, or token ids without a head.
    """
    rows = cell.config.draft_vocab_size
    if (head is None) != (rows is None) or (head is not None and head.shape != (rows, cell.config.hidden_size)):
        shape = None if head is None else list(head.shape)
        raise ValueError(f"head must have draft_vocab_size = {rows} rows of the cell's hidden size, got {shape}")
    if token_ids is not None and (head is None or token_ids.shape != (rows,) or token_ids.is_floating_point()):
        raise ValueError(f"token_ids must be whole numbers, one per row of head, got {list(token_ids.shape)}")
    tensors = dict(cell.state_dict())
    if head is not None:
        tensors[_HEAD] = head
    if token_ids is not None:
        tensors[_TOKEN_IDS] = token_ids.long()
    own = {"kind": cell.config.kind, "config": cell.config.to_dict(), "target": target}
    save_weights(folder, tensors, {**card, **own}, bits=bits)


def load_cell(
    source: str | os.PathLike[str] | Cell | CellWeights | None, *, name: str, kind: str, shipped: str, target: Target
) -> CellWeights:
    """The cell of a drafter, checked against the target; float32 on the CPU if it comes from a file.

    Args:
        source: a folder of `save_cell`, a published checkpoint (folder, file or hub id), an object, which is copied, or
            None for the weights shipped as `shipped`.
        name: of the drafter, for messages.
        kind: of cell that the drafter runs.

    Raises:
        ValueError: no weights for this target, damaged or foreign ones, or sizes that do not fit it; with names.
    """
    parts = target_parts(target, drafter=name)
    assert isinstance(target, HFTarget)
    if isinstance(source, (Cell, CellWeights)):
        weights = source if isinstance(source, CellWeights) else CellWeights(source)
        where = f"the cell of {name}"
        weights = CellWeights(
            copy.deepcopy(weights.cell),
            weights.head,
            weights.token_ids,
            weights.heads,
            weights.embeddings,
            weights.card,
        )
    elif source is None:
        trained = shipped.partition("-")[0]  # variants by loss are of one kind
        folder = shipped_for(target, shipped, name=name, command=f"adaptspec train {trained}")
        where, weights = str(folder), _from_folder(folder)
    elif is_weights_folder(source):
        where = str(source)
        check_target(read_card(source), target, where=str(source))
        weights = _from_folder(Path(source))
    else:
        where, weights = str(source), _from_checkpoint(source, kind=kind, target=target)
    _check(weights, parts, kind=kind, where=where, name=name)
    return weights


def target_fingerprint(model: torch.nn.Module) -> dict[str, Any]:
    """What tells one target from another: sizes and a few numbers out of its embedding and its final norm, which say
    the same in float32, bfloat16 and float16."""
    parts = target_parts(HFTarget(model), drafter="a fingerprint")
    return _fingerprint(parts)


def _fingerprint(parts: TargetParts) -> dict[str, Any]:
    embedding = parts.embed.weight.detach()
    rows = torch.linspace(0, embedding.shape[0] - 1, _SAMPLES).long()
    columns = torch.linspace(0, embedding.shape[1] - 1, _SAMPLES).long()
    numbers = [embedding[rows.to(embedding.device), columns.to(embedding.device)]]
    if (norm := getattr(parts.norm, "weight", None)) is not None:
        numbers.append(norm.detach()[columns.to(norm.device)])
    return {
        "model_type": getattr(parts.config, "model_type", ""),
        "hidden_size": parts.hidden_size,
        "layers": parts.layers,
        "vocab_size": parts.vocab_size,
        "weights": [[float(f"{value:.5g}") for value in part.float().tolist()] for part in numbers],
    }


def shipped_for(target: HFTarget, shipped: str, *, name: str, command: str) -> Path:
    """The folder of the weights shipped as `shipped`.

    Args:
        name: of the drafter.
        command: that trains such weights.

    Raises:
        ValueError: none are shipped, or they are another target's.
    """
    folder = shipped_folder(shipped)
    why = "none are shipped" if folder is None else _foreign(read_card(folder), target)
    if folder is None or why:
        raise ValueError(
            f"{name} has no weights for this target: {why}; train some with `{command}` or write '{name}:FOLDER'"
        )
    return folder


def check_target(card: Mapping[str, Any], target: HFTarget, *, where: str) -> None:
    """Raise ValueError unless the card's target is this one, in whatever precision."""
    if why := _foreign(card, target):
        raise ValueError(f"{where} was not trained for this target: {why}")


def _foreign(card: Mapping[str, Any], target: HFTarget) -> str | None:
    """What the target of a card has otherwise than this one; None if it is the same."""
    theirs, ours = card.get("target"), _fingerprint(target_parts(target, drafter="a fingerprint"))
    if not isinstance(theirs, dict):
        return "their card names no target"
    for key in ("model_type", "hidden_size", "layers", "vocab_size"):
        if theirs.get(key) != ours[key]:
            return f"their target has {key} {theirs.get(key)!r}, this one {ours[key]!r}"
    numbers = theirs.get("weights", [])
    if not isinstance(numbers, list) or not all(isinstance(part, list) and _all_numbers(part) for part in numbers):
        return "their card is damaged: weights of the target must be lists of numbers"
    for wanted, found in zip(numbers, ours["weights"], strict=False):
        largest = max(map(abs, found), default=0.0)
        if len(wanted) != len(found) or any(
            abs(a - b) > _TOLERANCE * largest for a, b in zip(wanted, found, strict=True)
        ):
            return "their target is of the same shape and has other weights"
    return None


def _all_numbers(values: list[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _from_folder(folder: Path) -> CellWeights:
    tensors, card = load_weights(folder)
    cell = make_cell(CellConfig.from_dict(card.get("config", {})))
    head, token_ids = tensors.pop(_HEAD, None), tensors.pop(_TOKEN_IDS, None)
    fill(cell, tensors, where=str(folder))
    return CellWeights(cell, head, token_ids, card=card)


def _from_checkpoint(path: str | os.PathLike[str], *, kind: str, target: Target) -> CellWeights:
    from adaptspec.drafters.checkpoints import load_checkpoint

    cell, extras = load_checkpoint(path if isinstance(path, str) else Path(path), kind=kind, target=target)
    assert isinstance(cell, Cell)
    return CellWeights(cell, extras.head, extras.token_ids, extras.heads, extras.embeddings)


def _check(weights: CellWeights, parts: TargetParts, *, kind: str, where: str, name: str) -> None:
    """Raise ValueError unless cell and matrices fit drafter and target."""
    config = weights.cell.config
    if config.kind != kind:
        raise ValueError(f"{where} is a cell of kind {config.kind!r}, {name} needs {kind!r}")
    if config.hidden_size != parts.hidden_size:
        raise ValueError(f"{where} has hidden_size {config.hidden_size}, the target {parts.hidden_size}")
    if max(config.taps) > parts.layers:
        raise ValueError(f"{where} taps the layers {list(config.taps)}, the target has {parts.layers}")
    check_finite(weights.cell.state_dict().items(), where=where)
    heads = weights.heads or (() if weights.head is None else (weights.head,))
    for head in heads:
        if head.dim() != 2 or head.shape[1] != parts.hidden_size:
            raise ValueError(f"the head of {where} must be [R, {parts.hidden_size}], got {list(head.shape)}")
        if weights.token_ids is None and len(head) > parts.vocab_size:
            raise ValueError(f"the head of {where} has {len(head)} rows, the target's vocabulary {parts.vocab_size}")
    if config.draft_vocab_size not in (None, *map(len, heads)):
        raise ValueError(f"{where} lacks its head of {config.draft_vocab_size} rows")
