"""Multi-token prediction layers out of the checkpoints of the models that ship them.

| layout | tensors | models |
|---|---|---|
| nextn | `model.layers.{L + k}.{eh_proj,enorm,hnorm,shared_head}` and a decoder layer | DeepSeek-V3, V3.2, GLM-4.5 to GLM-5, JoyAI, Step-3.5 |
| qwen | `mtp.{fc,pre_fc_norm_embedding,pre_fc_norm_hidden,norm}`, `mtp.layers.{k}` | Qwen3-Next, Qwen3.5 |
| mimo-v2 | `model.mtp.layers.{k}.{eh_proj,enorm,hnorm,final_layernorm}` and a decoder layer | MiMo-V2-Flash |
| mimo | `model.mtp_layers.{k}.{input_proj,token_layernorm,hidden_layernorm,final_layernorm}` | MiMo-7B |

What the decoder layer computes is read off its tensors: latent or grouped attention, experts or one feed-forward layer,
norms of queries and keys, gates, sinks. DeepSeek-V3.2 and GLM-5 choose 2,048 keys per row by an indexer; here rows see
all keys, which is the same up to that length.
"""  # noqa: E501

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from adaptspec.drafters.cells.attention import GroupedConfig, LatentConfig
from adaptspec.drafters.cells.block_mtp import BlockMTPCell
from adaptspec.drafters.cells.config import CellConfig
from adaptspec.drafters.checkpoints.common import Extras, Facts, check_hidden, own_matrix, rope, whole
from adaptspec.drafters.checkpoints.mtp_layer import Layer, block_config, block_tensors
from adaptspec.drafters.checkpoints.reader import Checkpoint, refuse_others, take


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a family keeps the parts of a prediction layer.

    Attributes:
        marker: a tensor that only this layout has; group 1 is the number of the layer (or nothing).
        parts: own name -> name below the layer.
        outside: own name -> name beside the layers, for parts that all layers share.
        swapped: the projection takes the hidden state first.
        normed_chain: the recursion feeds the normed state.
    """

    name: str
    marker: re.Pattern[str]
    parts: Mapping[str, str]
    outside: Mapping[str, str]
    swapped: bool = False
    normed_chain: bool = False


_WRAPPERS = r"((?:model\.|language_model\.)*)"
LAYOUTS = (
    Layout(
        "nextn",
        re.compile(_WRAPPERS + r"layers\.(\d+)\.(?:transformer\.)?eh_proj\.weight"),
        {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"},
        {},
    ),
    Layout(
        "qwen",
        re.compile(_WRAPPERS + r"mtp\.fc\.weight"),
        {},
        {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"},
        normed_chain=True,
    ),
    Layout(
        "mimo-v2",
        re.compile(_WRAPPERS + r"mtp\.layers\.(\d+)\.eh_proj\.weight"),
        {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "final_layernorm"},
        {},
        normed_chain=True,
    ),
    Layout(
        "mimo",
        re.compile(_WRAPPERS + r"mtp_layers\.(\d+)\.input_proj\.weight"),
        {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj", "norm": "final_layernorm"},
        {},
        swapped=True,
        normed_chain=True,
    ),
)
_IGNORED = ("embed_tokens.weight", "shared_head.head.weight", "shared_head.output.weight")
_OFFSET_NORMS = ("qwen3_next", "qwen3_5", "step3p")
"""Families whose RMS norms store the weight minus one."""
_UN_NORMED = ("step3p",)
"""Families whose prediction layers take the target's hidden state before its final norm."""


def load_mtp(checkpoint: Checkpoint, facts: Facts) -> tuple[BlockMTPCell, Extras]:
    """All prediction layers of a model's checkpoint.

    Raises:
        ValueError: the checkpoint has none (many are published without them), or parts that are not computed here.
    """
    layout, layers = _find(checkpoint)
    config = {**checkpoint.config, **(checkpoint.config.get("text_config") or {})}
    hidden = whole(checkpoint, config, "hidden_size")
    check_hidden(checkpoint, hidden, facts)
    family = str(config.get("model_type", ""))
    blocks = [block_config(checkpoint, config, layer, family=family) for layer in layers]
    first = blocks[0].attention
    cell = BlockMTPCell(
        CellConfig(
            kind="mtp",
            hidden_size=hidden,
            **_summary(first),
            intermediate_size=blocks[0].intermediate_size,
            rms_norm_eps=blocks[0].eps,
            rope_theta=rope(config)[0] if isinstance(config.get("rope_theta"), float | int) else 10_000.0,
            taps=(facts.layers,),
            final_norm=not family.startswith(_UN_NORMED),
            norm_output=layout.normed_chain,
            num_layers=len(layers),
        ),
        blocks,
    )
    offset = 1.0 if family.startswith(_OFFSET_NORMS) else 0.0
    heads = []
    for layer, module in zip(layers, cell.layers, strict=True):
        state = {name: tuple(value.shape) for name, value in module.state_dict().items()}
        wanted = {f"{ours}.weight": layer.tensors.get(f"{theirs}.weight") for ours, theirs in layout.parts.items()}
        wanted.update({f"{ours}.weight": f"{layer.outside}{theirs}.weight" for ours, theirs in layout.outside.items()})
        named = {
            ours: (theirs or f"{layer.prefix}{layout.parts[ours.removesuffix('.weight')]}.weight", state[ours])
            for ours, theirs in wanted.items()
        }
        own = take(checkpoint, named, dtype=facts.dtype)
        known = {theirs for theirs, _ in named.values()} | {layer.tensors.get(name) for name in _IGNORED}
        inner, used = block_tensors(checkpoint, layer, module.block, dtype=facts.dtype)
        refuse_others(checkpoint, layer.tensors.values(), known=known | used, what=f"the {layout.name} layout")
        own |= {f"block.{name}": value for name, value in inner.items()}
        for name, value in own.items():
            if offset and "norm" in name and value.dim() == 1:
                own[name] = (value.float() + offset).to(value.dtype)
        if layout.swapped:
            own["eh_proj.weight"] = torch.cat(own["eh_proj.weight"].chunk(2, dim=1)[::-1], dim=1)
        module.load_state_dict(own)
        head = layer.tensors.get("shared_head.head.weight", layer.tensors.get("shared_head.output.weight"))
        heads.append(own_matrix(checkpoint, head, facts, like=facts.head))
    embeddings = own_matrix(checkpoint, layers[0].tensors.get("embed_tokens.weight"), facts, like=facts.embeddings)
    several = len(layers) > 1 and any(head is not None for head in heads)
    return cell, Extras(
        f"mtp {layout.name}",
        head=None if several else heads[0],
        heads=tuple(facts.head if head is None else head for head in heads) if several else (),
        embeddings=embeddings,
        config=checkpoint.config,
    )


def _find(checkpoint: Checkpoint) -> tuple[Layout, list[Layer]]:
    """The layout, and the prediction layers in order."""
    for layout in LAYOUTS:
        found = [match for name in checkpoint.names if (match := layout.marker.fullmatch(name))]
        if not found:
            continue
        if layout.name == "qwen":
            outside = f"{found[0][1]}mtp."
            pattern = re.compile(re.escape(outside) + r"layers\.(\d+)\.")
            numbers = sorted({int(match[1]) for name in checkpoint.names if (match := pattern.match(name))})
            prefixes = [(number, f"{outside}layers.{number}.") for number in numbers]
        else:
            outside = ""
            prefixes = sorted((int(match[2]), match[0].split(f".{match[2]}.")[0] + f".{match[2]}.") for match in found)
        return layout, [Layer.of(checkpoint, prefix, number=n, outside=outside) for n, prefix in prefixes]
    raise ValueError(
        f"{checkpoint.where} has no multi-token prediction layers; looked for "
        + ", ".join(layout.marker.pattern.replace(_WRAPPERS, "").replace("\\", "") for layout in LAYOUTS)
    )


def _summary(attention: GroupedConfig | LatentConfig) -> dict[str, Any]:
    if isinstance(attention, LatentConfig):
        dim = attention.plain_dim + attention.rotary_dim
        return {"num_attention_heads": attention.heads, "num_key_value_heads": attention.heads, "head_dim": dim}
    return {
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.key_value_heads,
        "head_dim": attention.head_dim,
    }
