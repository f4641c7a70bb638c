"""Self-distillation data: the target answers prompts, because a drafter should learn what its target says."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adaptspec.training.batched_decode import TOP, BatchedDecoder, Sequencing
from adaptspec.training.corpus import Answer, CorpusWriter
from adaptspec.training.jobs import PromptTokens, plan_jobs

SHARD_ANSWERS = 64
"""Answers per shard: about a minute of work at most is lost with the process."""


@dataclass(frozen=True, slots=True)
class AnswersProgress:
    """How far a run is.

    Attributes:
        answers, total: answers on disk, and all that are wanted.
        answer_tokens: tokens in them, prompts not counted.
        seconds: since this run began.
        new_tokens: what this run has written.
    """

    answers: int
    total: int
    answer_tokens: int
    seconds: float
    new_tokens: int

    @property
    def tokens_per_second(self) -> float:
        """Answer tokens written per second of this run."""
        return self.new_tokens / self.seconds if self.seconds > 0 else 0.0


def write_answers(
    model: Any,
    prompts: Sequence[PromptTokens],
    folder: str | Path,
    *,
    origin: dict[str, Any],
    samples: int = 4,
    temperatures: Sequence[float] = (0.7, 1.0),
    max_new_tokens: int = 256,
    max_prompt_tokens: int | None = None,
    batch: int = 64,
    minutes: float | None = None,
    part: tuple[int, int] = (1, 1),
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    report: Callable[[AnswersProgress], None] = lambda progress: None,
) -> AnswersProgress:
    """Let the target answer `prompts` and keep the answers; a run that was cut short goes on where it was.

    Every prompt is answered greedily first, then sampled at `temperatures` in turn. Each answer draws from a generator
    of its own, seeded by (seed, prompt, sample): a resumed run gives the corpus of an uninterrupted one.

    Args:
        folder: see `adaptspec.training.corpus`.
        origin: what to note down about model and prompts besides what is decided here.
        samples: answers per prompt, more for domains with few prompts (see `plan_jobs`).
        max_prompt_tokens: longer prompts are left out; None keeps all.
        minutes: stop after this long; None: when all is done. Answers under way are dropped.
        part: (k, n): the k-th of n processes, each of which answers every n-th prompt; all may write to one folder.
        stop_ids: end-of-text tokens.
        report: called after every shard.

    Raises:
        ValueError: bad arguments, a folder with other answers, or no prompt that is short enough.
    """
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes must be > 0, got {minutes}")
    if max_prompt_tokens is not None and max_prompt_tokens < 1:
        raise ValueError(f"max_prompt_tokens must be >= 1, got {max_prompt_tokens}")
    number, parts = part
    if not 1 <= number <= parts:
        raise ValueError(f"part must be (k, n) with 1 <= k <= n, got {part}")
    decoder = BatchedDecoder(model, batch=batch, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
    jobs = plan_jobs(prompts, samples=samples, temperatures=temperatures, window=4 * batch)
    if max_prompt_tokens is not None:
        jobs = [job for job in jobs if len(prompts[job.prompt].token_ids) <= max_prompt_tokens]
        if not jobs:
            raise ValueError(f"all prompts are longer than max_prompt_tokens = {max_prompt_tokens}")
    jobs = [job for job in jobs if job.prompt % parts == number - 1]
    if not jobs:
        raise ValueError(f"part {number}/{parts} has no prompts to answer")
    writer = CorpusWriter(
        folder,
        origin={
            **origin,
            "prompts": prompts_digest(prompts),
            "samples": samples,
            "temperatures": list(temperatures),
            "max_new_tokens": max_new_tokens,
            "batch": batch,
            "seed": seed,
            "top": TOP,
        },
        vocab_size=int(model.get_output_embeddings().weight.shape[0]),
    )
    wanted = [job for job in jobs if (job.prompt, job.sample) not in writer.done]
    started, before = time.monotonic(), writer.answer_tokens
    deadline = None if minutes is None else started + 60.0 * minutes
    sequences = [
        Sequencing(
            job,
            np.asarray(prompts[job.prompt].token_ids),
            job.temperature,
            np.random.default_rng([seed, job.prompt, job.sample]) if job.temperature > 0 else None,
        )
        for job in wanted
    ]

    def progress() -> AnswersProgress:
        seconds = time.monotonic() - started
        return AnswersProgress(
            len(jobs) - len(wanted) + written, len(jobs), writer.answer_tokens, seconds, writer.answer_tokens - before
        )

    written, waiting = 0, []
    try:
        for sequence in decoder.run(sequences, go_on=lambda: deadline is None or time.monotonic() < deadline):
            waiting.append(_answer(sequence))
            if len(waiting) >= SHARD_ANSWERS:
                writer.write(waiting)
                written, waiting = written + len(waiting), []
                report(progress())
    finally:  # what is finished is worth keeping, whatever stopped the run
        writer.write(waiting)
        written += len(waiting)
    return progress()


def prompts_digest(prompts: Sequence[PromptTokens]) -> str:
    """SHA-256 over the token ids of the prompts, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(np.asarray(len(prompt.token_ids), dtype=np.int64).tobytes())
        digest.update(np.asarray(prompt.token_ids, dtype=np.int64).tobytes())
    return digest.hexdigest()


def _answer(sequence: Sequencing) -> Answer:
    token_ids = np.concatenate([sequence.prompt, np.asarray(sequence.answer, dtype=np.int64)])
    job = sequence.key
    return Answer(token_ids, len(sequence.prompt), job.prompt, job.sample, job.temperature, sequence.finished)
