"""Cells for a target, beginning as a copy of its last layer where shapes allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from adaptspec.drafters.cells import Cell, CellConfig, ConFuCell, make_cell
from adaptspec.drafters.target_parts import TargetParts

_LAYER_PARTS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
)


CONFU_SIZES = {"soft_prompts": 4, "contemplates": 8, "mixed": 2}
"""Ours: every soft prompt is one more row that the target runs."""


def cell_config(
    parts: TargetParts,
    *,
    kind: str,
    layers: int = 1,
    taps: Sequence[int] | None = None,
    intermediate_size: int | None = None,
) -> CellConfig:
    """A cell of the target's own sizes.

    EAGLE-3 gets an RMS norm per tap (hidden states of one layer can be thousands of times larger than of another) and
    the embedding added to its residual (with few key-value heads little of it comes through the attention).

    Args:
        layers: of "mtp".
        taps: of "eagle3" and "confu", by default after 2, half, and all but three of the layers; the others tap the
            last one.
    """
    if intermediate_size is not None and intermediate_size < 1:
        raise ValueError(f"intermediate_size must be >= 1, got {intermediate_size}")
    config, last = parts.config, parts.layers
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    scaled = rope if rope.get("rope_type", rope.get("type", "default")) != "default" else None
    common: dict[str, Any] = {
        "kind": kind,
        "hidden_size": parts.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or parts.hidden_size // heads,
        "intermediate_size": intermediate_size or getattr(config, "intermediate_size", None) or 4 * parts.hidden_size,
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
        "rope_theta": float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10_000.0),
        "rope_scaling": scaled,
    }
    if kind in ("eagle3", "confu"):
        chosen = default_taps(last) if taps is None else tuple(taps)
        future = CONFU_SIZES if kind == "confu" else {}
        return CellConfig(**common, taps=chosen, fc_norm=True, embedding_skip=True, **future)
    if taps is not None and tuple(taps) != (last,):
        raise ValueError(f"taps of {kind!r} must be the last layer, {last}, got {list(taps)}")
    return CellConfig(**common, taps=(last,), final_norm=True, num_layers=layers)


def default_taps(layers: int) -> tuple[int, ...]:
    """EAGLE-3's: low, middle and high (arXiv 2503.01840), fewer where the target has only few layers."""
    return tuple(sorted({min(max(1, tap), layers) for tap in (2, layers // 2, layers - 3)}))


def make_initial_cell(
    config: CellConfig, *, parts: TargetParts, layer: nn.Module, seed: int, copy: bool = True, scale: float = 1.0
) -> Cell:
    """A new cell; with `copy` its layer starts as the target's last one, run on its last tap, or, where it has no norm
    on its way in, as the identity.

    Args:
        layer: the target's last decoder layer.
        scale: root mean square of the states that the layer is used to: hidden states that come out of a norm are
            brought back to it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        cell = make_cell(config)
    if isinstance(cell, ConFuCell):
        begin_future(cell, parts=parts, seed=seed)
    if not copy:
        return cell
    with torch.no_grad():
        if config.kind in ("eagle3", "confu"):
            _copy_layer(cell.midlayer, layer)
            _copy(cell.midlayer.hidden_norm, getattr(layer, "input_layernorm", None))
            cell.midlayer.input_layernorm.weight.fill_(1.0)
            _copy(cell.norm, parts.norm)
            _take_last(cell.fc, scale if config.fc_norm else 1.0)
            if cell.midlayer.embed_proj is not None:
                cell.midlayer.embed_proj.weight.mul_(scale)
        elif config.kind == "mtp":
            for own in cell.layers:
                _copy_layer(own, layer)
                _copy(own.norm, parts.norm)
                _take_last(own.eh_proj, scale)
        else:
            _begin_as_identity(cell, parts)
    return cell


def _begin_as_identity(cell: Cell, parts: TargetParts) -> None:
    """Let a cell whose layer has no norm on its way in (EAGLE, GRIFFIN) give nearly the hidden state it is given. A
    copy of the target's layer would be out of scale there, and far more so after each step of the recursion."""
    fuse = cell.fc if isinstance(cell.fc, nn.Linear) else cell.fc.fc
    size = fuse.weight.shape[0]
    _take_last(fuse, 1.0)
    fuse.weight[:, :-size].mul_(10.0 / parts.embed.weight.float().pow(2).mean().sqrt())  # embeddings can be tiny
    for name, weight in cell.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.mul_(0.1)


@torch.no_grad()
def begin_future(cell: ConFuCell, *, parts: TargetParts, seed: int) -> None:
    """Let soft prompts and contemplate vectors begin as embeddings of tokens drawn at random, which the target can
    read."""
    draw = torch.Generator().manual_seed(seed)
    for vectors in (cell.soft_prompts, cell.contemplates):
        tokens = torch.randint(parts.vocab_size, (vectors.num_embeddings,), generator=draw)
        vectors.weight.copy_(parts.embed(tokens.to(parts.device)))


def _copy_layer(own: nn.Module, layer: nn.Module) -> None:
    units = _largest_units(own, layer)
    for name in _LAYER_PARTS:
        theirs: Any = layer
        mine: Any = own
        for part in name.split("."):
            theirs, mine = getattr(theirs, part, None), getattr(mine, part, None)
        if units is not None and name.startswith("mlp."):
            theirs = _Part(theirs.weight[:, units] if name == "mlp.down_proj" else theirs.weight[units])
        _copy(mine, theirs)


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows or columns of a matrix."""

    weight: torch.Tensor


def _largest_units(own: nn.Module, layer: nn.Module) -> torch.Tensor | None:
    """Those units of the target's MLP whose way in and out is largest, where the cell has fewer; else None."""
    mine, theirs = (getattr(getattr(each, "mlp", None), "up_proj", None) for each in (own, layer))
    down = getattr(getattr(layer, "mlp", None), "down_proj", None)
    if mine is None or theirs is None or down is None or len(mine.weight) >= len(theirs.weight):
        return None
    size = theirs.weight.float().norm(dim=1) * down.weight.float().norm(dim=0)
    return size.topk(len(mine.weight)).indices.sort().values


def _copy(mine: Any, theirs: Any) -> None:
    """Copy a weight where shapes allow. A matrix that reads more than the target's, or gives more, gets it last and
    small numbers elsewhere."""
    weight = getattr(theirs, "weight", None)
    if weight is None or getattr(mine, "weight", None) is None or weight.dim() != mine.weight.dim():
        return
    rows, size = mine.weight.shape[0], weight.shape[0]
    if weight.dim() == 1:
        if rows == size:
            mine.weight.copy_(weight)
        return
    columns, width = mine.weight.shape[1], weight.shape[1]
    if rows % size or columns < width:
        return
    mine.weight.mul_(0.1)
    for first in range(0, rows, size):  # GRIFFIN's layer gives two vectors, which begin alike
        mine.weight[first : first + size, columns - width :] = weight


def _take_last(fuse: nn.Linear, scale: float) -> None:
    """Let a fusing matrix give its last input times `scale`, and next to nothing of the others."""
    size, columns = fuse.weight.shape
    fuse.weight.mul_(0.1 * scale)
    fuse.weight[:, columns - size :] += scale * torch.eye(size)
