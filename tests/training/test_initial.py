"""Cells that begin as the target's last layer, also where they are narrower than it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adaptspec.training.recipes import make_trainee


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "griffin", "mtp3"])
def test_a_narrow_cell_takes_the_largest_units_of_the_last_layer(target: Any, kind: str) -> None:
    narrow = make_trainee(kind, target, intermediate=48)
    mlp = target.model.layers[-1].mlp
    size = (mlp.up_proj.weight.norm(dim=1) * mlp.down_proj.weight.norm(dim=0)).tolist()
    units = sorted(range(64), key=lambda unit: -size[unit])[:48]
    named = dict(narrow.rollout.module.named_parameters())
    found = [name for name in named if "layer" in name and name.endswith("mlp.up_proj.weight")]
    assert len(found) == (3 if kind == "mtp3" else 1) and narrow.config["intermediate_size"] == 48
    for name in found:
        prefix = name.removesuffix("up_proj.weight")
        assert torch.equal(named[name], mlp.up_proj.weight[sorted(units)])
        assert torch.equal(named[f"{prefix}gate_proj.weight"], mlp.gate_proj.weight[sorted(units)])
        down = named[f"{prefix}down_proj.weight"]
        assert torch.equal(down[:32], mlp.down_proj.weight[:, sorted(units)]) and down.shape[1] == 48


def test_sizes_that_cannot_be_are_refused(target: Any) -> None:
    with pytest.raises(ValueError, match="intermediate_size must be >= 1, got 0"):
        make_trainee("eagle3", target, intermediate=0)
    with pytest.raises(ValueError, match="intermediate is for kinds with a cell, not for 'medusa'"):
        make_trainee("medusa", target, intermediate=8)
