"""What speculation did for one request, in the field's terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """Of one request.

    Attributes:
        num_steps, num_tokens: decode steps, and tokens that they emitted.
        num_spec_steps: steps in which a draft was verified.
        num_draft_tokens, num_accepted_tokens: draft tokens verified, and accepted of them.
        acceptance_histogram: [K + 1], steps with a draft by how many tokens of it were accepted.
        mean_acceptance_length: tokens per step with a draft, the bonus token included; 1 without drafts.
        draft_acceptance_rate: accepted / verified draft tokens, bonus not included; 0 without drafts.
    """

    num_steps: int
    num_tokens: int
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_histogram: tuple[int, ...]

    @property
    def mean_acceptance_length(self) -> float:
        return 1.0 + self.num_accepted_tokens / self.num_spec_steps if self.num_spec_steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @classmethod
    def of(cls, totals: np.ndarray, histogram: np.ndarray) -> RequestSummary:
        """From the totals [4] and the histogram [K + 1] of `requests.RequestTable`."""
        steps, tokens, verified, accepted = totals.tolist()
        return cls(steps, tokens, int(histogram.sum()), verified, accepted, tuple(histogram.tolist()))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, the means included."""
        return {
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "acceptance_histogram": list(self.acceptance_histogram),
            "num_spec_steps": self.num_spec_steps,
            "num_steps": self.num_steps,
            "num_tokens": self.num_tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
        }
