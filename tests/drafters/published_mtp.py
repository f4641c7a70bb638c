"""Small copies of published models' prediction layers: tensors and configs as they are published, and what they compute
according to transformers' own decoder layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, VOCAB = 32, 64

Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Hidden states [B, T, H] and positions [B, T] to hidden states, causally."""


@dataclass
class Published:
    """A checkpoint and its reference.

    Attributes:
        tensors: by published name.
        config: as in config.json.
        layers: the decoder layers.
        names: of the parts of layer k: enorm, hnorm, eh_proj and norm.
        chained: the recursion feeds the normed state.
        offset: norms store the weight minus one.
    """

    config: dict[str, Any]
    layers: list[Layer]
    names: Callable[[int], dict[str, str]]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    chained: bool = False
    offset: float = 0.0

    def add_outside(self, seed: int = 7) -> None:
        """Random norms and projections around the decoder layers."""
        generator = torch.Generator().manual_seed(seed)
        for k in range(len(self.layers)):
            for part, name in self.names(k).items():
                size = (HIDDEN, 2 * HIDDEN) if part == "eh_proj" else (HIDDEN,)
                self.tensors[name] = 0.3 * torch.randn(size, generator=generator) + (0.0 if part == "eh_proj" else 1.0)

    def expected(
        self, embeddings: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, step: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Head input and next hidden state of one step over whole sequences."""
        part = {name: self.tensors[theirs].float() for name, theirs in self.names(step).items()}

        def norm(x: torch.Tensor, name: str) -> torch.Tensor:
            spread = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
            return spread * (part[name] + self.offset)

        joined = torch.cat([norm(embeddings, "enorm"), norm(hidden, "hnorm")], dim=-1) @ part["eh_proj"].T
        out = self.layers[step](joined, positions)
        normed = norm(out, "norm")
        return normed, normed if self.chained else out

    def save(self, folder: Path, *, shards: int = 1) -> Path:
        """Write safetensors, with an index if there are several shards."""
        (folder / "config.json").write_text(json.dumps(self.config))
        names = sorted(self.tensors)
        if shards == 1:
            save_file({name: self.tensors[name].contiguous() for name in names}, folder / "model.safetensors")
            return folder
        where = {}
        for number in range(shards):
            file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
            mine = names[number::shards]
            save_file({name: self.tensors[name].contiguous() for name in mine}, folder / file)
            where.update(dict.fromkeys(mine, file))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        return folder


def _nextn(prefix: str) -> dict[str, str]:
    parts = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"}
    return {part: f"{prefix}{name}.weight" for part, name in parts.items()}


def _random(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in [*module.named_parameters(), *module.named_buffers()]:
            if value.is_floating_point() and "inv_freq" not in name:
                value.copy_(0.3 * torch.randn(value.shape, generator=generator) + (1.0 if "norm" in name else 0.0))
    return module.eval()


def _run(layer: torch.nn.Module, rotary: Any, *, window: int | None = None, kind: str | None = None) -> Layer:
    def run(hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        gap = positions[:, :, None] - positions[:, None, :]
        seen = (gap >= 0) & (gap < (window or 10**9))
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]
        turned = rotary(hidden, positions) if kind is None else rotary(hidden, positions, kind)
        with torch.no_grad():
            out = layer(hidden, position_embeddings=turned, attention_mask=mask, position_ids=positions)
        return out[0] if isinstance(out, tuple) else out

    return run


def _published_names(layer: torch.nn.Module, prefix: str, *, fused: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of a transformers layer under published names, experts one by one unless `fused`."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in layer.state_dict().items():
        value = value.detach().clone()
        if not fused and name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(value):
                gate, up = both.chunk(2)
                tensors[f"{prefix}mlp.experts.{expert}.gate_proj.weight"] = gate.clone()
                tensors[f"{prefix}mlp.experts.{expert}.up_proj.weight"] = up.clone()
        elif not fused and name.endswith("experts.down_proj"):
            for expert, down in enumerate(value):
                tensors[f"{prefix}mlp.experts.{expert}.down_proj.weight"] = down.clone()
        else:
            tensors[f"{prefix}{name}"] = value
    return tensors


def _config(config_class: Any, **values: Any) -> Any:
    config = config_class(vocab_size=VOCAB, hidden_size=HIDDEN, rms_norm_eps=1e-6, **values)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


_LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
_EXPERTS = {"moe_intermediate_size": 10, "num_experts_per_tok": 3, "n_routed_experts": 8, "n_shared_experts": 2}


def deepseek_v3() -> Published:
    """Latent attention with YaRN, experts in groups, one layer after the last."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as source
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

    sizes = {**_LATENT, **_EXPERTS, "n_group": 4, "topk_group": 2, "intermediate_size": 24}
    yarn = {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1}
    yarn |= {"original_max_position_embeddings": 64}
    config = _config(
        DeepseekV3Config,
        **sizes,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "yarn", "rope_theta": 10_000.0, **yarn},
    )
    layer = _random(source.DeepseekV3DecoderLayer(config, 2), 1)
    published = {"model_type": "deepseek_v3", "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": 61}
    published |= {
        **sizes,
        "num_nextn_predict_layers": 1,
        "rope_theta": 10_000,
        "rope_scaling": {"type": "yarn", **yarn},
    }
    published |= {"scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6}
    prefix = "model.layers.61."
    result = Published(
        published,
        [_run(layer, source.DeepseekV3RotaryEmbedding(config))],
        lambda k: _nextn(prefix),
        _published_names(layer, prefix),
    )
    result.add_outside()
    return result


def glm4_flash() -> Published:
    """GLM-4.7-Flash: latent attention, experts, layer 47; an indexer as in GLM-5 is left aside."""
    from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite as source
    from transformers.models.glm4_moe_lite.configuration_glm4_moe_lite import Glm4MoeLiteConfig

    sizes = {**_LATENT, **_EXPERTS, "n_shared_experts": 1, "intermediate_size": 24}
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0}
    config = _config(Glm4MoeLiteConfig, **sizes, num_hidden_layers=3, rope_parameters=rope)
    layer = _random(source.Glm4MoeLiteDecoderLayer(config, 2), 2)
    prefix = "model.layers.47."
    published = {"model_type": "glm4_moe_lite", "hidden_size": HIDDEN, "vocab_size": VOCAB, **sizes}
    published |= {"rope_parameters": rope, "routed_scaling_factor": 1.8, "num_hidden_layers": 47}
    tensors = _published_names(layer, prefix)
    tensors[f"{prefix}self_attn.indexer.wk.weight"] = torch.zeros(4, HIDDEN)
    result = Published(
        published, [_run(layer, source.Glm4MoeLiteRotaryEmbedding(config))], lambda k: _nextn(prefix), tensors
    )
    result.add_outside()
    return result


def glm4_moe() -> Published:
    """GLM-4.7: grouped queries with biases, half-rotated heads and norms of queries and keys, experts."""
    from transformers.models.glm4_moe import modeling_glm4_moe as source
    from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig

    sizes = {**_EXPERTS, "n_shared_experts": 1, "intermediate_size": 24, "num_attention_heads": 4, "head_dim": 16}
    sizes |= {"num_key_value_heads": 2, "use_qk_norm": True, "attention_bias": True}
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5}
    config = _config(Glm4MoeConfig, **sizes, num_hidden_layers=3, rope_parameters=rope)
    layer = _random(source.Glm4MoeDecoderLayer(config, 2), 3)
    prefix = "model.layers.92."
    published = {"model_type": "glm4_moe", "hidden_size": HIDDEN, "vocab_size": VOCAB, **sizes}
    published |= {"rope_theta": 1_000_000, "partial_rotary_factor": 0.5, "routed_scaling_factor": 1.0}
    result = Published(
        published,
        [_run(layer, source.Glm4MoeRotaryEmbedding(config))],
        lambda k: _nextn(prefix),
        _published_names(layer, prefix),
    )
    result.add_outside()
    return result


def qwen3_5(*, experts: bool) -> Published:
    """Gated attention, quarter-rotated heads, norms that store the weight minus one; dense or with fused experts."""
    if experts:
        from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as source
        from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig as Config

        name = "Qwen3_5Moe"
        sizes: dict[str, Any] = {"moe_intermediate_size": 10, "num_experts_per_tok": 3, "num_experts": 8}
        sizes |= {"shared_expert_intermediate_size": 12}
    else:
        from transformers.models.qwen3_5 import modeling_qwen3_5 as source
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig as Config

        name, sizes = "Qwen3_5", {"intermediate_size": 24}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}
    config = _config(Config, **sizes, num_hidden_layers=1, layer_types=["full_attention"], rope_parameters={**rope})
    layer = _random(getattr(source, f"{name}DecoderLayer")(config, 0), 4)
    with torch.no_grad():
        for part, value in layer.named_parameters():
            if "norm" in part:
                value -= 1.0  # `_random` puts norms around one
    rotary = getattr(source, f"{name}TextRotaryEmbedding")(config)
    text = {"model_type": "qwen3_5_moe_text" if experts else "qwen3_5_text", "hidden_size": HIDDEN, "vocab_size": VOCAB}
    text |= {**sizes, "rope_parameters": rope, "mtp_num_hidden_layers": 1, "rms_norm_eps": 1e-6}
    outside = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"}
    result = Published(
        {"model_type": "qwen3_5", "text_config": text},
        [_run(layer, rotary)],
        lambda k: {part: f"mtp.{theirs}.weight" for part, theirs in outside.items()},
        _published_names(layer, "mtp.layers.0.", fused=True),
        chained=True,
        offset=1.0,
    )
    result.add_outside()
    return result


def mimo_v2_flash(layers: int = 3) -> Published:
    """Sliding windows, sinks, narrow values that are scaled, a third of each head rotated; dense; several layers."""
    from transformers.models.mimo_v2_flash import modeling_mimo_v2_flash as source
    from transformers.models.mimo_v2_flash.configuration_mimo_v2_flash import MiMoV2FlashConfig

    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.334}
    config = _config(
        MiMoV2FlashConfig,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=12,
        v_head_dim=8,
        intermediate_size=24,
        num_hidden_layers=1,
        layer_types=["sliding_attention"],
        mlp_layer_types=["dense"],
        rope_parameters={"sliding_attention": rope},
        sliding_window=5,
    )
    published: dict[str, Any] = {"model_type": "mimo_v2_flash", "hidden_size": HIDDEN, "vocab_size": VOCAB}
    published |= {"intermediate_size": 24, "num_attention_heads": 9, "num_key_value_heads": 9, "head_dim": 9}
    published |= {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 12, "swa_v_head_dim": 8}
    published |= {"swa_rope_theta": 10_000, "rope_theta": 5_000_000, "partial_rotary_factor": 0.334}
    published |= {"sliding_window_size": 4, "attention_value_scale": 0.707, "layernorm_epsilon": 1e-6}
    parts = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "final_layernorm"}
    result = Published(
        published,
        [],
        lambda k: {part: f"model.mtp.layers.{k}.{theirs}.weight" for part, theirs in parts.items()},
        chained=True,
    )
    for k in range(layers):
        layer = _random(source.MiMoV2FlashDecoderLayer(config, 0), 10 + k)
        rotary = source.MiMoV2FlashRotaryEmbedding(config)
        result.layers.append(_run(layer, rotary, window=5, kind="sliding_attention"))
        for name, value in _published_names(layer, f"model.mtp.layers.{k}.").items():
            name = name.replace("post_attention_layernorm", "pre_mlp_layernorm").replace("sinks", "attention_sink_bias")
            result.tensors[name] = value
    result.add_outside()
    return result


def step_3_5() -> Published:
    """Per-head gates, other head counts in sliding layers, per-layer rotary bases, clamped feed-forward layers, and a
    head of its own per layer."""
    from transformers.models.step3p7 import modeling_step3p7 as source
    from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig

    published: dict[str, Any] = {"model_type": "step3p5", "hidden_size": HIDDEN, "vocab_size": VOCAB}
    published |= {"num_attention_heads": 2, "num_attention_groups": 2, "head_dim": 12, "intermediate_size": 24}
    published |= {"num_hidden_layers": 1, "num_nextn_predict_layers": 2, "rms_norm_eps": 1e-6, "sliding_window": 5}
    published |= {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
    published |= {"attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 4}}
    published["attention_other_setting"] |= {"num_attention_groups": 2, "head_dim": 12}
    published |= {"rope_theta": [1e6, 1e4, 1e4], "partial_rotary_factors": [0.5, 1.0, 1.0]}
    published |= {"swiglu_limits_shared": [0.0, 0.0, 0.2], "use_head_wise_attn_gate": True}
    result = Published(published, [], lambda k: _nextn(f"model.layers.{k + 1}."), offset=1.0)
    for k in range(2):
        config = _config(
            Step3p7TextConfig,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=12,
            intermediate_size=24,
            num_hidden_layers=1,
            layer_types=["sliding_attention"],
            mlp_layer_types=["dense"],
            sliding_window=5,
            swiglu_limits_shared=[published["swiglu_limits_shared"][k + 1]],
            rope_theta=1e4,
        )
        layer = _random(source.Step3p7DecoderLayer(config, 0), 20 + k)
        with torch.no_grad():
            for part, value in layer.named_parameters():
                if "norm" in part:
                    value -= 1.0
        rotary = source.Step3p7RotaryEmbedding(config)
        result.layers.append(_run(layer, rotary, window=5, kind="sliding_attention"))
        result.tensors |= _published_names(layer, f"model.layers.{k + 1}.")
    result.add_outside()
    generator = torch.Generator().manual_seed(30)
    for k in range(2):
        head = torch.randn(VOCAB, HIDDEN, generator=generator)
        result.tensors[f"model.layers.{k + 1}.shared_head.head.weight"] = head
    return result


PUBLISHED: dict[str, Callable[[], Published]] = {
    "deepseek-v3": deepseek_v3,
    "glm-4.7-flash": glm4_flash,
    "glm-4.7": glm4_moe,
    "qwen3.5": lambda: qwen3_5(experts=False),
    "qwen3.5-moe": lambda: qwen3_5(experts=True),
    "mimo-v2-flash": mimo_v2_flash,
    "step-3.5": step_3_5,
}
