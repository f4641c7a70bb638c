"""What steps take in a replay: costs of the world, which no learner is shown but as the seconds of its own steps.

Constant costs (`StepCosts`) come from what was measured while a trace was recorded, from a named profile, or from a
file (`cost_world_file`); `CostPhases` lets them change along the stream. Changes are tied to the token position of the
stream and not to a step, so that every policy meets them at the same place of the text and best plays stay computable.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from adaptspec.control.cost import CostModel, CostPrior
from adaptspec.control.cost_cell import check_seconds
from adaptspec.control.cost_curve import MAX_NODES
from adaptspec.control.cost_table import SMALLEST_CONTEXT
from adaptspec.names import unknown_name
from adaptspec.types import Arm

LONGEST_CONTEXT = 20
"""Recorded costs are read off up to contexts of 2 ** 20 tokens; longer ones cost the same."""

FEW_TOKENS = 16
"""Catching up costs per token what it was measured to cost for so many."""

PROFILES: Mapping[str, CostPrior] = {
    "cpu-bf16": CostPrior(0.037, 0.023 / 63),
    "cpu-fp32": CostPrior(0.036, 0.094 / 63),
    "h100": CostPrior(0.010, 0.002 / 63),
    "loaded": CostPrior(0.030, 0.010),
}
"""Verification of one request, linear in rows. CPU with 2 cores: 37 ms for 1 row and 60 for 64 in bfloat16, 36 and 130
in float32; like an H100: 10 and 12; a loaded server: 20 ms and 10 more per row."""


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """What one step takes, in seconds: verification, drafting by asked drafter, and everything else."""

    verify: float
    draft: Mapping[str, float]
    overhead: float


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs that do not change.

    Attributes:
        verify: float64 [C, K + 1], seconds of a verification with 0..K draft nodes in C ranges of context. One curve
            [K + 1] is fine.
        contexts: C rising numbers of committed tokens, the upper ends of the ranges; longer contexts are in the last.
        draft: by drafter, seconds of a proposal, or float64 [K + 1] by budget. Every drafter of a replay must be there.
        overhead: seconds of everything else in a step: deciding, committing, observing.
        prefill_per_token: seconds; reported apart, charged to no step.
        catch_up_per_token: seconds, for drafters that must catch up on what was committed while they were not asked.
        noise: standard deviation of the logarithm of a measurement over its mean; 0 for none.
    """

    verify: np.ndarray
    contexts: tuple[int, ...] = (2**40,)
    draft: Mapping[str, float | np.ndarray] = field(default_factory=dict)
    overhead: float = 0.0
    prefill_per_token: float = 0.0
    catch_up_per_token: Mapping[str, float] = field(default_factory=dict)
    noise: float = 0.0

    def __post_init__(self) -> None:
        verify = np.atleast_2d(np.asarray(self.verify, dtype=np.float64))
        if verify.ndim != 2 or len(verify) != len(self.contexts) or not verify.shape[1]:
            raise ValueError(
                f"verify must have one curve for each of {len(self.contexts)} contexts, got {verify.shape}"
            )
        if not (np.isfinite(verify).all() and (verify > 0.0).all()):
            raise ValueError("verify must be finite seconds > 0")
        if any(low >= high for low, high in pairwise(self.contexts)):
            raise ValueError(f"contexts must rise, got {self.contexts}")
        object.__setattr__(self, "verify", verify)
        for name, seconds in self.draft.items():
            if isinstance(seconds, np.ndarray) and seconds.shape != (verify.shape[1],):
                raise ValueError(f"draft of {name!r} must have {verify.shape[1]} entries, got {seconds.shape}")
            for value in np.ravel(seconds).tolist():
                check_seconds(f"draft of {name!r}", value)
        for name, value in self.catch_up_per_token.items():
            check_seconds(f"catch_up_per_token of {name!r}", value)
        for name in ("overhead", "prefill_per_token", "noise"):
            check_seconds(name, getattr(self, name))

    def at(self, token: int) -> StepCosts:
        """The costs once `token` tokens of the stream are out: always these."""
        return self

    def scaled(self, factor: float) -> StepCosts:
        """A machine that takes `factor` times as long for everything."""
        if not 0.0 < factor < np.inf:
            raise ValueError(f"factor must be > 0 and finite, got {factor!r}")
        return replace(
            self,
            verify=self.verify * factor,
            draft={name: seconds * factor for name, seconds in self.draft.items()},
            overhead=self.overhead * factor,
            prefill_per_token=self.prefill_per_token * factor,
            catch_up_per_token={name: seconds * factor for name, seconds in self.catch_up_per_token.items()},
        )

    def check_drafters(self, names: Iterable[str]) -> None:
        """Raises ValueError unless it is known what each of these drafters costs."""
        for name in names:
            if name not in self.draft:
                raise unknown_name("drafter in costs", name, self.draft)

    def verify_seconds(self, nodes: int, *, context: int) -> float:
        """Mean seconds of a verification."""
        row = bisect_left(self.contexts, context)
        return self.verify.item(min(row, len(self.contexts) - 1), nodes)

    def verify_seconds_of(self, nodes: np.ndarray, contexts: np.ndarray) -> np.ndarray:
        """The same for arrays [..., P] of nodes and [P] of contexts."""
        rows = np.minimum(np.searchsorted(self.contexts, contexts), len(self.contexts) - 1)
        return self.verify[rows, nodes]

    def draft_seconds(self, drafter: str, budget: int) -> float:
        """Mean seconds of a proposal; 0 for "ar"."""
        if drafter == "ar":
            return 0.0
        seconds = self.draft[drafter]
        return seconds.item(budget) if isinstance(seconds, np.ndarray) else seconds

    def step(
        self, nodes: int, *, context: int, asked: Iterable[Arm], rng: np.random.Generator | None = None
    ) -> StepSeconds:
        """What a step takes that verifies `nodes` nodes and asks these drafters; with noise, as it is measured.

        Noise is log-normal with mean 1 and independent for the verification and each proposal.
        """
        verify = self.verify_seconds(nodes, context=context)
        drafts = {arm.drafter: self.draft_seconds(arm.drafter, arm.budget) for arm in asked}
        if self.noise:
            if rng is None:
                raise ValueError(f"rng must be given for costs with noise, got noise = {self.noise}")
            verify *= self._jitter(rng)
            drafts = {name: seconds * self._jitter(rng) for name, seconds in drafts.items()}
        return StepSeconds(verify, drafts, self.overhead)

    def _jitter(self, rng: np.random.Generator) -> float:
        return float(np.exp(self.noise * rng.standard_normal() - 0.5 * self.noise**2))


@dataclass(frozen=True, slots=True)
class CostPhases:
    """Costs that change along the stream: a throttled machine, a load that comes and goes.

    Attributes:
        phases: (token, costs): from when so many tokens of the stream are out; the first is from 0 on.

    >>> cool = StepCosts(np.array([0.03, 0.04]))
    >>> world = CostPhases(((0, cool), (1000, cool.scaled(2.0))))
    >>> world.at(999).verify_seconds(1, context=1), world.at(1000).verify_seconds(1, context=1)
    (0.04, 0.08)
    """

    phases: tuple[tuple[int, StepCosts], ...]

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.phases]
        if not starts or starts[0] != 0 or any(low >= high for low, high in pairwise(starts)):
            raise ValueError(f"phases must begin at token 0 and rise, got {starts}")

    def at(self, token: int) -> StepCosts:
        """The costs once `token` tokens of the stream are out."""
        return self.phases[bisect_right(self.phases, token, key=lambda phase: phase[0]) - 1][1]

    def check_drafters(self, names: Iterable[str]) -> None:
        """Raises ValueError unless it is known what each of these drafters costs."""
        names = list(names)
        for _, costs in self.phases:
            costs.check_drafters(names)


Costs = StepCosts | CostPhases


def recorded_costs(state: Mapping[str, Any]) -> StepCosts:
    """What a `CostModel` has learnt, from its state: `Trace.costs`, or a profile. Drafters never measured are left out.

    Raises:
        ValueError: a damaged state, or one in which no verification was measured.
    """
    model = CostModel.from_state(state)
    rows = model.to_table()
    if not any(row["part"] == "verify" for row in rows):
        raise ValueError("the recorded costs hold no verification")
    drafted = dict.fromkeys(row["drafter"] for row in rows if row["part"] == "draft")
    caught_up = dict.fromkeys(row["drafter"] for row in rows if row["part"] == "catch_up")
    contexts = tuple(2**exponent for exponent in range(SMALLEST_CONTEXT, LONGEST_CONTEXT + 1))
    return StepCosts(
        np.array([model.verify_curve(MAX_NODES, context=context) for context in contexts]),
        contexts,
        {name: np.array([model.draft_seconds(name, n) for n in range(MAX_NODES + 1)]) for name in drafted},
        model.overhead_seconds(),
        catch_up_per_token={name: model.catch_up_seconds(name, FEW_TOKENS) / FEW_TOKENS for name in caught_up},
    )


def profile_costs(name: str, recorded: StepCosts) -> StepCosts:
    """A profile's verification with what drafters were recorded to take; nothing else is charged.

    Raises:
        ValueError: unknown profile.
    """
    if name not in PROFILES:
        raise unknown_name("cost profile", name, PROFILES)
    curve = PROFILES[name].curve(1)
    return replace(recorded, verify=curve, contexts=(2**40,), overhead=0.0)
