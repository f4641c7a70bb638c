"""Training of block-parallel drafters: rows and blocks are those of drafting, small modules learn on a frozen backbone,
and a killed run goes on as if it had not been."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adaptspec.drafters import make_drafter
from adaptspec.drafters.block import BlockContext
from adaptspec.drafters.block.scorer import edge_log_probs
from adaptspec.drafters.block.weights import backbone_fingerprint, load_backbone, save_backbone
from adaptspec.drafters.cell_weights import target_fingerprint
from adaptspec.pretrained import load_weights, read_card
from adaptspec.target.hf import HFTarget
from adaptspec.training.batches import Batches
from adaptspec.training.block_recipes import make_initial_backbone
from adaptspec.training.block_rollouts import (
    SIBLINGS,
    BlockRollout,
    PrefixRollout,
    TransitionRollout,
    draw_anchors,
    run_blocks,
)
from adaptspec.training.losses import Objective
from adaptspec.training.recipes import make_trainee
from adaptspec.training.step_losses import LossSettings, batch_loss
from adaptspec.training.trainer import CHECKPOINT, TrainingSettings
from adaptspec.training.training import TrainOptions, train_drafter
from adaptspec.types import DraftTree
from tests import tiny_models
from tests.drafters.block_cases import BLOCK, tiny_backbone, tiny_block

OPTIONS = TrainOptions(rows=40, batch_rows=512, held_out=0.2, copy=False)


class Killed(Exception):
    pass


def batches(store: Any, taps: tuple[int, ...], steps: int = BLOCK - 1) -> Batches:
    return Batches(store, store.packs()[:6], taps=taps, steps=steps)


@pytest.mark.parametrize("changes", [{}, {"mask_token_id": 3, "qk_norm": True, "sliding_window": 4}])
def test_blocks_of_training_are_those_of_drafting(target: Any, store: Any, changes: dict[str, Any]) -> None:
    """An anchor's block, against a request that ends there."""
    backbone = tiny_backbone(**changes)
    embed = target.get_input_embeddings()
    seen = 0
    for batch in batches(store, backbone.config.taps).all():
        with torch.no_grad():
            blocks = run_blocks(backbone, embed, batch, count=BLOCK - 1)
        for pack in range(len(blocks.anchors)):
            for anchor, valid, hidden in zip(
                blocks.anchors[pack], blocks.valid[pack], blocks.hidden[pack], strict=True
            ):
                rows = batch.mask[pack, anchor].nonzero()[:, 0]
                if not valid:
                    continue
                assert batch.weights[pack, anchor, 0] > 0 and rows[-1] == anchor
                request = BlockContext(backbone, embed)
                features = dict(zip(backbone.config.taps, (tap[pack, rows] for tap in batch.features), strict=True))
                request.push(features, count=len(rows))
                request.settle()
                assert torch.allclose(request.draft(int(batch.tokens[pack, anchor, 0])), hidden, atol=2e-5)
                seen += 1
    assert seen > 10


def test_anchors_follow_the_draw_alone(store: Any) -> None:
    batch = next(iter(batches(store, (4,)).all()))
    first, again = (draw_anchors(replace(batch, draw=(0, 5))) for _ in range(2))
    other = draw_anchors(replace(batch, draw=(0, 6)))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    for anchors, valid in zip(*first, strict=True):
        chosen = anchors[valid].tolist()
        assert len(set(chosen)) == len(chosen) > 0


def rollout_of(kind: str, target: Any, store: Any) -> Any:
    model, embeddings = tiny_block(kind), target.get_input_embeddings().weight.detach()
    embed = partial(torch.nn.functional.embedding, weight=embeddings)
    if kind == "dflash":
        return BlockRollout(model, embed)
    if kind == "treeflash":
        return TransitionRollout(model, embed)
    return PrefixRollout(model, embed, rows=torch.from_numpy(store.rows))


@pytest.mark.parametrize("kind", ["dflash", "treeflash", "taps"])
def test_only_what_is_trained_gets_gradients(kind: str, target: Any, store: Any) -> None:
    rollout = rollout_of(kind, target, store)
    head = target.get_output_embeddings().weight.detach()[torch.from_numpy(store.rows)]
    batch = next(iter(batches(store, (1, 2, 4)).all()))
    settings = LossSettings(Objective("kl"), BLOCK - 1)
    loss, means = batch_loss(rollout, batch, head=head, settings=settings)
    loss.backward()
    assert len(means) == BLOCK - 1 and all(mean > 0 for mean in means)
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in rollout.module.parameters())
    if kind != "dflash":
        assert all(parameter.grad is None for parameter in rollout.model.model.parameters())
    with pytest.raises(ValueError, match=f"unroll must be at most {BLOCK - 1}"):
        list(rollout.steps(batch, BLOCK))


@pytest.mark.parametrize("kind", ["treeflash", "taps"])
def test_small_modules_begin_with_what_the_backbone_says(kind: str, target: Any, store: Any) -> None:
    rollout = rollout_of(kind, target, store)
    module = rollout.module
    last = [module.d.weight] if kind == "treeflash" else [module.score.weight, module.score.bias, module.other.weight]
    plain = BlockRollout(rollout.model.model, target.get_input_embeddings())
    head = target.get_output_embeddings().weight.detach()[torch.from_numpy(store.rows)]
    batch = next(iter(batches(store, (1, 2, 4)).all()))
    settings = LossSettings(Objective("kl"), BLOCK - 1)
    with torch.no_grad():
        expected = batch_loss(plain, batch, head=head, settings=settings)[1]
        assert not np.allclose(batch_loss(rollout, batch, head=head, settings=settings)[1], expected, atol=1e-3)
        for zero in last:
            zero.zero_()
        assert np.allclose(batch_loss(rollout, batch, head=head, settings=settings)[1], expected, atol=1e-4)


def test_edges_of_training_are_those_of_tries(target: Any, store: Any) -> None:
    """TAPS's distribution along a text, against what the drafter gets for a trie with the same siblings."""
    rows = torch.arange(64)
    model, embed, head = tiny_block("taps"), target.get_input_embeddings(), target.get_output_embeddings().weight
    rollout = PrefixRollout(model, embed, rows=rows)
    batch = next(iter(batches(store, (1, 2, 4)).all()))
    with torch.no_grad():
        blocks = run_blocks(model.model, embed, batch, count=BLOCK - 1)
        pack, place = next(zip(*blocks.valid.nonzero(as_tuple=True), strict=True))
        row = int(blocks.anchors[pack, place])
        normed = model.model.norm(blocks.hidden[pack, place])
        marginals = torch.log_softmax(normed @ head.T, -1)
        tokens, labels = batch.tokens.clone(), batch.labels.clone()
        nodes: list[tuple[int, int, float, int]] = []  # token, parent, marginal, rank
        levels, parent, path = [], -1, [0.0]
        for step in range(BLOCK - 1):
            width = SIBLINGS[(int(batch.positions[pack, row]) + step) % len(SIBLINGS)] if step else SIBLINGS[0]
            top = marginals[step].topk(width)
            levels.append((len(nodes), top.indices))
            chosen = min(1, width - 1)  # the text goes on with the second likeliest token where there is one
            labels[pack, row, step] = top.indices[chosen]
            if step + 1 < BLOCK - 1:
                tokens[pack, row, step + 1] = top.indices[chosen]
            found = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            nodes += [(token, parent, value, rank) for rank, (token, value) in enumerate(found)]
            parent = levels[-1][0] + chosen
        for _, above, value, _ in nodes:
            path.append(path[above + 1] + value)
        ids, parents, values, ranks = (np.array(column) for column in zip(*nodes, strict=True))
        trie = DraftTree(ids, parents, np.array(path[1:]), evidence={"rank": ranks.astype(float), "log_prob": values})
        expected = edge_log_probs(
            model.scorer,
            trie,
            children=embed(torch.from_numpy(ids)),
            parents=embed(torch.from_numpy(np.append(ids, int(tokens[pack, row, 0]))[parents])),
            hidden=normed,
            best=marginals.max(1).values.double().numpy(),
            entropy=-(marginals.exp() * marginals).sum(1).double().numpy(),
        )
        at = (torch.tensor([int(pack)]), torch.tensor([row]))
        steps = rollout.steps(replace(batch, tokens=tokens, labels=labels), BLOCK - 1)
        for step, (first, siblings) in zip(steps, levels, strict=True):
            q = torch.log_softmax(step.logits(at, head), -1)[0]
            assert q[siblings].numpy() == pytest.approx(expected[first : first + len(siblings)], abs=1e-3)


def test_a_new_backbone_reads_the_targets_last_layers(target: Any) -> None:
    trainee = make_trainee("dflash", target, seed=1)
    backbone, layer = trainee.rollout.module, target.model.layers[-1]
    assert trainee.taps == (1, 2) and backbone.config.block_size == 8 and backbone.config.tap_norm
    assert torch.equal(backbone.layers[-1].self_attn.q_proj.weight, layer.self_attn.q_proj.weight)
    assert torch.equal(backbone.layers[0].mlp.down_proj.weight, target.model.layers[-2].mlp.down_proj.weight)
    narrow = make_initial_backbone(
        replace(backbone.config, intermediate_size=16),
        parts=target_parts_of(target),
        layers=list(target.model.layers),
        seed=1,
    )
    columns = layer.mlp.down_proj.weight.norm(dim=0)
    assert narrow.layers[-1].mlp.down_proj.weight.norm(dim=0).sort().values.tolist() == pytest.approx(
        columns.sort().values[-16:].tolist()
    )
    state = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    context = backbone.fuse([torch.zeros_like(state), state])
    normed = layer.input_layernorm(state)
    assert torch.nn.functional.cosine_similarity(context, normed).min() > 0.97


def target_parts_of(model: Any) -> Any:
    from adaptspec.drafters.target_parts import target_parts

    return target_parts(HFTarget(model), drafter="a test")


@pytest.fixture(scope="module")
def learnt(circle: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a backbone that has learnt the circle, and how that went."""
    model, answers = circle
    folder = tmp_path_factory.mktemp("learnt") / "dflash"
    settings = TrainingSettings(steps=40, evaluations=1)
    return folder, train_drafter("dflash", model, answers=answers, folder=folder, settings=settings, options=OPTIONS)


def test_a_small_corpus_is_learnt_to_a_high_acceptance(learnt: tuple[Path, Any], circle: tuple[Any, Path]) -> None:
    folder, progress = learnt
    first, best = progress.history[0], progress.best
    assert first["length"] < 2.0 < 4.0 < best["length"] <= best["length8"]
    assert progress.loss < 6.0 and best["top1"][0] > 0.9  # a mean over the run, which begins at 15
    card = read_card(folder)
    assert card["kind"] == "dflash" and card["held_out"] == best and card["steps"] == 40
    assert not (folder / CHECKPOINT).exists()
    drafter = make_drafter(f"dflash:{folder}")
    drafter.bind(HFTarget(circle[0]))
    assert drafter.needs.taps == tuple(card["config"]["taps"])
    with pytest.raises(ValueError, match="was not trained for this target"):
        make_drafter(f"ddtree:{folder}").bind(HFTarget(tiny_models.make_llama(layers=3, seed=9)))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["treeflash", "taps"])
def test_small_modules_are_trained_on_it(
    kind: str, precision: str, learnt: tuple[Path, Any], circle: tuple[Any, Path], tmp_path: Path
) -> None:
    """TreeFlash on a backbone that knows nothing: the token before says what comes next. TAPS on one that is not sure
    enough of what it knows."""
    model, answers = circle
    backbone = tiny_backbone(taps=(1, 2), block_size=8)
    if kind == "taps":
        backbone = load_backbone(learnt[0])[0]
        with torch.no_grad():
            backbone.norm.weight.mul_(0.3)
    save_backbone(tmp_path / "dflash", backbone, target=target_fingerprint(model), card={}, bits=32)
    options = replace(OPTIONS, backbone=str(tmp_path / "dflash"))
    steps = 30 if kind == "treeflash" else 20
    settings = TrainingSettings(steps=steps, evaluations=1, lr=0.05, precision=precision)
    progress = train_drafter(kind, model, answers=answers, folder=tmp_path / kind, settings=settings, options=options)
    first, best = progress.history[0], progress.best
    assert best["alpha"][1] > first["alpha"][1] + 0.05 and best["alpha"][4] > first["alpha"][4] + 0.05
    tensors, card = load_weights(tmp_path / kind)
    assert card["backbone"] == backbone_fingerprint(tmp_path / "dflash") and "fc.weight" not in tensors
    drafter = make_drafter(f"{kind}:{tmp_path / kind}")  # finds its backbone beside it
    drafter.bind(HFTarget(model))
    (tmp_path / "dflash").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="give its folder with backbone="):
        make_drafter(f"{kind}:{tmp_path / kind}").bind(HFTarget(model))
    make_drafter(f"{kind}:{tmp_path / kind}", backbone=tmp_path / "elsewhere").bind(HFTarget(model))
    with pytest.raises(ValueError, match="was trained on the backbone"):
        make_drafter(f"{kind}:{tmp_path / kind}", backbone=learnt[0]).bind(HFTarget(model))


@pytest.mark.parametrize("kind", ["dflash", "taps"])
def test_a_killed_run_goes_on_bit_for_bit(
    kind: str, learnt: tuple[Path, Any], circle: tuple[Any, Path], tmp_path: Path
) -> None:
    model, answers = circle
    settings = TrainingSettings(steps=5, evaluations=2, checkpoint_seconds=1e-9, patience=9)
    options = OPTIONS if kind == "dflash" else replace(OPTIONS, backbone=str(learnt[0]))

    def run(folder: Path, kill_at: int | None, seed: int = 0) -> Any:
        def report(progress: Any, share: float) -> None:
            if progress.step == kill_at:
                raise Killed

        return train_drafter(
            kind, model, answers=answers, folder=folder, settings=replace(settings, seed=seed), options=options,
            report=report,
        )  # fmt: skip

    whole = run(tmp_path / "whole", None)
    with pytest.raises(Killed):
        run(tmp_path / "parts", 3)
    assert (tmp_path / "parts" / CHECKPOINT).is_file()
    parts = run(tmp_path / "parts", None)
    left, right = load_weights(tmp_path / "whole")[0], load_weights(tmp_path / "parts")[0]
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
    assert (whole.step, whole.positions, whole.loss) == (parts.step, parts.positions, parts.loss)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("treeflash", {}, "treeflash is trained on a backbone; none is shipped"),
        ("taps", {"backbone": "nowhere"}, "backbone must be a folder of `adaptspec train dflash`, got nowhere"),
        ("dflash", {"backbone": "x"}, "backbone is an option of treeflash and taps, not of 'dflash'"),
        ("medusa", {"backbone": "x"}, "backbone is an option of treeflash and taps, not of 'medusa'"),
        ("dflash", {"unroll": 8}, "unroll must be at most 7, the places of a block, got 8"),
        ("dflash", {"loss": "feature"}, "this loss needs a drafter that predicts hidden states"),
    ],
)
def test_bad_options(
    circle: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any],
    message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("adaptspec.training.block_recipes.shipped_folder", lambda name: None)
    with pytest.raises(ValueError, match=message):
        train_drafter(
            kind, circle[0], answers=circle[1], folder=tmp_path / "w", settings=TrainingSettings(steps=1),
            options=replace(OPTIONS, **options),
        )  # fmt: skip
