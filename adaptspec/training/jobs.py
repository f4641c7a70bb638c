"""Which prompt is answered how often, at which temperature, and in which order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

BALANCE_LIMIT = 3
"""A domain with few prompts is sampled at most this many times as often per prompt as the largest one."""


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A tokenised prompt and the domain it belongs to. `token_ids` ends where the answer begins."""

    token_ids: np.ndarray
    domain: str = "general"


@dataclass(frozen=True, slots=True, order=True)
class Job:
    """One answer to be written: sample 0 of every prompt is greedy."""

    prompt: int
    sample: int
    temperature: float


def plan_jobs(
    prompts: Sequence[PromptTokens], *, samples: int, temperatures: Sequence[float], window: int = 256
) -> list[Job]:
    """All jobs in the order in which they are started: every prompt greedily, then the sampled ones.

    Domains take turns, so that any beginning of the list is balanced. In the sampled part a domain with fewer prompts
    than the largest is sampled more often per prompt, up to `BALANCE_LIMIT` times. Inside windows of `window` jobs
    prompts are sorted by length, because sequences decoded together cost what the longest of them costs; the samples of
    one prompt follow each other, because they share its prefill.

    Args:
        samples: answers per prompt of the largest domain; the first is greedy.
        temperatures: those of samples 1, 2, ... in turn, each > 0.

    Raises:
        ValueError: no prompts, or a number out of range.
    """
    if not prompts:
        raise ValueError("prompts must not be empty")
    if samples < 1:
        raise ValueError(f"samples must be >= 1, got {samples}")
    if samples > 1 and not temperatures:
        raise ValueError("temperatures must not be empty when samples > 1")
    for temperature in temperatures:
        if not 0.0 < temperature < math.inf:
            raise ValueError(f"temperatures must be > 0 and finite, got {temperature}")
    domains: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        domains.setdefault(prompt.domain, []).append(index)
    largest = max(len(members) for members in domains.values())
    greedy = _take_turns([[Job(index, 0, 0.0) for index in members] for members in domains.values()])
    sampled = []
    for members in domains.values():
        rounds = (samples - 1) * min(BALANCE_LIMIT, largest // len(members))
        sampled.append(
            [
                Job(index, sample, float(temperatures[(sample - 1) % len(temperatures)]))
                for index in members
                for sample in range(1, rounds + 1)
            ]
        )
    ordered: list[Job] = []
    for part in (greedy, _take_turns(sampled)):
        for start in range(0, len(part), window):
            ordered += sorted(
                part[start : start + window], key=lambda job: (len(prompts[job.prompt].token_ids), job.prompt)
            )
    return ordered


def _take_turns(queues: Sequence[Sequence[Job]]) -> list[Job]:
    """One prompt of each queue in turn, with all its jobs."""
    groups = [[list(jobs) for _, jobs in groupby(queue, key=lambda job: job.prompt)] for queue in queues]
    deepest = max(len(queue) for queue in groups)
    return [job for rank in range(deepest) for queue in groups if rank < len(queue) for job in queue[rank]]
