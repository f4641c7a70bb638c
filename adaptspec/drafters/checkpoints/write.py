"""Saving cells and heads in the published formats, so that other engines can run them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from adaptspec.drafters.cells import Cell
from adaptspec.drafters.hydra_heads import HydraHeads
from adaptspec.drafters.medusa_heads import MedusaHeads

_ARCHITECTURES = {
    "eagle1": "LlamaForCausalLMEagle",
    "eagle3": "LlamaForCausalLMEagle3",
    "griffin": "LlamaForCausalLM",
}
_OWN_OPTIONS = ("embedding_skip", "fc_norm", "norm_output")
"""Options of cells that not every engine knows; they are written into the config, and only `fc_norm` and `norm_output`
are known outside."""


def save_checkpoint(
    module: torch.nn.Module,
    folder: str | Path,
    *,
    vocab_size: int,
    head: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
    embeddings: torch.Tensor | None = None,
) -> list[Path]:
    """Write a cell (EAGLE-1, EAGLE-3, GRIFFIN) or heads (Medusa, Hydra) as its authors do.

    Args:
        module: what was trained.
        folder: made if it does not exist.
        vocab_size: of the target.
        head: [R, H], the output matrix: of EAGLE-3 required, of Medusa and Hydra heads without their own the target's,
            which is repeated for every head.
        token_ids: int64 [R], the target's token of each row of `head`, ascending; None if R is the whole vocabulary.
        embeddings: [V, H], the target's embedding, which EAGLE checkpoints repeat; left out if None.

    Returns:
        The files written.

    Raises:
        ValueError: a module of another kind, options that the format cannot express, or a head that does not fit.
    """
    folder = Path(folder)
    if isinstance(module, MedusaHeads | HydraHeads):
        return _save_heads(module, folder, vocab_size=vocab_size, head=head)
    if not isinstance(module, Cell) or module.config.kind not in _ARCHITECTURES:
        kind = module.config.kind if isinstance(module, Cell) else type(module).__name__
        raise ValueError(f"module must be an EAGLE or GRIFFIN cell or Medusa or Hydra heads, got {kind}")
    config = module.config
    if config.embedding_skip:
        raise ValueError("embedding_skip has no place in the published format of EAGLE-3; train without it to export")
    tensors = {name: value.detach() for name, value in module.state_dict().items()}
    extra: dict[str, Any] = {"vocab_size": vocab_size, "bias": config.bias}
    if config.kind == "eagle3":
        if head is None:
            raise ValueError("head must be given: an EAGLE-3 checkpoint has an lm_head of its own")
        tensors |= _eagle3_head(head, token_ids, hidden_size=config.hidden_size, vocab_size=vocab_size)
        extra |= {
            "draft_vocab_size": len(head),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": _layer_ids(config.taps), "use_aux_hidden_state": True},
            "norm_before_residual": config.norm_before_residual,
            "norm_before_fc": config.norm_before_fc,
            **{name: True for name in _OWN_OPTIONS if getattr(config, name)},
        }
    elif head is not None:
        raise ValueError(f"a checkpoint of kind {config.kind!r} uses the target's head and stores none")
    if embeddings is not None:
        tensors["embed_tokens.weight"] = embeddings.detach()
    written = {
        "architectures": [_ARCHITECTURES[config.kind]],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else dict(config.rope_scaling),
        "attention_bias": config.attention_bias,
        **extra,
    }
    return _write(folder, written, tensors=tensors, name="model.safetensors")


def _eagle3_head(
    head: torch.Tensor, token_ids: torch.Tensor | None, *, hidden_size: int, vocab_size: int
) -> dict[str, torch.Tensor]:
    """`lm_head`, and for a reduced vocabulary the offsets and the mask."""
    if head.dim() != 2 or head.shape[1] != hidden_size:
        raise ValueError(f"head must have shape [R, {hidden_size}], got {list(head.shape)}")
    if token_ids is None:
        if len(head) != vocab_size:
            raise ValueError(f"token_ids must be given for a head of {len(head)} rows, the vocabulary has {vocab_size}")
        return {"lm_head.weight": head.detach()}
    ids = token_ids.cpu().long()
    if ids.shape != (len(head),) or not bool((ids[1:] > ids[:-1]).all()):
        raise ValueError(f"token_ids must be {len(head)} ascending tokens, one per row of head")
    if not 0 <= int(ids[0]) <= int(ids[-1]) < vocab_size:
        raise ValueError(f"token_ids must be in [0, {vocab_size}), got {int(ids[0])} to {int(ids[-1])}")
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[ids] = True
    return {"lm_head.weight": head.detach(), "d2t": ids - torch.arange(len(ids)), "t2d": mask}


def _layer_ids(taps: tuple[int, ...]) -> list[int]:
    """Taps as `eagle_aux_hidden_state_layer_ids`, in the convention that counts the layers before the state."""
    if taps[0] == 1:
        raise ValueError(f"taps must not begin with 1: engines read such a list as one layer later, got {list(taps)}")
    return list(taps)


def _save_heads(
    module: MedusaHeads | HydraHeads, folder: Path, *, vocab_size: int, head: torch.Tensor | None
) -> list[Path]:
    config = module.config
    own = module.output_weights()
    if own is None and head is None:
        raise ValueError(
            "head must be given: these heads use the target's output matrix, and the format stores one each"
        )
    if own is not None and head is not None:
        raise ValueError("head must be None: these heads have output matrices of their own")
    size = config.hidden_size
    if head is not None and tuple(head.shape) != (vocab_size, size):
        raise ValueError(f"head must have shape [{vocab_size}, {size}], got {list(head.shape)}")
    state = {name: value.detach().cpu() for name, value in module.state_dict().items()}
    medusa = isinstance(module, MedusaHeads)
    shifted = isinstance(module, HydraHeads) and module.prefix is not None  # dropout layers take every other number
    tensors: dict[str, torch.Tensor] = {}
    for i in range(config.heads):
        for k in range(config.layers):
            number = 2 * k + 1 if shifted else k
            parts = ("linear", "res_connection") if not medusa and k == 0 else ("linear",)
            for part in parts:
                for what in ("weight", "bias"):
                    below = f"{i}.{number}.{part}.{what}"
                    tensors[below if medusa else f"hydra_mlp.{below}"] = state[f"blocks.{i}.{k}.{part}.{what}"]
        output = f"{i}.{config.layers}" if medusa else f"hydra_lm_head.{i}" + (".1" if shifted else "")
        matrix = state[f"outputs.{i}.weight"] if head is None else head.detach().cpu().clone()
        tensors[f"{output}.weight"] = matrix
        if not medusa:
            bias = state.get(f"outputs.{i}.bias")
            tensors[f"{output}.bias"] = matrix.new_zeros(vocab_size) if bias is None else bias
    if shifted:
        for name, value in state.items():
            if name.startswith("prefix.layer."):
                tensors[f"prefix_embeding_layer.layers.0.{name.removeprefix('prefix.layer.')}"] = value
        tensors["prefix_embeding_layer.norm.weight"] = state["prefix.norm.weight"]
    if medusa:
        written: dict[str, Any] = {"medusa_num_heads": config.heads, "medusa_num_layers": config.layers}
        return _write(folder, written, tensors=tensors, name="medusa_lm_head.pt")
    written = {
        "hydra_num_heads": config.heads,
        "hydra_num_layers": config.layers,
        "hydra_head_arch": "prefix-mlp" if shifted else "mlp",
        "grounded_heads": True,
    }
    if shifted:
        assert isinstance(module, HydraHeads)
        prefix = module.config
        written |= {
            "num_attention_heads": prefix.attention_heads,
            "num_key_value_heads": prefix.key_value_heads,
            "head_dim": prefix.head_dim,
            "intermediate_size": prefix.intermediate_size,
            "rope_theta": prefix.rope_theta,
            "rms_norm_eps": prefix.eps,
        }
    return _write(folder, written, tensors=tensors, name="hydra_lm_head.pt")


def _write(folder: Path, config: Mapping[str, Any], *, tensors: Mapping[str, torch.Tensor], name: str) -> list[Path]:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / name
    plain = {key: value.cpu().clone().contiguous() for key, value in tensors.items()}
    if name.endswith(".safetensors"):
        save_file(plain, weights, metadata={"format": "pt"})
    else:
        torch.save(plain, weights)
    description = folder / "config.json"
    description.write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    return [weights, description]
