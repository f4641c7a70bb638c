"""Features on disk: parts of some thousand tokens, each written whole or not at all, and mapped when they are read.

<folder>/features.json                  sizes, and which tokens the reduced head has
<folder>/part-00000/packs.npz           token ids and how they are packed
<folder>/part-00000/top.npz             per token: the target's most likely next tokens
<folder>/part-00000/tap-15.npy          per token: the hidden state after 15 layers, bfloat16
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adaptspec.training.corpus import read_json
from adaptspec.training.packs import Pack

FORMAT = "adaptspec-features"
VERSION = 1


@dataclass(frozen=True, slots=True)
class FeaturePart:
    """Packs whose tokens are rows of the arrays, one pack after another.

    Attributes:
        packs: in the order of the rows.
        starts: int64 [packs], the first row of each.
        top_ids: int32 [N, k], the target's most likely tokens after each token, most likely first.
        top_log_probs: float32 [N, k], their log-probabilities over the whole vocabulary.
        inside: float32 [N], the target's probability of all tokens of the reduced head together.
        taps: per layer uint16 [N, H], hidden states as the bits of bfloat16, mapped from disk.
    """

    packs: tuple[Pack, ...]
    starts: np.ndarray
    top_ids: np.ndarray
    top_log_probs: np.ndarray
    inside: np.ndarray
    taps: dict[int, np.ndarray]


@dataclass(frozen=True, slots=True)
class FeatureStore:
    """All parts of a folder, and the tokens of the reduced head, int64 [R]."""

    parts: tuple[FeaturePart, ...]
    rows: np.ndarray

    def packs(self) -> list[tuple[int, int]]:
        """Part and place in it of every pack."""
        return [(number, place) for number, part in enumerate(self.parts) for place in range(len(part.packs))]


def open_features(folder: str | Path, *, taps: Sequence[int]) -> FeatureStore:
    """Map what `prepare_features` wrote.

    Raises:
        ValueError: nothing there, or a tap is missing.
    """
    folder = Path(folder)
    description = read_feature_description(folder)
    parts = []
    for path in sorted(folder.glob("part-*")):
        packs = read_packs(path)
        if lacking := [tap for tap in taps if not (path / f"tap-{tap}.npy").is_file()]:
            raise ValueError(f"{path} lacks the taps {lacking}; call prepare_features with them")
        with np.load(path / "top.npz") as top:
            arrays = {name: top[name] for name in ("ids", "log_probs", "inside")}
        mapped = {tap: np.load(path / f"tap-{tap}.npy", mmap_mode="r") for tap in taps}
        starts = np.cumsum([0, *map(len, packs)])[:-1]
        parts.append(FeaturePart(packs, starts, arrays["ids"], arrays["log_probs"], arrays["inside"], mapped))
    if not parts:
        raise ValueError(f"{folder} holds no features")
    return FeatureStore(tuple(parts), np.asarray(description["rows"], dtype=np.int64))


def read_feature_description(folder: Path) -> dict[str, Any]:
    """The features.json of a folder. Raises ValueError if there is none, or one of something else."""
    return read_json(folder / "features.json", holds="features", format=FORMAT, version=VERSION)


def write_part(path: Path, part: FeaturePart) -> None:
    """Write a part beside its place and move it there."""
    unfinished = Path(tempfile.mkdtemp(dir=path.parent, prefix=".part-"))
    np.savez(
        unfinished / "packs.npz",
        token_ids=np.concatenate([pack.token_ids for pack in part.packs]).astype(np.int32),
        prompt_lengths=np.array([pack.prompt_length for pack in part.packs], np.int32),
        prompts=np.array([pack.prompt for pack in part.packs], np.int32),
        counts=np.array([len(pack.samples) for pack in part.packs], np.int32),
        samples=np.array([sample for pack in part.packs for sample in pack.samples], np.int32),
        answer_lengths=np.array([length for pack in part.packs for length in pack.answer_lengths], np.int32),
    )
    np.savez(unfinished / "top.npz", ids=part.top_ids, log_probs=part.top_log_probs, inside=part.inside)
    for tap, states in part.taps.items():
        np.save(unfinished / f"tap-{tap}.npy", states)
    unfinished.chmod(0o755)
    unfinished.rename(path)


def read_packs(path: Path) -> tuple[Pack, ...]:
    """The packs of a part. Raises ValueError if it is damaged."""
    try:
        with np.load(path / "packs.npz", allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged; delete it and it is computed again: {error}") from error
    packs, token, answer = [], 0, 0
    for prompt, length, count in zip(arrays["prompts"], arrays["prompt_lengths"], arrays["counts"], strict=True):
        lengths = tuple(arrays["answer_lengths"][answer : answer + count].tolist())
        size = int(length) + sum(lengths)
        ids = arrays["token_ids"][token : token + size].astype(np.int64)
        samples = tuple(arrays["samples"][answer : answer + count].tolist())
        packs.append(Pack(ids, int(length), lengths, int(prompt), samples))
        token, answer = token + size, answer + int(count)
    return tuple(packs)
