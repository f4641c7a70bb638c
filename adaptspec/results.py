"""What a generation returns and how its numbers are added up."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from adaptspec.types import StepRecord

if TYPE_CHECKING:
    import torch

    from adaptspec.session import Session


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """What one generation cost and gained. Times in seconds.

    Attributes:
        mean_accepted_length: tokens per verify pass, bonus token included.
        acceptance_rate: accepted / verified draft nodes, bonus token not included; 0 without drafts.
        arms: steps per arm.
        lossless: False only with the verifier "typical".
    """

    new_tokens: int
    seconds: float
    prefill_seconds: float
    steps: int
    mean_accepted_length: float
    acceptance_rate: float
    arms: dict[str, int]
    draft_seconds: float
    evaluate_seconds: float
    catch_up_seconds: float
    verify_seconds: float
    commit_seconds: float
    observe_seconds: float
    controller_seconds: float
    other_seconds: float
    finish_reason: str
    lossless: bool
    set_aside: dict[str, str] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """New tokens / wall time, prefill included."""
        return self.new_tokens / self.seconds if self.seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, `tokens_per_second` included."""
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """What `AdaptiveSpec.generate` returns: `sequences` int64 [1, T], prompt included, statistics, step records."""

    sequences: torch.Tensor
    stats: GenerationStats
    trace: list[StepRecord]

    @property
    def finish_reason(self) -> str:
        """ "eos", "length", "stop" (a stop string or criterion) or "context" (the model's context is full)."""
        return self.stats.finish_reason


def stats_of(session: Session, *, seconds: float, lossless: bool) -> GenerationStats:
    """Add up the trace of a finished session."""
    trace = session.trace
    verified = sum(record.verified for record in trace)
    accepted = sum(record.accepted for record in trace)
    emitted = sum(record.emitted for record in trace)
    arms: dict[str, int] = {}
    for record in trace:
        arms[record.arm] = arms.get(record.arm, 0) + 1
    total = {
        name: sum(getattr(record, name) for record in trace)
        for name in (
            "draft_seconds",
            "evaluate_seconds",
            "catch_up_seconds",
            "verify_seconds",
            "commit_seconds",
            "observe_seconds",
            "controller_seconds",
            "other_seconds",
        )
    }
    assert session.finish_reason is not None
    return GenerationStats(
        new_tokens=session.new_tokens,
        seconds=seconds,
        prefill_seconds=session.prefill_seconds,
        steps=len(trace),
        mean_accepted_length=emitted / len(trace) if trace else 1.0,
        acceptance_rate=accepted / verified if verified else 0.0,
        arms=arms,
        finish_reason=session.finish_reason,
        lossless=lossless,
        set_aside=dict(session.proposer.set_aside),
        **total,
    )
