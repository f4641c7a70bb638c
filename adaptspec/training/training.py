"""A whole training run: answers, features, drafter, trainer, weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adaptspec.target.layout import inspect_model
from adaptspec.training.batches import Batches, split_held_out
from adaptspec.training.corpus import answer_tokens, read_answers, read_description
from adaptspec.training.feature_store import FeatureStore
from adaptspec.training.features import prepare_features
from adaptspec.training.losses import Objective
from adaptspec.training.recipes import Recipe, Trainee, load_start, make_trainee, needed_taps, recipe
from adaptspec.training.step_losses import LossSettings
from adaptspec.training.trainer import CHECKPOINT, Progress, Trainer, TrainingSettings


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What a user decides about a run besides its length; None: as the recipe of the kind says.

    Attributes:
        loss, eta: see `Objective`.
        unroll: steps trained.
        decay: of later steps.
        rows: of the output matrix in training.
        intermediate: units of a cell's MLP, by default as many as the target's layers have.
        taps: of "eagle3", "confu", "kangaroo" and "cats".
        start: weights to go on from, see `load_start`; they say the taps.
        frozen: train only what "confu" adds to the cell that it starts with.
        backbone: folder that "treeflash" and "taps" are trained on, the shipped one by default.
        copy: begin as the target's last layer.
        batch_rows: padded rows per batch.
        prompt_weight: of rows that predict prompt tokens.
        held_out: share of prompts.
        held_out_texts: most packs looked at per check.
    """

    loss: str | None = None
    eta: float = 3.0
    unroll: int | None = None
    decay: float = 0.8
    rows: int = 8192
    intermediate: int | None = None
    taps: tuple[int, ...] | None = None
    start: str | None = None
    frozen: bool = False
    backbone: str | None = None
    copy: bool = True
    batch_rows: int = 2048
    prompt_weight: float = 0.5
    held_out: float = 0.05
    held_out_texts: int = 64


def train_drafter(
    kind: str,
    model: Any,
    *,
    answers: str | Path,
    folder: str | Path,
    settings: TrainingSettings,
    options: TrainOptions | None = None,
    features: str | Path | None = None,
    special_ids: Sequence[int] = (),
    command: Sequence[str] = (),
    note: Callable[[str], None] = lambda text: None,
    prepared: Callable[[int, int], None] = lambda done, total: None,
    report: Callable[[Progress, float], None] = lambda progress, share: None,
) -> Progress:
    """Train a drafter of a kind on answers of its target, and write its weights with a card.

    Args:
        kind: see `adaptspec.training.recipes.RECIPES`.
        model: the target.
        answers: a folder of `write_answers`, by this target.
        folder: for the weights, and checkpoints while it runs; the same call goes on after a kill.
        features: where hidden states are kept, by default a folder `features` beside the answers' shards. Several kinds
            share it.
        special_ids: tokens that the reduced head keeps in any case.
        command: to note on the card.
        note, prepared, report: told what goes on: lines, tokens of features, steps of training.

    Raises:
        FileNotFoundError, ValueError: see the parts.
    """
    options = TrainOptions() if options is None else options
    chosen = recipe(kind)
    chosen = replace(chosen, loss=options.loss or chosen.loss, unroll=options.unroll or chosen.unroll)
    loss = LossSettings(Objective(chosen.loss, options.eta), chosen.unroll, options.decay, chosen.aligned)
    corpus = read_answers(answers)
    origin = read_description(answers)
    if not corpus:
        raise ValueError(f"{answers} holds no answers yet")
    layers = len(inspect_model(model).layers)
    start = None
    if options.start is not None:
        start = load_start(kind, options.start, model, seed=settings.seed, frozen=options.frozen)
    elif options.frozen:
        raise ValueError("frozen keeps the cell of start as it is; give one, for example the shipped 'eagle3'")
    if start is not None and options.taps not in (None, start.config.taps):
        raise ValueError(f"taps are those of start, {list(start.config.taps)}, got {list(options.taps or ())}")
    if start is not None and options.intermediate is not None:
        raise ValueError("intermediate is that of start; leave it out")
    taps = needed_taps(kind, layers, options.taps, backbone=options.backbone) if start is None else start.config.taps
    note(f"{len(corpus)} answers of {answer_tokens(corpus)} tokens; features after layers {list(taps)}")
    store = prepare_features(
        model,
        corpus,
        Path(answers) / "features" if features is None else features,
        taps=taps,
        rows=options.rows,
        keep=special_ids,
        report=prepared,
    )
    trainee = make_trainee(
        kind,
        model,
        seed=settings.seed,
        copy=options.copy,
        scale=_scale(store, taps[-1]) if taps else 1.0,
        intermediate=options.intermediate,
        taps=options.taps,
        start=start,
        backbone=options.backbone,
        rows=store.rows.tolist(),
    )
    trainer = Trainer(
        trainee.rollout,
        loss=loss,
        settings=settings,
        depth=chosen.depth,
        folder=folder,
        identity={
            "kind": kind,
            "answers": corpus_digest(store),
            "start": options.start,
            **({"frozen": True} if options.frozen else {}),
            "config": trainee.config,
            **trainee.identity,
        },
        by_alpha=chosen.by_alpha,
        report=report,
        **_data(trainee, chosen, store, model=model, loss=loss, settings=settings, options=options),
    )
    size = sum(parameter.numel() for parameter in trainee.rollout.module.parameters() if parameter.requires_grad)
    note(f"training {kind}: {size / 1e6:.1f} M parameters, loss {chosen.loss}, {chosen.unroll} steps unrolled")
    progress = trainer.run()
    card = {
        "answers": {"tokens": answer_tokens(corpus), "digest": corpus_digest(store), "origin": origin},
        "loss": {"name": chosen.loss, "eta": options.eta, "unroll": chosen.unroll, "decay": options.decay},
        "steps": progress.step,
        "positions": progress.positions,
        "seconds": round(progress.seconds, 1),
        "seed": settings.seed,
        "start": options.start,
        "frozen": options.frozen,
        "held_out": progress.best,
        "history": progress.history,
        "command": list(command),
    }
    trainee.save(Path(folder), card)
    (Path(folder) / CHECKPOINT).unlink(missing_ok=True)
    return progress


def _data(
    trainee: Trainee,
    chosen: Recipe,
    store: FeatureStore,
    *,
    model: Any,
    loss: LossSettings,
    settings: TrainingSettings,
    options: TrainOptions,
) -> dict[str, Any]:
    """Head rows and batches for a `Trainer`."""
    weight = model.get_output_embeddings().weight.detach()
    learn, held = split_held_out(store, share=options.held_out, seed=settings.seed)
    chosen_texts = np.random.default_rng([settings.seed, 1]).permutation(len(held))[: options.held_out_texts]
    shared: dict[str, Any] = {
        "taps": trainee.taps,
        "batch_rows": options.batch_rows,
        "first": trainee.rollout.first,
        "device": weight.device,
    }
    rows = torch.from_numpy(store.rows).to(weight.device)
    row_of = torch.full((weight.shape[0],), -1, dtype=torch.long, device=weight.device)
    row_of[rows] = torch.arange(len(rows), device=weight.device)
    training = Batches(
        store,
        learn,
        steps=chosen.unroll,
        prompt_weight=options.prompt_weight,
        next_features=loss.objective.needs_features or trainee.next_features,
        **shared,
    )
    held_out = Batches(
        store,
        [held[i] for i in chosen_texts],
        steps=chosen.depth,
        prompt_weight=0.0,
        next_features=trainee.next_features,
        **shared,
    )
    return {
        "head": weight.index_select(0, rows).float(),
        "row_of": row_of,
        "training": training,
        "held_out": held_out,
    }


def corpus_digest(store: FeatureStore) -> str:
    """Short hash of all texts of a store, in their order."""
    digest = hashlib.sha256()
    for part in store.parts:
        for pack in part.packs:
            digest.update(pack.token_ids.tobytes())
    return digest.hexdigest()[:16]


def _scale(store: FeatureStore, tap: int) -> float:
    """Root mean square of the hidden states of a tap, over a sample of positions; the median, because the first
    positions of a text can be hundreds of times larger."""
    states = np.array(store.parts[0].taps[tap][:2048])
    values = torch.from_numpy(states.view(np.int16)).view(torch.bfloat16).float()
    return float(values.pow(2).mean(dim=1).sqrt().median())
