"""Computing what drafters learn from: hidden states and likely next tokens of the target, once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adaptspec.files import whole_file
from adaptspec.target.layout import inspect_model
from adaptspec.target.rows import top_ids
from adaptspec.training.corpus import Answer
from adaptspec.training.feature_store import (
    FORMAT,
    VERSION,
    FeaturePart,
    FeatureStore,
    open_features,
    read_feature_description,
    read_packs,
    write_part,
)
from adaptspec.training.packs import Pack, make_packs
from adaptspec.vocab.counts import count_tokens


def prepare_features(
    model: Any,
    answers: Sequence[Answer],
    folder: str | Path,
    *,
    taps: Sequence[int],
    rows: int = 8192,
    keep: Sequence[int] = (),
    top_k: int = 16,
    most_tokens: int = 768,
    batch_tokens: int = 1024,
    part_tokens: int = 8192,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> FeatureStore:
    """Compute what the folder lacks for these answers, and map all of it.

    Parts are written whole or not at all, so a run that was cut short goes on; answers that came since get parts of
    their own. Hidden states come from a teacher-forced forward over packs, see `adaptspec.training.packs`.

    Args:
        taps: layers, `k` is after k decoder layers; may be none. Taps that older parts lack are added to them.
        rows: tokens of the reduced head: the most frequent of the answers at the first call, which later calls keep.
        keep: tokens that are among them in any case.
        top_k: target tokens kept per position.
        report: called with tokens done and tokens in all.

    Raises:
        ValueError: numbers out of range, no answers, or a folder made with other numbers.
    """
    layout = inspect_model(model)
    vocab_size = int(model.get_output_embeddings().weight.shape[0])
    for tap in taps:
        if not 1 <= tap <= len(layout.layers):
            raise ValueError(f"taps must be in [1, {len(layout.layers)}], got {tap}")
    for name, value in (("rows", rows), ("top_k", top_k), ("batch_tokens", batch_tokens), ("part_tokens", part_tokens)):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    if not answers:
        raise ValueError("answers must not be empty")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokens = _head_tokens(folder, answers, rows=min(rows, vocab_size), keep=keep, vocab_size=vocab_size, top_k=top_k)
    for leftover in folder.glob(".part-*"):
        shutil.rmtree(leftover)
    wanted = {(answer.prompt, answer.sample) for answer in answers}
    existing = [(path, read_packs(path)) for path in sorted(folder.glob("part-*"))]
    covered = {(pack.prompt, sample) for _, packs in existing for pack in packs for sample in pack.samples}
    if strange := covered - wanted:
        raise ValueError(f"{folder} holds features of answers that are not among these, like {min(strange)}")
    new = make_packs([a for a in answers if (a.prompt, a.sample) not in covered], most_tokens=most_tokens)
    fresh = _split(new, part_tokens)
    lacking = [
        (path, packs, missing)
        for path, packs in existing
        if (missing := [tap for tap in taps if not (path / f"tap-{tap}.npy").is_file()])
    ]
    total = sum(map(len, new)) + sum(len(pack) for _, packs, _ in lacking for pack in packs)
    done = 0
    for path, packs, missing in lacking:
        computed = _compute(model, layout, packs, taps=missing, tokens=None, top_k=top_k, batch_tokens=batch_tokens)
        for tap, states in computed.taps.items():
            with whole_file(path / f"tap-{tap}.npy") as file:
                np.save(file, states)
        done += sum(map(len, packs))
        report(done, total)
    number = 1 + max((int(path.name.split("-")[1]) for path, _ in existing), default=-1)
    for offset, packs in enumerate(fresh):
        computed = _compute(model, layout, packs, taps=taps, tokens=tokens, top_k=top_k, batch_tokens=batch_tokens)
        write_part(folder / f"part-{number + offset:05d}", computed)
        done += sum(map(len, packs))
        report(done, total)
    return open_features(folder, taps=taps)


def _head_tokens(
    folder: Path, answers: Sequence[Answer], *, rows: int, keep: Sequence[int], vocab_size: int, top_k: int
) -> np.ndarray:
    """The tokens of the reduced head, ascending; chosen once per folder."""
    if (folder / "features.json").is_file():
        found = read_feature_description(folder)
        for name, value in (("vocab_size", vocab_size), ("top_k", top_k), ("row_count", rows)):
            if found[name] != value:
                raise ValueError(f"{folder} was made with {name} = {found[name]}, got {value}; choose another folder")
        return np.asarray(found["rows"], dtype=np.int64)
    if any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty and holds no features")
    frequent = count_tokens(
        (answer.token_ids[answer.prompt_length :] for answer in answers), vocab_size=vocab_size
    ).token_ids
    kept = np.unique(np.asarray(list(keep), dtype=np.int64))
    others = frequent[~np.isin(frequent, kept)]
    tokens = np.sort(np.concatenate([kept, others[: max(0, rows - len(kept))]]))
    description = {
        "format": FORMAT,
        "version": VERSION,
        "vocab_size": vocab_size,
        "top_k": top_k,
        "row_count": rows,
        "rows": tokens.tolist(),
    }
    with whole_file(folder / "features.json") as file:
        file.write(json.dumps(description).encode())
    return tokens


def _split(packs: Sequence[Pack], part_tokens: int) -> list[tuple[Pack, ...]]:
    parts: list[list[Pack]] = []
    size = part_tokens
    for pack in packs:
        if size >= part_tokens:
            parts.append([])
            size = 0
        parts[-1].append(pack)
        size += len(pack)
    return [tuple(part) for part in parts]


@torch.inference_mode()
def _compute(
    model: Any,
    layout: Any,
    packs: Sequence[Pack],
    *,
    taps: Sequence[int],
    tokens: np.ndarray | None,
    top_k: int,
    batch_tokens: int,
) -> FeaturePart:
    """Forward over packs of similar length together. Without `tokens` only the hidden states are computed."""
    weight = model.get_input_embeddings().weight
    device, hidden_size = weight.device, weight.shape[1]
    starts = np.cumsum([0, *map(len, packs)])
    total, top_k = int(starts[-1]), min(top_k, int(model.get_output_embeddings().weight.shape[0]))
    out = FeaturePart(
        tuple(packs),
        starts[:-1],
        np.zeros((total, top_k), np.int32),
        np.zeros((total, top_k), np.float32),
        np.zeros(total, np.float32),
        {tap: np.zeros((total, hidden_size), np.uint16) for tap in taps},
    )
    rows = None if tokens is None else torch.from_numpy(tokens).to(device)
    recorded: dict[int, torch.Tensor] = {}
    hooks = [layout.layers[tap - 1].register_forward_hook(_recorder(recorded, tap)) for tap in taps]
    try:
        for members in _batches(packs, batch_tokens):
            longest = max(len(packs[i]) for i in members)
            ids = torch.zeros((len(members), longest), dtype=torch.long)
            positions = torch.zeros_like(ids)
            visible = torch.eye(longest, dtype=torch.bool).repeat(len(members), 1, 1)
            for row, i in enumerate(members):
                size = len(packs[i])
                ids[row, :size] = torch.from_numpy(packs[i].token_ids)
                positions[row, :size] = torch.from_numpy(packs[i].positions())
                visible[row, :size, :size] = torch.from_numpy(packs[i].visible())
            output = model(
                input_ids=ids.to(device),
                position_ids=positions.to(device),
                attention_mask=_masks(layout, visible.to(device), positions.to(device), weight.dtype),
                use_cache=False,
                logits_to_keep=0 if tokens is not None else 1,
            )
            for row, i in enumerate(members):
                place = slice(starts[i], starts[i + 1])
                for tap in taps:
                    state = recorded[tap][row, : len(packs[i])].to(torch.bfloat16).cpu()
                    out.taps[tap][place] = state.view(torch.int16).numpy().view(np.uint16)
                if rows is not None:
                    logits = output.logits[row, : len(packs[i])].float()
                    whole = logits.logsumexp(dim=-1)
                    ids_here = top_ids(logits, top_k)
                    values = logits.gather(1, torch.from_numpy(ids_here).to(device)) - whole[:, None]
                    inside = (logits.index_select(1, rows).logsumexp(dim=-1) - whole).exp()
                    out.top_ids[place] = ids_here
                    out.top_log_probs[place] = values.cpu().numpy()
                    out.inside[place] = inside.clamp(max=1.0).cpu().numpy()
    finally:
        for hook in hooks:
            hook.remove()
    return out


def _recorder(recorded: dict[int, torch.Tensor], tap: int) -> Callable[..., None]:
    def record(module: torch.nn.Module, args: Any, output: Any) -> None:
        recorded[tap] = output[0] if isinstance(output, tuple) else output

    return record


def _batches(packs: Sequence[Pack], batch_tokens: int) -> list[list[int]]:
    """Packs by length, as many together as `batch_tokens` padded tokens allow."""
    batches: list[list[int]] = []
    for i in sorted(range(len(packs)), key=lambda i: -len(packs[i])):
        if not batches or (len(batches[-1]) + 1) * len(packs[batches[-1][0]]) > batch_tokens:
            batches.append([])
        batches[-1].append(i)
    return batches


def _masks(
    layout: Any, visible: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Additive masks [B, 1, T, T], one per attention kind."""
    masks = {}
    for kind in layout.kinds:
        seen = visible
        if kind == "sliding_attention" and layout.window is not None:
            seen = visible & (positions[:, :, None] - positions[:, None, :] < layout.window)
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        masks[kind] = mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]
    return masks if layout.mapping else next(iter(masks.values()))
