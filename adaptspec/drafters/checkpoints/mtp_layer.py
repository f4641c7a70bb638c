"""The decoder layer inside a published prediction layer: what it computes, and where its tensors are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from adaptspec.drafters.cells.attention import GroupedConfig, LatentConfig
from adaptspec.drafters.cells.blocks import Block, BlockConfig
from adaptspec.drafters.cells.experts import ExpertsConfig
from adaptspec.drafters.checkpoints.common import epsilon, rope, whole
from adaptspec.drafters.checkpoints.reader import Checkpoint, take

_NORMS_BEHIND_ATTENTION = ("post_attention_layernorm", "pre_mlp_layernorm")
_INDEXER = "self_attn.indexer."


@dataclass(frozen=True, slots=True)
class Layer:
    """The tensors of one prediction layer.

    Attributes:
        prefix: what their names begin with; `outside`: the same for parts that layers share.
        number: as it stands in the names.
        tensors: name below the prefix -> whole name. Block scales of 8-bit tensors and indexers are left out.
    """

    prefix: str
    outside: str
    number: int
    tensors: Mapping[str, str]

    @classmethod
    def of(cls, checkpoint: Checkpoint, prefix: str, *, number: int, outside: str) -> Layer:
        tensors = {}
        for name in checkpoint.names:
            if not name.startswith(prefix) or name.endswith(("_scale_inv", "inv_freq")):
                continue
            below = name.removeprefix(prefix).removeprefix("transformer.")
            if not below.startswith(_INDEXER):
                tensors[below] = name
        return cls(prefix, outside, number, tensors)


def block_config(checkpoint: Checkpoint, config: Mapping[str, Any], layer: Layer, *, family: str) -> BlockConfig:
    """What the layer computes: its kind from its tensors, sizes that tensors do not tell from the model's config.

    Raises:
        ValueError: attention or feed-forward layers of a kind that is not computed here.
    """
    eps = epsilon(checkpoint, config, "rms_norm_eps", "layernorm_epsilon")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"{checkpoint.where}: hidden_act must be silu, got {config['hidden_act']!r}")
    if "self_attn.qkv_proj.weight" in layer.tensors:
        raise ValueError(
            f"{checkpoint.where}: {layer.tensors['self_attn.qkv_proj.weight']} packs queries, keys and values in an "
            "order that depends on how the file was made; supported are q_proj, k_proj and v_proj"
        )
    if "self_attn.kv_a_proj_with_mqa.weight" in layer.tensors:
        attention: GroupedConfig | LatentConfig = _latent(checkpoint, config, layer, eps=eps)
    elif "self_attn.q_proj.weight" in layer.tensors:
        attention = _grouped(checkpoint, config, layer, eps=eps, family=family)
    else:
        raise ValueError(
            f"{checkpoint.where} lacks the tensors {layer.prefix}self_attn.q_proj.weight or "
            f"{layer.prefix}self_attn.kv_a_proj_with_mqa.weight: supported are grouped and latent attention"
        )
    experts = _experts(checkpoint, config, layer, hidden=attention.hidden_size)
    dense = layer.tensors.get("mlp.gate_proj.weight")
    limits = config.get("swiglu_limits_shared") or []
    limit = limits[layer.number] if layer.number < len(limits) else None
    return BlockConfig(
        attention,
        intermediate_size=checkpoint.shape(dense)[0] if dense else (experts.intermediate_size if experts else 1),
        eps=eps,
        experts=experts,
        limit=float(limit) if limit else None,
    )


def block_tensors(
    checkpoint: Checkpoint, layer: Layer, block: Block, *, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Parameters of `block`, and the names of the tensors that they came from."""
    shapes = {name: tuple(value.shape) for name, value in block.state_dict().items()}
    behind = next(
        (name for name in _NORMS_BEHIND_ATTENTION if f"{name}.weight" in layer.tensors), _NORMS_BEHIND_ATTENTION[0]
    )
    renamed = {
        "post_attention_layernorm.weight": f"{behind}.weight",
        "mlp.correction_bias": "mlp.gate.e_score_correction_bias",
        "mlp.shared_gate.weight": "mlp.shared_expert_gate.weight",
    }
    shared = "shared_expert" if "mlp.shared_expert.down_proj.weight" in layer.tensors else "shared_experts"
    wanted: dict[str, tuple[str, tuple[int, ...]]] = {}
    for ours, shape in shapes.items():
        theirs = renamed.get(ours, ours.replace("mlp.shared.", f"mlp.{shared}."))
        wanted[ours] = (layer.tensors.get(theirs, f"{layer.prefix}{theirs}"), shape)
    parts = {}
    used: set[str] = set()
    if "mlp.gate_up_proj" in wanted:
        packed = {name: layer.tensors.get(f"mlp.experts.{name}") for name in ("gate_up_proj", "down_proj")}
        if all(packed.values()):
            wanted.update({f"mlp.{name}": (str(theirs), shapes[f"mlp.{name}"]) for name, theirs in packed.items()})
        else:
            del wanted["mlp.gate_up_proj"], wanted["mlp.down_proj"]
            parts, used = _stacked(checkpoint, layer, shapes, dtype=dtype)
    parts |= take(checkpoint, wanted, dtype=dtype)
    return parts, used | {theirs for theirs, _ in wanted.values()}


def _latent(checkpoint: Checkpoint, config: Mapping[str, Any], layer: Layer, *, eps: float) -> LatentConfig:
    theta, scaling = rope(config)
    compressed = "self_attn.q_a_proj.weight" in layer.tensors
    return LatentConfig(
        hidden_size=whole(checkpoint, config, "hidden_size"),
        heads=whole(checkpoint, config, "num_attention_heads"),
        query_rank=whole(checkpoint, config, "q_lora_rank") if compressed else None,
        key_value_rank=whole(checkpoint, config, "kv_lora_rank"),
        plain_dim=whole(checkpoint, config, "qk_nope_head_dim"),
        rotary_dim=whole(checkpoint, config, "qk_rope_head_dim"),
        value_dim=whole(checkpoint, config, "v_head_dim"),
        rope_theta=theta,
        rope_scaling=scaling,
        eps=eps,
        interleaved=bool(config.get("rope_interleave", True)),
        bias="self_attn.kv_a_proj_with_mqa.bias" in layer.tensors,
    )


def _grouped(
    checkpoint: Checkpoint, config: Mapping[str, Any], layer: Layer, *, eps: float, family: str
) -> GroupedConfig:
    hidden = whole(checkpoint, config, "hidden_size")
    config, window = _of_layer(config, layer.number, family=family)
    heads = whole(checkpoint, config, "num_attention_heads")
    groups = whole(checkpoint, config, "num_key_value_heads", "num_attention_groups", default=heads)
    dim = whole(checkpoint, config, "head_dim", default=hidden // heads)
    theta, scaling = rope(config)
    parameters = config.get("rope_parameters") or {}
    default = 0.25 if family.startswith(("qwen3_5", "qwen3_next")) else 0.5 if family.startswith("glm4_moe") else 1.0
    fraction = config.get("partial_rotary_factor", parameters.get("partial_rotary_factor", default))
    rows = checkpoint.shape(layer.tensors["self_attn.q_proj.weight"])[0]
    gate = "head" if "self_attn.g_proj.weight" in layer.tensors else "none"
    if rows == 2 * heads * dim:
        gate = "element"
    values = layer.tensors.get("self_attn.v_proj.weight")
    return GroupedConfig(
        hidden_size=hidden,
        heads=heads,
        key_value_heads=groups,
        head_dim=dim,
        value_dim=checkpoint.shape(values)[0] // groups if values else None,
        rope_theta=theta,
        rope_scaling=scaling,
        rotary_dim=int(dim * fraction),
        eps=eps,
        qk_norm="self_attn.q_norm.weight" in layer.tensors,
        bias="self_attn.q_proj.bias" in layer.tensors,
        output_bias="self_attn.o_proj.bias" in layer.tensors,
        window=window,
        sinks="self_attn.attention_sink_bias" in layer.tensors,
        value_scale=float(config.get("attention_value_scale") or 1.0),
        gate=gate,
    )


def _of_layer(config: Mapping[str, Any], number: int, *, family: str) -> tuple[dict[str, Any], int | None]:
    """A config with what holds for one layer, and its window: MiMo-V2 predicts with its sliding-window attention,
    Step-3.5 lists heads, rotary bases and fractions per layer."""
    found = dict(config)
    if family.startswith("mimo_v2"):
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta"):
            if config.get(f"swa_{name}") is not None:
                found[name] = config[f"swa_{name}"]
        before = config.get("sliding_window_size")  # that many tokens before the row, and the row
        return found, before + 1 if before else config.get("sliding_window")
    kinds = config.get("layer_types") or []
    kind = kinds[number] if number < len(kinds) else "full_attention"
    for name in ("rope_theta", "partial_rotary_factors"):
        values = config.get(name)
        if isinstance(values, list):
            found[name.removesuffix("s")] = values[min(number, len(values) - 1)]
    other = config.get("attention_other_setting") or {}
    if other and other.get("attention_type") == kind:
        for name in ("num_attention_heads", "num_attention_groups", "head_dim"):
            if name in other:
                found[name] = other[name]
    if config.get("yarn_only_types") and kind not in config["yarn_only_types"]:
        found["rope_scaling"] = None
    return found, config.get("sliding_window") if kind == "sliding_attention" else None


def _experts(checkpoint: Checkpoint, config: Mapping[str, Any], layer: Layer, *, hidden: int) -> ExpertsConfig | None:
    router = layer.tensors.get("mlp.gate.weight")
    if router is None:
        return None
    shared = next(
        (
            name
            for kind in ("shared_experts", "shared_expert")
            if (name := layer.tensors.get(f"mlp.{kind}.down_proj.weight"))
        ),
        None,
    )
    sigmoid = "mlp.gate.e_score_correction_bias" in layer.tensors
    if not sigmoid and config.get("scoring_func", "softmax") != "softmax":
        raise ValueError(f"{checkpoint.where} lacks the tensors {layer.prefix}mlp.gate.e_score_correction_bias")
    return ExpertsConfig(
        hidden_size=hidden,
        experts=checkpoint.shape(router)[0],
        chosen=whole(checkpoint, config, "num_experts_per_tok"),
        intermediate_size=whole(checkpoint, config, "moe_intermediate_size"),
        shared_size=checkpoint.shape(shared)[1] if shared else 0,
        scoring="sigmoid" if sigmoid else "softmax",
        groups=whole(checkpoint, config, "n_group", default=1),
        chosen_groups=whole(checkpoint, config, "topk_group", default=1),
        normalise=bool(config.get("norm_topk_prob", True)),
        scale=float(config.get("routed_scaling_factor") or 1.0),
        shared_gate="mlp.shared_expert_gate.weight" in layer.tensors,
    )


def _stacked(
    checkpoint: Checkpoint, layer: Layer, shapes: Mapping[str, tuple[int, ...]], *, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Experts that are stored one by one, as two tensors for all of them."""
    count, double, hidden = shapes["mlp.gate_up_proj"]
    sizes = {"gate": (double // 2, hidden), "up": (double // 2, hidden), "down": (hidden, double // 2)}
    wanted = {}
    for expert in range(count):
        for part, size in sizes.items():
            below = f"mlp.experts.{expert}.{part}_proj.weight"
            wanted[f"{expert}.{part}"] = (layer.tensors.get(below, f"{layer.prefix}{below}"), size)
    found = take(checkpoint, wanted, dtype=dtype)
    gate_up = torch.stack([torch.cat([found[f"{e}.gate"], found[f"{e}.up"]]) for e in range(count)])
    down = torch.stack([found[f"{e}.down"] for e in range(count)])
    return {"mlp.gate_up_proj": gate_up, "mlp.down_proj": down}, {theirs for theirs, _ in wanted.values()}
