"""Random adapters for the tiny models of hidden size 32."""

from __future__ import annotations

from typing import Any

import torch

from adaptspec.drafters.early_exit.adapter import AdapterConfig, Adapters

EXITS = {"kangaroo": (2,), "cats": (1, 3)}


def tiny_adapters(kind: str, *, seed: int = 0, **changes: Any) -> Adapters:
    """Adapters whose norms and matrices all matter."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = AdapterConfig(**{"kind": kind, "exits": EXITS[kind], **sizes, **changes})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        adapters = Adapters(config)
        for parameter in adapters.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(1.5 * torch.randn_like(parameter) / parameter.shape[1] ** 0.5)
    return adapters.eval()
