"""What `adaptspec train` can train, each with the settings of its paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

import torch

from adaptspec.drafters.block.weights import KINDS as BLOCK_KINDS
from adaptspec.drafters.cell_weights import load_cell, save_cell, target_fingerprint
from adaptspec.drafters.cells import Cell, ConFuCell, make_cell
from adaptspec.drafters.early_exit.adapter import EXITS
from adaptspec.drafters.early_exit.adapter_weights import save_adapters
from adaptspec.drafters.hydra_heads import HydraConfig, HydraHeads
from adaptspec.drafters.medusa_heads import MedusaConfig, MedusaHeads
from adaptspec.drafters.small_model import build_small_model, config_like, save_small_model
from adaptspec.drafters.target_parts import target_parts
from adaptspec.names import unknown_name
from adaptspec.pretrained import is_weights_folder, read_card, save_weights, shipped_folder, shipped_names
from adaptspec.target.hf import HFTarget
from adaptspec.training.block_recipes import begin_block, block_taps
from adaptspec.training.contemplating import ConFuRollout
from adaptspec.training.exit_adapters import ExitRollout, check_exits, default_exits, make_adapters
from adaptspec.training.initial import CONFU_SIZES, begin_future, cell_config, default_taps, make_initial_cell
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
        by_alpha: see `Trainer`.
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
    by_alpha: bool = False


RECIPES: dict[str, Recipe] = {
    "eagle1": Recipe("EAGLE and EAGLE-2 (2401.15077)", cell="eagle1", loss="feature", unroll=1),
    "eagle3": Recipe("EAGLE-3 (2503.01840)", cell="eagle3"),
    "confu": Recipe("ConFu (2603.08899)", cell="confu"),
    "griffin": Recipe("GRIFFIN (2502.11018)", cell="griffin", loss="griffin", aligned=True),
    "mtp1": Recipe("one multi-token-prediction layer (2412.19437)", cell="mtp", loss="ce"),
    "mtp3": Recipe("three multi-token-prediction layers", cell="mtp", layers=3, loss="ce"),
    "medusa": Recipe("Medusa's heads (2401.10774)", layers=4, loss="kl", unroll=4, depth=4),
    "hydra": Recipe("Hydra's heads (2402.05109)", layers=4, loss="kl", unroll=4, depth=4),
    "kangaroo": Recipe("Kangaroo's adapter (2404.18911)", unroll=1),
    "cats": Recipe("the adapters of CATS (2605.11186)", unroll=1),
    "dflash": Recipe("DFlash's backbone (2602.06036)", layers=2, unroll=7, depth=7),
    "treeflash": Recipe("TreeFlash's correction on a backbone (2606.03819)", unroll=7, depth=7),
    "taps": Recipe("TAPS's scorer on a backbone (2606.00487)", unroll=7, depth=7, by_alpha=True),
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
        identity: plain values that a checkpoint of its training must agree on.
        next_features: it reads `Batch.next_features`.
    """

    rollout: Rollout
    taps: tuple[int, ...]
    config: dict[str, Any]
    save: Callable[[Path, dict[str, Any]], None]
    identity: dict[str, Any] = field(default_factory=dict)
    next_features: bool = False


def recipe(kind: str) -> Recipe:
    """The recipe of a kind. Raises ValueError for an unknown one."""
    if kind not in RECIPES:
        raise unknown_name("kind of drafter", kind, RECIPES)
    return RECIPES[kind]


def needed_taps(
    kind: str, layers: int, taps: Sequence[int] | None = None, *, backbone: str | Path | None = None
) -> tuple[int, ...]:
    """Layers of a target of `layers` layers that a kind reads; those on a backbone read what that reads."""
    if kind in BLOCK_KINDS:
        return block_taps(kind, layers, taps, backbone)
    if backbone is not None:
        raise ValueError(f"backbone is an option of treeflash and taps, not of {kind!r}")
    if kind in EXITS:
        return default_exits(kind, layers) if taps is None else check_exits(kind, taps, layers)
    if recipe(kind).cell in ("eagle3", "confu"):
        return default_taps(layers) if taps is None else tuple(taps)
    return () if kind == "draft-model" else (layers,)


def make_trainee(
    kind: str,
    model: Any,
    *,
    seed: int = 0,
    copy: bool = True,
    scale: float = 1.0,
    intermediate: int | None = None,
    taps: Sequence[int] | None = None,
    start: Cell | None = None,
    backbone: str | Path | None = None,
    rows: Sequence[int] | None = None,
) -> Trainee:
    """A new drafter of a kind for a target.

    Args:
        model: the target, a transformers causal language model. It is not changed.
        copy, scale: see `make_initial_cell`.
        start: of `load_start`, in place of a new cell.
        backbone: folder of the backbone that "treeflash" and "taps" are trained on; None for the shipped one.
        rows: tokens of the head in training; all if None.

    Raises:
        ValueError: unknown kind, a target that does not fit, or a start for a kind without a cell.
    """
    chosen = recipe(kind)
    if intermediate is not None and not chosen.cell:
        raise ValueError(f"intermediate is for kinds with a cell, not for {kind!r}")
    if start is not None and not chosen.cell:
        raise ValueError(f"start is for kinds with a cell, not for {kind!r}")
    target = HFTarget(model)
    parts = target_parts(target, drafter=kind)
    identity = target_fingerprint(model)
    embed = _frozen(parts.embed)
    norm = _frozen(parts.norm)
    if kind in BLOCK_KINDS:
        return Trainee(
            *begin_block(
                kind,
                target,
                parts,
                embed=embed,
                identity=identity,
                layers=chosen.layers,
                seed=seed,
                copy=copy,
                taps=taps,
                backbone=backbone,
                rows=rows,
            )
        )
    if chosen.cell:
        if start is None:
            config = cell_config(
                parts, kind=chosen.cell, layers=chosen.layers, taps=taps, intermediate_size=intermediate
            )
            layer = target.layout.layers[-1]
            cell = make_initial_cell(config, parts=parts, layer=layer, seed=seed, copy=copy, scale=scale)
        else:
            config, cell = start.config, start
        cell = cell.to(parts.device)
        if config.final_norm:
            cell.use_final_norm(norm)
        rollout = CellRollout(cell, embed)
        if isinstance(cell, ConFuCell):
            rollout = ConFuRollout(cell, embed, model)
        return Trainee(
            rollout,
            config.taps,
            config.to_dict(),
            lambda folder, card: save_cell(folder, cell, target=identity, card=card),
        )
    if kind in EXITS:
        layers = target.layout.layers
        exits = needed_taps(kind, len(layers), taps)
        adapters = make_adapters(kind, exits, parts=parts, layers=layers, seed=seed, copy=copy).to(parts.device)
        return Trainee(
            ExitRollout(adapters),
            exits,
            adapters.config.to_dict(),
            lambda folder, card: save_adapters(folder, adapters, target=identity, card=card),
            next_features=True,
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


def load_start(kind: str, source: str | Path, model: Any, *, seed: int = 0, frozen: bool = False) -> Cell:
    """Trained weights to go on from: those of the same kind, or for "confu" those of an EAGLE-3 cell, to which soft
    prompts and contemplate vectors are added.

    Args:
        source: see `find_start`.
        seed: of what is added.
        frozen: only what is added is to be trained.

    Raises:
        ValueError: weights of another kind or target, or with a head of their own, which is not trained here; frozen
            weights to which nothing is added.
    """
    chosen = recipe(kind)
    if not chosen.cell:
        raise ValueError(f"start is for kinds with a cell, not for {kind!r}")
    source = find_start(kind, source)
    found = chosen.cell
    if kind == "confu" and is_weights_folder(source):
        found = read_card(source).get("kind", found)
    elif kind == "confu":
        found = "eagle3"
    if found not in (chosen.cell, *(["eagle3"] if kind == "confu" else [])):
        raise ValueError(f"start of 'confu' must be a cell of kind 'confu' or 'eagle3', got {found!r}")
    target = HFTarget(model)
    weights = load_cell(source, name=kind, kind=found, shipped="", target=target)
    if weights.head is not None or weights.heads or weights.embeddings is not None:
        raise ValueError(f"start must be weights without a head or embeddings of their own, got {source}")
    cell = weights.cell
    if found == chosen.cell:
        if frozen:
            raise ValueError(f"frozen is for 'confu' that starts with an 'eagle3' cell, got {kind!r} and {found!r}")
        return cell
    config = replace(cell.config, kind="confu", **CONFU_SIZES)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        grown = make_cell(config)
    assert isinstance(grown, ConFuCell)
    begin_future(grown, parts=target_parts(target, drafter=kind), seed=seed)
    grown.load_state_dict({**grown.state_dict(), **cell.state_dict()})
    if frozen:
        for name, parameter in grown.named_parameters():
            parameter.requires_grad_(name not in cell.state_dict())
    return grown


def find_start(kind: str, source: str | Path) -> str | Path:
    """Where weights to go on from lie: a folder of `save_cell` or what else `load_cell` reads as it was given, shipped
    weights by their name.

    Raises:
        ValueError: a single word that is neither a path nor the name of shipped weights.
    """
    name = str(source)
    if Path(name).exists() or len(PurePath(name).parts) != 1 or "/" in name:
        return source
    folder = shipped_folder(name)
    if folder is None:
        shipped = ", ".join(shipped_names())
        raise ValueError(
            f"start must be a folder of weights or the name of shipped ones ({shipped or 'none are shipped'}), got "
            f"{name!r}; train some with `adaptspec train {kind}` and give their folder"
        )
    return folder


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
