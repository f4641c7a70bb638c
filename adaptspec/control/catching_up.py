"""When a drafter that lags behind is worth the time that bringing it up takes.

Catching up is paid once and pays off over the steps that follow. So a switch to a cold drafter is made if what it is
known to gain per step, over `CATCH_UP_STEPS` steps, is worth more than catching up takes. What is not known to pay is
tried all the same, but only from an allowance: a share of the run's time, which may be overdrawn once and must then be
earned back. So nothing is locked out for good, and trying costs no more than that share.
"""

from __future__ import annotations

CATCH_UP_STEPS = 20
"""Over so many steps the time that a drafter needs to catch up must pay off."""

CATCH_UP_SHARE = 0.01
"""Share of the run's time that may go into catching up without being known to pay."""

_MOST_STEPS = 500
"""Allowance is saved up for no more than about so many steps: what was not needed for long is not spent at once."""


class CatchUpAllowance:
    """Seconds that may be spent on catching up to find something out.

    >>> allowance = CatchUpAllowance()
    >>> allowance.take(0.5), allowance.take(0.1)    # the first time is free; then it has to be earned
    (True, False)
    >>> for _ in range(60):
    ...     allowance.earn(1.0)
    >>> allowance.take(0.1)
    True
    """

    __slots__ = ("seconds",)

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def earn(self, step_seconds: float) -> None:
        """A step took so long."""
        if self.seconds > 0.0:
            self.seconds *= 1.0 - 1.0 / _MOST_STEPS
        self.seconds += CATCH_UP_SHARE * step_seconds

    def take(self, seconds: float) -> bool:
        """Spend, if nothing is owed."""
        if self.seconds < 0.0:
            return False
        self.seconds -= seconds
        return True
