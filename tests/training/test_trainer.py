"""Training runs on a small target: they learn, they can be killed, and they say what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adaptspec.drafters.cell_weights import load_cell
from adaptspec.pretrained import load_weights, read_card
from adaptspec.target.hf import HFTarget
from adaptspec.training.batches import Batches
from adaptspec.training.evaluate import evaluate
from adaptspec.training.optimisers import Muon, Optimisers, orthogonal, rate_factor
from adaptspec.training.recipes import RECIPES, make_trainee
from adaptspec.training.trainer import CHECKPOINT, TrainingSettings
from adaptspec.training.training import TrainOptions, train_drafter
from tests import tiny_models

OPTIONS = TrainOptions(rows=48, batch_rows=256, held_out=0.2)


@pytest.mark.parametrize(
    ("kind", "steps", "least"),
    [("eagle1", 40, 1.9), ("eagle3", 40, 3.5), ("griffin", 40, 2.5), ("mtp1", 40, 3.5), ("mtp3", 40, 3.5)]
    + [("medusa", 60, 3.0), ("hydra", 40, 3.5)],
)
def test_a_small_corpus_is_learnt_to_a_high_acceptance(
    circle: tuple[Any, Path], tmp_path: Path, kind: str, steps: int, least: float
) -> None:
    model, answers = circle
    settings = TrainingSettings(steps=steps, evaluations=2, lr=0.2 if kind == "medusa" else 0.02)
    fresh = TrainOptions(rows=40, batch_rows=512, held_out=0.2, copy=False)
    progress = train_drafter(kind, model, answers=answers, folder=tmp_path / kind, settings=settings, options=fresh)
    first, best = progress.history[0], progress.best
    assert first["length"] < least < best["length"] <= best["length8"]
    assert best["top1"][0] > 0.9 and all(
        one <= three <= eight for one, three, eight in zip(best["top1"], best["top3"], best["top8"], strict=True)
    )
    card = read_card(tmp_path / kind)
    assert card["kind"] == RECIPES[kind].cell or kind
    assert card["held_out"] == best and card["answers"]["tokens"] == 320 and card["steps"] == steps
    assert not (tmp_path / kind / CHECKPOINT).exists()


def test_trained_weights_are_read_by_the_drafter(circle: tuple[Any, Path], tmp_path: Path) -> None:
    model, answers = circle
    settings = TrainingSettings(steps=2)
    train_drafter(
        "eagle3", model, answers=answers, folder=tmp_path / "w", settings=settings, features=tmp_path / "features"
    )
    weights = load_cell(tmp_path / "w", name="eagle3", kind="eagle3", shipped="eagle3", target=HFTarget(model))
    assert weights.card["loss"]["name"] == "kl" and weights.card["answers"]["origin"]["model"] == "circle"
    other = tiny_models.make_llama(layers=3, seed=9)
    with pytest.raises(ValueError, match="was not trained for this target"):
        load_cell(tmp_path / "w", name="eagle3", kind="eagle3", shipped="eagle3", target=HFTarget(other))


class Killed(Exception):
    pass


@pytest.mark.parametrize(("kind", "optimiser"), [("eagle3", "muon"), ("griffin", "adamw")])
def test_a_killed_run_goes_on_bit_for_bit(
    target: Any, answers_folder: Path, tmp_path: Path, kind: str, optimiser: str
) -> None:
    settings = TrainingSettings(
        steps=9, evaluations=3, checkpoint_seconds=1e-9, optimiser=optimiser, lr=0.01, patience=9
    )

    def run(folder: Path, kill_at: int | None) -> Any:
        def report(progress: Any, share: float) -> None:
            if progress.step == kill_at:
                raise Killed

        return train_drafter(
            kind, target, answers=answers_folder, folder=folder, settings=settings, options=OPTIONS,
            features=tmp_path / "features", report=report,
        )  # fmt: skip

    whole = run(tmp_path / "whole", None)
    for kill_at in (2, 5):
        with pytest.raises(Killed):
            run(tmp_path / "parts", kill_at)
        assert (tmp_path / "parts" / CHECKPOINT).is_file()
    parts = run(tmp_path / "parts", None)
    left, right = load_weights(tmp_path / "whole")[0], load_weights(tmp_path / "parts")[0]
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
    assert (whole.step, whole.positions, whole.loss) == (parts.step, parts.positions, parts.loss)
    times = ("seconds",)
    assert [{k: v for k, v in check.items() if k not in times} for check in whole.history] == [
        {k: v for k, v in check.items() if k not in times} for check in parts.history
    ]


def test_a_checkpoint_of_another_run_is_refused(target: Any, answers_folder: Path, tmp_path: Path) -> None:
    def run(seed: int = 0, **change: Any) -> None:
        def report(progress: Any, share: float) -> None:
            raise Killed

        train_drafter(
            "mtp1", target, answers=answers_folder, folder=tmp_path / "w", features=tmp_path / "features",
            settings=TrainingSettings(steps=4, seed=seed, checkpoint_seconds=1e-9),
            options=TrainOptions(**{"rows": 48, "held_out": 0.2, **change}), report=report,
        )  # fmt: skip

    with pytest.raises(Killed):
        run()
    with pytest.raises(ValueError, match="is of a run with loss"):
        run(loss="kl")
    with pytest.raises(ValueError, match="is of a run with settings"):
        run(seed=1)
    (tmp_path / "w" / CHECKPOINT).write_bytes(b"half")
    with pytest.raises(ValueError, match="is damaged"):
        run()


def test_early_stop_keeps_the_best_weights(target: Any, answers_folder: Path, tmp_path: Path) -> None:
    settings = TrainingSettings(steps=400, evaluations=200, patience=2, lr=3.0)  # far too fast: it gets worse
    progress = train_drafter(
        "eagle3", target, answers=answers_folder, folder=tmp_path / "w", settings=settings, options=OPTIONS,
        features=tmp_path / "features",
    )  # fmt: skip
    assert progress.step < 400 and progress.stale == 2
    scores = [0.5 * (check["length"] + check["length8"]) for check in progress.history]
    assert max(scores) == pytest.approx(progress.best_score, abs=1e-3) and scores.index(max(scores)) == len(scores) - 3


def test_a_loss_that_is_no_number_is_an_error(
    target: Any, answers_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Batches.make

    def broken(self: Batches, members: Any) -> Any:
        batch = make(self, members)
        if self.prompt_weight:
            batch.features[0][0, 0] = float("nan")
        return batch

    monkeypatch.setattr(Batches, "make", broken)
    with pytest.raises(ValueError, match=r"the loss became nan at step 0 .*lower lr"):
        train_drafter(
            "medusa", target, answers=answers_folder, folder=tmp_path / "w", settings=TrainingSettings(steps=3),
            options=OPTIONS, features=tmp_path / "features",
        )  # fmt: skip


def test_held_out_figures_by_hand(target: Any, store: Any) -> None:
    trainee = make_trainee("eagle3", target, seed=2)
    batches = Batches(store, store.packs()[:6], taps=trainee.taps, steps=3, prompt_weight=0.0)
    head = target.get_output_embeddings().weight.detach()[torch.from_numpy(store.rows)]
    row_of = torch.full((64,), -1, dtype=torch.long)
    row_of[torch.from_numpy(store.rows)] = torch.arange(len(store.rows))
    found = evaluate(trainee.rollout, batches.all(), head=head, row_of=row_of, depth=3)
    shares, total, chain = np.zeros((3, 3)), np.zeros(3), 0
    with torch.no_grad():
        for batch in batches.all():
            steps = [step.head_input @ head.T for step in trainee.rollout.steps(batch, 3)]
            for b, r in (batch.weights[:, :, 0] > 0).nonzero().tolist():
                going = True
                for k in range(3):
                    if batch.weights[b, r, k] == 0:
                        break
                    best = store.rows[steps[k][b, r].topk(8).indices.numpy()].tolist()
                    wanted = int(batch.argmax[b, r, k])
                    shares[:, k] += [wanted in best[:count] for count in (1, 3, 8)]
                    total[k] += 1
                    going = going and wanted == best[0]
                    chain += going
    assert found.positions == total[0]
    assert np.allclose([found.top1, found.top3, found.top8], shares / total)
    assert found.length == pytest.approx(1 + chain / total[0])
    assert all(0.0 < value <= 1.0 for value in found.alpha)


def test_muon_moves_along_orthogonal_directions() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((6, 6), (8, 3), (3, 8)):
        gradient = torch.randn(shape, generator=generator)
        values = torch.linalg.svdvals(orthogonal(gradient))
        assert values.min() > 0.5 and values.max() < 1.3
        left, _, right = torch.linalg.svd(gradient, full_matrices=False)
        assert torch.linalg.matrix_norm(left.T @ orthogonal(gradient) @ right.T - torch.diag(values)) < 1.5
        weight = torch.nn.Parameter(torch.zeros(shape))
        weight.grad = gradient
        Muon([weight], lr=0.1).step()
        expected = -0.1 * max(1.0, shape[0] / shape[1]) ** 0.5 * orthogonal(gradient)
        assert torch.allclose(weight.detach(), expected, atol=1e-5)
    with pytest.raises(ValueError, match="Muon takes matrices"):
        Muon([torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="optimiser must be 'muon' or 'adamw', got 'sgd'"):
        Optimisers(torch.nn.Linear(2, 2), kind="sgd")


def test_the_rate_rises_and_falls() -> None:
    rates = [rate_factor(i / 100) for i in range(101)]
    assert max(rates) == pytest.approx(1.0) and rates.index(max(rates)) == 5
    assert rates[:6] == sorted(rates[:6]) and rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] == pytest.approx(0.02)


def test_a_copied_layer_starts_nearer_to_the_target(circle: tuple[Any, Path], tmp_path: Path) -> None:
    model, answers = circle
    lengths = {}
    for copy in (True, False):
        progress = train_drafter(
            "eagle3", model, answers=answers, folder=tmp_path / str(copy), settings=TrainingSettings(steps=1),
            options=TrainOptions(rows=40, held_out=0.2, copy=copy), features=tmp_path / "features",
        )  # fmt: skip
        lengths[copy] = progress.loss
    assert lengths[True] != lengths[False]
    cell = make_trainee("eagle3", model, scale=1.0).rollout.module
    last = model.model.layers[-1]
    assert torch.equal(cell.midlayer.self_attn.q_proj.weight[:, 32:], last.self_attn.q_proj.weight)
    assert torch.equal(cell.midlayer.mlp.down_proj.weight, last.mlp.down_proj.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"minutes": 1.0}, "either minutes or steps"),
        ({"steps": 0}, "steps must be >= 1, got 0"),
        ({"steps": None, "minutes": 0.0}, "minutes must be > 0"),
        ({"lr": 0.0}, "lr must be > 0"),
        ({"patience": 0}, "patience must be >= 1"),
        ({"precision": "bfloat"}, "unknown precision 'bfloat'; did you mean 'bfloat16'"),
    ],
)
def test_bad_settings(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingSettings(**{"steps": 5, **change})


def test_bad_kinds_and_folders(target: Any, answers_folder: Path, tmp_path: Path) -> None:
    settings = TrainingSettings(steps=1)
    with pytest.raises(ValueError, match="unknown kind of drafter 'eagel3'; did you mean 'eagle3'"):
        train_drafter("eagel3", target, answers=answers_folder, folder=tmp_path / "w", settings=settings)
    with pytest.raises(ValueError, match="holds no answers"):
        train_drafter("eagle3", target, answers=tmp_path, folder=tmp_path / "w", settings=settings)
    with pytest.raises(ValueError, match="needs a drafter that predicts hidden states"):
        train_drafter(
            "medusa", target, answers=answers_folder, folder=tmp_path / "w", settings=settings,
            features=tmp_path / "features", options=TrainOptions(rows=48, loss="feature"),
        )  # fmt: skip


@pytest.mark.parametrize("kind", sorted(set(RECIPES) - {"treeflash", "taps"}))
def test_products_in_bfloat16_learn_what_float32_learns(circle: tuple[Any, Path], tmp_path: Path, kind: str) -> None:
    model, answers = circle

    def trained(precision: str) -> Any:
        settings = TrainingSettings(steps=6, evaluations=2, precision=precision)
        return train_drafter(
            kind, model, answers=answers, folder=tmp_path / precision, settings=settings,
            options=TrainOptions(rows=40, batch_rows=512, held_out=0.2),
        )  # fmt: skip

    plain, rounded = trained("float32"), trained("bfloat16")
    assert rounded.loss == pytest.approx(plain.loss, rel=0.1)
    assert rounded.loss != plain.loss
    assert rounded.best["length"] == pytest.approx(plain.best["length"], abs=0.3)
    weights, _ = load_weights(tmp_path / "bfloat16")
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())


def test_the_last_check_is_in_float32(circle: tuple[Any, Path], tmp_path: Path) -> None:
    model, answers = circle
    settings = TrainingSettings(steps=3, evaluations=1, precision="bfloat16")
    progress = train_drafter(
        "mtp1", model, answers=answers, folder=tmp_path, settings=settings, options=TrainOptions(rows=40, held_out=0.2)
    )
    checked = [check for check in progress.history if check["length"] == progress.best["length"]]
    assert read_card(tmp_path)["held_out"] == progress.best
    assert all(check["alpha"] != progress.best["alpha"] for check in checked)
