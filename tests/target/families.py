"""Tiny random models of real architectures, one per family that the target supports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

VOCAB = 96
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA = {**_COMMON, "intermediate_size": 64, "num_key_value_heads": 2}


def _build(name: str, config: dict[str, Any], **extra: Any) -> Callable[[str], Any]:
    def build(attention: str) -> Any:
        import transformers

        settings = getattr(transformers, f"{name}Config" if name != "Gemma3" else "Gemma3TextConfig")(
            **config, **extra, attn_implementation=attention
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = getattr(transformers, f"{name}ForCausalLM" if name != "GPT2" else "GPT2LMHeadModel")(settings)
        # Larger weights than the initialiser's: logits then depend on the whole context, so a wrong mask shows.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4.0)
        return model.eval()

    return build


FAMILIES: dict[str, Callable[[str], Any]] = {
    "llama": _build("Llama", _LLAMA),
    "llama-no-groups": _build("Llama", {**_LLAMA, "num_key_value_heads": 4}),
    "qwen2": _build("Qwen2", _LLAMA),
    "qwen2-mixed-window": _build("Qwen2", _LLAMA, use_sliding_window=True, sliding_window=8, max_window_layers=2),
    "qwen3": _build("Qwen3", _LLAMA, head_dim=8),
    "mistral": _build("Mistral", _LLAMA, sliding_window=None),
    "mistral-window": _build("Mistral", _LLAMA, sliding_window=8),
    "gemma2": _build("Gemma2", _LLAMA, head_dim=8, query_pre_attn_scalar=8, sliding_window=8),
    "gemma3": _build(
        "Gemma3",
        _LLAMA,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gpt2": _build("GPT2", {**_COMMON, "n_positions": 256}),
    "phi": _build("Phi", {**_LLAMA, "num_key_value_heads": 4}),
    "phi3": _build("Phi3", _LLAMA, sliding_window=None),
    "qwen3-moe": _build(
        "Qwen3Moe",
        _LLAMA,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        decoder_sparse_step=1,
    ),
}
EAGER_ONLY = frozenset(["gemma2"])
"""Families whose attention soft-caps scores, which scaled dot-product attention cannot."""
