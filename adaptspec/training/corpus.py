"""Answers on disk: compact shards, each written whole or not at all, and what they come from.

<folder>/corpus.json         model, prompts, temperatures, seed, versions
<folder>/shard-00000.npz     token ids, 16 bits each where the vocabulary allows, offsets and origins
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adaptspec.files import whole_file

FORMAT = "adaptspec-answers"
VERSION = 1
_MAY_DIFFER = ("versions", "batch", "device", "samples")
"""Entries of corpus.json that a resumed run may change: they do not change what an answer is."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and one answer of the target to it.

    Attributes:
        token_ids: int64 [T], prompt and answer.
        prompt_length: tokens of the prompt.
        prompt: which prompt; the same number means the same prompt.
        sample: 0 is the greedy answer.
        temperature: at which it was sampled.
        finished: the target ended it, rather than the length limit.
    """

    token_ids: np.ndarray
    prompt_length: int
    prompt: int
    sample: int
    temperature: float
    finished: bool

    @property
    def answer_length(self) -> int:
        """Tokens after the prompt."""
        return len(self.token_ids) - self.prompt_length


class CorpusWriter:
    """Appends shards to a folder, and knows what a run before left there.

    Args:
        folder: created if absent.
        origin: what the answers come from, plain JSON values. Must say the same as the folder's corpus.json, library
            versions, batch size and number of samples aside.
        vocab_size: decides the width of stored ids.

    Raises:
        ValueError: the folder holds other answers, or something else.
    """

    def __init__(self, folder: str | Path, *, origin: Mapping[str, Any], vocab_size: int) -> None:
        self.folder = Path(folder)
        self.dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
        description = {"format": FORMAT, "version": VERSION, "vocab_size": vocab_size, **json.loads(json.dumps(origin))}
        if (self.folder / "corpus.json").is_file():
            _check_same(read_description(self.folder), description, self.folder)
        else:
            if self.folder.exists() and not all(path.name.startswith(".") for path in self.folder.iterdir()):
                raise ValueError(f"{self.folder} is not empty and holds no answers (no corpus.json)")
            self.folder.mkdir(parents=True, exist_ok=True)
            with whole_file(self.folder / "corpus.json") as file:
                file.write(json.dumps(description, indent=1, ensure_ascii=False).encode())
        self.done: set[tuple[int, int]] = set()
        self.answer_tokens = 0
        for answer in read_answers(self.folder):
            self.done.add((answer.prompt, answer.sample))
            self.answer_tokens += answer.answer_length

    def write(self, answers: Sequence[Answer]) -> None:
        """Write one more shard, named after its first answer: processes that write different answers never collide."""
        if not answers:
            return
        name = f"shard-{answers[0].prompt:06d}-{answers[0].sample:03d}.npz"
        arrays = {
            "token_ids": np.concatenate([answer.token_ids for answer in answers]).astype(self.dtype),
            "offsets": np.cumsum([0, *(len(answer.token_ids) for answer in answers)]).astype(np.int64),
            "prompt_lengths": np.array([answer.prompt_length for answer in answers], dtype=np.int32),
            "prompts": np.array([answer.prompt for answer in answers], dtype=np.int32),
            "samples": np.array([answer.sample for answer in answers], dtype=np.int32),
            "temperatures": np.array([answer.temperature for answer in answers], dtype=np.float64),
            "finished": np.array([answer.finished for answer in answers], dtype=bool),
        }
        with whole_file(self.folder / name) as file:
            np.savez(file, **arrays)
        self.done.update((answer.prompt, answer.sample) for answer in answers)
        self.answer_tokens += sum(answer.answer_length for answer in answers)


def read_description(folder: str | Path) -> dict[str, Any]:
    """The corpus.json of a folder of answers.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: the folder holds no answers, or of another version.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder of answers: {folder}")
    hint = "; make some with: adaptspec train answers"
    return read_json(folder / "corpus.json", holds="answers", format=FORMAT, version=VERSION, hint=hint)


def read_json(path: Path, *, holds: str, format: str, version: int, hint: str = "") -> dict[str, Any]:
    """A description in a folder of data.

    Args:
        holds: what the folder should hold, and `hint` how to get it, for messages.
        format, version: what the description must be of.

    Raises:
        ValueError: there is none, or one of something else.
    """
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(f"{path.parent} holds no {holds} (no {path.name}){hint}") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(description, dict) or description.get("format") != format:
        raise ValueError(f"{path} does not describe {holds}")
    if description.get("version") != version:
        raise ValueError(f"{path.parent}: version must be {version}, got {description.get('version')!r}")
    return description


def read_answers(folder: str | Path) -> list[Answer]:
    """All answers of a folder, sorted by prompt and sample: the order does not depend on when they were written.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: no answers in it, or a damaged shard.
    """
    folder = Path(folder)
    read_description(folder)
    answers = [answer for path in _shards(folder) for answer in _read_shard(path)]
    return sorted(answers, key=lambda answer: (answer.prompt, answer.sample))


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.npz"))


def _read_shard(path: Path) -> Iterator[Answer]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        offsets = arrays["offsets"]
        for i in range(len(offsets) - 1):
            yield Answer(
                arrays["token_ids"][offsets[i] : offsets[i + 1]].astype(np.int64),
                int(arrays["prompt_lengths"][i]),
                int(arrays["prompts"][i]),
                int(arrays["samples"][i]),
                float(arrays["temperatures"][i]),
                bool(arrays["finished"][i]),
            )
    except (ValueError, LookupError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is damaged; delete it and its answers are written again: {error}") from error


def _check_same(found: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    for name in found.keys() | wanted.keys():
        if name not in _MAY_DIFFER and found.get(name) != wanted.get(name):
            raise ValueError(
                f"{folder} holds answers with {name} = {found.get(name)!r}, this run has {wanted.get(name)!r}; "
                "choose another folder, or the same options to continue"
            )


def answer_tokens(answers: Iterable[Answer]) -> int:
    """Tokens that the target wrote."""
    return sum(answer.answer_length for answer in answers)


def choose_texts(
    answers: Sequence[Answer], *, count: int, most_tokens: int, seed: int = 0
) -> list[tuple[np.ndarray, int]]:
    """Some answers with their prompts: int64 [T] and the tokens of the prompt; one per prompt, greedy ones first.

    Args:
        count: at most so many.
        most_tokens: tokens of each, at most; what is longer is cut, and prompts that leave no room are left out.
    """
    first: dict[int, Answer] = {}
    for answer in sorted(answers, key=lambda answer: (answer.prompt, answer.sample)):
        if answer.prompt_length < min(most_tokens, len(answer.token_ids)):
            first.setdefault(answer.prompt, answer)
    found = list(first.values())
    order = np.random.default_rng(seed).permutation(len(found))[:count]
    return [(found[i].token_ids[:most_tokens].astype(np.int64), found[i].prompt_length) for i in order]
