"""Seconds that the parts of a step will take, learnt online from what they took.

Cost is a property of hardware and load, acceptance one of text and drafter: they are learnt apart. Every part is a
decayed, robust running value (`cost_cell`); verification and drafting are curves over nodes or budget, one per batch
and context bucket (`cost_curve`, `cost_table`). Report only what belongs to the part: no prefill, no compilation, and
catching a cold drafter up apart from drafting.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from adaptspec.bandits.checks import check_count
from adaptspec.bandits.state import check_equal, read_array, read_int
from adaptspec.control.cost_cell import CostCell, check_fields, check_seconds, merge_cells
from adaptspec.control.cost_curve import MAX_NODES, CostPrior
from adaptspec.control.cost_drafter import MAX_TOKENS, DrafterCosts
from adaptspec.control.cost_profile import fingerprint, read_profile, write_profile
from adaptspec.control.cost_table import SMALLEST_CONTEXT, CostTable, Key
from adaptspec.types import Arm

__all__ = ["MAX_DRAFTERS", "MAX_NODES", "CostModel", "CostPrior", "fingerprint"]

STATE_VERSION = 1
MAX_DRAFTERS = 64
"""Drafters remembered; the one measured longest ago makes room."""

DEFAULT_PRIOR = CostPrior(0.03, 0.0005)
"""A verification on no machine in particular; its shape is used until two sizes were measured."""

_FIELDS = ("version", "priors", "clock", "verify", "overhead", "drafters")
_NOTHING = CostPrior(0.0)


class CostModel:
    """Expected seconds of verifying, drafting, catching up and everything else.

    Batch sizes fall into powers of two, contexts (committed tokens) into powers of two from 512; `nodes` and `budget`
    count draft nodes per request, root not included. A bucket without measurements borrows the nearest one's curve,
    scaled by the prior between batch sizes and by its own measurements as soon as it has any. Estimates never
    decrease with nodes. Memory is bounded (`MAX_DRAFTERS`, and per table `MAX_CURVES` curves of `MAX_POINTS` sizes):
    what was measured longest ago is forgotten.

    Args:
        verify_prior: assumed before any verification was measured.
        draft_priors: the same by drafter; drafting and catching up are free until measured or given, so that
            every drafter gets its first try.

    >>> costs = CostModel(verify_prior=CostPrior(0.036, 0.0015))
    >>> for nodes, seconds in ((0, 0.036), (64, 0.132)):
    ...     costs.observe_verify(nodes, seconds)
    >>> costs.observe_draft("suffix", 32, 0.001)
    >>> round(costs.step_seconds(Arm("suffix", 32), 32), 4)
    0.085
    """

    def __init__(
        self,
        *,
        verify_prior: CostPrior = DEFAULT_PRIOR,
        draft_priors: Mapping[str, CostPrior] | None = None,
    ) -> None:
        self.draft_priors = dict(draft_priors or {})
        for name, prior in {"verify_prior": verify_prior, **self.draft_priors}.items():
            if not isinstance(prior, CostPrior):
                raise ValueError(f"{name} must be a CostPrior, got {prior!r}")
        self._verify = CostTable(verify_prior)
        self._drafters: dict[str, DrafterCosts] = {}
        self._overhead: CostCell | None = None
        self._clock = 0

    def observe_verify(self, nodes: int, seconds: float, *, batch: int = 1, context: int = 0) -> None:
        """A verification of `nodes` draft nodes took `seconds`.

        Raises:
            ValueError: times that are negative or not finite, sizes out of range; nothing is learnt then.
        """
        self._verify.observe(_key("full", batch, context), _size("nodes", nodes), check_seconds("seconds", seconds))

    def observe_draft(
        self, drafter: str, budget: int, seconds: float, *, vocab: str = "full", batch: int = 1, context: int = 0
    ) -> None:
        """Drafting with a budget of `budget` nodes took `seconds`. Raises as `observe_verify`."""
        key = _key(_name("vocab", vocab), batch, context)
        size, seconds = _size("budget", budget), check_seconds("seconds", seconds)
        self._drafter(drafter).table.observe(key, size, seconds)

    def observe_catch_up(self, drafter: str, tokens: int, seconds: float) -> None:
        """Bringing a cold drafter's state up by `tokens` tokens took `seconds`. Raises as `observe_verify`."""
        tokens = _whole("tokens", tokens, minimum=1, maximum=MAX_TOKENS)
        seconds = check_seconds("seconds", seconds)
        self._drafter(drafter).observe_catch_up(tokens, seconds)

    def observe_overhead(self, seconds: float) -> None:
        """Deciding, committing and observing took `seconds` in one step. Raises as `observe_verify`."""
        seconds = check_seconds("seconds", seconds)
        if self._overhead is None:
            self._overhead = CostCell(seconds)
        else:
            self._overhead.add(seconds)

    def _drafter(self, drafter: str) -> DrafterCosts:
        """The costs of a drafter that is being measured."""
        costs = self._drafters.get(drafter)
        if costs is None:
            if _name("drafter", drafter) == "ar":
                raise ValueError("drafter must not be 'ar': no speculation drafts nothing, got 'ar'")
            costs = self._drafters[drafter] = DrafterCosts(self.draft_priors.get(drafter, _NOTHING))
        self._clock += 1
        costs.touched = self._clock
        self._shrink()
        return costs

    def _shrink(self) -> None:
        while len(self._drafters) > MAX_DRAFTERS:
            del self._drafters[min(self._drafters, key=lambda name: self._drafters[name].touched)]

    def verify_seconds(self, nodes: int, *, batch: int = 1, context: int = 0) -> float:
        """Expected seconds of verifying `nodes` draft nodes."""
        return self._verify.curve(_key("full", batch, context)).item(_size("nodes", nodes))

    def verify_curve(self, max_nodes: int, *, batch: int = 1, context: int = 0) -> np.ndarray:
        """float64 [max_nodes + 1], expected seconds by nodes; read-only and never decreasing."""
        return self._verify.curve(_key("full", batch, context))[: _size("max_nodes", max_nodes) + 1]

    def draft_seconds(
        self, drafter: str, budget: int, *, vocab: str = "full", batch: int = 1, context: int = 0
    ) -> float:
        """Expected seconds of drafting; 0 for "ar", the prior (or 0) for a drafter that was never measured."""
        size, key = _size("budget", budget), _key(_name("vocab", vocab), batch, context)
        costs = self._drafters.get(drafter)
        if costs is not None:
            return costs.table.curve(key).item(size)
        prior = self.draft_priors.get(_name("drafter", drafter), _NOTHING)
        return prior.curve(1 << key[1]).item(size)

    def catch_up_seconds(self, drafter: str, tokens: int) -> float:
        """Expected seconds of bringing a cold drafter up by `tokens` tokens: what switching to it costs.

        The seconds per token are those measured at the nearest power of two of the tokens, because a few tokens cost
        more each than many; 0 while nothing was measured.
        """
        tokens = _whole("tokens", tokens, minimum=0, maximum=MAX_TOKENS)
        costs = self._drafters.get(_name("drafter", drafter))
        return 0.0 if costs is None else costs.catch_up_seconds(tokens)

    def overhead_seconds(self) -> float:
        """Expected seconds of deciding, committing and observing in one step; 0 while nothing was measured."""
        return 0.0 if self._overhead is None else self._overhead.value

    def step_seconds(
        self,
        arm: Arm,
        nodes: int,
        *,
        batch: int = 1,
        context: int = 0,
        cold_tokens: int = 0,
        extra_rows: int = 0,
    ) -> float:
        """Expected seconds of a step that plays `arm` and verifies `nodes` draft nodes.

        Args:
            cold_tokens: how far the drafter's state lags behind.
            extra_rows: rows that the drafter adds to the pass besides.

        A budget of "auto" is taken to be `nodes`.
        """
        if not isinstance(arm, Arm):
            raise TypeError(f"arm must be an Arm, got {type(arm).__name__}")
        rows = _size("nodes", nodes) + _size("extra_rows", extra_rows)
        seconds = self.overhead_seconds()
        seconds += self.verify_seconds(min(rows, MAX_NODES), batch=batch, context=context)
        if arm.drafter == "ar":
            if nodes != 0:
                raise ValueError(f"nodes must be 0 for the arm 'ar', got {nodes}")
            return seconds
        budget = nodes if arm.budget == "auto" else arm.budget
        seconds += self.draft_seconds(arm.drafter, budget, vocab=arm.vocab, batch=batch, context=context)
        return seconds + (self.catch_up_seconds(arm.drafter, cold_tokens) if cold_tokens else 0.0)

    def known(self, arm: Arm, nodes: int | None = None, *, batch: int = 1, context: int = 0) -> bool:
        """Whether the costs of a step with `arm` were measured in this batch and context bucket.

        That is: a verification (of exactly `nodes`, if given), and drafting with the arm's drafter, vocabulary and
        budget ("auto": any). Otherwise they are guessed from neighbours or the prior.
        """
        if not isinstance(arm, Arm):
            raise TypeError(f"arm must be an Arm, got {type(arm).__name__}")
        verified = self._verify.curves.get(_key("full", batch, context), {})
        if not (verified if nodes is None else _size("nodes", nodes) in verified):
            return False
        if arm.drafter == "ar":
            return True
        costs = self._drafters.get(arm.drafter)
        drafted = {} if costs is None else costs.table.curves.get(_key(arm.vocab, batch, context), {})
        return bool(drafted) if arm.budget == "auto" else arm.budget in drafted

    def to_table(self) -> list[dict[str, Any]]:
        """One row per measured cell, for reports. `batch` and `context` are the buckets' upper ends.

        Rows of "catch_up" hold tokens (upper end of the power of two) under `nodes` and seconds per token.
        """
        rows = [_row("verify", key, size, cell, drafter=None) for key, size, cell in self._verify.cells()]
        for name, costs in self._drafters.items():
            rows += [_row("draft", key, size, cell, drafter=name) for key, size, cell in costs.table.cells()]
            rows += [_row("catch_up", None, 1 << e, cell, drafter=name) for e, cell in costs.catch_up.items()]
        if self._overhead is not None:
            rows.append(_row("overhead", None, None, self._overhead, drafter=None))
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides future estimates, as plain Python values that survive JSON exactly."""
        return {
            "version": STATE_VERSION,
            "priors": self._priors(),
            "clock": self._clock,
            "verify": self._verify.state_dict(),
            "overhead": None if self._overhead is None else self._overhead.state_dict(),
            "drafters": {name: costs.state_dict() for name, costs in self._drafters.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`: estimates and what is learnt later are then identical.

        Raises:
            ValueError: another version, other priors, or a damaged state; nothing is changed then.
        """
        check_fields(state, _FIELDS, what="the costs")
        check_equal(state, "priors", self._priors())
        self._adopt(self._read(state))

    def save_profile(self, path: str | os.PathLike[str], *, fingerprint: str) -> None:
        """Write what was learnt as JSON, marked with the machine's `fingerprint()`.

        Raises:
            ValueError: the file holds something else than a profile with this fingerprint.
        """
        write_profile(path, fingerprint=fingerprint, state=self.state_dict())

    def load_profile(self, path: str | os.PathLike[str], *, fingerprint: str, foreign: bool = False) -> None:
        """Replace what was learnt by a profile; this model's priors stay.

        With `foreign`, a profile of another machine stands in for the priors instead: it gives the shape, the first
        measurements here set the scale, and what was learnt here stays.

        Raises:
            ValueError: a damaged profile, or one with another fingerprint while not `foreign`; nothing is changed then.
        """
        loaded = self._read(read_profile(path, fingerprint=fingerprint, foreign=foreign))
        if not foreign:
            self._adopt(loaded)
            return
        self._verify.lean_on(loaded._verify)
        if self._overhead is None and loaded._overhead is not None:
            self._overhead = loaded._overhead
            self._overhead.distrust()
        for name, costs in loaded._drafters.items():
            self._drafters.setdefault(name, DrafterCosts(costs.table.prior)).lean_on(costs)
        self._shrink()

    @staticmethod
    def merge(states: Sequence[Mapping[str, Any]], *, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One state with what all replicas learnt: per cell the mean of their values, weighted by the measurements.

        Equal to one model fed with all measurements as long as nothing is clipped or forgotten (every replica's first
        measurement of a cell is discounted). With the `base` that the replicas began from, each weighs as much as it
        measured since, and the base counts once. What is not a value (a change under way, a foreign profile) is the
        first state's, so a replica that gives its own state first can load the result.

        Raises:
            ValueError: no states, or states with different priors.
        """
        if not states:
            raise ValueError("states must hold at least one state, got none")
        models = [CostModel.from_state(state) for state in states]
        start = None if base is None else CostModel.from_state(base)
        own, *others = models
        for model in (*others, *([] if start is None else [start])):
            if model._priors() != own._priors():
                raise ValueError(f"states must agree on priors, got {own._priors()!r} and {model._priors()!r}")
        own._merge(others, base=start)
        return own.state_dict()

    def _merge(self, others: Sequence[CostModel], *, base: CostModel | None) -> None:
        self._verify.merge([other._verify for other in others], base=None if base is None else base._verify)
        overheads = [model._overhead for model in (self, *others) if model._overhead is not None]
        if overheads:
            self._overhead = merge_cells(overheads, base=None if base is None else base._overhead)
        for name in dict.fromkeys(name for model in (self, *others) for name in model._drafters):
            replicas = [model._drafters[name] for model in (self, *others) if name in model._drafters]
            replicas[0].merge(replicas[1:], base=None if base is None else base._drafters.get(name))
            self._drafters[name] = replicas[0]
        self._clock = max(model._clock for model in (self, *others))
        self._shrink()

    def _priors(self) -> dict[str, Any]:
        drafts = {name: [p.seconds_at_1, p.seconds_per_node] for name, p in self.draft_priors.items()}
        verify = self._verify.prior
        return {"verify": [verify.seconds_at_1, verify.seconds_per_node], "draft": drafts}

    def _read(self, state: Any) -> CostModel:
        """A model with this one's priors in that state."""
        check_fields(state, _FIELDS, what="the costs")
        check_equal(state, "version", STATE_VERSION)
        model = CostModel(verify_prior=self._verify.prior, draft_priors=self.draft_priors)
        model._clock = read_int(state, "clock")
        model._verify = CostTable.from_state(state["verify"], prior=self._verify.prior)
        model._overhead = None if state["overhead"] is None else CostCell.from_state(state["overhead"])
        drafters = state["drafters"]
        if not isinstance(drafters, Mapping) or len(drafters) > MAX_DRAFTERS:
            raise ValueError(f"state: drafters must be a mapping of at most {MAX_DRAFTERS}, got {drafters!r:.80}")
        for name, costs in drafters.items():
            prior = self.draft_priors.get(_name("drafter", name), _NOTHING)
            model._drafters[name] = DrafterCosts.from_state(costs, prior=prior)
        return model

    def _adopt(self, model: CostModel) -> None:
        self._verify, self._overhead = model._verify, model._overhead
        self._drafters, self._clock = model._drafters, model._clock

    @classmethod
    def from_state(cls, state: Any) -> CostModel:
        """A model in a saved state, priors included. Raises ValueError on a damaged one."""
        check_fields(state, _FIELDS, what="the costs")
        priors = state["priors"]
        check_fields(priors, ("verify", "draft"), what="priors")
        if not isinstance(priors["draft"], Mapping):
            raise ValueError(f"state: draft of priors must be a mapping, got {priors['draft']!r:.80}")
        model = cls(
            verify_prior=CostPrior(*read_array(priors, "verify", (2,), minimum=0.0).tolist()),
            draft_priors={
                name: CostPrior(*read_array(priors["draft"], name, (2,), minimum=0.0).tolist())
                for name in priors["draft"]
            },
        )
        model.load_state_dict(state)
        return model


def _whole(name: str, value: Any, *, minimum: int, maximum: int) -> int:
    if type(value) is int and minimum <= value <= maximum:
        return value
    number = check_count(name, value, minimum=minimum)
    if number > maximum:
        raise ValueError(f"{name} must be a whole number in [{minimum}, {maximum}], got {value!r}")
    return number


def _size(name: str, value: Any) -> int:
    return _whole(name, value, minimum=0, maximum=MAX_NODES)


def _name(field: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{field} must be a name, got {value!r}")
    return value


def _key(vocab: str, batch: int, context: int) -> Key:
    if type(batch) is not int or not 1 <= batch <= MAX_TOKENS:
        batch = _whole("batch", batch, minimum=1, maximum=MAX_TOKENS)
    if type(context) is not int or not 0 <= context <= MAX_TOKENS:
        context = _whole("context", context, minimum=0, maximum=MAX_TOKENS)
    exponent = (context - 1).bit_length()
    return vocab, (batch - 1).bit_length(), SMALLEST_CONTEXT if exponent < SMALLEST_CONTEXT else exponent


def _row(part: str, key: Key | None, nodes: int | None, cell: CostCell, *, drafter: str | None) -> dict[str, Any]:
    vocab, batch, context = (None, None, None) if key is None else (key[0], 1 << key[1], 1 << key[2])
    where = {"part": part, "drafter": drafter, "vocab": vocab, "nodes": nodes, "batch": batch, "context": context}
    return where | {"seconds": cell.value, "count": cell.count}
