"""What a whole batch may do in a step, and what the step costs whatever is drafted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Load:
    """What the step costs whatever is drafted.

    Attributes:
        rows: decoding rows, all of them.
        tokens: tokens of the pass without drafts.
        context: mean committed tokens.
        off_seconds: expected of the step without drafts.
        extra: float64 [D], seconds that playing a drafter costs besides drafting (its state has gone stale).
        usable: bool [D].
    """

    rows: int
    tokens: int
    context: float
    off_seconds: float
    extra: np.ndarray
    usable: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What the rows that may draft are given.

    Attributes:
        drafters: in play, in the order of the policy; none is "off".
        arms: int64 [R], index into the arms, -1 for none; None where nobody is given one.
        drafts: whether any row is given an arm.
        tokens, verified, seconds: expected of the whole step: tokens of all rows, draft tokens in the pass.
    """

    drafters: tuple[int, ...]
    arms: np.ndarray | None
    drafts: bool
    tokens: float
    verified: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def same(self, other: Plan) -> bool:
        """Whether both give all rows the same."""
        return self is other or (self.drafters == other.drafters and np.array_equal(self.arms, other.arms))
