"""Cells that tests use, as options."""

from __future__ import annotations

from typing import Any

LAYERS = 4
VARIANTS: dict[str, dict[str, Any]] = {
    "eagle1": {"kind": "eagle1", "bias": True, "final_norm": True},
    "eagle1-plain": {"kind": "eagle1", "attention_bias": True},
    "eagle3": {"kind": "eagle3"},
    "eagle3-normed": {
        "kind": "eagle3",
        "norm_before_residual": True,
        "norm_before_fc": True,
        "norm_output": True,
        "qk_norm": True,
    },
    "eagle3-own": {"kind": "eagle3", "fc_norm": True, "embedding_skip": True},
    "griffin": {"kind": "griffin", "bias": True, "final_norm": True},
    "mtp": {"kind": "mtp", "final_norm": True},
    "mtp-window": {"kind": "mtp", "norm_output": True, "sliding_window": 5, "rotary_dim": 4},
    "mtp3": {"kind": "mtp", "final_norm": True, "num_layers": 3, "output_gate": True},
}
"""Cells that together use every option."""

DRAFTER_VARIANTS = {
    "eagle1": "eagle1",
    "eagle2": "eagle1",
    "eagle-self": "eagle1",
    "eagle3": "eagle3-own",
    "eagle3-lk": "eagle3",
    "griffin": "griffin",
    "mtp1": "mtp",
    "mtp1-kl": "mtp",
    "mtp1-lk": "mtp-window",
    "mtp3": "mtp3",
}
"""The cell that each registered drafter is tested with."""

SAME_CODE = {
    "eagle1": "eagle2",
    "eagle-self": "eagle2",
    "eagle3": "eagle2",
    "eagle3-lk": "eagle2",
    "griffin": "eagle2",
    "mtp1": "eagle2",
    "mtp1-kl": "eagle2",
    "mtp1-lk": "eagle2",
}
"""Drafters that differ in their weights, and in defaults of their options, from another one."""
