"""Random block-parallel modules for the tiny Llama."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from adaptspec.drafters.block import (
    Backbone,
    BackboneConfig,
    PrefixScorer,
    ScorerConfig,
    TapsModel,
    TransitionConfig,
    TransitionCorrection,
    TreeFlashModel,
)

BLOCK = 6
"""Rows of a block; five tokens are drafted."""


def tiny_backbone(*, seed: int = 0, **changes: Any) -> Backbone:
    """A random backbone of two layers for a target of hidden size 32 and 4 layers or more."""
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "taps": (1, 2, 4),
        "num_layers": 2,
        "block_size": BLOCK,
    }
    return randomise(Backbone(BackboneConfig(**{**sizes, **changes})), seed=seed)


def tiny_block(drafter: str, *, seed: int = 0, **changes: Any) -> nn.Module:
    """What dflash, ddtree, treeflash or taps is made with."""
    backbone = tiny_backbone(seed=seed, **changes)
    if drafter == "treeflash":
        return TreeFlashModel(backbone, randomise(TransitionCorrection(TransitionConfig(32, 24)), seed=seed + 1))
    if drafter == "taps":
        config = ScorerConfig(32, depths=backbone.config.block_size - 1, width=8, inner=16)
        return TapsModel(backbone, randomise(PrefixScorer(config), seed=seed + 1))
    return backbone


def randomise(module: Any, *, seed: int) -> Any:
    """Random numbers for every parameter, so that all of them matter."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for name, parameter in module.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(float("norm" in name) + 0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(1.5 * torch.randn_like(parameter) / parameter.shape[1] ** 0.5)
    return module.eval()
