"""Training routers of vocabulary heads on what they will see: the target's states, or a drafter's head inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adaptspec.drafters.cell_weights import load_cell
from adaptspec.drafters.target_parts import target_parts
from adaptspec.pretrained import read_card
from adaptspec.target.hf import HFTarget
from adaptspec.training.batches import Batches
from adaptspec.training.corpus import answer_tokens, read_answers, read_description
from adaptspec.training.features import prepare_features
from adaptspec.training.unroll import CellRollout
from adaptspec.vocab.routers import ROUTERS, save_router
from adaptspec.vocab.train_router import RouterTraining, train_router

TOP = 4
"""Target tokens per position: those that a good draft tree would hold."""


def train_head_router(
    kind: str,
    model: Any,
    *,
    answers: str | Path,
    folder: str | Path,
    drafter: str | Path | None = None,
    features: str | Path | None = None,
    depth: int = 3,
    positions: int = 50_000,
    rows: int = 8192,
    steps: int = 500,
    seed: int = 0,
    special_ids: Sequence[int] = (),
    command: Sequence[str] = (),
    prepared: Callable[[int, int], None] = lambda done, total: None,
) -> RouterTraining:
    """Train a router over all rows of the target's head and write its folder.

    Args:
        kind: "coral" or "dynaspec".
        drafter: a folder of trained cell weights whose head inputs, `depth` steps deep, are learnt from; None: the
            target's own final states, which any drafter's resemble.
        features, rows, special_ids: see `train_drafter`; the folder of features is shared.
        positions: most positions learnt from.
        steps: of the optimiser.

    Raises:
        FileNotFoundError, ValueError: unknown kind, folders without answers or with weights for another target, or
            numbers out of range.
    """
    if kind not in ROUTERS:
        raise ValueError(f"kind must be one of {', '.join(ROUTERS)}, got {kind!r}")
    for name, value in (("depth", depth), ("positions", positions)):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    target = HFTarget(model)
    parts = target_parts(target, drafter=kind)
    cell = None
    if drafter is not None:
        own = str(read_card(drafter).get("kind"))
        cell = load_cell(drafter, name=own, kind=own, shipped=own, target=target).cell.to(parts.device).eval()
        if cell.config.final_norm:
            cell.use_final_norm(parts.norm)
    taps = (parts.layers,) if cell is None else cell.config.taps
    corpus, origin = read_answers(answers), read_description(answers)
    store = prepare_features(
        model,
        corpus,
        Path(answers) / "features" if features is None else features,
        taps=taps,
        rows=rows,
        keep=special_ids,
        report=prepared,
    )
    batches = Batches(
        store,
        store.packs(),
        taps=taps,
        steps=1 if cell is None else depth,
        next_features=cell is None,
        device=parts.device,
    )
    hidden, top, found = [], [], 0
    tokens = torch.from_numpy(store.rows).to(parts.device)
    with torch.no_grad():
        for members in batches.order(seed=seed, epoch=0):
            batch = batches.make(members)
            known = batch.top_rows[..., :TOP]
            ids = torch.where(known >= 0, tokens[known.clamp(min=0)], batch.argmax[..., None])
            for step, states in enumerate(_states(cell, batch, parts)):
                chosen = batch.weights[..., step] > 0
                hidden.append(states[chosen].float().cpu())
                top.append(ids[:, :, step][chosen].cpu())
                found += len(top[-1])
            if found >= positions:
                break
    router, report = train_router(
        torch.cat(hidden)[:positions],
        torch.cat(top)[:positions],
        kind=kind,  # type: ignore[arg-type]
        weight=parts.head,
        steps=steps,
        seed=seed,
    )
    facts = {
        "answers": {"tokens": answer_tokens(corpus), "origin": origin},
        "drafter": None if drafter is None else str(drafter),
        "steps": steps,
        "seed": seed,
        "loss": float(np.mean(report.losses[-20:])),
        "coverage": [round(value, 4) for value in report.coverage],
        "command": list(command),
    }
    save_router(folder, router, facts)
    return report


def _states(cell: Any, batch: Any, parts: Any) -> list[torch.Tensor]:
    if cell is not None:
        rollout = CellRollout(cell, lambda ids: parts.embed(ids).float())
        return [step.head_input for step in rollout.steps(batch, batch.tokens.shape[2])]
    # The target's state that says what a row is to predict is the next position's.
    return [parts.norm(batch.next_features[0][:, :, 0].to(parts.dtype))]
