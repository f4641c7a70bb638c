"""Block-parallel modules on disk: a backbone's folder, and folders of small modules that name the backbone they were
trained on, so that several methods share one."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from adaptspec.drafters.block.backbone import Backbone
from adaptspec.drafters.block.config import BackboneConfig
from adaptspec.drafters.block.scorer import PrefixScorer, ScorerConfig, TapsModel
from adaptspec.drafters.block.transition import TransitionConfig, TransitionCorrection, TreeFlashModel
from adaptspec.drafters.cell_weights import check_target, shipped_for
from adaptspec.drafters.target_parts import TargetParts, target_parts
from adaptspec.drafters.tensors import check_finite, fill
from adaptspec.names import unknown_name
from adaptspec.pretrained import is_weights_folder, load_weights, read_card, save_weights, shipped_folder
from adaptspec.target.hf import HFTarget

if TYPE_CHECKING:
    from adaptspec.target.base import Target

BACKBONE = "dflash"
"""Kind and usual folder name of backbones."""

SMALL: dict[str, tuple[type[nn.Module], type[Any], type[nn.Module]]] = {
    "treeflash": (TransitionCorrection, TransitionConfig, TreeFlashModel),
    "taps": (PrefixScorer, ScorerConfig, TapsModel),
}
"""By kind: the small module, its config, and what holds it and the backbone."""

KINDS = (BACKBONE, *SMALL)


def save_backbone(
    folder: str | os.PathLike[str],
    backbone: Backbone,
    *,
    target: Mapping[str, Any],
    card: Mapping[str, Any],
    bits: int = 8,
) -> None:
    """Write a folder for the drafters dflash and ddtree.

    Args:
        target: `target_fingerprint` of the model it was trained for.
        card: data, steps, loss, what it reached, command.
        bits: see `adaptspec.pretrained.save_weights`.
    """
    own = {"kind": BACKBONE, "config": backbone.config.to_dict(), "target": dict(target)}
    save_weights(folder, backbone.state_dict(), {**card, **own}, bits=bits)


def save_small(
    folder: str | os.PathLike[str],
    module: nn.Module,
    *,
    backbone: str,
    target: Mapping[str, Any],
    card: Mapping[str, Any],
    bits: int = 8,
) -> None:
    """Write a folder for the drafters treeflash or taps, which holds the small module alone.

    Args:
        backbone: `backbone_fingerprint` of the folder of the backbone it was trained on.
        target, card, bits: as for `save_backbone`.

    Raises:
        ValueError: a module of another kind.
    """
    kind = next((kind for kind, (cls, _, _) in SMALL.items() if isinstance(module, cls)), None)
    if kind is None:
        raise ValueError(f"module must be one of {', '.join(c.__name__ for c, _, _ in SMALL.values())}, got {module!r}")
    own = {"kind": kind, "config": dict(module.config.to_dict()), "target": dict(target), "backbone": backbone}
    save_weights(folder, module.state_dict(), {**card, **own}, bits=bits)


def backbone_fingerprint(folder: str | os.PathLike[str]) -> str:
    """What tells the backbone of a folder from all others: the checksum of its weights.

    Raises:
        FileNotFoundError, ValueError: the folder holds no backbone.
    """
    card = read_card(folder)
    if card.get("kind") != BACKBONE:
        raise ValueError(f"{folder} holds weights of kind {card.get('kind')!r}, a backbone is {BACKBONE!r}")
    return str(card["sha256"])


def load_backbone(folder: str | os.PathLike[str]) -> tuple[Backbone, dict[str, Any]]:
    """What `save_backbone` wrote, in float32 on the CPU, and the card.

    Raises:
        FileNotFoundError, ValueError: no such folder, a damaged one, or one of another kind.
    """
    tensors, card = load_weights(folder)
    if card.get("kind") != BACKBONE:
        raise ValueError(f"{folder} holds weights of kind {card.get('kind')!r}, a backbone is {BACKBONE!r}")
    backbone = Backbone(BackboneConfig.from_dict(card.get("config", {})))
    fill(backbone, tensors, where=str(folder))
    return backbone, card


def load_block(
    source: str | os.PathLike[str] | nn.Module | None,
    *,
    name: str,
    kind: str,
    target: Target,
    backbone: str | os.PathLike[str] | None = None,
) -> nn.Module:
    """The modules of a block-parallel drafter, checked against the target; float32 on the CPU if they come from files.

    Args:
        source: a folder of `save_backbone` or `save_small`, a published checkpoint (folder, file or hub id), an object,
            which is copied, or None for the weights shipped for the kind.
        name: of the drafter, for messages.
        kind: "dflash", "treeflash" or "taps".
        backbone: folder of the backbone that a small module belongs to. By default a folder "dflash" beside the
            module's own, then the shipped one.

    Returns:
        A `Backbone`, `TreeFlashModel` or `TapsModel`.

    Raises:
        ValueError: no weights for this target, damaged or foreign ones, or sizes that do not fit it; with names.
    """
    if kind not in KINDS:
        raise unknown_name("kind of block-parallel weights", kind, KINDS)
    parts = target_parts(target, drafter=name)
    assert isinstance(target, HFTarget)
    if isinstance(source, nn.Module):
        where, module = f"the module of {name}", copy.deepcopy(source)
    elif source is None:
        folder = shipped_for(target, kind, name=name, command=f"adaptspec train {kind}")
        where, module = str(folder), _from_folder(folder, kind=kind, name=name, target=target, backbone=backbone)
    elif is_weights_folder(source):
        where, module = str(source), _from_folder(Path(source), kind=kind, name=name, target=target, backbone=backbone)
    else:
        from adaptspec.drafters.checkpoints import load_checkpoint

        where = str(source)
        if kind == "taps":
            raise ValueError(f"{where} holds no card.json: {name} has no published checkpoints, give a trained folder")
        path = source if isinstance(source, str) else Path(source)
        module = load_checkpoint(path, kind=kind, target=target)[0]
    expected = Backbone if kind == BACKBONE else SMALL[kind][2]
    if not isinstance(module, expected):
        raise ValueError(f"{name} needs {expected.__name__}, got {type(module).__name__}")
    _check(backbone_of(module).config, parts, where=where)
    check_finite(module.state_dict().items(), where=where)
    return module


def backbone_of(module: nn.Module) -> Backbone:
    """The backbone of what `load_block` gives."""
    found = module if isinstance(module, Backbone) else module.model
    assert isinstance(found, Backbone)
    return found


def _from_folder(folder: Path, *, kind: str, name: str, target: HFTarget, backbone: Any) -> nn.Module:
    card = read_card(folder)
    if card.get("kind") != kind:
        raise ValueError(f"{folder} holds weights of kind {card.get('kind')!r}, drafter {name!r} needs {kind!r}")
    check_target(card, target, where=str(folder))
    if kind == BACKBONE:
        return load_backbone(folder)[0]
    tensors, card = load_weights(folder)
    module_class, config_class, whole_class = SMALL[kind]
    config = card.get("config")
    if not isinstance(config, Mapping) or set(config) != set(config_class.__slots__):
        raise ValueError(
            f"{folder}: config of the card must hold {', '.join(config_class.__slots__)}, got {config!r:.200}"
        )
    module = module_class(config_class(**config))
    fill(module, tensors, where=str(folder))
    found = _find_backbone(folder, str(card.get("backbone")), backbone)
    return whole_class(load_backbone(found)[0], module)


def _find_backbone(folder: Path, fingerprint: str, given: str | os.PathLike[str] | None) -> Path:
    """The folder of the backbone that a small module was trained on."""
    shipped = shipped_folder(BACKBONE)
    places: Sequence[Path] = [Path(given)] if given is not None else [folder.parent / BACKBONE]
    if given is None and shipped is not None and shipped != places[0]:
        places = [*places, shipped]
    for place in places:
        if is_weights_folder(place) and backbone_fingerprint(place) == fingerprint:
            return place
    raise ValueError(
        f"{folder} was trained on the backbone {fingerprint[:12]}, which is in none of "
        f"{', '.join(map(str, places))}; give its folder with backbone="
    )


def _check(config: BackboneConfig, parts: TargetParts, *, where: str) -> None:
    """Raise ValueError unless a backbone fits the target."""
    if config.hidden_size != parts.hidden_size:
        raise ValueError(f"{where} has hidden_size {config.hidden_size}, the target {parts.hidden_size}")
    if max(config.taps) > parts.layers:
        raise ValueError(f"{where} taps the layers {list(config.taps)}, the target has {parts.layers}")
    rows = getattr(getattr(parts.embed, "weight", None), "shape", (parts.vocab_size,))[0]
    if config.mask_token_id is not None and config.mask_token_id >= rows:
        raise ValueError(f"{where} has mask_token_id {config.mask_token_id}, the target's embedding {rows} rows")
