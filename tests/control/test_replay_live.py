"""The promise of replays: a live run that is told the same costs chooses the same arms and emits the same tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from adaptspec import AdaptiveSpec
from adaptspec.control.controller import Assembly, Controller, StepContext, StepNotes, StepOutcome
from adaptspec.control.cost import CostModel
from adaptspec.control.cost_worlds import CostPhases, Costs, StepCosts
from adaptspec.control.replay import recosted, replay
from adaptspec.control.trace import Proposals, Trace, TracedRequest
from adaptspec.drafters import make_drafter
from adaptspec.types import Decision, DraftContext, DraftTree, Observation, Sampling, StepRecord, Verdict
from tests.target.families import FAMILIES

DRAFTERS = ("prompt-lookup", "sam", "ngram-cache", "suffix")
POOL = ("prompt-lookup", "sam", "ngram-cache", "suffix@8")
"""The suffix drafter chooses the match that suits its budget, so that smaller trees are not part of larger ones."""

NODES = 8
MAX_NEW_TOKENS = 40
SEED = 10

STEADY = StepCosts(0.03 + 0.002 * np.arange(9.0), draft=dict.fromkeys(DRAFTERS, 0.0002), overhead=0.0003)
NOISY = CostPhases(((0, STEADY), (70, StepCosts(0.01 + 0.02 * np.arange(9.0), draft=STEADY.draft, noise=0.3))))


@pytest.fixture(scope="module")
def model() -> Any:
    return FAMILIES["llama"]("sdpa")


def prompts() -> list[torch.Tensor]:
    """Texts that repeat themselves; a random model that reads them goes in circles for a while."""
    return [((torch.arange(18 + n) % (5 + n)) * 7 + 3 + n)[None] for n in range(4)]


def record(model: Any, *, temperature: float) -> Trace:
    """What the drafters propose at every position of the target's own outputs."""
    target = AdaptiveSpec(["suffix"], "fixed:ar", seed=SEED)
    drafters = {name: make_drafter(name) for name in DRAFTERS}
    requests = []
    for number, prompt in enumerate(prompts()):
        result = target.generate(model, prompt, max_new_tokens=MAX_NEW_TOKENS, temperature=temperature)
        text = result.sequences[0].numpy()
        begin = prompt.shape[1]
        trees: dict[str, list[DraftTree]] = {name: [] for name in DRAFTERS}
        for name, drafter in drafters.items():
            drafter.prefill(text[: begin + 1])
            for length in range(begin + 1, len(text)):
                depth = MAX_NEW_TOKENS - (length - begin) - 1
                context = DraftContext(
                    int(text[length - 1]), length, depth, Sampling(temperature), np.random.default_rng(0)
                )
                trees[name].append(drafter.propose(context, NODES) if depth >= 1 else DraftTree.empty())
                said = text[length : length + 1]
                drafter.observe(Observation(DraftTree.empty(), Verdict(np.zeros(0, np.int64), said), said))
            drafter.finish()
        proposals = {name: Proposals.of(found) for name, found in trees.items()}
        requests.append(TracedRequest(str(number), "any", begin, text[begin:].copy(), proposals))
    nodes = dict.fromkeys(DRAFTERS, NODES)
    return Trace(tuple(requests), nodes, MAX_NEW_TOKENS, temperature, CostModel().state_dict(), "test")


@pytest.fixture(scope="module")
def traces(model: Any) -> dict[float, Trace]:
    return {temperature: record(model, temperature=temperature) for temperature in (0.0, 0.15)}


def test_the_traces_cover_both_ways_to_end(traces: dict[float, Trace]) -> None:
    lengths = {len(request.tokens) for trace in traces.values() for request in trace.requests}
    assert MAX_NEW_TOKENS in lengths and min(lengths) < MAX_NEW_TOKENS


@dataclass
class Listening(Controller):
    """Passes everything on, and keeps the digests of what the controller was told and decided."""

    inner: Controller
    digests: list[str] = field(default_factory=list)

    def drafters_in_play(self, names: Collection[str]) -> list[str]:
        return self.inner.drafters_in_play(names)

    def begin(self) -> None:
        self.inner.begin()

    def select(self, context: StepContext) -> Decision:
        return self.inner.select(context)

    def assemble(self, decision: Decision, trees: Mapping[str, DraftTree]) -> Assembly:
        self.assembly = self.inner.assemble(decision, trees)
        return self.assembly

    def update(self, decision: Decision, outcome: StepOutcome) -> StepNotes:
        notes = self.inner.update(decision, outcome)
        self.digests.append(notes.digest)
        return notes


@dataclass
class Recosted(Listening):
    """Tells costs instead of measured times."""

    costs: Costs = STEADY
    tokens: int = 0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))

    def update(self, decision: Decision, outcome: StepOutcome) -> StepNotes:
        costs = self.costs.at(self.tokens)
        self.tokens += outcome.record.emitted
        told = recosted(outcome, decision=decision, assembly=self.assembly, costs=costs, rng=self.rng)
        return super().update(decision, told)


def spec_for(strategy: str, guard: float | None) -> AdaptiveSpec:
    return AdaptiveSpec(POOL, strategy, budgets=(2, NODES), guard=guard, seed=SEED)


STRATEGIES = ("hedge", "ucb", "exp3", "draft-then-choose", "mixture")


@pytest.mark.parametrize(
    ("strategy", "guard", "temperature", "costs"),
    [
        *((name, None, 0.0, STEADY) for name in STRATEGIES),
        *((name, None, 0.15, NOISY) for name in STRATEGIES),
        *((name, 0.05, 0.0, NOISY) for name in ("adahedge", "thompson", "fixed:prompt-lookup@2", "fixed:suffix@auto")),
    ],
)
def test_a_live_run_is_its_replay(
    strategy: str, guard: float | None, temperature: float, costs: Costs, model: Any, traces: dict[float, Trace]
) -> None:
    trace = traces[temperature]
    live = spec_for(strategy, guard)
    teller = live.engine.controller = Recosted(live.engine.controller, costs=costs)
    steps: list[list[StepRecord]] = []
    for prompt, request in zip(prompts(), trace.requests, strict=True):
        result = live.generate(model, prompt, max_new_tokens=MAX_NEW_TOKENS, temperature=temperature)
        assert result.sequences[0, prompt.shape[1] :].tolist() == request.tokens.tolist()
        steps.append(list(result.trace))
    replayed = Listening(spec_for(strategy, guard).engine.controller)

    run = replay(trace, replayed, costs=costs, rng=np.random.default_rng(1))

    flat = [step for request in steps for step in request]
    assert [run.arms[arm] for arm in run.arm] == [step.arm for step in flat]
    assert run.verified.tolist() == [step.verified for step in flat]
    assert run.emitted.tolist() == [step.emitted for step in flat]
    lengths = [prompt.shape[1] + 1 for prompt, request in zip(prompts(), steps, strict=True) for _ in request]
    assert (run.position + np.array(lengths)).tolist() == [step.position for step in flat]
    assert np.diff(run.starts).tolist() == list(map(len, steps))
    assert replayed.digests == teller.digests  # of all that a learner was told, to the last bit
    assert run.tokens > 1.03 * len(run.emitted)  # drafts were accepted; otherwise all of this says little
