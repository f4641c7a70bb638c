"""Adapters from a folder of ours, from Kangaroo's published checkpoints, or from an object."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaptspec.drafters.cell_weights import check_target, shipped_for
from adaptspec.drafters.early_exit.adapter import AdapterConfig, Adapters
from adaptspec.drafters.target_parts import target_parts
from adaptspec.drafters.tensors import check_finite, fill
from adaptspec.pretrained import is_weights_folder, load_weights, read_card, save_weights
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
        folder = shipped_for(target, shipped, name=name, command=f"adaptspec train {kind}")
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
    check_finite(adapters.state_dict().items(), where=where)
    return adapters


def _from_folder(folder: Path) -> Adapters:
    tensors, card = load_weights(folder)
    adapters = Adapters(AdapterConfig.from_dict(card.get("config", {})))
    fill(adapters, tensors, where=str(folder))
    return adapters
