"""When to look again: hysteresis between plans, tries of drafters that were not played for long, the way back from off.

Off costs hardly a thought: plans are looked at anew every few steps only, and a drafter is tried again after a wait
that doubles with every try that ends in off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from adaptspec.bandits.state import read_int
from adaptspec.serving.plans import Plan

MARGIN = 0.03
"""A plan must be better by this share to take another's place."""

DWELL, DWELL_MARGIN = 8, 0.15
"""For so many steps after a switch it must be better by this share."""

LOOK_EVERY = 16
"""While speculation is off it is looked at anew after so many steps at the latest."""

PROBE_EVERY, LONGEST_WAIT = 64, 1024
"""Steps off after which a drafter is tried again; doubled with every try that ends in off."""

TRY_FIRST, TRY_EVERY = 32, 512
"""While speculating, steps after which the drafter played longest ago is tried, at first and in the long run."""

PROBE_TRIALS = 8
"""Rows times steps of a probe."""


@dataclass(slots=True)
class Pace:
    """Where the choice of plans stands in time.

    Attributes:
        step: steps so far.
        off_streak: latest of them in a row without speculation.
        since_look, since_switch: steps since plans were compared, and since another plan took over.
        probe_wait, next_probe: steps off between tries, and `off_streak` at the next one.
        probe_left, probe_drafter, probes: steps left of the try under way, who is tried, and tries so far.
        try_wait, next_try: the same while speculating.
        quiet: 1 if nothing paid at the latest look.
        plan: key of the plan under way.
        played: per drafter, the step in which it was last in play.
    """

    step: int = 0
    off_streak: int = 0
    since_look: int = LOOK_EVERY
    since_switch: int = DWELL
    probe_wait: int = PROBE_EVERY
    next_probe: int = PROBE_EVERY
    probe_left: int = 0
    probe_drafter: int = -1
    probes: int = 0
    try_wait: int = TRY_FIRST
    next_try: int = TRY_FIRST
    quiet: int = 0
    plan: list[int] = field(default_factory=list)
    played: list[int] = field(default_factory=list)

    def rests(self) -> bool:
        """Whether this step is off without a look; it is counted then."""
        if not self.quiet or not self.off_streak or self.probe_left or self.off_streak >= self.next_probe:
            return False
        if self.since_look >= min(self.off_streak // 2, LOOK_EVERY):
            return False
        self.since_look += 1
        self.off_streak += 1
        return True

    def looks(self) -> None:
        """Plans are compared in this step."""
        self.since_switch += 1
        self.since_look = 0

    @property
    def margin(self) -> float:
        """By what share another plan must be better than the one under way."""
        return DWELL_MARGIN if self.since_switch < DWELL else MARGIN

    def switch(self, plan: list[int]) -> None:
        """Another plan takes over."""
        self.plan = plan
        self.since_switch = 0

    def play(self, drafters: Sequence[int]) -> None:
        """These are in play in this step."""
        for drafter in drafters:
            self.played[drafter] = self.step

    def count(self, *, drafts: bool, probe: bool) -> None:
        """The step is decided."""
        if probe:
            self.since_look = LOOK_EVERY
        elif drafts:
            self.off_streak, self.probe_wait, self.next_probe = 0, PROBE_EVERY, PROBE_EVERY
        else:
            self.off_streak += 1

    def probe(
        self, alone: Sequence[Plan | None], lazily: Callable[[], Sequence[Plan | None]], *, rows: int
    ) -> Plan | None:
        """What to try again in this step, if a try is due.

        Args:
            alone: the best plan of every drafter alone, None where it cannot be played.
            lazily: gives every drafter at its shortest length on all rows; None where it is unavailable.
            rows: that may draft.
        """
        again = not self.off_streak and self.step >= self.next_try
        if not (self.probe_left or again or self.off_streak >= self.next_probe):
            return None
        shortest = lazily()
        usable = [drafter for drafter, plan in enumerate(shortest) if plan is not None]
        if not usable:
            self.probe_left = 0
            return None
        if self.probe_left and self.probe_drafter in usable:
            self.probe_left -= 1
        elif self.off_streak >= self.next_probe:
            # The most promising and the one not seen for longest take turns.
            promising = max(usable, key=lambda drafter: (_rate(alone[drafter], shortest[drafter]), -drafter))
            self._begin_probe(self._oldest(usable) if self.probes % 2 else promising, rows=rows)
            self.next_probe = self.off_streak + self.probe_wait
            self.probe_wait = min(2 * self.probe_wait, LONGEST_WAIT)
        elif again:
            oldest = self._oldest(usable)
            wait, self.try_wait = self.try_wait, min(2 * self.try_wait, TRY_EVERY)
            self.next_try = self.step + self.try_wait
            if self.step - self.played[oldest] < wait:
                return None
            self._begin_probe(oldest, rows=rows)
        else:
            self.probe_left = 0
            return None
        best = alone[self.probe_drafter]
        return best if best is not None and best.drafts else shortest[self.probe_drafter]

    def _oldest(self, drafters: Sequence[int]) -> int:
        return min(drafters, key=lambda drafter: (self.played[drafter], drafter))

    def _begin_probe(self, drafter: int, *, rows: int) -> None:
        self.probe_drafter = drafter
        self.probe_left = -(-PROBE_TRIALS // max(rows, 1)) - 1
        self.probes += 1

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state(cls, state: Any, *, drafters: int) -> Pace:
        """Raises ValueError on anything but a `state_dict()` with as many drafters."""
        names = [entry.name for entry in fields(cls)]
        if not isinstance(state, Mapping) or state.keys() != set(names):
            raise ValueError(f"state: progress must be a mapping of {', '.join(names)}")
        lists = {}
        for name, length in (("plan", None), ("played", drafters)):
            value = state[name]
            if not isinstance(value, list) or (length is not None and len(value) != length):
                raise ValueError(
                    f"state: {name} must be a list of {'some' if length is None else length} whole numbers"
                )
            lists[name] = [read_int({name: item}, name) for item in value]
        numbers = {name: read_int(state, name, minimum=-1) for name in names if name not in lists}
        return cls(**numbers, **lists)


def _rate(*plans: Plan | None) -> float:
    return max(plan.rate for plan in plans if plan is not None and plan.drafts)
