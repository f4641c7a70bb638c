"""A world to prove controllers in: text, drafters and times are known, and the steps go as in a session.

Everything random belongs to a position of the text and not to a step: whether a drafter is right about a token, and how
long a step that begins there takes. So every controller meets the same text, whatever it plays (common random numbers),
and differences between two runs are differences between their decisions.

Conditions change by assignment between two `World.run`s: `world.verify = ...`, `world.drafters["head"].accept = ...`.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from adaptspec.control.arms import make_arms
from adaptspec.control.controller import Controller, FixedController, StepContext, StepNotes, StepOutcome
from adaptspec.control.strategies import make_controller
from adaptspec.types import Arm, Decision, DraftTree, StepRecord

PERIOD = 1 << 17
"""The text and its random numbers repeat after so many tokens."""

WORDS = 1000
"""Tokens of the text are below; tokens that only wrong proposals carry are not."""

DEEPEST = 64

LIKELY = (1.0, 0.5, 0.2, 0.1)
"""How a tree drafter sees its candidates of rank 0, 1, ... relative to the first; decides the shape of its trees."""


@dataclass
class Drafter:
    """Knows the next token with a probability that may depend on the position, and says how sure it is.

    Attributes:
        accept: position of the root -> probability that its first candidate is right where the parent was.
        fall: factor on that per depth: what trained heads lose by drafting on their own guesses.
        others: probability that the right token is its candidate of rank 1, 2, ... if not the first; () drafts chains.
        claim: position -> the probability that it believes in, in scores and evidence; None: the true one.
        evidence: "head" (log_prob, rank), "lookup" (match_length, count, parent_count), or "none" but the score.
        declines: position -> whether it proposes nothing there.
        seconds: position -> what a proposal takes there.
    """

    accept: Callable[[int], float]
    fall: float = 1.0
    others: tuple[float, ...] = ()
    claim: Callable[[int], float] | None = None
    evidence: Literal["head", "lookup", "none"] = "head"
    declines: Callable[[int], bool] = lambda position: False
    seconds: Callable[[int], float] = lambda position: 0.0002

    def propose(self, position: int, budget: int, *, max_depth: int, text: Text, index: int) -> DraftTree:
        """The tree at a root; `index` tells its wrong tokens and its luck from those of other drafters."""
        if self.declines(position):
            return DraftTree.empty()
        shape = _shape(budget, min(max_depth, DEEPEST), len(self.others) + 1)
        depths, ranks, levels = shape.depths, shape.ranks, shape.levels
        right = self._right_ranks(position, text.luck(index, position)[: shape.deepest])
        wrong = WORDS + index * len(LIKELY) + ranks
        tokens = np.where(ranks == right[levels], text.after(position)[levels], wrong)
        claimed = self.accept(position) if self.claim is None else self.claim(position)
        by_depth = np.maximum(claimed * self.fall ** np.arange(shape.deepest), 1e-6)
        shares = np.array([1.0, *(share * (1.0 - claimed) / max(claimed, 1e-6) for share in self.others)])
        conditional = np.minimum(by_depth[levels] * shares[ranks], 1.0)
        scores = np.log(conditional)
        if self.others:
            for node, parent in enumerate(shape.parents.tolist()):
                if parent >= 0:
                    scores[node] += scores[parent]
        else:
            scores = scores.cumsum()
        return DraftTree(tokens, shape.parents, scores, evidence=self._columns(claimed, conditional, depths, ranks))

    def _right_ranks(self, position: int, luck: np.ndarray) -> np.ndarray:
        """int64 [D], the rank of the right token at every depth; larger than any candidate's if it has none."""
        first = self.accept(position) * self.fall ** np.arange(len(luck))
        right = (luck >= first).astype(np.int64)
        bound = first
        for share in self.others:
            bound = bound + share * (1.0 - first)
            right += luck >= bound
        return right

    def _columns(
        self, claimed: float, conditional: np.ndarray, depths: np.ndarray, ranks: np.ndarray
    ) -> dict[str, np.ndarray]:
        if self.evidence == "head":
            return {"log_prob": np.log(conditional), "rank": ranks.astype(np.float64)}
        if self.evidence == "lookup":
            length = float(round(16 * claimed))
            count, parent_count = np.full(len(depths), np.ceil(8 * claimed)), np.full(len(depths), 8.0)
            return {"match_length": length + depths - 1.0, "count": count, "parent_count": parent_count}
        return {}


@dataclass(frozen=True, slots=True)
class _Shape:
    """Parents, depths, ranks [N] and levels (depths from 0) of a tree whose tokens are not known yet."""

    parents: np.ndarray
    depths: np.ndarray
    ranks: np.ndarray
    levels: np.ndarray
    deepest: int


@lru_cache(maxsize=4096)
def _shape(budget: int, max_depth: int, width: int) -> _Shape:
    """The `budget` likeliest nodes, best first; smaller budgets are the first rows of larger ones."""
    waiting = [(-1.0, 1, 0, -1)]
    rows: list[tuple[int, int, int]] = []
    while waiting and len(rows) < budget:
        value, depth, rank, parent = heapq.heappop(waiting)
        if rank + 1 < width:
            heapq.heappush(waiting, (value * LIKELY[rank + 1] / LIKELY[rank], depth, rank + 1, parent))
        if depth < max_depth:
            heapq.heappush(waiting, (0.7 * value, depth + 1, 0, len(rows)))
        rows.append((parent, depth, rank))
    parents, depths, ranks = np.array(rows, dtype=np.int64).T
    return _Shape(parents.copy(), depths.copy(), ranks.copy(), depths - 1, int(depths.max()))


class Text:
    """What the target says, and the luck of drafters and clocks, by position."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._words = self._wrapped(np.random.default_rng([seed, 0]).integers(0, WORDS, PERIOD))
        self._lucks: dict[int, np.ndarray] = {}
        self._jitters: dict[int, np.ndarray] = {}

    @staticmethod
    def _wrapped(values: np.ndarray) -> np.ndarray:
        return np.concatenate((values, values[: DEEPEST + 2]))

    def after(self, position: int) -> np.ndarray:
        """int64 [DEEPEST + 1], the tokens that follow the one at `position`."""
        start = position % PERIOD + 1
        return self._words[start : start + DEEPEST + 1]

    def luck(self, index: int, position: int) -> np.ndarray:
        """float64 [DEEPEST] in [0, 1): uniform numbers that belong to the tokens after `position`."""
        if index not in self._lucks:
            self._lucks[index] = self._wrapped(np.random.default_rng([self._seed, 1, index]).random(PERIOD))
        start = position % PERIOD + 1
        return self._lucks[index][start : start + DEEPEST]

    def jitter(self, clock: int, position: int) -> float:
        """A normal number that belongs to what one clock measures at `position`."""
        if clock not in self._jitters:
            self._jitters[clock] = np.random.default_rng([self._seed, 2, clock]).standard_normal(PERIOD)
        return self._jitters[clock].item(position % PERIOD)


@dataclass(frozen=True, slots=True, repr=False)
class Step:
    """What happened in one step, as it was and not as it was measured."""

    position: int
    asked: tuple[str, ...]
    arm: str
    tree: DraftTree
    tokens: int
    seconds: float
    notes: StepNotes

    @property
    def verified(self) -> int:
        return len(self.tree)


@dataclass
class World:
    """Plays controllers as a session does: ask, assemble, verify, commit, tell.

    Attributes:
        drafters: by name.
        verify: draft nodes -> seconds of a verification.
        overhead: seconds of everything else in a step.
        noise: standard deviation of the logarithm of measured times.
        request_tokens: length of a request.
        prompt: tokens before its first.
        ends_early: requests end by a token that nobody foresees, so that drafts may reach beyond; otherwise by length.
        seed: of the text.
        told: what the controller is told of a step, in place of what came of it: for false clocks and false accounts.
    """

    drafters: dict[str, Drafter]
    verify: Callable[[int], float] = lambda nodes: 0.030 + 0.0005 * nodes
    overhead: float = 0.0001
    noise: float = 0.05
    request_tokens: int = 256
    prompt: int = 64
    ends_early: bool = False
    seed: int = 0
    told: Callable[[StepOutcome], StepOutcome] = lambda outcome: outcome
    position: int = 0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._text = Text(self.seed)
        self._in_request = 0

    def step(self, controller: Controller) -> Step:
        """One step of whatever request is running."""
        if self._in_request == 0:
            controller.begin()
        left = self.request_tokens - self._in_request
        remaining = 1 << 20 if self.ends_early else left
        context = StepContext(length=self.prompt + self._in_request, remaining=remaining)
        decision = controller.select(context)
        trees, drafts = self._propose(decision, remaining - 1)
        assembly = controller.assemble(decision, trees)
        words = self._text.after(self.position)
        accepted = _accepted(assembly.tree, words)
        tokens = words[: min(accepted + 1, left)]
        finished = len(tokens) == left
        verify_seconds = self.verify(len(assembly.tree)) * self._jitter(0)
        record = StepRecord(
            step_id=decision.step_id,
            position=context.length,
            arm=str(assembly.arm),
            propensity=decision.propensity,
            drafted=sum(len(tree) for tree in trees.values()),
            verified=len(assembly.tree),
            accepted=accepted,
            emitted=len(tokens),
            draft_seconds=sum(seconds for name, seconds in drafts.items() if name in assembly.used),
            evaluate_seconds=sum(seconds for name, seconds in drafts.items() if name not in assembly.used),
            verify_seconds=verify_seconds,
            commit_seconds=0.0,
            observe_seconds=0.0,
            controller_seconds=0.0,
            other_seconds=self.overhead,
        )
        outcome = StepOutcome(record, assembly.tree, trees, tokens, drafts, finished=finished)
        notes = controller.update(decision, self.told(outcome))
        seconds = verify_seconds + sum(drafts.values()) + self.overhead
        step = Step(self.position, tuple(trees), str(assembly.arm), assembly.tree, len(tokens), seconds, notes)
        self.steps += 1
        self.position += len(tokens)
        self.tokens += len(tokens)
        self.seconds += seconds
        self._in_request = 0 if finished else self._in_request + len(tokens)
        return step

    def run(self, controller: Controller, *, steps: int | None = None, tokens: int | None = None) -> list[Step]:
        """So many steps, or as many as `tokens` take."""
        done: list[Step] = []
        end = self.position + (tokens or 0)
        while len(done) < steps if steps is not None else self.position < end:
            done.append(self.step(controller))
        return done

    def finish_request(self, controller: Controller) -> list[Step]:
        """To the end of the running request, after which a controller's state may be saved."""
        return self.run(controller, tokens=self.request_tokens - self._in_request) if self._in_request else []

    def abandon_request(self) -> None:
        """The running request dies: the controller is not told, the next step begins another."""
        self._in_request = 0

    def rate(self, arm: Arm | str, *, tokens: int) -> float:
        """Tokens per second of one arm on the text ahead, under the conditions of now."""
        parsed = Arm.parse(arm) if isinstance(arm, str) else arm
        return rate(copy.copy(self).run(FixedController(parsed), tokens=tokens))

    def best_fixed(self, budgets: Sequence[int], *, tokens: int) -> tuple[str, float]:
        """The fixed arm of the highest rate on the text ahead, no speculation included."""
        rates = {str(arm): self.rate(arm, tokens=tokens) for arm in self.arms(budgets)}
        best = max(rates, key=lambda arm: rates[arm])
        return best, rates[best]

    def arms(self, budgets: Sequence[int]) -> tuple[Arm, ...]:
        return make_arms(list(self.drafters), budgets=budgets, vocab=("full",))

    def controller(
        self, strategy: str, *, budgets: Sequence[int] = (2, 8), guard: float | None = None, seed: int = 0
    ) -> Controller:
        """The package's controller for this world's drafters."""
        return make_controller(strategy, arms=self.arms(budgets), drafters=self.drafters, guard=guard, seed=seed)

    def _propose(self, decision: Decision, max_depth: int) -> tuple[dict[str, DraftTree], dict[str, float]]:
        trees: dict[str, DraftTree] = {}
        drafts: dict[str, float] = {}
        names = list(self.drafters)
        for arm in decision.asked if max_depth >= 1 else ():
            assert isinstance(arm.budget, int)
            drafter, index = self.drafters[arm.drafter], names.index(arm.drafter)
            trees[arm.drafter] = drafter.propose(
                self.position, arm.budget, max_depth=max_depth, text=self._text, index=index
            )
            drafts[arm.drafter] = drafter.seconds(self.position) * self._jitter(1 + index)
            if decision.first_only and len(trees[arm.drafter]):
                break
        return trees, drafts

    def _jitter(self, clock: int) -> float:
        return float(np.exp(self.noise * self._text.jitter(clock, self.position))) if self.noise else 1.0


def _accepted(tree: DraftTree, words: np.ndarray) -> int:
    """Nodes of the tree on the path that the target takes."""
    node, depth = -1, 0
    children = dict(
        zip(zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True), range(len(tree)), strict=True)
    )
    while (child := children.get((node, int(words[depth])))) is not None:
        node, depth = child, depth + 1
    return depth


def constantly(value: float) -> Callable[[int], float]:
    """The same at every position."""
    return lambda position: value


def rate(steps: Sequence[Step]) -> float:
    """Tokens per second: the sum of the one over the sum of the other."""
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


def share(steps: Sequence[Step], arm: str) -> float:
    """Share of the steps whose record names `arm`."""
    return sum(step.arm == arm for step in steps) / len(steps)


def nodes(steps: Sequence[Step]) -> float:
    """Verified nodes per step."""
    return float(np.mean([step.verified for step in steps]))


def asked(steps: Sequence[Step], drafter: str) -> float:
    """Share of the steps in which the drafter was asked."""
    return sum(drafter in step.asked for step in steps) / len(steps)


def garbage(step: Step, index: int) -> int:
    """Verified nodes that carry wrong tokens of the drafter number `index`."""
    first = WORDS + index * len(LIKELY)
    return int(((step.tree.token_ids >= first) & (step.tree.token_ids < first + len(LIKELY))).sum())
