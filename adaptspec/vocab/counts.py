"""Which tokens occur most: counting them, and reading and writing lists of them."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from adaptspec import pretrained
from adaptspec.files import whole_file

_UNREADABLE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    EOFError,
    RuntimeError,
    pickle.UnpicklingError,
)
"""What readers raise on files that hold something else."""

ListKind = Literal["text", "target"]
"""Counted over texts that people wrote, or over what the target answered (which is better: VocabTrim, 2506.22694)."""

SUFFIXES = (".safetensors", ".json", ".npy", ".pt")


@dataclass(frozen=True, slots=True, eq=False)
class FrequencyList:
    """Token ids by falling frequency.

    Attributes:
        token_ids: int64 [L], all different, the most frequent first.
        vocab_size: of the tokenizer they were counted with, None where a file does not say.
        source: what was counted.

    Raises:
        ValueError: ids that are not whole numbers >= 0, repeated, or not below `vocab_size`.
    """

    token_ids: np.ndarray
    vocab_size: int | None = None
    source: str = ""

    def __post_init__(self) -> None:
        ids = np.asarray(self.token_ids)
        if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
            raise ValueError(f"token_ids must be one or more whole numbers, got {ids.dtype} {list(ids.shape)}")
        if ids.min() < 0 or (self.vocab_size is not None and ids.max() >= self.vocab_size):
            bad = ids.min() if ids.min() < 0 else ids.max()
            raise ValueError(f"token_ids must be >= 0 and below vocab_size = {self.vocab_size}, got {bad}")
        if len(np.unique(ids)) < len(ids):
            raise ValueError("token_ids must be all different, got a repeated one")
        object.__setattr__(self, "token_ids", ids.astype(np.int64))

    def check_fits(self, vocab_size: int) -> None:
        """Raises ValueError if the list is of another vocabulary."""
        if self.vocab_size is not None and self.vocab_size != vocab_size:
            raise ValueError(
                f"the frequency list is for a vocabulary of {self.vocab_size} tokens, the target has {vocab_size}"
            )
        if self.token_ids.max() >= vocab_size:
            raise ValueError(
                f"the frequency list holds token {self.token_ids.max()}, the target has {vocab_size} tokens: it is for "
                "another vocabulary"
            )


def count_tokens(corpus: Iterable[Sequence[int] | np.ndarray], *, vocab_size: int, source: str = "") -> FrequencyList:
    """All tokens of a vocabulary by how often they occur, the lower id first among equals; those that never do at the
    end.

    Args:
        corpus: token ids, text by text.

    Raises:
        ValueError: a token outside [0, vocab_size).

    >>> count_tokens([[3, 1, 3], [1, 3]], vocab_size=4).token_ids.tolist()
    [3, 1, 0, 2]
    """
    if vocab_size < 1:
        raise ValueError(f"vocab_size must be >= 1, got {vocab_size}")
    counts = np.zeros(vocab_size, dtype=np.int64)
    for text in corpus:
        ids = np.asarray(text, dtype=np.int64)
        if ids.ndim != 1 or (len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size)):
            raise ValueError(f"texts must be token ids in [0, {vocab_size}), got {ids.min()} to {ids.max()}")
        counts += np.bincount(ids, minlength=vocab_size)
    return FrequencyList(np.argsort(-counts, kind="stable"), vocab_size, source)


def save_frequencies(path: str | os.PathLike[str], frequencies: FrequencyList) -> None:
    """Write a list as .safetensors, .json or .npy (which holds the ids only); whole or not at all.

    Raises:
        ValueError: another suffix.
    """
    path = Path(path)
    ids = frequencies.token_ids.astype(np.int32)
    said = {"source": frequencies.source}
    if frequencies.vocab_size is not None:
        said["vocab_size"] = str(frequencies.vocab_size)
    if path.suffix not in (".safetensors", ".json", ".npy"):
        raise ValueError(f"path must end in .safetensors, .json or .npy, got {path}")
    with whole_file(path) as file:
        if path.suffix == ".safetensors":
            from safetensors.numpy import save

            file.write(save({"token_ids": ids}, metadata=said))
        elif path.suffix == ".json":
            document = {**said, "vocab_size": frequencies.vocab_size, "token_ids": ids.tolist()}
            file.write(f"{json.dumps(document)}\n".encode())
        else:
            np.save(file, ids, allow_pickle=False)


def load_frequencies(path: str | os.PathLike[str]) -> FrequencyList:
    """What `save_frequencies` wrote, or a published `freq_{V}.pt`: a saved list of ids, read without running code.

    Raises:
        FileNotFoundError: no such file.
        ValueError: another suffix, or the file holds something else.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"path of a frequency list must end in {', '.join(SUFFIXES)}, got {path}")
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    try:
        return _READERS[path.suffix](path)
    except _UNREADABLE as error:
        raise ValueError(f"{path} holds no frequency list: {error}") from error


def shipped_sizes() -> list[int]:
    """Sizes of the vocabularies that `shipped_frequencies` has a list for."""
    return sorted({int(path.stem.rpartition("-")[2]) for path in _lists().glob("*-*.safetensors")})


def _lists() -> Path:
    return Path(pretrained.__file__).parent / "frequencies"


def shipped_frequencies(kind: ListKind, vocab_size: int) -> FrequencyList:
    """The list that comes with the package for a vocabulary of this size. Where none was counted over texts, it is the
    one of the target's answers.

    Raises:
        ValueError: none does.
    """
    found = [_lists() / f"{name}-{vocab_size}.safetensors" for name in (kind, "target")]
    path = next((path for path in found if path.is_file()), None)
    if path is None:
        raise ValueError(
            f"no frequency list is shipped for a vocabulary of {vocab_size} tokens; count one "
            "(adaptspec.vocab.count_tokens) and give its path, for example fr:16384:PATH"
        )
    frequencies = load_frequencies(path)
    frequencies.check_fits(vocab_size)
    return frequencies


def choose_tokens(
    frequencies: FrequencyList, count: int, *, keep: np.ndarray, available: np.ndarray, name: str
) -> np.ndarray:
    """int64 [count], ascending: `keep`, and then the most frequent tokens.

    Args:
        available: bool [V], tokens that the head has a row for.
        name: of the head, for errors.

    Raises:
        ValueError: the head has fewer rows, the list names fewer tokens, or `keep` alone is more.
    """
    rows = int(available.sum())
    if count > rows:
        raise ValueError(f"vocab {name!r} asks for {count} rows, the head has {rows}")
    if len(keep) > count:
        raise ValueError(f"vocab {name!r} must hold {len(keep)} special tokens, which are more than {count} rows")
    listed = frequencies.token_ids[available[frequencies.token_ids]]
    others = listed[~np.isin(listed, keep)][: count - len(keep)]
    if len(keep) + len(others) < count:
        raise ValueError(f"vocab {name!r} needs {count} tokens, the frequency list names {len(listed)} of this head")
    return np.sort(np.concatenate([keep, others]))


def _read_safetensors(path: Path) -> FrequencyList:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            said = file.metadata() or {}
            ids = file.get_tensor("token_ids")
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    size = said.get("vocab_size")
    return FrequencyList(ids, None if size is None else int(size), said.get("source", ""))


def _read_json(path: Path) -> FrequencyList:
    document = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(document, list):
        document = {"token_ids": document}
    return FrequencyList(np.asarray(document["token_ids"]), document.get("vocab_size"), document.get("source", ""))


def _read_npy(path: Path) -> FrequencyList:
    return FrequencyList(np.load(path, allow_pickle=False))


def _read_pt(path: Path) -> FrequencyList:
    import torch

    saved = torch.load(path, map_location="cpu", weights_only=True)
    return FrequencyList(np.asarray(saved))


_READERS = {".safetensors": _read_safetensors, ".json": _read_json, ".npy": _read_npy, ".pt": _read_pt}
