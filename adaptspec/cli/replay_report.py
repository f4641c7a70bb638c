"""Strategies and comparators over seeds and stream orders, as one dictionary and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from adaptspec.cli.progress import Reporter
from adaptspec.control.cost_worlds import Costs
from adaptspec.control.oracles import ArmTable, Hindsight, arm_table
from adaptspec.control.regret import UNITS, Regret, band, order_requests, regret
from adaptspec.control.replay import ReplayRun, replay
from adaptspec.control.strategies import make_controller
from adaptspec.control.trace import Trace
from adaptspec.types import Arm

if TYPE_CHECKING:
    from rich.table import Table

COMPARATORS = ("best-fixed", "best-per-domain", "best-per-prompt", "best-switching", "best-per-step")
"""From the weakest to the strongest, as far as they can be compared."""

POINTS = 50
"""Places along the stream at which regret is kept."""


@dataclass(slots=True)
class Plays:
    """Everything that is played, seed by seed.

    Attributes:
        arms: of the strategies; those with numbers are the comparators' too.
        order: of `adaptspec.control.regret.order_requests`.
        switches: of the best switching play.
        guard: as in `make_controller`.
        seeds: that are finished.
        runs: by strategy or comparator, one entry per seed.
        curves: by strategy or comparator and the comparator it is held against, one per seed.
    """

    trace: Trace
    arms: Sequence[Arm]
    strategies: Sequence[str]
    costs: Costs
    order: str
    switches: int
    guard: float | None
    seeds: list[int] = field(default_factory=list, init=False)
    runs: dict[str, list[_Totals]] = field(default_factory=dict, init=False)
    curves: dict[tuple[str, str], list[Regret]] = field(default_factory=dict, init=False)
    _tables: list[ArmTable] = field(default_factory=list, init=False)

    def play(self, seed: int, progress: Reporter) -> None:
        """All strategies and comparators on the stream of one seed."""
        progress.step(f"seed {seed}: best plays in hindsight")
        fixed = [arm for arm in self.arms if arm.budget != "auto"]
        if not self._tables:
            tokens = self.trace.max_new_tokens
            self._tables = [arm_table(request, fixed, max_new_tokens=tokens) for request in self.trace.requests]
        order = order_requests(self.trace, self.order, rng=np.random.default_rng([seed, 0]))
        hindsight = Hindsight(self.trace, fixed, costs=self.costs, order=order, tables=self._tables)
        comparators = {
            "best-fixed": hindsight.best_fixed(),
            "best-per-domain": hindsight.best_per_domain(),
            "best-per-prompt": hindsight.best_per_prompt(),
            "best-switching": hindsight.best_switching(self.switches),
            "best-per-step": hindsight.best_per_step(),
        }
        played = {"ar": hindsight.fixed(Arm.autoregressive()), **comparators}
        for name in self.strategies:
            progress.step(f"seed {seed}: {name}")
            controller = make_controller(
                name, arms=self.arms, drafters=list(self.trace.nodes), guard=self.guard, seed=seed
            )
            played[name] = replay(
                self.trace, controller, costs=self.costs, order=order, rng=np.random.default_rng([seed, 1])
            )
        # Only now, so that an interrupted seed leaves nothing behind.
        self.seeds.append(seed)
        for name, run in played.items():
            self.runs.setdefault(name, []).append(_Totals.of(run))
            for other, best in comparators.items():
                self.curves.setdefault((name, other), []).append(regret(run, best, points=POINTS))

    def summary(self) -> dict[str, Any]:
        """The fields `seeds`, `stream`, `comparators` and `runs` of the report."""
        domains: dict[str, int] = {}
        for request in self.trace.requests:
            domains[request.domain] = domains.get(request.domain, 0) + 1
        known = ("ar", *COMPARATORS)
        return {
            "seeds": self.seeds,
            "stream": {
                "requests": len(self.trace.requests),
                "tokens": sum(request.positions for request in self.trace.requests),
                "domains": domains,
            },
            "comparators": [self._entry(name) for name in known if name in self.runs],
            "runs": [self._entry(name) for name in self.runs if name not in known],
        }

    def _entry(self, name: str) -> dict[str, Any]:
        runs = self.runs[name]
        seconds, tokens, steps = (sum(getattr(run, key) for run in runs) for key in ("seconds", "tokens", "steps"))
        deciding = sum(run.deciding_seconds for run in runs)
        bests = {other: self.runs[other] for other in COMPARATORS}
        return {
            "name": name,
            "tokens_per_second": tokens / seconds,
            "tokens_per_second_seeds": [run.tokens / run.seconds for run in runs],
            "seconds_seeds": [run.seconds for run in runs],
            "rounds_seeds": [run.steps for run in runs],
            "prefill_seconds": sum(run.prefill_seconds for run in runs) / len(runs),
            "mean_accepted_length": tokens / steps,
            "mean_verified": sum(run.verified for run in runs) / steps,
            "arms": _shares(runs),
            "deciding_seconds_per_step": deciding / steps,
            "tokens_per_second_deciding_charged": tokens / (seconds + deciding),
            "against": {other: sum(run.seconds for run in best) / seconds for other, best in bests.items()},
            "regret": {other: self._regret(name, other) for other in COMPARATORS},
        }

    def _regret(self, name: str, comparator: str) -> dict[str, Any]:
        curves = self.curves[name, comparator]
        regrets: dict[str, Any] = {"position": _rounded(curves[0].position)}
        for unit in UNITS:
            found = band([getattr(curve, unit) for curve in curves])
            regrets[unit] = {key: _rounded(getattr(found, key)) for key in ("mean", "low", "high")}
        return regrets


@dataclass(frozen=True, slots=True)
class _Totals:
    """What is kept of a run."""

    tokens: int
    steps: int
    verified: int
    seconds: float
    prefill_seconds: float
    deciding_seconds: float
    arms: Mapping[str, float]

    @classmethod
    def of(cls, run: ReplayRun) -> _Totals:
        return cls(
            run.tokens,
            len(run.seconds),
            int(run.verified.sum()),
            run.total_seconds,
            run.prefill_seconds,
            run.deciding_seconds,
            run.arm_shares(),
        )


def _shares(runs: Sequence[_Totals]) -> dict[str, float]:
    """Share of the steps by arm over all seeds, largest first."""
    steps = sum(run.steps for run in runs)
    shares: dict[str, float] = {}
    for run in runs:
        for arm, share in run.arms.items():
            shares[arm] = shares.get(arm, 0.0) + share * run.steps / steps
    return dict(sorted(shares.items(), key=lambda entry: -entry[1]))


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]


def replay_table(report: Mapping[str, Any], *, title: str | None = None) -> Table:
    """One row per comparator and strategy, over all seeds.

    "of ..." is tokens per second as a share of that comparator's; "length" the mean accepted length, bonus included;
    "regret" seconds lost against the best fixed arm; "deciding" what the controller took here, charged to nobody.
    """
    from rich import box
    from rich.table import Table

    from adaptspec.cli.table import number, percent, spread

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    several = len(report["seeds"]) > 1
    columns = ["tokens/s", *(["over seeds"] if several else []), "length"]
    columns += [f"of {name.removeprefix('best-').removeprefix('per-')}" for name in COMPARATORS]
    for column in (*columns, "regret (s)", "deciding (ms)"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("arms (share of steps)", no_wrap=True)
    for kind in ("comparators", "runs"):
        for run in report[kind]:
            lost = run["regret"]["best-fixed"]["seconds"]
            deciding = run["deciding_seconds_per_step"]
            table.add_row(
                run["name"],
                number(run["tokens_per_second"], 1),
                *([spread(run["tokens_per_second_seeds"])] if several else []),
                number(run["mean_accepted_length"], 2),
                *(number(run["against"][name], 3) for name in COMPARATORS),
                number(lost["mean"][-1], 2),
                number(1000 * deciding if deciding else None, 2),
                "  ".join(f"{arm} {percent(share)}" for arm, share in list(run["arms"].items())[:3]),
                style="bold" if kind == "runs" else None,
            )
        table.add_section()
    return table
