"""Cells that begin as the target's last layer, also where they are narrower than it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adaptspec.training.recipes import make_trainee


@pytest.mark.parametrize("kind", ["eagle3", "mtp3"])
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


@pytest.mark.parametrize("kind", ["eagle1", "griffin"])
def test_a_cell_without_a_norm_on_its_way_in_begins_as_the_identity(target: Any, kind: str) -> None:
    cell = make_trainee(kind, target).rollout.module
    hidden = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[5, 9, 3, 30, 31, 7]])
    embeddings = target.get_input_embeddings()(tokens)
    with torch.no_grad():
        for step in range(3):
            given, following = cell(embeddings, hidden, positions=torch.arange(6)[None] + step)
            for states in (given, following):
                assert torch.cosine_similarity(states, hidden, dim=-1).min() > 0.6
                assert 0.5 < states.norm() / hidden.norm() < 2.0
            hidden = following


def test_sizes_that_cannot_be_are_refused(target: Any) -> None:
    with pytest.raises(ValueError, match="intermediate_size must be >= 1, got 0"):
        make_trainee("eagle3", target, intermediate=0)
    with pytest.raises(ValueError, match="intermediate is for kinds with a cell, not for 'medusa'"):
        make_trainee("medusa", target, intermediate=8)
