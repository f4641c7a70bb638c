"""Medusa's and Hydra's head files.

`medusa_lm_head.pt`: `{i}.{k}.linear.{weight,bias}` per residual block k, then `{i}.{blocks}.weight` [V, H].
`hydra_lm_head.pt`: `hydra_mlp.{i}.{k}.{linear,res_connection}.{weight,bias}`, `hydra_lm_head.{i}.{weight,bias}`, and
for the variant "prefix-mlp", where dropout layers shift the numbers, `prefix_embeding_layer.{layers.0.*,norm}`.
Numbers of heads and blocks come from the tensors: uploaded configs are known to be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from adaptspec.drafters.checkpoints.common import (
    Extras,
    Facts,
    attention_sizes,
    check_hidden,
    check_vocab,
    epsilon,
    llama_names,
    rope,
    whole,
)
from adaptspec.drafters.checkpoints.reader import Checkpoint, refuse_others, take
from adaptspec.drafters.hydra_heads import HydraConfig, HydraHeads
from adaptspec.drafters.medusa_heads import MedusaConfig, MedusaHeads

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
HYDRA_FILES = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")
_PREFIX = "prefix_embeding_layer."


def load_medusa(checkpoint: Checkpoint, facts: Facts) -> tuple[MedusaHeads, Extras]:
    """All heads of a Medusa file, with their own output matrices."""
    names = {name.removeprefix("medusa_head."): name for name in checkpoint.names}
    heads = _count(names, r"(\d+)\.\d+\.linear\.weight")
    layers = _count(names, r"0\.(\d+)\.linear\.weight")
    if not heads:
        raise ValueError(f"{checkpoint.where} lacks the tensors 0.0.linear.weight: it holds no Medusa heads")
    hidden = checkpoint.shape(names["0.0.linear.weight"])[0]
    check_hidden(checkpoint, hidden, facts)
    output = names.get(f"0.{layers}.weight")
    vocab = checkpoint.shape(output)[0] if output else facts.vocab_size
    check_vocab(checkpoint, vocab, facts, what=f"head 0.{layers}.weight")
    module = MedusaHeads(MedusaConfig(hidden, heads=heads, layers=layers, vocab_size=vocab))
    wanted: dict[str, tuple[str, tuple[int, ...]]] = {}
    for i in range(heads):
        for k in range(layers):
            wanted[f"blocks.{i}.{k}.linear.weight"] = (f"{i}.{k}.linear.weight", (hidden, hidden))
            wanted[f"blocks.{i}.{k}.linear.bias"] = (f"{i}.{k}.linear.bias", (hidden,))
        wanted[f"outputs.{i}.weight"] = (f"{i}.{layers}.weight", (vocab, hidden))
    _fill(checkpoint, module, names, wanted, what="Medusa")
    return module, Extras("medusa", config=checkpoint.config)


def load_hydra(checkpoint: Checkpoint, facts: Facts) -> tuple[HydraHeads, Extras]:
    """All heads of a Hydra file ("mlp" and "prefix-mlp", grounded), with their own output matrices."""
    names = {name.removeprefix("hydra_head."): name for name in checkpoint.names}
    prefix = any(name.startswith(_PREFIX) for name in names)
    heads = _count(names, r"hydra_mlp\.(\d+)\.\d+\.linear\.weight")
    blocks = sorted(
        {int(found[1]) for name in names if (found := _match(r"hydra_mlp\.0\.(\d+)\.linear\.weight", name))}
    )
    if not heads:
        raise ValueError(
            f"{checkpoint.where} lacks the tensors hydra_mlp.0.0.linear.weight; supported are Hydra heads of the kinds "
            "mlp and prefix-mlp"
        )
    first = f"hydra_mlp.0.{blocks[0]}"
    hidden = checkpoint.shape(names[f"{first}.linear.weight"])[0]
    check_hidden(checkpoint, hidden, facts)
    if f"{first}.res_connection.weight" not in names:
        raise ValueError(
            f"{checkpoint.where} lacks the tensors {first}.res_connection.weight: its heads do not see drafted tokens "
            "(grounded_heads is false), which makes them Medusa heads"
        )
    if (offset := checkpoint.config.get("hidden_state_offset")) not in (None, 0):
        raise ValueError(f"{checkpoint.where}: hidden_state_offset must be 0, the last hidden state, got {offset}")
    output = re.compile(r"hydra_lm_head\.0(\.1)?\.weight")
    found = next((name for name in names if output.fullmatch(name)), "hydra_lm_head.0.weight")
    middle = found.removeprefix("hydra_lm_head.0").removesuffix(".weight")
    vocab = checkpoint.shape(names[found])[0] if found in names else facts.vocab_size
    check_vocab(checkpoint, vocab, facts, what=found)
    sizes: dict[str, float] = {}
    config = {**_target_config(facts), **{k: v for k, v in checkpoint.config.items() if v is not None}}
    if prefix:
        attention = attention_sizes(checkpoint, config, hidden)
        sizes = {
            "attention_heads": attention["num_attention_heads"],
            "key_value_heads": attention["num_key_value_heads"],
            "head_dim": attention["head_dim"],
            "intermediate_size": whole(checkpoint, config, "intermediate_size"),
            "rope_theta": rope(config)[0],
            "eps": epsilon(checkpoint, config),
        }
    bias = found.replace("weight", "bias") in names
    module = HydraHeads(
        HydraConfig(
            hidden,
            heads=heads,
            layers=len(blocks),
            prefix=prefix,
            vocab_size=vocab,
            output_bias=bias,
            **sizes,  # type: ignore[arg-type]
        )
    )
    wanted = {}
    for i in range(heads):
        for k, number in enumerate(blocks):
            width = (i + 2) * hidden if k == 0 else hidden
            for part in ("linear", "res_connection") if k == 0 else ("linear",):
                ours, theirs = f"blocks.{i}.{k}.{part}", f"hydra_mlp.{i}.{number}.{part}"
                wanted[f"{ours}.weight"] = (f"{theirs}.weight", (hidden, width))
                wanted[f"{ours}.bias"] = (f"{theirs}.bias", (hidden,))
        wanted[f"outputs.{i}.weight"] = (f"hydra_lm_head.{i}{middle}.weight", (vocab, hidden))
        if bias:
            wanted[f"outputs.{i}.bias"] = (f"hydra_lm_head.{i}{middle}.bias", (vocab,))
    if prefix:
        shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
        for name in llama_names(""):
            wanted[f"prefix.layer.{name}"] = (f"{_PREFIX}layers.0.{name}", shapes[f"prefix.layer.{name}"])
        wanted["prefix.norm.weight"] = (f"{_PREFIX}norm.weight", (hidden,))
    ignored = [name for name in names if name in (f"{_PREFIX}embed_tokens.weight",) or name.endswith("inv_freq")]
    _fill(checkpoint, module, names, wanted, what="Hydra", ignored=ignored)
    return module, Extras("hydra prefix-mlp" if prefix else "hydra mlp", config=checkpoint.config)


def _fill(
    checkpoint: Checkpoint,
    module: torch.nn.Module,
    names: Mapping[str, str],
    wanted: Mapping[str, tuple[str, tuple[int, ...]]],
    *,
    what: str,
    ignored: list[str] | None = None,
) -> None:
    known = [theirs for theirs, _ in wanted.values()]
    refuse_others(checkpoint, names, known=(*known, *(ignored or ())), what=f"{what} heads")
    module.load_state_dict(take(checkpoint, {k: (names.get(t, t), shape) for k, (t, shape) in wanted.items()}))


def _target_config(facts: Facts) -> dict[str, object]:
    """The prefix layer is shaped like a layer of the target; its own config does not repeat that."""
    return facts.config.to_dict() if hasattr(facts.config, "to_dict") else {}


def _match(pattern: str, name: str) -> re.Match[str] | None:
    return re.fullmatch(pattern, name)


def _count(names: Mapping[str, str], pattern: str) -> int:
    """One more than the largest number that the pattern finds, 0 without any."""
    return max((int(found[1]) + 1 for name in names if (found := _match(pattern, name))), default=0)
