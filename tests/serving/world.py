"""A serving stack without a model: requests whose drafts are accepted by chance, and a clock that charges for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from adaptspec.serving import Decision, ServingPolicy, StepContext, StepOutcome

Acceptance = Callable[[str, str, int, int], float]
"""(drafter, request, context, step) -> probability that a draft token is accepted if the one before was."""


def affine_pass(fixed: float = 0.02, per_token: float = 0.0001, free: int = 0) -> Callable[[int, int], float]:
    """Seconds of a pass by its tokens and mean context: flat up to `free` tokens."""
    return lambda tokens, context: fixed + per_token * max(tokens - free, 0)


@dataclass(slots=True)
class Step:
    """What happened in one step."""

    decision: Decision
    tokens: int
    verified: int
    accepted: int
    seconds: float


@dataclass(slots=True)
class World:
    """See the module.

    Attributes:
        accept: how good drafters are.
        draft: seconds by drafter, from rows and length; a drafter that is missing costs nothing.
        pass_seconds: from tokens of the pass and mean context.
        offer: tokens that a drafter has for a request in a step, None for as many as it is asked for.
        told: drafters whose offer is told before the decision.
        noise: relative spread of the times.
        catch_up: seconds per refresh, by drafter.
    """

    accept: Acceptance
    draft: Mapping[str, Callable[[int, int], float]] = field(default_factory=dict)
    pass_seconds: Callable[[int, int], float] = field(default_factory=affine_pass)
    offer: Callable[[str, str, int], int | None] = lambda drafter, request, step: None
    told: Sequence[str] = ()
    noise: float = 0.0
    catch_up: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    contexts: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def step(self, policy: ServingPolicy, ids: Sequence[str], **given: Any) -> Step:
        """One step of the batch `ids`; `given` are further fields of the context."""
        self.steps += 1
        contexts = [self.contexts.setdefault(request, 100) for request in ids]
        if self.told:
            given["available"] = {
                name: [-1 if (n := self.offer(name, request, self.steps)) is None else n for request in ids]
                for name in self.told
            }
        decision = policy.decide(StepContext(ids, contexts, **given))
        decoding = given.get("decoding", [True] * len(ids))
        proposed, accepted = [0] * len(ids), [0] * len(ids)
        for row, (request, name) in enumerate(zip(ids, decision.drafters, strict=True)):
            if name is None:
                continue
            asked = int(decision.lengths[row])
            had = self.offer(name, request, self.steps)
            proposed[row] = asked if had is None else min(had, asked)
            chance = self.accept(name, request, contexts[row], self.steps)
            while accepted[row] < proposed[row] and self.rng.random() < chance:
                accepted[row] += 1
        verified = sum(proposed)
        noise = float(np.exp(self.noise * self.rng.standard_normal())) if self.noise else 1.0
        drafting = {}
        for name in Counter(decision.drafters):
            if name is not None and decision.length(name):
                cost = self.draft.get(name)
                rows = len(decision.rows(name))
                drafting[name] = noise * cost(rows, decision.length(name)) if cost is not None else 0.0
        refresh = {name: self.catch_up.get(name, 0.0) for name in decision.refresh}
        cold = {name for name in self.catch_up if any(decision.cold_tokens[decision.rows(name)] > 0)}
        refresh |= {name: self.catch_up[name] for name in cold}
        tokens = sum(decoding) + verified + given.get("prefill_tokens", 0)
        passing = noise * self.pass_seconds(tokens, int(np.mean(contexts)))
        outcome = StepOutcome(
            proposed, proposed, accepted, verify_seconds=passing, draft_seconds=drafting, refresh_seconds=refresh
        )
        policy.observe(decision, outcome)
        emitted = 0
        for row, request in enumerate(ids):
            if decoding[row]:
                self.contexts[request] += accepted[row] + 1
                emitted += accepted[row] + 1
        assert outcome.wall_seconds is not None
        return Step(decision, emitted, verified, sum(accepted), outcome.wall_seconds)

    def run(
        self, policy: ServingPolicy, steps: int, batch: Callable[[int], Sequence[str]] | Sequence[str], **given: Any
    ) -> Log:
        """So many steps; `batch` may depend on the step."""
        ids = batch if callable(batch) else lambda step: batch
        return Log([self.step(policy, ids(number), **given) for number in range(steps)])


@dataclass(slots=True)
class Log:
    """The steps of a run."""

    steps: list[Step]

    def __getitem__(self, part: slice) -> Log:
        return Log(self.steps[part])

    @property
    def rate(self) -> float:
        """Tokens per second, sums over sums."""
        return sum(step.tokens for step in self.steps) / sum(step.seconds for step in self.steps)

    @property
    def plans(self) -> Counter[str]:
        return Counter(step.decision.plan for step in self.steps)

    @property
    def reasons(self) -> Counter[str]:
        return Counter(step.decision.reason for step in self.steps)

    def share(self, plan: str) -> float:
        """Of the steps, those with this plan."""
        return self.plans[plan] / len(self.steps)

    @property
    def switches(self) -> int:
        """How often the plan changed from one step to the next."""
        plans = [step.decision.plan for step in self.steps]
        return sum(a != b for a, b in zip(plans, plans[1:], strict=False))

    def mean_length(self, requests: Sequence[str] | None = None) -> float:
        """Draft tokens asked for per row and step."""
        lengths = [
            int(length)
            for step in self.steps
            for request, length in zip(step.decision.request_ids, step.decision.lengths, strict=True)
            if requests is None or request in requests
        ]
        return float(np.mean(lengths))


def names(count: int, prefix: str = "r") -> list[str]:
    """Request ids."""
    return [f"{prefix}{number}" for number in range(count)]
