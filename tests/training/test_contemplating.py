"""ConFu's training: the same future tokens and the same recursion as in drafting, and gradients where they belong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adaptspec.drafters.cell_weights import save_cell, target_fingerprint
from adaptspec.drafters.cells import Cell
from adaptspec.drafters.confu import ConFu
from adaptspec.target.hf import HFTarget
from adaptspec.training.batches import Batch, Batches
from adaptspec.training.losses import Objective
from adaptspec.training.recipes import load_start, make_trainee
from adaptspec.training.step_losses import LossSettings, batch_loss
from adaptspec.types import DraftContext, PairedRows, Sampling
from tests import tiny_models
from tests.drafters.cell_cases import tiny_confu_cell

STEPS = 3


@pytest.fixture
def trainee(target: Any) -> Any:
    """ConFu whose future tokens matter."""
    made = make_trainee("confu", target, seed=1)
    with torch.no_grad():
        made.rollout.module.future_proj.weight.normal_(std=0.2, generator=torch.Generator().manual_seed(0))
    return made


def batch_of(store: Any, trainee: Any, members: list[int]) -> Batch:
    return Batches(store, store.packs(), taps=trainee.taps, steps=STEPS).make(members)


def text_behind(batch: Batch, row: int) -> list[int]:
    """The tokens that a row of the first text stands behind, its own included."""
    seen = batch.mask[0, row].nonzero()[:, 0]
    by_position = {int(batch.positions[0, i]): int(batch.own[0, i]) for i in seen}
    return [by_position[position] for position in range(len(by_position))]


def some_rows(batch: Batch) -> list[int]:
    counted = (batch.weights[0].amin(dim=1) > 0).nonzero()[:, 0].tolist()
    return [counted[0], counted[len(counted) // 2], counted[-1]]


def test_futures_are_those_of_drafting(target: Any, store: Any, trainee: Any) -> None:
    cell = trainee.rollout.module.eval()
    batch = batch_of(store, trainee, [0, 3])
    rows, known = trainee.rollout.anchors(batch)
    assert known.all() and rows.shape == batch.own.shape
    found = trainee.rollout.futures(batch, rows).detach()

    def vectors(tokens: np.ndarray) -> torch.Tensor:
        return cell.contemplate(target.get_input_embeddings()(torch.from_numpy(tokens)))

    judge = HFTarget(target)
    judge.tap((4,))
    for row in some_rows(batch):
        text = text_behind(batch, row)
        judge.prefill(torch.tensor(text))
        wanted = judge.paired(text[-1], PairedRows(cell.soft_prompts.weight, vectors, 4))
        assert torch.allclose(found[0, row], wanted, atol=1e-4)
    others = trainee.rollout.futures(batch, rows.flip(1)).detach().flip(1)
    assert torch.allclose(others, found, atol=1e-5), "contemplate tokens must not see each other"


def test_a_draft_is_what_the_recursion_in_training_says(target: Any, store: Any, trainee: Any) -> None:
    trainee.rollout.module.eval()
    batch = batch_of(store, trainee, [0])
    with torch.no_grad():
        steps = [step.head_input[0] for step in trainee.rollout.steps(batch, STEPS)]
    head = target.get_output_embeddings().weight.detach()
    for row in some_rows(batch):
        judge, drafter = HFTarget(target), ConFu(trainee.rollout.module, tree="chain", max_depth=STEPS)
        drafter.bind(judge)
        judge.tap(drafter.needs.taps)
        text = text_behind(batch, row)
        features = {
            tap: states.to(torch.bfloat16).float()  # as they are stored
            for tap, states in judge.prefill(torch.tensor(text)).features.items()
        }
        root = int(batch.tokens[0, row, 0])
        drafter.prefill(np.array([*text, root]), features)
        context = DraftContext(root, len(text) + 1, 64, Sampling(), np.random.default_rng(0))
        fed = batch.tokens[0, row, 1:].numpy()
        q = drafter.draft_probs_along(context, np.append(fed, 0))
        for step in range(STEPS):
            wanted = torch.softmax(steps[step][row] @ head.T, dim=-1).numpy()
            assert np.abs(q[step] - wanted).max() < 2e-3


def test_anchors_are_a_function_of_the_batch(store: Any, trainee: Any) -> None:
    trainee.rollout.module.train()
    batch = batch_of(store, trainee, [0, 1])
    rows, known = trainee.rollout.anchors(batch)
    again, _ = trainee.rollout.anchors(batch)
    assert torch.equal(rows, again) and rows.shape[1] == max(1, round(0.25 * batch.own.shape[1]))
    assert torch.equal(known, (batch.weights[:, :, 0] > 0).gather(1, rows)) and known.any()
    other, _ = trainee.rollout.anchors(batch_of(store, trainee, [2, 1]))
    assert other.shape != rows.shape or not torch.equal(other, rows)


def test_gradients_reach_what_contemplates_and_leave_the_target_alone(target: Any, store: Any, trainee: Any) -> None:
    before = {name: value.clone() for name, value in target.state_dict().items()}
    module = trainee.rollout.module.train()
    head = target.get_output_embeddings().weight.detach()[torch.from_numpy(store.rows)]
    batch = batch_of(store, trainee, [0, 1])
    settings = LossSettings(Objective("kl"), STEPS)
    loss, _ = batch_loss(trainee.rollout, batch, head=head, settings=settings)
    loss.backward()
    for name in ("soft_prompts.weight", "contemplates.weight", "router.weight", "future_proj.weight"):
        gradient = dict(module.named_parameters())[name].grad
        assert gradient is not None and torch.isfinite(gradient).all() and gradient.abs().sum() > 0, name
    assert all(parameter.grad is None and parameter.requires_grad for parameter in target.parameters())
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


def test_it_begins_as_the_eagle3_cell_that_it_starts_from(target: Any, store: Any, tmp_path: Path) -> None:
    eagle = make_trainee("eagle3", target, seed=5)
    eagle.save(tmp_path / "eagle3", {"steps": 1})
    start = load_start("confu", tmp_path / "eagle3", target, seed=2)
    trainee = make_trainee("confu", target, start=start)
    stored = load_start("eagle3", tmp_path / "eagle3", target)
    batch = batch_of(store, trainee, [0])
    with torch.no_grad():
        for ours, theirs in zip(
            trainee.rollout.steps(batch, 2), make_trainee("eagle3", target, start=stored).rollout.steps(batch, 2),
            strict=True,
        ):  # fmt: skip
            assert torch.equal(ours.head_input, theirs.head_input)
    trainee.save(tmp_path / "confu", {"steps": 1})
    again = load_start("confu", tmp_path / "confu", target)
    assert again.config == start.config and again.config.kind == "confu"


def test_bad_starts(target: Any, tmp_path: Path) -> None:
    identity = target_fingerprint(target)
    cell: Cell = tiny_confu_cell()
    save_cell(tmp_path / "confu", cell, target=identity, card={})
    make_trainee("griffin", target).save(tmp_path / "griffin", {})
    with pytest.raises(ValueError, match="start of 'confu' must be a cell of kind 'confu' or 'eagle3', got 'griffin'"):
        load_start("confu", tmp_path / "griffin", target)
    with pytest.raises(ValueError, match="a cell of kind 'confu', eagle3 needs 'eagle3'"):
        load_start("eagle3", tmp_path / "confu", target)
    with pytest.raises(ValueError, match="start is for kinds with a cell, not for 'medusa'"):
        load_start("medusa", tmp_path / "confu", target)
    with pytest.raises(ValueError, match="not trained for this target"):
        load_start("confu", tmp_path / "confu", tiny_models.make_llama(layers=4))
