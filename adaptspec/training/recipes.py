"""What `adaptspec train` can train, each with the settings of its paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from adaptspec.drafters.cell_weights import save_cell, target_fingerprint
from adaptspec.drafters.hydra_heads import HydraConfig, HydraHeads
from adaptspec.drafters.medusa_heads import MedusaConfig, MedusaHeads
from adaptspec.drafters.small_model import build_small_model, config_like, save_small_model
from adaptspec.drafters.target_parts import target_parts
from adaptspec.names import unknown_name
from adaptspec.pretrained import save_weights
from adaptspec.target.hf import HFTarget
from adaptspec.training.initial import cell_config, default_taps, make_initial_cell
from adaptspec.training.unroll import CellRollout, HeadsRollout, ModelRollout, Rollout


@dataclass(frozen=True, slots=True)
class Recipe:
    """Defaults of one kind.

    Attributes:
        cell: kind of the cell, "" for drafters without one.
        layers: of the cell, or heads.
        loss: see `adaptspec.training.losses.Objective`.
        unroll: steps trained.
        depth: steps looked at on held-out answers.
        aligned: GRIFFIN's masking.
        lr: peak of Muon.
        summary: one line for people.
    """

    summary: str
    cell: str = ""
    layers: int = 1
    loss: str = "kl"
    unroll: int = 3
    depth: int = 5
    aligned: bool = False
    lr: float = 0.02


RECIPES: dict[str, Recipe] = {
    "eagle1": Recipe("EAGLE and EAGLE-2 (2401.15077)", cell="eagle1", loss="feature", unroll=1),
    "eagle3": Recipe("EAGLE-3 (2503.01840)", cell="eagle3"),
    "griffin": Recipe("GRIFFIN (2502.11018)", cell="griffin", loss="griffin", aligned=True),
    "mtp1": Recipe("one multi-token-prediction layer (2412.19437)", cell="mtp", loss="ce"),
    "mtp3": Recipe("three multi-token-prediction layers", cell="mtp", layers=3, loss="ce"),
    "medusa": Recipe("Medusa's heads (2401.10774)", layers=4, loss="kl", unroll=4, depth=4),
    "hydra": Recipe("Hydra's heads (2402.05109)", layers=4, loss="kl", unroll=4, depth=4),
    "draft-model": Recipe("an independent small language model", unroll=1, depth=1),
}


@dataclass(frozen=True, slots=True)
class Trainee:
    """A drafter to be trained, with what belongs to it.

    Attributes:
        rollout: how it is run.
        taps: layers of the target whose states it reads, in this order.
        config: of the module, for the card.
        save: writes a folder: called with folder and the rest of the card.
    """

    rollout: Rollout
    taps: tuple[int, ...]
    config: dict[str, Any]
    save: Callable[[Path, dict[str, Any]], None]


def recipe(kind: str) -> Recipe:
    """The recipe of a kind. Raises ValueError for an unknown one."""
    if kind not in RECIPES:
        raise unknown_name("kind of drafter", kind, RECIPES)
    return RECIPES[kind]


def needed_taps(kind: str, layers: int, taps: Sequence[int] | None = None) -> tuple[int, ...]:
    """Layers of a target of `layers` layers that a kind reads."""
    if recipe(kind).cell == "eagle3":
        return default_taps(layers) if taps is None else tuple(taps)
    return () if kind == "draft-model" else (layers,)


def make_trainee(
    kind: str,
    model: Any,
    *,
    seed: int = 0,
    copy: bool = True,
    scale: float = 1.0,
    taps: Sequence[int] | None = None,
) -> Trainee:
    """A new drafter of a kind for a target.

    Args:
        model: the target, a transformers causal language model. It is not changed.
        copy, scale: see `make_initial_cell`.

    Raises:
        ValueError: unknown kind, or a target that does not fit.
    """
    chosen = recipe(kind)
    target = HFTarget(model)
    parts = target_parts(target, drafter=kind)
    identity = target_fingerprint(model)
    embed = _frozen(parts.embed)
    norm = _frozen(parts.norm)
    if chosen.cell:
        config = cell_config(parts, kind=chosen.cell, layers=chosen.layers, taps=taps)
        cell = make_initial_cell(
            config, parts=parts, layer=target.layout.layers[-1], seed=seed, copy=copy, scale=scale
        ).to(parts.device)
        if config.final_norm:
            cell.use_final_norm(norm)
        return Trainee(
            CellRollout(cell, embed),
            config.taps,
            config.to_dict(),
            lambda folder, card: save_cell(folder, cell, target=identity, card=card),
        )
    if kind == "draft-model":
        return _draft_trainee(model, identity, seed=seed, copy=copy)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        heads: MedusaHeads | HydraHeads
        if kind == "medusa":
            heads = MedusaHeads(MedusaConfig(parts.hidden_size, heads=chosen.layers))
        else:
            heads = HydraHeads(HydraConfig(parts.hidden_size, heads=chosen.layers))
    heads = heads.to(parts.device)
    values = asdict(heads.config)

    def save(folder: Path, card: dict[str, Any]) -> None:
        save_weights(folder, heads.state_dict(), {**card, "kind": kind, "config": values, "target": identity})

    return Trainee(HeadsRollout(heads, embed, norm), (parts.layers,), values, save)


def _draft_trainee(model: Any, identity: dict[str, Any], *, seed: int, copy: bool) -> Trainee:
    """A small Llama of two layers between the target's own embedding and head, which start as its first and last."""
    layers = model.config.get_text_config().num_hidden_layers
    config = config_like(model, layers=min(2, layers))
    chosen = (0, layers - 1)[-config.layers :]
    small = build_small_model(config, model, copy_layers=chosen if copy else None, seed=seed).float()

    def save(folder: Path, card: dict[str, Any]) -> None:
        save_small_model(folder, small, config, target=model, card=card)

    return Trainee(ModelRollout(small), (), asdict(config), save)


def _frozen(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A module of the target with float32 results, and without gradients into its weights."""

    @torch.no_grad()
    def run(x: torch.Tensor) -> torch.Tensor:
        weight = getattr(module, "weight", None)
        if x.is_floating_point() and weight is not None:
            x = x.to(weight.dtype)
        return module(x).float()

    return run
