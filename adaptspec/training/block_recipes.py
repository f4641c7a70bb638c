"""What training of block-parallel drafters begins with: a new backbone, or a small module on a trained one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from adaptspec.drafters.block import (
    Backbone,
    BackboneConfig,
    PrefixScorer,
    ScorerConfig,
    TapsModel,
    TransitionConfig,
    TransitionCorrection,
    TreeFlashModel,
)
from adaptspec.drafters.block.weights import (
    BACKBONE,
    SMALL,
    backbone_fingerprint,
    load_backbone,
    save_backbone,
    save_small,
)
from adaptspec.drafters.cell_weights import check_target
from adaptspec.drafters.target_parts import TargetParts
from adaptspec.pretrained import is_weights_folder, read_card, shipped_folder
from adaptspec.target.hf import HFTarget
from adaptspec.training.block_rollouts import BlockRollout, PrefixRollout, TransitionRollout
from adaptspec.training.initial import _copy, _copy_layer, _take_last, cell_config, default_taps
from adaptspec.training.unroll import Embed, Rollout

BLOCK_SIZE = 8
Save = Callable[[Path, dict[str, Any]], None]


def backbone_folder(kind: str, given: str | Path | None) -> Path:
    """The folder of the backbone that a small module is trained on: the given one, or the shipped one.

    Raises:
        ValueError: there is none, or it is none.
    """
    folder = shipped_folder(BACKBONE) if given is None else Path(given)
    if folder is None:
        raise ValueError(f"{kind} is trained on a backbone; none is shipped, give the folder of a trained one")
    if not is_weights_folder(folder):
        raise ValueError(f"backbone must be a folder of `adaptspec train {BACKBONE}`, got {folder}")
    backbone_fingerprint(folder)
    return folder


def block_taps(kind: str, layers: int, taps: Sequence[int] | None, backbone: str | Path | None) -> tuple[int, ...]:
    """Layers of a target of `layers` layers that a kind reads.

    Raises:
        ValueError: taps or a backbone for a kind that takes none, or no backbone.
    """
    if kind == BACKBONE:
        if backbone is not None:
            raise ValueError(f"backbone is an option of {' and '.join(SMALL)}, not of {kind!r}")
        return default_taps(layers) if taps is None else tuple(taps)
    found = tuple(read_card(backbone_folder(kind, backbone))["config"]["taps"])
    if taps is not None and tuple(taps) != found:
        raise ValueError(f"taps of {kind!r} are those of its backbone, {list(found)}, got {list(taps)}")
    return found


def begin_block(
    kind: str,
    target: HFTarget,
    parts: TargetParts,
    *,
    embed: Embed,
    identity: dict[str, Any],
    layers: int,
    seed: int,
    copy: bool,
    taps: Sequence[int] | None,
    backbone: str | Path | None,
    rows: Sequence[int] | None,
) -> tuple[Rollout, tuple[int, ...], dict[str, Any], Save, dict[str, Any]]:
    """What a `Trainee` is made of.

    Args:
        embed: the target's embedding, without gradients.
        identity: fingerprint of the target.
        layers: of a new backbone.
        copy: begin as the target's last layers.
        backbone: folder, see `backbone_folder`.
        rows: tokens of the head in training; all if None.

    Raises:
        ValueError: see `block_taps`; a backbone of another target.
    """
    chosen = block_taps(kind, parts.layers, taps, backbone)
    if kind == BACKBONE:
        config = backbone_config(parts, target.layout.layers[-1], layers=layers, taps=chosen)
        own = make_initial_backbone(config, parts=parts, layers=target.layout.layers, seed=seed, copy=copy)
        own = own.to(parts.device)
        return (
            BlockRollout(own, embed),
            chosen,
            config.to_dict(),
            lambda folder, card: save_backbone(folder, own, target=identity, card=card),
            {},
        )
    folder = backbone_folder(kind, backbone)
    frozen, card = load_backbone(folder)
    check_target(card, target, where=str(folder))
    fingerprint = backbone_fingerprint(folder)
    size = parts.hidden_size
    module: Any
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "treeflash":
            module = TransitionCorrection(TransitionConfig(size, size))
        else:
            module = PrefixScorer(ScorerConfig(size, depths=frozen.config.block_size - 1))
    rollout: Rollout
    if kind == "treeflash":
        rollout = TransitionRollout(TreeFlashModel(frozen, module).to(parts.device), embed)
    else:
        tokens = torch.as_tensor(range(parts.vocab_size) if rows is None else rows, device=parts.device)
        rollout = PrefixRollout(TapsModel(frozen, module).to(parts.device), embed, rows=tokens)

    def save(folder: Path, card: dict[str, Any]) -> None:
        save_small(folder, module, backbone=fingerprint, target=identity, card=card)

    return rollout, chosen, dict(module.config.to_dict()), save, {"backbone": fingerprint}


def backbone_config(parts: TargetParts, layer: nn.Module, *, layers: int, taps: Sequence[int]) -> BackboneConfig:
    """A backbone of the target's own sizes, with feed-forward parts of at most twice the hidden size, one RMS norm per
    tap and learnt masks.

    Args:
        layer: of the target, for whether it norms queries and keys.
    """
    like = cell_config(parts, kind="eagle3", taps=taps)
    return BackboneConfig(
        hidden_size=like.hidden_size,
        num_attention_heads=like.num_attention_heads,
        num_key_value_heads=like.num_key_value_heads,
        head_dim=like.head_dim,
        intermediate_size=min(like.intermediate_size, 2 * like.hidden_size),
        taps=tuple(taps),
        num_layers=layers,
        block_size=BLOCK_SIZE,
        rms_norm_eps=like.rms_norm_eps,
        rope_theta=like.rope_theta,
        rope_scaling=like.rope_scaling,
        qk_norm=_norm_of(layer, "q_norm", like.head_dim) is not None,
        tap_norm=True,
    )


def make_initial_backbone(
    config: BackboneConfig, *, parts: TargetParts, layers: Sequence[nn.Module], seed: int, copy: bool = True
) -> Backbone:
    """A new backbone; with `copy` its layers start as the target's last ones, reading its last tap. Feed-forward parts
    keep the units with the largest outputs.

    Args:
        layers: of the target.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = Backbone(config)
        if backbone.mask_embeddings is not None:
            nn.init.normal_(backbone.mask_embeddings.weight, std=float(parts.embed.weight.detach().float().std()))
    if not copy:
        return backbone
    with torch.no_grad():
        for own, layer in zip(backbone.layers, list(layers)[-config.num_layers :], strict=False):
            _copy_layer(own, layer)
            _copy_largest_units(own.mlp, getattr(layer, "mlp", None))
            for name in ("q_norm", "k_norm") if config.qk_norm else ():
                _copy(getattr(own.self_attn, name), _norm_of(layer, name, config.head_dim))
        _copy(backbone.hidden_norm, getattr(layers[-1], "input_layernorm", None))
        _copy(backbone.norm, parts.norm)
        _take_last(backbone.fc, 1.0)
    return backbone


def _copy_largest_units(own: Any, theirs: Any) -> None:
    """Of a gated feed-forward part that is wider, the units with the largest output columns."""
    gate, up, down = (getattr(getattr(theirs, f"{name}_proj", None), "weight", None) for name in ("gate", "up", "down"))
    width = own.down_proj.weight.shape[1]
    if gate is None or up is None or down is None or down.shape[0] != own.down_proj.weight.shape[0]:
        return
    if down.shape[1] <= width:
        return
    kept = down.float().norm(dim=0).topk(width).indices.sort().values
    own.gate_proj.weight.copy_(gate[kept])
    own.up_proj.weight.copy_(up[kept])
    own.down_proj.weight.copy_(down[:, kept])


def _norm_of(layer: nn.Module, name: str, size: int) -> Any:
    """The norm of queries or keys per head, None if the layer has none of that size."""
    norm = getattr(getattr(layer, "self_attn", None), name, None)
    weight = getattr(norm, "weight", None)
    return norm if weight is not None and tuple(weight.shape) == (size,) else None
