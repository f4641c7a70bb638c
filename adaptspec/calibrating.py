"""A calibration run: what verifying, drafting and the rest of a step take on this machine, before the first request.

Costs are this machine's: deciding with those of another gave 0.08 to 0.77 of the speed in replays. A run reads a
context, then takes `repeats + 1` steps per size: with the defaults about 20 s of processor time for the embedded model
in float32. It needs no user data, and changes nothing but the costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from adaptspec.bandits.checks import check_count
from adaptspec.control.controller import Assembly, Controller, StepContext, StepNotes, StepOutcome
from adaptspec.control.cost import MAX_NODES, CostModel
from adaptspec.control.cost_cell import RECENT
from adaptspec.control.cost_drafter import MAX_TOKENS
from adaptspec.drafters import Drafter
from adaptspec.machine import machine_fingerprint, profile_path
from adaptspec.proposing import Proposer
from adaptspec.session import Limits, Session
from adaptspec.target.hf import HFTarget
from adaptspec.types import Arm, Decision, DraftTree, Sampling

__all__ = [
    "CONTEXT",
    "SIZES",
    "CostSamples",
    "machine_fingerprint",
    "measure_costs",
    "measure_samples",
    "profile_path",
]

SIZES = (0, 1, 2, 4, 8, 16, 32, 64)
CONTEXT = 256

DRAFT_SECONDS = 60.0
"""A drafter that takes longer for one proposal cannot be measured."""

TEXT = """\
The order was placed on Monday, and the order was confirmed on Tuesday. On Wednesday the warehouse reported that the \
order could not be shipped, because two of the three parts were missing. The customer was told on Thursday that two of \
the three parts were missing, and asked whether the third part should be shipped alone.

def total_price(parts, shipping):
    total = 0.0
    for part in parts:
        if part.missing:
            continue
        total += part.price * part.quantity
    return total + shipping

1. Check which parts are missing. 2. Ask the customer whether the parts that are not missing should be shipped. \
3. Ship the parts, or wait until all parts are there. The total price is the price of all parts, plus shipping.
"""
"""Prose, code and a list that repeat themselves as such texts do, so that lookup drafters have something to find."""


@dataclass(frozen=True, slots=True)
class CostSamples:
    """What a calibration run measured, in seconds; the first use of every size is left out.

    Attributes:
        verify: by context and nodes, one per repeat.
        draft: by context and arm (drafter, budget and vocabulary), one per repeat.
        overhead: of all steps: deciding, committing, observing.
    """

    verify: Mapping[tuple[int, int], Sequence[float]]
    draft: Mapping[tuple[int, Arm], Sequence[float]]
    overhead: Sequence[float]

    def teach(self, costs: CostModel) -> CostModel:
        """Tell `costs` every median, at least as often as its size was used; returns it.

        New cells end at the median exactly, unless a smaller size took several times as long as larger ones, which
        `CostModel` only half believes. What was learnt before stays, and the run counts as so many measurements more:
        where the median is off by a quarter or more, it passes for a change of speed and is adopted.
        """
        tell: list[tuple[bool, int, Callable[[], None]]] = []
        for (context, nodes), seconds in self.verify.items():
            known = costs.known(Arm.autoregressive(), nodes, context=context)
            tell.append((known, nodes, partial(costs.observe_verify, nodes, median(seconds), context=context)))
        for (context, arm), seconds in self.draft.items():
            name, budget = arm.drafter, arm.budget
            assert isinstance(budget, int), "arms were asked for so many nodes"
            observe = partial(costs.observe_draft, name, budget, median(seconds), vocab=arm.vocab, context=context)
            tell.append((costs.known(arm, context=context), budget, observe))
        # Known sizes first, because new ones that agree with themselves would hide that the speed has changed; then
        # large ones first, because a model that knows two sizes takes a third that costs far more for a slow first use.
        tell.sort(key=lambda entry: entry[:2], reverse=True)
        # A cell forgets its first measurement when it gets a second, hence one more than there are.
        times = max(1 + max(map(len, self.verify.values())), RECENT)
        for turn in (True, False):
            for _ in range(times):
                for known, _, observe in tell:
                    if known == turn:
                        observe()
        for _ in range(times):
            costs.observe_overhead(median(self.overhead))
        return costs

    def summary(self) -> dict[str, Any]:
        """Plain values for reports: rows of "verify" and "draft" with median, fastest and slowest seconds.

        `relative` compares with a pass of one row, None if that was not measured.
        """
        verify = []
        for (context, nodes), seconds in self.verify.items():
            one_row = median(self.verify.get((context, 0), [0.0]))
            relative = median(seconds) / one_row if one_row > 0.0 else None
            verify.append({"context": context, "nodes": nodes, **_spread(seconds), "relative": relative})
        draft = [
            {"context": context, "drafter": arm.drafter, "vocab": arm.vocab, "budget": arm.budget, **_spread(seconds)}
            for (context, arm), seconds in self.draft.items()
        ]
        return {"verify": verify, "draft": draft, "overhead_seconds": median(self.overhead)}


def measure_costs(
    target: HFTarget,
    drafters: Mapping[str, Drafter],
    *,
    sizes: Sequence[int] = SIZES,
    contexts: Sequence[int] = (CONTEXT,),
    repeats: int = 5,
    seed: int = 0,
    tokens: Sequence[int] | None = None,
    costs: CostModel | None = None,
) -> CostModel:
    """A cost model filled by `measure_samples`; see there.

    Args:
        costs: the model to fill, a new one by default. What it has learnt stays, see `CostSamples.teach`.
    """
    samples = measure_samples(
        target, drafters, sizes=sizes, contexts=contexts, repeats=repeats, seed=seed, tokens=tokens
    )
    return samples.teach(CostModel() if costs is None else costs)


def measure_samples(
    target: HFTarget,
    drafters: Mapping[str, Drafter],
    *,
    sizes: Sequence[int] = SIZES,
    contexts: Sequence[int] = (CONTEXT,),
    repeats: int = 5,
    seed: int = 0,
    tokens: Sequence[int] | None = None,
) -> CostSamples:
    """Play real steps, with trees of given sizes, and note what their parts take.

    One request per context. In every round each size is used once; where a round begins, and in which direction it
    goes, changes from round to round, so that a drifting clock rate hits all sizes alike. The first round is not
    counted. A step that verifies n nodes first asks every drafter for n. The trees are binary and their tokens are
    drawn: what a pass takes follows from the number of rows, hardly from their shape. Between requests only: no
    sequence may be open on the target. What drafters have learnt is put back, and the target is closed again.

    Args:
        target: any device.
        drafters: by the name that arms use; they are bound to the target.
        sizes: draft nodes to verify, and budgets to draft for.
        contexts: committed tokens at which to measure, up to the model's limit.
        repeats: counted uses of every size.
        seed: of the trees' tokens, and of the text where the target has no tokenizer.
        tokens: text to read and to draft in, repeated to fill the context. Default: a built-in text, or made-up
            phrases of random ids where the target has no tokenizer.

    Raises:
        ValueError: sizes, contexts, repeats or tokens out of range, or a drafter that fails.
        RuntimeError: a sequence is open on the target.
    """
    sizes = list(dict.fromkeys(_whole_numbers("sizes", sizes, low=0, high=MAX_NODES)))
    rounds = 1 + check_count("repeats", repeats, minimum=1)
    rng = np.random.default_rng(check_count("seed", seed, minimum=0))
    if target.length:
        raise RuntimeError("costs are measured between requests, but a sequence is open on the target")
    trees = [_binary_tree(nodes, target.vocab_size, rng) for nodes in _rotated(sizes, rounds)]
    limit = MAX_TOKENS if target.context_limit is None else target.context_limit
    contexts = list(dict.fromkeys(_whole_numbers("contexts", contexts, low=len(trees) + 2, high=limit)))
    # Drawn tokens are hardly ever accepted; at the end of the model's context there must be room even if all were.
    depths = [int(tree.depths().max(initial=0)) for tree in trees]
    last_start = limit - sum(depths) - len(trees) - max(depths) - 1
    if last_start < 2:
        raise ValueError(
            f"sizes and repeats must be fewer: {len(trees)} steps of up to {max(sizes)} nodes do not fit into the "
            f"model's context of {limit}"
        )
    text = _text(target, rng) if tokens is None else _whole_numbers("tokens", tokens, low=0, high=target.vocab_size - 1)

    verify: dict[tuple[int, int], list[float]] = {(context, nodes): [] for context in contexts for nodes in sizes}
    sources = [(name, vocab) for name, drafter in drafters.items() for vocab in drafter.vocab]
    draft: dict[tuple[int, Arm], list[float]] = {
        (context, Arm(name, nodes, vocab)): []
        for context in contexts
        for name, vocab in sources
        for nodes in sizes
        if nodes
    }
    overhead: list[float] = []
    for context in contexts:
        prompt = torch.from_numpy(np.resize(np.asarray(text, np.int64), min(context - len(trees), last_start)))
        outcomes = _rehearse(target, drafters, trees=trees, prompt=prompt, rng=rng)
        for outcome in outcomes[len(sizes) :]:
            nodes, record = len(outcome.tree), outcome.record
            verify[context, nodes].append(record.verify_seconds)
            for name, vocab in sources if nodes else ():
                arm = Arm(name, nodes, vocab)
                draft[context, arm].append(outcome.draft_seconds[arm.source])
            overhead.append(record.overhead_seconds)
    return CostSamples(verify, draft, overhead)


class _Schedule(Controller):
    """Verifies given trees one after the other and asks every drafter for as many nodes, with each of its
    vocabularies: of every size another one first each time, since what comes second may find warm caches."""

    def __init__(self, trees: Sequence[DraftTree], drafters: Mapping[str, Drafter]) -> None:
        self.trees = trees
        self.drafters = drafters
        self.outcomes: list[StepOutcome] = []
        self._steps = 0
        self._uses: Counter[int] = Counter()

    @property
    def done(self) -> bool:
        """Whether the last tree's step has begun."""
        return self._steps == len(self.trees)

    def drafters_in_play(self, names: Collection[str]) -> list[str]:
        return [name for name in self.drafters if name in names]

    def select(self, context: StepContext) -> Decision:
        nodes = len(self.trees[self._steps])
        self._steps += 1
        if not nodes:
            return Decision(self._steps, Arm.autoregressive())
        self._uses[nodes] += 1
        asked: list[Arm] = []
        for name, drafter in self.drafters.items():
            first = self._uses[nodes] % len(drafter.vocab)
            asked += [Arm(name, nodes, vocab) for vocab in drafter.vocab[first:] + drafter.vocab[:first]]
        return Decision(self._steps, Arm("calibration", nodes), asked=tuple(asked))

    def assemble(self, decision: Decision, trees: Mapping[str, DraftTree]) -> Assembly:
        return Assembly(self.trees[decision.step_id - 1], decision.arm, frozenset(trees))

    def update(self, decision: Decision, outcome: StepOutcome) -> StepNotes:
        self.outcomes.append(outcome)
        return StepNotes()


def _rehearse(
    target: HFTarget,
    drafters: Mapping[str, Drafter],
    *,
    trees: Sequence[DraftTree],
    prompt: torch.Tensor,
    rng: np.random.Generator,
) -> list[StepOutcome]:
    """One request that verifies `trees`; what its steps took, in order."""
    for drafter in drafters.values():
        drafter.bind(target)
    learnt = {name: drafter.state_dict() for name, drafter in drafters.items()}
    schedule = _Schedule(trees, drafters)
    proposer = Proposer(vocab_size=target.vocab_size, timeout=DRAFT_SECONDS)
    session = Session(
        target=target,
        drafters=drafters,
        controller=schedule,
        proposer=proposer,
        sampling=Sampling(),
        processors=None,
        verifier="auto",
        limits=Limits(MAX_TOKENS, should_stop=lambda tokens: schedule.done),
        rng=rng,
    )
    try:
        session.run(prompt)
    finally:
        target.tap(())
        for name, drafter in drafters.items():
            drafter.load_state_dict(learnt[name])
    if proposer.set_aside:
        raise ValueError(f"a drafter cannot be measured: {next(iter(proposer.set_aside.values()))}")
    assert len(schedule.outcomes) == len(trees), "every step has room"
    return schedule.outcomes


def _rotated(sizes: Sequence[int], rounds: int) -> Iterator[int]:
    """Every size once per round, from another one on and in the other direction each time."""
    for number in range(rounds):
        first = number % len(sizes)
        order = [*sizes[first:], *sizes[:first]]
        yield from reversed(order) if number % 2 else order


def _binary_tree(nodes: int, vocab_size: int, rng: np.random.Generator) -> DraftTree:
    """Two children for the root and for every node, as far as `nodes` go; siblings carry different tokens."""
    tokens = np.resize(rng.choice(vocab_size, min(nodes, vocab_size), replace=False), nodes)
    return DraftTree(tokens.astype(np.int64), np.arange(nodes) // 2 - 1, np.zeros(nodes))


def _text(target: HFTarget, rng: np.random.Generator) -> list[int]:
    if target.tokenizer is not None:
        return list(target.tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    phrases = [rng.integers(target.vocab_size, size=length).tolist() for length in range(3, 13)]
    return [token for choice in rng.integers(len(phrases), size=30) for token in phrases[choice]]


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    return {"seconds": median(seconds), "fastest": min(seconds), "slowest": max(seconds)}


def _whole_numbers(name: str, values: Sequence[int], *, low: int, high: int) -> list[int]:
    numbers = list(values)
    if not numbers:
        raise ValueError(f"{name} must not be empty")
    for value in numbers:
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
            raise ValueError(f"{name} must be whole numbers in [{low}, {high}], got {value!r}")
    return [int(value) for value in numbers]
