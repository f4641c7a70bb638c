"""Whole-text unrolling against drafting position by position, and what the trainer makes of the steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from adaptspec.drafters.cells import Cell, CellCache
from adaptspec.drafters.cells.recursion import Recursion
from adaptspec.training.batches import Batches
from adaptspec.training.losses import Objective, kl
from adaptspec.training.recipes import make_trainee
from adaptspec.training.step_losses import LossSettings, batch_loss, hits, targets_of
from adaptspec.training.unroll import CellRollout, ModelRollout

STEPS = 4
KINDS = ("eagle1", "eagle3", "griffin", "mtp1", "mtp3")


def slow(cell: Cell, embed: Any, tokens: torch.Tensor, states: list[torch.Tensor], start: int) -> list[torch.Tensor]:
    """Head inputs of steps 0, 1, ... for one row of one text: rows 0 .. start run one after another on the target's
    states, then the recursion goes on alone. A cell of one layer only."""
    cache = CellCache(1)
    inputs = []
    for i in range(start + 1):
        hidden = cell.fuse([state[i] for state in states])[None, None]
        head_input, hidden = cell(embed(tokens[i + 1])[None, None], hidden, positions=torch.tensor([[i]]), cache=cache)
    inputs.append(head_input[0, 0])
    for step in range(1, STEPS):
        token = tokens[start + 1 + step]
        position = torch.tensor([[start + step]])
        head_input, hidden = cell(embed(token)[None, None], hidden, positions=position, cache=cache, step=step)
        inputs.append(head_input[0, 0])
    return inputs


@pytest.fixture(scope="module")
def made(target: Any, store: Any) -> dict[str, Any]:
    """Every kind with random weights, and batches of packed texts for it."""
    found = {}
    for kind in KINDS:
        trainee = make_trainee(kind, target, seed=1, copy=False)
        found[kind] = (trainee, Batches(store, store.packs(), taps=trainee.taps, steps=STEPS, batch_rows=100))
    return found


def texts(store: Any, taps: tuple[int, ...], count: int) -> Any:
    """The first packs that hold several answers: their number in `packs()`, and text by text tokens and states."""
    for number, (part_number, place) in enumerate(store.packs()):
        part = store.parts[part_number]
        pack = part.packs[place]
        if len(pack.samples) < 2:
            continue
        for answer in range(len(pack.samples)):
            indices = part.starts[place] + pack.indices(answer)
            states = [
                torch.from_numpy(np.array(part.taps[tap])[indices].view(np.int16)).view(torch.bfloat16).float()
                for tap in taps
            ]
            yield number, torch.from_numpy(pack.token_ids[pack.indices(answer)]), states
        count -= 1
        if not count:
            return


@pytest.mark.parametrize("kind", KINDS)
def test_unrolling_equals_drafting_position_by_position(store: Any, made: dict[str, Any], kind: str) -> None:
    trainee, batches = made[kind]
    rollout = trainee.rollout
    cell, embed = rollout.cell, rollout.embed
    compared = 0
    with torch.no_grad():
        for number, tokens, states in texts(store, trainee.taps, 2):
            batch = batches.make([number])
            steps = [step.head_input[0] for step in rollout.steps(batch, STEPS)]
            for start in range(1 + cell.config.num_layers, len(tokens) - 1 - STEPS, 3):
                read = batch.tokens[0]
                wanted = tokens[start + 1 : start + 1 + STEPS]
                mine = ((batch.positions[0] == start) & (read == wanted).all(dim=1)).nonzero()[:, 0]
                assert len(mine)
                if cell.config.num_layers == 1:
                    expected = slow(cell, embed, tokens, states, start)
                else:
                    recursion = Recursion(cell, embed)
                    features = {tap: state[: start + 1] for tap, state in zip(trainee.taps, states, strict=True)}
                    recursion.push(tokens[1 : start + 2].numpy(), features)
                    recursion.settle()
                    expected = [recursion.root()[0]]
                    for step in range(1, STEPS):
                        token = tokens[start + 1 + step : start + 2 + step].numpy()
                        expected.append(recursion.draft(token, np.array([step - 1]))[-1])
                for step in range(STEPS):
                    assert torch.allclose(steps[step][mine[0]], expected[step], atol=2e-4), (kind, start, step)
                compared += 1
    assert compared > 8


@pytest.mark.parametrize("fault", ["position", "diagonal"])
def test_the_comparison_would_notice_a_fault(store: Any, made: dict[str, Any], fault: str) -> None:
    trainee, batches = made["eagle3"]
    number, tokens, states = next(iter(texts(store, trainee.taps, 1)))
    batch = batches.make([number])
    cell = trainee.rollout.cell
    original = cell.forward

    def faulty(embeddings: Any, hidden: Any, *, positions: Any, mask: Any, cache: Any, step: int) -> Any:
        if fault == "position":
            positions = positions - step
        elif step:
            rows = mask.shape[2]
            mask = torch.cat([mask[..., :rows], mask[..., :rows].repeat(1, 1, 1, step)], dim=3)
        return original(embeddings, hidden, positions=positions, mask=mask, cache=cache, step=step)

    start = 4
    with torch.no_grad():
        right = slow(cell, trainee.rollout.embed, tokens, states, start)[2]
        row = int((batch.positions[0] == start).nonzero()[0])
        cell.forward = faulty
        try:
            wrong = list(trainee.rollout.steps(batch, STEPS))[2].head_input[0, row]
        finally:
            del cell.forward
    assert not torch.allclose(wrong, right, atol=1e-3)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_heads_read_what_their_own_forward_reads(target: Any, store: Any, kind: str) -> None:
    trainee = make_trainee(kind, target, seed=1)
    module = trainee.rollout.module
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
        batches = Batches(store, store.packs(), taps=trainee.taps, steps=STEPS)
        for number, tokens, states in texts(store, trainee.taps, 1):
            hidden = target.model.norm(states[0])[None]
            embedded = target.get_input_embeddings()(tokens)[None]
            expected = module(hidden) if kind == "medusa" else module(hidden, embedded)
            batch = batches.make([number])
            for step, found in enumerate(trainee.rollout.steps(batch, STEPS)):
                for start in range(1, len(tokens) - 1 - STEPS):
                    wanted = tokens[start + 1 : start + 1 + STEPS]
                    mine = (batch.positions[0] == start) & (batch.tokens[0] == wanted).all(dim=1)
                    assert torch.allclose(found.head_input[0][mine][0], expected[step][0, start], atol=1e-4)


def test_a_draft_model_reads_the_whole_text(target: Any, store: Any) -> None:
    rollout = ModelRollout(target)
    batches = Batches(store, store.packs(), taps=(), steps=1, first=rollout.first)
    with torch.no_grad():
        for number, tokens, _ in texts(store, (), 1):
            batch = batches.make([number])
            found = next(rollout.steps(batch, 1)).head_input[0] @ target.get_output_embeddings().weight.T
            expected = target(input_ids=tokens[None]).logits[0]
            for position in range(len(tokens) - 2):
                mine = (batch.positions[0] == position - 1) & (batch.tokens[0, :, 0] == tokens[position])
                difference = (found[mine] - expected[position]).abs().amax(dim=1)
                assert difference.min() < 1e-3
    with pytest.raises(ValueError, match="one step, got 2"):
        next(rollout.steps(batch, 2))


def test_the_loss_is_the_decayed_sum_of_weighted_means(target: Any, store: Any, made: dict[str, Any]) -> None:
    trainee, batches = made["eagle3"]
    head = target.get_output_embeddings().weight.detach()[torch.from_numpy(store.rows)]
    batch = batches.make([0, 1])
    loss, means = batch_loss(
        trainee.rollout, batch, head=head, settings=LossSettings(Objective("kl"), STEPS, decay=0.5)
    )
    expected = 0.0
    with torch.no_grad():
        for number, step in enumerate(trainee.rollout.steps(batch, STEPS)):
            above = below = 0.0
            for b, r in (batch.weights[:, :, number] > 0).nonzero().tolist():
                place = (torch.tensor([b]), torch.tensor([r]))
                value = kl(step.head_input[b, r][None] @ head.T, targets_of(batch, number, place))
                above += float(value) * float(batch.weights[b, r, number])
                below += float(batch.weights[b, r, number])
            assert means[number] == pytest.approx(above / below, rel=1e-4)
            expected += 0.5**number * above / below
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)


def test_aligned_rows_end_where_the_draft_would_have(target: Any, store: Any, made: dict[str, Any]) -> None:
    trainee, batches = made["griffin"]
    head = target.get_output_embeddings().weight.detach()[torch.from_numpy(store.rows)]
    batch = batches.make([0, 1, 2, 3, 4])
    settings = LossSettings(Objective("ce"), 3, decay=1.0, aligned=True)
    _, means = batch_loss(trainee.rollout, batch, head=head, settings=settings)
    with torch.no_grad():
        going = torch.ones(batch.weights.shape[:2], dtype=torch.bool)
        for number, step in enumerate(trainee.rollout.steps(batch, 3)):
            rows = (batch.weights[:, :, number] > 0) & going
            logits = (step.head_input @ head.T)[rows]
            labels = batch.labels[:, :, number][rows]
            loss = torch.nn.functional.cross_entropy(logits, labels.clamp(min=0), reduction="none") * (labels >= 0)
            weight = batch.weights[:, :, number][rows]
            assert means[number] == pytest.approx(float((loss * weight).sum() / weight.sum()), rel=1e-4)
            kept = torch.stack(
                [(row.topk(3).indices == label).any() for row, label in zip(logits, labels, strict=True)]
            )
            assert number or 0 < kept.sum() < len(kept)
            going[rows] = kept
    assert torch.equal(hits(logits, labels, count=3), kept)


def test_the_target_is_never_trained(target: Any, store: Any) -> None:
    before = {name: value.clone() for name, value in target.state_dict().items()}
    for kind, loss in (("eagle1", "feature"), ("griffin", "griffin"), ("medusa", "kl"), ("mtp1", "ce")):
        trainee = make_trainee(kind, target, seed=0)
        batches = Batches(store, store.packs(), taps=trainee.taps, steps=2, next_features=True)
        head = target.get_output_embeddings().weight.detach()[torch.from_numpy(store.rows)]
        batch = batches.make([0])
        value, _ = batch_loss(trainee.rollout, batch, head=head, settings=LossSettings(Objective(loss), 2))
        value.backward()
        used = [parameter for parameter in trainee.rollout.module.parameters() if parameter.grad is not None]
        assert used and all(torch.isfinite(parameter.grad).all() for parameter in used)
    assert all(parameter.grad is None for parameter in target.parameters())
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


def test_the_feature_that_is_wanted_is_the_next_one(target: Any, store: Any) -> None:
    trainee = make_trainee("eagle1", target, seed=0)
    batches = Batches(store, store.packs(), taps=trainee.taps, steps=2, next_features=True)
    number, tokens, states = next(iter(texts(store, trainee.taps, 1)))
    batch = batches.make([number])
    wanted = target.model.norm(states[0])
    for step in range(2):
        found = trainee.rollout.target_feature(batch, step)[0]
        assert torch.allclose(found[:3], wanted[1 + step : 4 + step], atol=1e-5)
    other = make_trainee("eagle3", target, seed=0).rollout
    assert isinstance(other, CellRollout)
    with pytest.raises(ValueError, match="predicts no hidden states"):
        other.target_feature(batch, 0)


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="steps must be >= 1, got 0"):
        LossSettings(Objective("kl"), 0)
    with pytest.raises(ValueError, match=r"decay must be in \(0, 1\], got 0"):
        LossSettings(Objective("kl"), 1, decay=0.0)
