"""DFlash and TreeFlash checkpoints.

DFlash: `fc.weight` [H, taps H], `hidden_norm`, `norm`, and per draft layer an ordinary decoder layer `layers.N.*` with
`q_norm` and `k_norm`; `config.json` holds `block_size` and, below `dflash_config`, `mask_token_id` and
`target_layer_ids`, the indices of the layers whose outputs are read. The embedding and the head are the target's.
TreeFlash: the same below `model.`, and `ar_approximation.{ug,d,norm}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from adaptspec.drafters.block import (
    Backbone,
    BackboneConfig,
    TransitionConfig,
    TransitionCorrection,
    TreeFlashModel,
)
from adaptspec.drafters.checkpoints.common import (
    Extras,
    Facts,
    attention_sizes,
    check_hidden,
    epsilon,
    own_matrix,
    rope,
    whole,
)
from adaptspec.drafters.checkpoints.reader import Checkpoint, refuse_others, take

_CORRECTION = "ar_approximation."
_REPEATED = ("embed_tokens.weight", "lm_head.weight")
_SLIDING, _WHOLE = "sliding_attention", "full_attention"


def load_dflash(checkpoint: Checkpoint, facts: Facts) -> tuple[Backbone, Extras]:
    """A DFlash draft model.

    Raises:
        ValueError: tensors or config entries are missing, unknown, foreign or of another shape, with names; own
            embedding or head that differ from the target's.
    """
    names = _plain(checkpoint)
    backbone = Backbone(_config(checkpoint, names, facts))
    _fill(checkpoint, backbone, names, facts, what="the DFlash draft model")
    return backbone, Extras("dflash", config=checkpoint.config)


def load_treeflash(checkpoint: Checkpoint, facts: Facts) -> tuple[TreeFlashModel, Extras]:
    """A DFlash draft model with TreeFlash's correction; raises as `load_dflash`."""
    names = _plain(checkpoint)
    options = _options(checkpoint, "treeflash_config")
    kind = options.get("ar_approximation", checkpoint.config.get("ar_approximation", "swiglu"))
    if kind != "swiglu":
        raise ValueError(f"{checkpoint.where}: ar_approximation must be 'swiglu', got {kind!r}")
    matrix = f"{_CORRECTION}d.weight"
    if matrix not in names:
        raise ValueError(f"{checkpoint.where} lacks the tensors {matrix}; without it, it is a checkpoint of dflash")
    backbone = Backbone(_config(checkpoint, names, facts))
    width = checkpoint.shape(names[matrix])[-1]
    model = TreeFlashModel(backbone, TransitionCorrection(TransitionConfig(facts.hidden_size, width)))
    theirs = {name if name.startswith(_CORRECTION) else f"model.{name}": found for name, found in names.items()}
    _fill(checkpoint, model, theirs, facts, what="TreeFlash", prefix="model.")
    return model, Extras("treeflash", config=checkpoint.config)


def _options(checkpoint: Checkpoint, name: str) -> Mapping[str, Any]:
    """What a method's own entry of `config.json` holds."""
    options = checkpoint.config.get(name) or {}
    if not isinstance(options, Mapping):
        raise ValueError(f"{checkpoint.where}: {name} of config.json must be an object, got {options!r:.80}")
    return options


def _plain(checkpoint: Checkpoint) -> dict[str, str]:
    """Names in the checkpoint by name without a `model.` in front."""
    return {name.removeprefix("model."): name for name in checkpoint.names if not name.endswith("rotary_emb.inv_freq")}


def _config(checkpoint: Checkpoint, names: Mapping[str, str], facts: Facts) -> BackboneConfig:
    config = checkpoint.config
    hidden = whole(checkpoint, config, "hidden_size")
    check_hidden(checkpoint, hidden, facts)
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"{checkpoint.where}: hidden_act must be silu, got {config['hidden_act']!r}")
    options = _options(checkpoint, "dflash_config")
    mask = options.get("mask_token_id", config.get("mask_token_id"))
    rows = facts.vocab_size if facts.embeddings is None else len(facts.embeddings)
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < rows:
        raise ValueError(
            f"{checkpoint.where}: mask_token_id of config.json must be a token of the target, in [0, {rows}), "
            f"got {mask!r}"
        )
    layers = whole(checkpoint, config, "num_hidden_layers")
    theta, scaling = rope(config)
    window, sliding = _window(checkpoint, config, layers)
    return BackboneConfig(
        hidden_size=hidden,
        **attention_sizes(checkpoint, config, hidden),
        intermediate_size=whole(checkpoint, config, "intermediate_size"),
        num_layers=layers,
        block_size=whole(checkpoint, config, "block_size"),
        taps=_taps(checkpoint, config, options, layers, facts),
        mask_token_id=mask,
        rms_norm_eps=epsilon(checkpoint, config),
        rope_theta=theta,
        rope_scaling=scaling,
        attention_bias="layers.0.self_attn.q_proj.bias" in names,
        qk_norm="layers.0.self_attn.q_norm.weight" in names,
        sliding_window=window,
        sliding_layers=sliding,
    )


def _taps(
    checkpoint: Checkpoint, config: Mapping[str, Any], options: Mapping[str, Any], layers: int, facts: Facts
) -> tuple[int, ...]:
    """`target_layer_ids` are indices of layers; a tap is the number of layers before the state."""
    ids = options.get("target_layer_ids", config.get("target_layer_ids"))
    if ids is None:
        ids = spread_layers(whole(checkpoint, config, "num_target_layers", default=facts.layers), layers)
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ValueError(f"{checkpoint.where}: target_layer_ids must be layers, got {ids!r}")
    # What transformers gives for the last layer has been through the final norm, which no tap has.
    if not all(0 <= i < facts.layers - 1 for i in ids):
        raise ValueError(
            f"{checkpoint.where}: target_layer_ids must be in [0, {facts.layers - 1}) for a target of {facts.layers} "
            f"layers, got {ids}"
        )
    return tuple(i + 1 for i in ids)


def spread_layers(target_layers: int, draft_layers: int) -> list[int]:
    """Indices of target layers that DFlash reads unless its config says otherwise: one per draft layer, evenly from 1
    to the number of layers minus 3.

    >>> spread_layers(36, 5)
    [1, 9, 17, 25, 33]
    """
    if draft_layers == 1:
        return [target_layers // 2]
    first, last = 1, target_layers - 3
    return [round(first + i * (last - first) / (draft_layers - 1)) for i in range(draft_layers)]


def _window(
    checkpoint: Checkpoint, config: Mapping[str, Any], layers: int
) -> tuple[int | None, tuple[int, ...] | None]:
    kinds = config.get("layer_types") or [_WHOLE] * layers
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {_SLIDING, _WHOLE}:
        raise ValueError(
            f"{checkpoint.where}: layer_types must be {layers} of {_WHOLE} and {_SLIDING}, got {kinds!r:.200}"
        )
    sliding = tuple(layer for layer, kind in enumerate(kinds) if kind == _SLIDING)
    return (whole(checkpoint, config, "sliding_window"), sliding) if sliding else (None, None)


def _fill(
    checkpoint: Checkpoint, module: nn.Module, names: Mapping[str, str], facts: Facts, *, what: str, prefix: str = ""
) -> None:
    """Read all parameters; refuse tensors that the module has no place for."""
    wanted = {name: (names.get(name, name), tuple(value.shape)) for name, value in module.state_dict().items()}
    repeated = [f"{prefix}{name}" for name in _REPEATED]
    refuse_others(checkpoint, names, known=(*wanted, *repeated), what=what)
    for name, ours in zip(repeated, (facts.embeddings, facts.head), strict=True):
        if own_matrix(checkpoint, names.get(name), facts, like=ours) is not None:
            raise ValueError(f"{checkpoint.where}: {names[name]} must be the target's, and differs from it")
    module.load_state_dict(take(checkpoint, wanted))
