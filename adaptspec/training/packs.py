"""Answers to one prompt share its tokens: a pack is the prompt followed by several answers, each seeing the prompt and
itself only. What is computed about the prompt is then computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from adaptspec.training.corpus import Answer


@dataclass(frozen=True, slots=True)
class Pack:
    """A prompt and answers to it.

    Attributes:
        token_ids: int64 [N], the prompt and then the answers one after another.
        prompt_length: tokens of the prompt.
        answer_lengths: tokens of each answer.
        prompt: which prompt.
        samples: which sample each answer is.
    """

    token_ids: np.ndarray
    prompt_length: int
    answer_lengths: tuple[int, ...]
    prompt: int
    samples: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.token_ids)

    def starts(self) -> list[int]:
        """Where each answer begins."""
        ends = np.cumsum([self.prompt_length, *self.answer_lengths])
        return ends[:-1].tolist()

    def positions(self) -> np.ndarray:
        """int64 [N], the place of each token in its own text."""
        parts = [np.arange(self.prompt_length)]
        parts += [self.prompt_length + np.arange(length) for length in self.answer_lengths]
        return np.concatenate(parts)

    def visible(self) -> np.ndarray:
        """bool [N, N], which tokens each token follows, itself included."""
        seen = np.tri(len(self), dtype=bool)
        for start, length in zip(self.starts(), self.answer_lengths, strict=True):
            seen[start : start + length, self.prompt_length : start] = False
        return seen

    def indices(self, answer: int) -> np.ndarray:
        """int64 [T], where the tokens of one text (the prompt and one answer) lie."""
        start = self.starts()[answer]
        return np.concatenate([np.arange(self.prompt_length), start + np.arange(self.answer_lengths[answer])])


def make_packs(answers: Sequence[Answer], *, most_tokens: int = 768) -> list[Pack]:
    """Packs of at most `most_tokens` tokens, or of one answer where that alone is longer.

    Larger packs repeat prompts less often, and spend more on attention between texts that do not see each other.

    Raises:
        ValueError: answers to one prompt number that begin with different prompts.
    """
    if most_tokens < 1:
        raise ValueError(f"most_tokens must be >= 1, got {most_tokens}")
    packs = []
    for _, group in groupby(sorted(answers, key=lambda answer: (answer.prompt, answer.sample)), key=lambda a: a.prompt):
        together: list[Answer] = []
        for answer in group:
            if together:
                first = together[0]
                if not np.array_equal(answer.token_ids[: answer.prompt_length], first.token_ids[: first.prompt_length]):
                    raise ValueError(f"answers to prompt {answer.prompt} begin with different prompts")
                size = len(first.token_ids) + sum(other.answer_length for other in together[1:])
                if size + answer.answer_length > most_tokens:
                    packs.append(_pack(together))
                    together = []
            together.append(answer)
        packs.append(_pack(together))
    return packs


def _pack(answers: Sequence[Answer]) -> Pack:
    first = answers[0]
    return Pack(
        np.concatenate([first.token_ids, *(other.token_ids[other.prompt_length :] for other in answers[1:])]),
        first.prompt_length,
        tuple(answer.answer_length for answer in answers),
        first.prompt,
        tuple(answer.sample for answer in answers),
    )
