"""A floor under the loss: speculation may not have cost more than a share of the speed without it.

Kept in steps without speculation of the load at hand, so that one account serves every batch size: a step that emits m
tokens per row and takes u times as long as the pass without drafts earns m - (1 - share) u, one without speculation
earns `share`. A plan may be played while the account covers the worst that its next step may cost, one token per row in
the longest time seen. What is refused earns, so that no refusal is for good.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adaptspec.bandits.checks import check_between
from adaptspec.bandits.state import read_float, read_int

CREDIT, LIMIT, DEBT = 5.0, 20.0, -5.0
"""Where the account begins, and between what it is kept. Debt is limited because a stall says nothing of a plan."""

MEASURE_EVERY = 256
"""Steps after which no speculation is measured again at a load."""

UNGUARDED_STEPS = 16
"""Steps at a new load after which no speculation is measured where there is no guard."""

MEASUREMENTS = 2
"""Steps without speculation that come first at a new load."""

_PEAK_FADE = 0.98
_STALL = 3.0


class Floor:
    """See the module.

    Args:
        share: of the speed without speculation that may be lost. None allows every plan, and measures no speculation
            later: what drafts cost is still known only from steps without them.
    """

    def __init__(self, share: float | None) -> None:
        if share is not None and check_between("guard", share, low=0.0, high=1.0) >= 1.0:
            raise ValueError(f"guard must be in (0, 1) or None, got {share}")
        self.share = share
        self.balance = CREDIT
        self.peak = 1.5
        self._measured: dict[int, list[int]] = {}

    def must_measure(self, load: int, *, step: int) -> bool:
        """Whether the speed without speculation is unknown, or was not measured for long, at this load."""
        if load not in self._measured:
            later = [MEASUREMENTS, step + UNGUARDED_STEPS - MEASURE_EVERY]
            self._measured[load] = [0, step] if self.share is not None else later
        times, last = self._measured[load]
        return times < MEASUREMENTS or step - last >= MEASURE_EVERY

    def forget(self) -> None:
        """The machine has become faster or slower: what a step without speculation takes must be measured again."""
        for entry in self._measured.values():
            entry[0] = 0

    def allows(self, slowdown: float) -> bool:
        """Whether a plan may be played that is expected to take so many times as long as no speculation."""
        if self.share is None:
            return True
        return (1.0 - self.share) * slowdown * self.peak - 1.0 <= max(self.balance, 0.0)

    def account(self, load: int, *, step: int, off: bool, tokens: float, slowdown: float, expected: float) -> None:
        """A step is over.

        Args:
            tokens: emitted per row.
            slowdown, expected: how many times as long as no speculation it took, and was expected to take.
        """
        share = 0.0 if self.share is None else self.share
        if off:
            times, _ = self._measured.get(load, (0, step))
            self._measured[load] = [min(times + 1, MEASUREMENTS), step]
            self._earn(share * tokens)
            return
        over = slowdown / expected if expected > 0.0 else 1.0
        self.peak = max(1.0, min(over, _STALL), 1.0 + _PEAK_FADE * (self.peak - 1.0))
        self._earn(tokens - (1.0 - share) * min(slowdown, _STALL * max(expected, 1.0)))

    def _earn(self, amount: float) -> None:
        self.balance = min(max(self.balance + amount, DEBT), LIMIT)

    def state_dict(self) -> dict[str, Any]:
        measured = [[load, *entry] for load, entry in self._measured.items()]
        return {"share": self.share, "balance": self.balance, "peak": self.peak, "measured": measured}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError on anything but a `state_dict()` with this share; nothing changes then."""
        if not isinstance(state, Mapping) or state.get("share") != self.share:
            got = state.get("share") if isinstance(state, Mapping) else state
            raise ValueError(f"state: share of the guard must be {self.share}, got {got!r:.80}")
        balance = read_float(state, "balance", minimum=DEBT, maximum=LIMIT)
        peak = read_float(state, "peak", minimum=1.0)
        measured: dict[int, list[int]] = {}
        rows = state.get("measured")
        if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == 3 for row in rows):
            raise ValueError(f"state: measured must be a list of triples, got {rows!r:.80}")
        for load, times, last in rows:
            measured[read_int({"load": load}, "load", maximum=64)] = [
                read_int({"times": times}, "times", maximum=MEASUREMENTS),
                read_int({"last": last}, "last", minimum=-MEASURE_EVERY),
            ]
        self.balance, self.peak, self._measured = balance, peak, measured
