"""Adapters from a folder of ours, from Kangaroo's published checkpoints, or from an object."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from adaptspec.drafters.cell_weights import check_target
from adaptspec.drafters.early_exit.adapter import AdapterConfig, Adapters
from adaptspec.drafters.target_parts import target_parts
from adaptspec.pretrained import is_weights_folder, load_weights, read_card, save_weights, shipped_folder
from adaptspec.target.hf import HFTarget

if TYPE_CHECKING:
    from adaptspec.target.base import Target


def save_adapters(
    folder: str | os.PathLike[str],
    adapters: Adapters,
    *,
    target: dict[str, Any],
    card: Mapping[str, Any],
    bits: int = 8,
) -> None:
    """Write a folder that `load_adapters` reads and `kangaroo:FOLDER` or `cats:FOLDER` names.

    Args:
        target: `target_fingerprint` of the model they were trained for.
        card: data, steps, loss, what was reached, command.
        bits: see `adaptspec.pretrained.save_weights`.
    """
    own = {"kind": adapters.config.kind, "config": adapters.config.to_dict(), "target": target}
    save_weights(folder, adapters.state_dict(), {**card, **own}, bits=bits)


def load_adapters(
    source: str | os.PathLike[str] | Adapters | None,
    *,
    name: str,
    kind: str,
    shipped: str,
    target: Target,
    exit: int | None = None,
) -> Adapters:
    """The adapters of a drafter, checked against the target; float32 on the CPU if they come from a file.

    Args:
        source: a folder of `save_adapters`, a published folder of Kangaroo, an object, which is copied, or None for the
            weights shipped as `shipped`.
        name: of the drafter, for messages.
        kind: of adapters that it runs.
        exit: of a published adapter, None for Kangaroo's choice.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: no weights for this target, damaged or foreign ones, or sizes that do not fit it; with names.
    """
    parts = target_parts(target, drafter=name)
    assert isinstance(target, HFTarget)
    if isinstance(source, Adapters):
        where, adapters = f"the adapters of {name}", copy.deepcopy(source)
    elif source is None:
        folder = shipped_folder(shipped)
        hint = f"train some with `adaptspec train {kind}` or write '{name}:FOLDER'"
        if folder is None:
            raise ValueError(f"{name} has no weights for this target: none are shipped; {hint}")
        try:
            check_target(read_card(folder), target, where=str(folder))
        except ValueError as error:
            raise ValueError(f"{name} has no weights for this target: {error}; {hint}") from error
        where, adapters = str(folder), _from_folder(folder)
    elif is_weights_folder(source):
        where = str(source)
        check_target(read_card(source), target, where=where)
        adapters = _from_folder(Path(source))
    elif kind == "kangaroo":
        from adaptspec.drafters.early_exit.published import default_exit, load_published

        where, adapters = str(source), load_published(source, exit=exit or default_exit(parts.layers))
    else:
        raise ValueError(f"{source} holds no trained weights; train some with `adaptspec train {kind}`")
    config = adapters.config
    if config.kind != kind:
        raise ValueError(f"{where} holds adapters of kind {config.kind!r}, {name} needs {kind!r}")
    if config.hidden_size != parts.hidden_size:
        raise ValueError(f"{where} has hidden_size {config.hidden_size}, the target {parts.hidden_size}")
    if config.exits[-1] >= parts.layers:
        raise ValueError(f"{where} exits after the layers {list(config.exits)}, the target has {parts.layers}")
    return adapters


def _from_folder(folder: Path) -> Adapters:
    tensors, card = load_weights(folder)
    adapters = Adapters(AdapterConfig.from_dict(card.get("config", {})))
    fill(adapters, tensors, where=str(folder))
    return adapters


def fill(adapters: Adapters, tensors: Mapping[str, torch.Tensor], *, where: str) -> None:
    """Load tensors. Raises ValueError that names those missing, unknown or of another shape."""
    expected = adapters.state_dict()
    wrong = {name for name in expected.keys() & tensors.keys() if expected[name].shape != tensors[name].shape}
    for problem, names in (
        ("lacks the tensors", expected.keys() - tensors.keys()),
        ("holds unknown tensors", tensors.keys() - expected.keys()),
        ("has tensors of another shape", wrong),
    ):
        if names:
            raise ValueError(f"{where} {problem} {', '.join(sorted(names))}")
    adapters.load_state_dict(dict(tensors))
