"""GRIFFIN+GS and GRIFFIN+LTD: the backbone's trees, cut by a fixed rule and by policies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from adaptspec.cli.pool import describe_drafter
from adaptspec.drafters import make_drafter
from adaptspec.drafters.cell_weights import target_fingerprint
from adaptspec.drafters.draft_policies import (
    DEPTHS,
    FEATURES,
    SIZES,
    DraftPolicies,
    describe_tree,
    read_policies,
    save_policies,
)
from adaptspec.drafters.griffin_gs import StaticTree, read_static_tree
from adaptspec.target.hf import HFTarget
from adaptspec.trees import beam_rerank, truncate
from adaptspec.types import DraftTree
from tests import tiny_models
from tests.drafters.cell_cases import Request, same_proposal, tiny_cell, tiny_llama
from tests.drafters.policy_cases import fixed_policies, random_policies

PROMPT = [11, 3, 50, 7, 7, 29, 40, 3]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


def griffin(depth: int) -> Any:
    return make_drafter("griffin", path=tiny_cell("griffin"), max_depth=depth)


def plain(model: Any, *, depth: int, budget: int) -> DraftTree:
    return Request(model, griffin(depth), PROMPT).ask(budget)


@pytest.mark.parametrize(("depth", "size", "budget"), [(3, 9, 40), (2, 40, 12), (5, 12, 12), (1, 3, 1)])
def test_a_static_tree_is_the_backbones_of_that_depth_and_size(depth: int, size: int, budget: int, model: Any) -> None:
    drafter = make_drafter("griffin-gs", path=StaticTree(depth, size), drafter=griffin(6))
    request = Request(model, drafter, PROMPT)
    for _ in range(2):
        tree = request.ask(budget)
        assert len(tree) <= min(size, budget) and tree.depths().max() <= depth
        assert same_proposal(tree, Request(model, griffin(depth), request.tokens).ask(min(size, budget)))
        request.commit(tree, [0], 5)
    assert request.ask(budget, max_depth=1).depths().max() == 1


@pytest.mark.parametrize(("depth", "size"), [(3, 20), (6, 10), (9, 30), (12, 240)])
def test_policies_choose_depth_and_size(depth: int, size: int, model: Any) -> None:
    drafter = make_drafter("griffin-ltd", path=fixed_policies(depth=depth, size=size), drafter=griffin(12))
    tree = Request(model, drafter, PROMPT).ask(64)
    assert len(tree) == min(size, 64)
    wanted = plain(model, depth=depth, budget=64)
    assert same_proposal(tree, truncate(wanted, size))


def test_policies_follow_what_they_see(model: Any) -> None:
    drafter = make_drafter("griffin-ltd", path=random_policies(3), drafter=griffin(12))
    request = Request(model, drafter, PROMPT)
    sizes, depths = set(), set()
    for bonus in (4, 60, 9, 30, 11, 2):
        tree = request.ask(100)
        sizes.add(len(tree))
        depths.add(int(tree.depths().max()))
        request.commit(tree, [], bonus)
    assert len(sizes) > 1


def test_a_stop_ends_growth_and_nothing_else() -> None:
    told: list[tuple[int, np.ndarray]] = []

    def expand(token_ids: np.ndarray, parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        q = np.random.default_rng(len(told)).dirichlet(np.ones(4), size=len(token_ids))
        order = np.argsort(-q, axis=1)
        return order, np.log(np.take_along_axis(q, order, axis=1))

    def stop(depth: int, scores: np.ndarray) -> bool:
        told.append((depth, scores))
        return depth == 2

    tree = beam_rerank(expand, root=0, budget=50, width=3, max_depth=6, stop=stop)
    assert [depth for depth, _ in told] == [1, 2] and tree.depths().max() == 2 and len(tree) == 4 + 12
    assert np.allclose(np.sort(np.concatenate([scores for _, scores in told])), np.sort(tree.scores))


def test_what_policies_see() -> None:
    levels = [np.log([0.6, 0.3]), np.log([0.5, 0.2, 0.1, 1e-30])]
    seen = describe_tree(levels, length=256)
    assert seen.shape == (FEATURES,) and seen[0] == 2 / 12 and seen[1] == 0.5
    assert np.allclose(seen[2:10], [*(np.log([0.5, 0.2, 0.1]) / 16), -1.0, *[-1.0] * 4])
    assert np.allclose(seen[10:], 1.7 / 12)  # all six nodes are among the best ten
    many = describe_tree([np.full(25, np.log(0.04))], length=1)
    assert np.allclose(many[10:13] * 12, [0.4, 0.8, 1.0]) and np.isclose(many[-1] * 12, 1.0)


def test_files_come_back(tmp_path: Path) -> None:
    setting = StaticTree(4, 33, "eagle3:somewhere", {"machine": "m", "table": [{"depth": 4}]})
    (tmp_path / "s.json").write_text(setting.to_json(), encoding="utf-8")
    assert read_static_tree(tmp_path / "s.json") == setting
    policies = random_policies(1)
    save_policies(tmp_path / "p.safetensors", DraftPolicies.of(policies.arrays(), drafter="mtp1", card={"seed": 3}))
    again = read_policies(tmp_path / "p.safetensors")
    assert again.drafter == "mtp1" and again.card == {"seed": 3}
    rng = np.random.default_rng(0)
    for x in rng.normal(size=(50, FEATURES)):
        assert again.stops(x) == policies.stops(x) and again.nodes(x) == policies.nodes(x)
    assert (tmp_path / "p.safetensors").stat().st_size < 20_000
    assert {again.nodes(x) for x in rng.normal(size=(200, FEATURES))} <= set(SIZES) and DEPTHS[-1] == 12


def test_another_target_is_refused(model: Any, tmp_path: Path) -> None:
    other = tiny_models.make_llama(layers=4, seed=9)
    card = {"target": target_fingerprint(model)}
    (tmp_path / "s.json").write_text(StaticTree(2, 5, card=card).to_json(), encoding="utf-8")
    gs = make_drafter(f"griffin-gs:{tmp_path / 's.json'}", drafter=griffin(2))
    policies = DraftPolicies.of(random_policies().arrays(), drafter="griffin", card=card)
    ltd = make_drafter("griffin-ltd", path=policies, drafter=griffin(12))
    for drafter, where in ((gs, "s.json"), (ltd, "the policies")):
        drafter.bind(HFTarget(model))
        with pytest.raises(ValueError, match=f"{where} was not trained for this target"):
            drafter.bind(HFTarget(other))


@pytest.mark.parametrize("name", ["griffin-gs", "griffin-ltd"])
def test_shipped_rules_are_the_embedded_models(name: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make_drafter(name)
    with pytest.raises(
        ValueError, match=f"was not trained for this target: .*; make one with `adaptspec train {name}`"
    ):
        drafter.bind(HFTarget(model))
    assert describe_drafter(name, type(drafter))["weights_for"] == ["embedded"]
    monkeypatch.setattr("adaptspec.drafters.sized.shipped_rule", lambda name: None)
    with pytest.raises(FileNotFoundError, match=f"{name} needs a file and none is shipped; make one with"):
        make_drafter(name)


def test_bad_files_and_drafters(tmp_path: Path) -> None:
    damaged = json.dumps({**json.loads(StaticTree(2, 5).to_json()), "depth": 0})
    for text, message in (
        ("x", "is no static tree"),
        ("{}", "is no static tree of version 1"),
        (damaged, "is damaged: depth must be >= 1, got 0"),
    ):
        (tmp_path / "bad.json").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            make_drafter(f"griffin-gs:{tmp_path / 'bad.json'}")
    (tmp_path / "bad.safetensors").write_bytes(b"12345678abc")
    with pytest.raises(ValueError, match="holds no draft policies"):
        make_drafter(f"griffin-ltd:{tmp_path / 'bad.safetensors'}")
    with pytest.raises(FileNotFoundError, match="no file of draft policies"):
        make_drafter("griffin-ltd:nowhere")
    with pytest.raises(ValueError, match="drafter must be a feature-recursive one.*got 'suffix'"):
        make_drafter("griffin-gs", path=StaticTree(2, 5), drafter="suffix")
    with pytest.raises(ValueError, match="max_depth >= 5, got 'dynamic' and 3"):
        make_drafter("griffin-gs", path=StaticTree(5, 5), drafter=griffin(3))
    with pytest.raises(FileNotFoundError, match="adaptspec train griffin-gs"):
        make_drafter("griffin-gs", path=tmp_path)
    for nothing in (0, ""):
        with pytest.raises(ValueError, match="drafter"):
            make_drafter("griffin-gs", path=StaticTree(2, 5), drafter=nothing)
    save_file({"weight": torch.zeros(2, dtype=torch.bfloat16)}, tmp_path / "foreign.safetensors")
    with pytest.raises(ValueError, match="holds no draft policies of version 1"):
        make_drafter("griffin-ltd", path=tmp_path / "foreign.safetensors")
    arrays = random_policies().arrays()
    with pytest.raises(ValueError, match="the policies lack mean"):
        DraftPolicies.of({k: v for k, v in arrays.items() if k != "mean"}, drafter="griffin", card={})
    with pytest.raises(ValueError, match=r"size.out must be finite numbers \[24, 5\], got \[3, 5\]"):
        DraftPolicies.of({**arrays, "size.out": np.zeros((3, 5))}, drafter="griffin", card={})
    with pytest.raises(ValueError, match=r"depth.hidden must be finite numbers \[1, 34\]"):
        DraftPolicies.of({**arrays, "depth.hidden_bias": np.zeros(())}, drafter="griffin", card={})
