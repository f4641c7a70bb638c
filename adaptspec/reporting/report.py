"""What a report says, as plain data."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adaptspec.types import StepRecord

RECENT = 100
"""Latest steps whose reasons are counted."""


@dataclass(frozen=True, slots=True)
class ArmLine:
    """One arm's steps. `tokens_per_step` includes bonus tokens; `acceptance_rate` = accepted / verified nodes does not,
    and is None where nothing was verified."""

    arm: str
    steps: int
    share: float
    tokens_per_step: float
    acceptance_rate: float | None
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class SpanLine:
    """A stretch of steps, counted from 1: steps by arm, and sums of tokens (bonus included), verified draft nodes and
    seconds."""

    first_step: int
    steps: int
    arms: dict[str, int]
    tokens: int
    verified: int
    seconds: float

    def share(self, arm: str) -> float:
        """Of the steps, those that played an arm."""
        return self.arms.get(arm, 0) / self.steps


def regroup(spans: Sequence[SpanLine], count: int) -> list[SpanLine]:
    """The same steps in `count` spans, or as many as there are if they are fewer."""
    count = min(count, len(spans))
    groups = [spans[number * len(spans) // count : (number + 1) * len(spans) // count] for number in range(count)]
    return [
        SpanLine(
            group[0].first_step,
            sum(span.steps for span in group),
            dict(sum((Counter(span.arms) for span in group), Counter())),
            sum(span.tokens for span in group),
            sum(span.verified for span in group),
            sum(span.seconds for span in group),
        )
        for group in groups
    ]


@dataclass(frozen=True, slots=True)
class DepthLine:
    """One depth of a drafter's proposals.

    Attributes:
        judged: proposals that the text followed up to the depth before, with candidates here and a known token.
        hits: those of them that had the token: hits / judged is the acceptance given that the parent was accepted.
        candidates: nodes that these proposals had there; hits / candidates is the same per node.
        unknown: proposals with candidates here that the text followed so far, where the step's text ended.
    """

    depth: int
    judged: int
    hits: int
    candidates: int
    unknown: int


@dataclass(frozen=True, slots=True)
class DrafterLine:
    """One drafter's proposals, verified or not. `unjudged` are sampled ones that were not verified."""

    drafter: str
    asked: int
    declined: int
    unjudged: int
    depths: tuple[DepthLine, ...]


@dataclass(frozen=True, slots=True)
class CalibrationLine:
    """Candidates whose probability of acceptance was taken to be in [low, high): `predicted` is the mean of it, `hits`
    of them were right."""

    low: float
    high: float
    candidates: int
    predicted: float
    hits: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the controller expected of the latest steps, per step, and what came; catching up left out."""

    steps: int
    expected_tokens: float
    tokens: float
    expected_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class CostLine:
    """Learnt seconds of one size: draft nodes verified, or the budget that a drafter was asked for, or tokens that it
    caught up on (seconds are per token then)."""

    drafter: str | None
    size: int
    seconds: float
    measurements: float


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost table in short: of every part, the sizes of the context bucket that was measured most.

    Attributes:
        context: its upper end in tokens, for `verify`; None if no verification was measured.
        overhead: seconds of deciding, committing and observing per step, None if never measured.
    """

    context: int | None
    verify: tuple[CostLine, ...]
    draft: tuple[CostLine, ...]
    catch_up: tuple[CostLine, ...]
    overhead: float | None


@dataclass(frozen=True, slots=True)
class GuardLine:
    """State of the guard.

    Attributes:
        allowance: share of the speed without speculation that may be lost.
        balance: tokens that speculation is ahead of that floor; below 0 it is behind.
        baseline_tokens_per_second: measured without speculation; None before the first measurement.
        baseline_steps, warmup: measurements made, and how many come first.
        off_streak: latest decisions in a row for no speculation.
        probe_every: length of such a streak after which an arm is tried again.
    """

    allowance: float
    balance: float
    baseline_tokens_per_second: float | None
    baseline_steps: int
    warmup: int
    off_streak: int
    probe_every: int


@dataclass(frozen=True, slots=True)
class Report:
    """What `AdaptiveSpec.report` returns; `print` it. Times in seconds; None where nothing was seen.

    Attributes:
        new_tokens: of all requests, each request's first token included, which its prefill gives.
        verified, accepted: draft nodes. `acceptance_rate` is accepted / verified: bonus tokens are not in it.
        mean_accepted_length: tokens per step, bonus included.
        seconds: of the steps. `tokens_per_second` is of the steps, too; prefill is told apart.
        running_rate: tokens per second that decisions are measured against: recent, where the strategy learns it.
        parts: seconds by part of a step.
        arms: most played first.
        spans: all steps from the first on, in spans of equal length.
        calibration: empty if the strategy values no candidates.
        reasons: why the latest `RECENT` steps were decided as they were: keys of `control.controller.REASONS`.
        last, proposed: the latest step, and how many nodes each asked drafter proposed in it.
        faults, latest_fault: how often a drafter was set aside, and why at last.
        why: a sentence on the latest step.
    """

    strategy: str
    requests: int
    steps: int
    new_tokens: int
    verified: int
    accepted: int
    mean_accepted_length: float | None
    acceptance_rate: float | None
    prefill_seconds: float
    seconds: float
    tokens_per_second: float | None
    running_rate: float | None
    parts: dict[str, float]
    arms: tuple[ArmLine, ...]
    spans: tuple[SpanLine, ...]
    drafters: tuple[DrafterLine, ...]
    calibration: tuple[CalibrationLine, ...]
    forecast: Forecast | None
    costs: Costs | None
    guard: GuardLine | None
    reasons: dict[str, int]
    last: StepRecord | None
    proposed: dict[str, int]
    faults: int
    latest_fault: str | None
    why: str

    def __str__(self) -> str:
        """Plain text, a section per subject."""
        from adaptspec.reporting.text import render

        return render(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that survive JSON exactly."""
        return json.loads(json.dumps(asdict(self), allow_nan=False))

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw the report as one picture. A file that is already there is replaced.

        Args:
            path: ends in .png, .pdf or .svg.

        Returns:
            The path.

        Raises:
            ValueError: another ending, or nothing was seen yet.
            ImportError: matplotlib is not installed.
            OSError: the file cannot be written.
        """
        from adaptspec.reporting.picture import save

        return save(self, Path(path))
