"""EAGLE-1, EAGLE-2, EAGLE-3 and GRIFFIN checkpoints.

EAGLE-1 and -2: `fc.weight` [H, 2H], perhaps `fc.bias`, and `layers.0.*` without an input norm. GRIFFIN: the same with
`fc.fc`, `fc.mlp`, and a down projection twice as wide. EAGLE-3: `fc.weight` [H, 3H], `midlayer.*` (`layers.0.*` where
it was converted for a serving engine), `norm`, `lm_head` [R, H], and with R below the vocabulary `d2t` [R], int64
offsets (row i is token i + d2t[i]), and `t2d` [V], a bool mask of the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from adaptspec.drafters.cells import Cell, CellConfig, make_cell
from adaptspec.drafters.checkpoints.common import (
    Extras,
    Facts,
    attention_sizes,
    check_hidden,
    check_vocab,
    epsilon,
    own_matrix,
    rope,
    whole,
)
from adaptspec.drafters.checkpoints.reader import Checkpoint, refuse_others, take

_EMBEDDING = "embed_tokens.weight"


def load_eagle1(checkpoint: Checkpoint, facts: Facts, *, kind: str = "eagle1") -> tuple[Cell, Extras]:
    """EAGLE-1 and -2, and with `kind` "griffin" GRIFFIN."""
    config, names = _plain(checkpoint)
    hidden = whole(checkpoint, config, "hidden_size")
    check_hidden(checkpoint, hidden, facts)
    _one_layer(checkpoint, config)
    matrix = "fc.weight" if kind == "eagle1" else "fc.fc.weight"
    cell = make_cell(
        CellConfig(
            kind=kind,
            taps=(facts.layers,),
            final_norm=True,
            bias=names.get(matrix.replace("weight", "bias")) is not None,
            **_layer_sizes(checkpoint, config, names, layer="layers.0.", hidden=hidden),
        )
    )
    _fill(checkpoint, cell, names, ignored=(_EMBEDDING, "lm_head.weight"), what=kind)
    embeddings = own_matrix(checkpoint, names.get(_EMBEDDING), facts, like=facts.embeddings)
    head = own_matrix(checkpoint, names.get("lm_head.weight"), facts, like=facts.head)
    return cell, Extras(kind, head=head, embeddings=embeddings, config=checkpoint.config)


def load_eagle3(checkpoint: Checkpoint, facts: Facts, *, taps: tuple[int, ...] | None = None) -> tuple[Cell, Extras]:
    """EAGLE-3 in the authors' names or those of serving engines and trainers."""
    config, names = _plain(checkpoint)
    names = {name.replace("layers.0.", "midlayer.", 1): theirs for name, theirs in names.items()}
    hidden = whole(checkpoint, config, "hidden_size")
    check_hidden(checkpoint, whole(checkpoint, config, "target_hidden_size", default=hidden), facts)
    check_hidden(checkpoint, hidden, facts)
    _one_layer(checkpoint, config)
    if "fc.weight" not in names:
        raise ValueError(f"{checkpoint.where} lacks the tensors fc.weight; an EAGLE-3 checkpoint fuses target layers")
    inputs = checkpoint.shape(names["fc.weight"])[1] // hidden
    wanted = taps if taps is not None else _taps(checkpoint, config, facts, inputs)
    if len(wanted) != inputs:
        raise ValueError(f"{checkpoint.where}: fc reads {inputs} target layers, taps are {list(wanted)}")
    rows, token_ids = _draft_vocabulary(checkpoint, config, names, facts)
    eagle = config.get("eagle_config") or {}
    flags = {
        name: bool(config.get(name, eagle.get(name, False)))
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    }
    cell = make_cell(
        CellConfig(
            kind="eagle3",
            taps=wanted,
            draft_vocab_size=rows,
            **flags,
            **_layer_sizes(checkpoint, config, names, layer="midlayer.", hidden=hidden),
        )
    )
    _fill(checkpoint, cell, names, ignored=(_EMBEDDING, "lm_head.weight", "d2t", "t2d"), what="eagle3")
    head = take(checkpoint, {"head": (names.get("lm_head.weight", "lm_head.weight"), (rows, hidden))})["head"]
    embeddings = own_matrix(checkpoint, names.get(_EMBEDDING), facts, like=facts.embeddings)
    return cell, Extras("eagle3", head=head, token_ids=token_ids, embeddings=embeddings, config=checkpoint.config)


def _plain(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, str]]:
    """The config without nesting, and names in the checkpoint by name without a `model.` in front."""
    config = {**(checkpoint.config.get("transformer_layer_config") or {}), **checkpoint.config}
    names = {name.removeprefix("model."): name for name in checkpoint.names if not name.endswith("rotary_emb.inv_freq")}
    return config, names


def _one_layer(checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    if whole(checkpoint, config, "num_hidden_layers", default=1) != 1:
        raise ValueError(
            f"{checkpoint.where} has {config['num_hidden_layers']} draft layers; supported are checkpoints with one"
        )
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"{checkpoint.where}: hidden_act must be silu, got {config['hidden_act']!r}")


def _layer_sizes(
    checkpoint: Checkpoint, config: Mapping[str, Any], names: Mapping[str, str], *, layer: str, hidden: int
) -> dict[str, Any]:
    theta, scaling = rope(config)
    return {
        "hidden_size": hidden,
        **attention_sizes(checkpoint, config, hidden),
        "intermediate_size": whole(checkpoint, config, "intermediate_size"),
        "rms_norm_eps": epsilon(checkpoint, config),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "attention_bias": f"{layer}self_attn.q_proj.bias" in names,
        "qk_norm": f"{layer}self_attn.q_norm.weight" in names,
    }


def _taps(checkpoint: Checkpoint, config: Mapping[str, Any], facts: Facts, inputs: int) -> tuple[int, ...]:
    """Target layers that are fused, `k` meaning after k layers.

    Two conventions are in use for `eagle_aux_hidden_state_layer_ids`: the number of layers before the state, and the
    index of the layer that gives it. Nobody taps after the first layer, but before the second everybody does, so a list
    that begins with 1 is of the second kind.
    """
    eagle = config.get("eagle_config") or {}
    ids = config.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        if inputs != 3:
            raise ValueError(
                f"{checkpoint.where}: fc reads {inputs} target layers and config.json does not say which; give taps"
            )
        return (2, facts.layers // 2, facts.layers - 3)
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) for i in ids):
        raise ValueError(f"{checkpoint.where}: eagle_aux_hidden_state_layer_ids must be layers, got {ids!r}")
    wanted = tuple(i + 1 for i in ids) if ids[0] == 1 else tuple(ids)
    if not all(1 <= tap <= facts.layers for tap in wanted):
        raise ValueError(
            f"{checkpoint.where}: eagle_aux_hidden_state_layer_ids {ids} do not fit a target of {facts.layers} layers"
        )
    return wanted


def _draft_vocabulary(
    checkpoint: Checkpoint, config: Mapping[str, Any], names: Mapping[str, str], facts: Facts
) -> tuple[int, torch.Tensor | None]:
    """Rows of the head, and the target's token of each; None if they are all tokens in order."""
    rows = whole(checkpoint, config, "draft_vocab_size", default=facts.vocab_size)
    if "d2t" not in names:
        check_vocab(checkpoint, rows, facts, what="lm_head (without d2t)")
        return rows, None
    if checkpoint.shape(names["d2t"]) != (rows,):
        raise ValueError(f"{checkpoint.where}: d2t must have shape [{rows}], got {checkpoint.shape(names['d2t'])}")
    offsets = checkpoint.read(names["d2t"])
    if offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise ValueError(f"{checkpoint.where}: d2t must be whole numbers, got {offsets.dtype}")
    token_ids = offsets.long() + torch.arange(rows)
    if not 0 <= int(token_ids.min()) <= int(token_ids.max()) < facts.vocab_size:
        raise ValueError(
            f"{checkpoint.where}: d2t leads to tokens {int(token_ids.min())} to {int(token_ids.max())}, the target's "
            f"vocabulary has {facts.vocab_size}"
        )
    if len(token_ids.unique()) != rows:
        raise ValueError(f"{checkpoint.where}: d2t leads to one token from two rows; it must hold offsets")
    if "t2d" in names:
        mask = checkpoint.read(names["t2d"]).bool()
        if int(mask.sum()) != rows or not bool(mask[token_ids].all()):
            raise ValueError(f"{checkpoint.where}: t2d marks other tokens than d2t leads to")
    return rows, token_ids


def _fill(checkpoint: Checkpoint, cell: Cell, names: Mapping[str, str], *, ignored: tuple[str, ...], what: str) -> None:
    """Read all parameters of the cell; refuse tensors that it has no place for."""
    wanted = {name: (names.get(name, name), tuple(value.shape)) for name, value in cell.state_dict().items()}
    refuse_others(checkpoint, names, known=(*wanted, *ignored), what=f"the {what} cell")
    cell.load_state_dict(take(checkpoint, wanted))
