"""The running rate of a stream: the sum of tokens over the sum of seconds, never a mean of single ratios."""

from __future__ import annotations

from dataclasses import dataclass

RATE_FADE = 0.998
"""Weight of the past per step: about 500 steps."""


@dataclass(slots=True)
class RunningRate:
    """Tokens per second over the latest steps (Dinkelbach's rho)."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        """One step."""
        self.tokens = RATE_FADE * self.tokens + tokens
        self.seconds = RATE_FADE * self.seconds + seconds

    @property
    def value(self) -> float:
        """0 before the first step."""
        return self.tokens / self.seconds if self.seconds > 0.0 else 0.0

    def state(self) -> list[float]:
        """Both sums."""
        return [self.tokens, self.seconds]
