"""Adapters of early exits are trained as they draft, and learn what can be learnt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adaptspec.drafters.early_exit.adapter_rows import AdapterRows
from adaptspec.pretrained import read_card
from adaptspec.training.batches import Batches
from adaptspec.training.exit_adapters import ExitRollout, check_exits, default_exits
from adaptspec.training.losses import Objective
from adaptspec.training.recipes import make_trainee
from adaptspec.training.step_losses import LossSettings, batch_loss
from adaptspec.training.trainer import TrainingSettings
from adaptspec.training.training import TrainOptions, train_drafter
from tests.drafters.exit_cases import tiny_adapters


def batches(store: Any, exits: tuple[int, ...], *, steps: int) -> Batches:
    return Batches(store, store.packs()[:3], taps=exits, steps=steps, first=-1, next_features=True)


def test_training_runs_adapters_as_drafting_does(store: Any) -> None:
    """Step k of a row is what the adapter gives when it drafts k tokens on, behind the rows of the text so far."""
    adapters = tiny_adapters("kangaroo")
    (batch,) = [batches(store, (2,), steps=3).make([0])]
    steps = list(ExitRollout(adapters).steps(batch, 3))
    compared = 0
    pack = store.parts[0].packs[store.packs()[0][1]]
    indices = pack.indices(0)
    start = int(store.parts[0].starts[store.packs()[0][1]])
    states = torch.from_numpy(np.array(store.parts[0].taps[2])[start + indices].view(np.int16))
    states = states.view(torch.bfloat16).float()
    row_of = {int(batch.positions[0, r]) + 1: r for r in reversed(range(batch.positions.shape[1]))}
    with torch.no_grad():
        for place in range(len(indices) - 4):
            rows = AdapterRows(adapters.exits[0])
            if place:
                rows.push(states[:place])
            outputs = [rows.begin(states[place : place + 1])]
            for k in (1, 2):
                outputs.append(rows.draft(states[place + k : place + k + 1], np.array([k - 1])))
            r = row_of[place]
            for k, output in enumerate(outputs):
                if float(batch.weights[0, r, k]) > 0:
                    assert torch.allclose(output[0], steps[k].head_input[0, r], atol=1e-4)
                    compared += 1
    assert compared > 8


def test_later_adapters_learn_the_same_tokens(target: Any, store: Any) -> None:
    trainee = make_trainee("cats", target)
    assert trainee.taps == (1, 2) and trainee.next_features
    batch = batches(store, trainee.taps, steps=1).make([0])
    head = target.get_output_embeddings().weight.detach()[torch.from_numpy(store.rows)]
    loss = LossSettings(Objective("kl"), 1)
    total, _ = batch_loss(trainee.rollout, batch, head=head, settings=loss)
    total.backward()
    drafting, correcting = trainee.rollout.module.exits
    assert all(float(p.grad.abs().sum()) > 0 for one in (drafting, correcting) for p in one.parameters())
    (step,) = trainee.rollout.steps(batch, 1)
    apart = [
        float(batch_loss(_Fixed(states), batch, head=head, settings=loss)[0])
        for states in (step.head_input.detach(), step.also[0].detach())
    ]
    assert float(total.detach()) == pytest.approx(sum(apart), rel=1e-5)


class _Fixed:
    """A rollout that gives what it was told."""

    def __init__(self, states: torch.Tensor) -> None:
        self.states = states

    def steps(self, batch: Any, count: int) -> Any:
        from adaptspec.training.unroll import Step

        yield Step(self.states)


def test_a_copied_adapter_begins_as_an_early_exit(target: Any) -> None:
    adapter = make_trainee("kangaroo", target, taps=(3,)).rollout.module.exits[0]
    layer = target.model.layers[3]
    assert torch.equal(adapter.self_attn.q_proj.weight, layer.self_attn.q_proj.weight)
    assert torch.equal(adapter.input_layernorm.weight, layer.input_layernorm.weight)
    assert torch.equal(adapter.norm.weight, target.model.norm.weight)
    fresh = make_trainee("kangaroo", target, taps=(3,), copy=False, seed=1).rollout.module.exits[0]
    assert not torch.equal(fresh.self_attn.q_proj.weight, layer.self_attn.q_proj.weight)


class Killed(Exception):
    pass


def test_cats_is_trained_and_a_killed_run_goes_on(target: Any, answers_folder: Path, tmp_path: Path) -> None:
    from adaptspec.drafters.early_exit.adapter_weights import load_adapters
    from adaptspec.target.hf import HFTarget

    settings = TrainingSettings(steps=6, evaluations=2, checkpoint_seconds=1e-9, lr=0.01, patience=9)

    def run(folder: Path, kill_at: int | None) -> Any:
        def report(progress: Any, share: float) -> None:
            if progress.step == kill_at:
                raise Killed

        return train_drafter(
            "cats", target, answers=answers_folder, folder=folder, settings=settings,
            options=TrainOptions(rows=48, batch_rows=256, held_out=0.2, taps=(1, 3)),
            features=tmp_path / "features", report=report,
        )  # fmt: skip

    whole = run(tmp_path / "whole", None)
    with pytest.raises(Killed):
        run(tmp_path / "parts", 3)
    parts = run(tmp_path / "parts", None)
    assert (whole.step, whole.positions, whole.loss) == (parts.step, parts.positions, parts.loss)
    card = read_card(tmp_path / "whole")
    assert card["kind"] == "cats" and card["config"]["exits"] == [1, 3] and card["held_out"] == whole.best
    loaded = [
        load_adapters(tmp_path / name, name="cats", kind="cats", shipped="cats", target=HFTarget(target)).state_dict()
        for name in ("whole", "parts")
    ]
    assert all(torch.equal(loaded[0][name], loaded[1][name]) for name in loaded[0])


def test_exits_for_targets_of_all_sizes() -> None:
    assert default_exits("kangaroo", 32) == (2,) and default_exits("kangaroo", 40) == (3,)
    assert default_exits("kangaroo", 2) == (1,)
    assert default_exits("cats", 30) == (3, 10) and default_exits("cats", 4) == (1, 2) == default_exits("cats", 3)
    with pytest.raises(ValueError, match="cats needs a target of more than 2 layers, got 2"):
        default_exits("cats", 2)
    for exits in ((3, 2), (1,), (0, 2), (1, 4), (2, 2)):
        with pytest.raises(ValueError, match=r"taps of 'cats' must be 2 ascending layers in \[1, 3\]"):
            check_exits("cats", exits, 4)


def test_a_small_corpus_is_learnt_to_a_high_acceptance(circle: tuple[Any, Path], tmp_path: Path) -> None:
    model, answers = circle
    progress = train_drafter(
        "kangaroo", model, answers=answers, folder=tmp_path / "w", settings=TrainingSettings(steps=30, evaluations=2),
        options=TrainOptions(rows=40, batch_rows=512, held_out=0.2, copy=False, taps=(1,)),
    )  # fmt: skip
    assert progress.history[0]["length"] < progress.best["length"] and progress.best["length"] > 4.5
    assert read_card(tmp_path / "w")["config"]["exits"] == [1]
