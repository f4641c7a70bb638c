"""Where the heads of Medusa and Hydra come from: a folder of trained weights, or a published checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from adaptspec.drafters.cell_weights import check_target, shipped_for, target_fingerprint
from adaptspec.drafters.checkpoints import load_checkpoint
from adaptspec.drafters.hydra_heads import HydraConfig, HydraHeads
from adaptspec.drafters.medusa_heads import MedusaConfig, MedusaHeads
from adaptspec.pretrained import is_weights_folder, load_weights

if TYPE_CHECKING:
    from adaptspec.target.hf import HFTarget

MODULES = {"medusa": (MedusaHeads, MedusaConfig), "hydra": (HydraHeads, HydraConfig)}


def load_heads(path: str | None, *, kind: str, target: HFTarget) -> torch.nn.Module:
    """Heads of a kind of `MODULES`.

    Args:
        path: a folder that `save_weights` wrote, a published checkpoint, or None for the shipped weights.

    Raises:
        ValueError: none are shipped for this target, or the weights are of another kind or damaged.
    """
    if path is None:
        path = str(shipped_for(target, kind, name=kind, command=f"adaptspec train {kind}"))
    if not is_weights_folder(path):
        return load_checkpoint(path, kind=kind, target=target)[0]
    tensors, card = load_weights(path)
    check_target(card, target, where=path)
    return heads_from(tensors, card, kind=kind, where=path)


def head_card(module: MedusaHeads | HydraHeads, *, target: torch.nn.Module) -> dict[str, Any]:
    """What the card of trained heads must hold; add data, steps and results."""
    kind = next(kind for kind, (module_class, _) in MODULES.items() if isinstance(module, module_class))
    return {"kind": kind, "config": asdict(module.config), "target": target_fingerprint(target)}


def heads_from(
    state_dict: Mapping[str, torch.Tensor], card: Mapping[str, Any], *, kind: str, where: str
) -> torch.nn.Module:
    """Heads out of what `load_weights` gave: the card holds "kind" and "config" (the fields of the config class).

    Raises:
        ValueError: another kind, or tensors that do not fit the config.
    """
    if card.get("kind") != kind:
        raise ValueError(f"{where} holds weights of kind {card.get('kind')!r}, drafter {kind!r} was asked for")
    module_class, config_class = MODULES[kind]
    config = card.get("config")
    if not isinstance(config, Mapping) or set(config) - set(config_class.__slots__):
        raise ValueError(
            f"{where}: config of the card must hold fields of {config_class.__name__}, got {config!r:.200}"
        )
    if missing := [name for name in ("hidden_size",) if name not in config]:
        raise ValueError(f"{where}: config of the card lacks {', '.join(missing)}")
    module = module_class(config_class(**config))
    wanted = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in state_dict.items()}
    if wanted != found:
        wrong = sorted(set(wanted.items()) ^ set(found.items()))
        raise ValueError(f"{where}: weights do not fit their config at {', '.join(name for name, _ in wrong[:8])}")
    module.load_state_dict(state_dict)
    return module
