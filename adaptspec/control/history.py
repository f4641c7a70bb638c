"""What a run's report is made of: counted step by step, in memory that does not grow with the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from adaptspec.control.assembly import Candidates
from adaptspec.types import ROOT, Decision, DraftTree, StepRecord

LATEST = 512
"""Step records that are kept whole."""

SPANS = 64
"""Spans of equal length into which the steps since the start are divided."""

DEPTHS = 64
"""What lies deeper is counted at this depth."""

BINS = 10
"""Bins of equal width for predicted probabilities."""

PARTS = ("draft", "evaluate", "catch_up", "verify", "commit", "observe", "controller", "other")
"""Parts of a step's time, as in `StepRecord.<part>_seconds`."""

_SECONDS = attrgetter(*(f"{part}_seconds" for part in PARTS))


def follow(tree: DraftTree, tokens: Sequence[int]) -> tuple[list[list[int]], dict[int, int]]:
    """Walk a tree along the tokens that followed the root.

    Returns:
        Per depth, from 1 on, the rows whose parent lies on the text; the last entry is about the token after `tokens`,
        so that nothing is known of it, if there are more entries than tokens. And the depth of every row on the text,
        `ROOT` (depth 0) included.

    >>> follow(DraftTree(np.array([3, 4, 5, 6]), np.array([-1, -1, 0, 1]), np.zeros(4)), [3])    # 6 is below a miss
    ([[0, 1], [2]], {-1: 0, 0: 1})
    """
    levels: list[list[int]] = []
    path = {ROOT: 0}
    ids, known = tree.token_ids.tolist(), len(tokens)
    for row, parent in enumerate(tree.parents.tolist()):
        if parent in path:
            depth = path[parent]
            if depth == len(levels):
                levels.append([row])
            else:
                levels[depth].append(row)
            if depth < known and ids[row] == tokens[depth]:
                path[row] = depth + 1
    return levels, path


@dataclass(slots=True)
class ProposalCounts:
    """What became of one drafter's proposals. Entry k counts those that the text followed for k tokens.

    Attributes:
        missed: then the text said something that was not among the candidates.
        ended: the proposal ended there, right to its end.
        open: the step's text ended there and the proposal went on. What lies deeper is not known (censored). Where a
            text ends depends on tokens before that node only, so leaving it out does not bias the rates by depth.
        candidates: entry k counts nodes of depth k + 1 whose parent was on the text and whose own outcome is known.
        declined: times that the drafter was asked and proposed nothing.
        unjudged: sampled proposals that were not verified: the text says nothing of what they would have gained.
    """

    missed: list[int] = field(default_factory=lambda: [0] * (DEPTHS + 1))
    ended: list[int] = field(default_factory=lambda: [0] * (DEPTHS + 1))
    open: list[int] = field(default_factory=lambda: [0] * (DEPTHS + 1))
    candidates: list[int] = field(default_factory=lambda: [0] * (DEPTHS + 1))
    declined: int = 0
    unjudged: int = 0

    def add(self, tree: DraftTree, tokens: Sequence[int]) -> None:
        """Count one proposal and the tokens that followed its root."""
        if not len(tree):
            self.declined += 1
            return
        levels, path = follow(tree, tokens)
        length, known = max(path.values()), len(tokens)
        outcomes = self.ended if len(levels) == length else self.missed if length < known else self.open
        outcomes[min(length, DEPTHS)] += 1
        for depth, rows in enumerate(levels[:known]):
            self.candidates[min(depth, DEPTHS)] += len(rows)

    @property
    def asked(self) -> int:
        """Times that the drafter was asked."""
        return self.declined + self.unjudged + sum(self.missed) + sum(self.ended) + sum(self.open)

    def hits(self) -> list[int]:
        """[DEPTHS + 1], by depth: proposals that had the text's token there, all tokens before it included."""
        followed = np.sum((self.missed, self.ended, self.open), axis=0)
        return followed[::-1].cumsum()[::-1].tolist()

    def judged(self) -> list[int]:
        """[DEPTHS + 1], by depth: proposals that the text followed up to there and that had a candidate for the next
        token, which is known. `hits()[d] / judged()[d]` is the acceptance at depth d, given that the parent was
        accepted. Entry 0, the root, is 0."""
        return [0, *(hit + miss for hit, miss in zip(self.hits()[1:], self.missed[:-1], strict=True))]


@dataclass(slots=True)
class ValueCounts:
    """How the probabilities that decisions were based on came true, by bin: P(candidate accepted | its parent was).

    Attributes:
        trials, hits: [BINS], candidates whose parent was on the text, and those that carried the text's token.
        predicted: [BINS], sums of the probabilities.
    """

    trials: list[int] = field(default_factory=lambda: [0] * BINS)
    hits: list[int] = field(default_factory=lambda: [0] * BINS)
    predicted: list[float] = field(default_factory=lambda: [0.0] * BINS)

    def add(self, candidates: Candidates, tokens: Sequence[int]) -> None:
        """Count the candidates of one step; verified or not makes no difference to what the text says of them."""
        tree = candidates.tree
        levels, path = follow(tree, tokens)
        values = tree.evidence["conditional"].tolist()
        trials, hits, predicted = self.trials, self.hits, self.predicted
        for rows in levels[: len(tokens)]:
            for row in rows:
                value = values[row]
                place = int(value * BINS) if value < 1.0 else BINS - 1
                trials[place] += 1
                predicted[place] += value
                if row in path:
                    hits[place] += 1


@dataclass(slots=True)
class ArmCounts:
    """Sums over the steps that played one arm; `emitted` includes bonus tokens, `verified` and `accepted` do not."""

    steps: int = 0
    emitted: int = 0
    verified: int = 0
    accepted: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Span:
    """A stretch of steps: steps by arm, and sums of tokens, verified nodes and seconds."""

    arms: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    emitted: int = 0
    verified: int = 0
    seconds: float = 0.0

    def join(self, other: Span) -> None:
        """Take in the stretch that follows."""
        for arm, steps in other.arms.items():
            self.arms[arm] = self.arms.get(arm, 0) + steps
        self.steps += other.steps
        self.emitted += other.emitted
        self.verified += other.verified
        self.seconds += other.seconds


class History:
    """Everything that a report says of the past.

    `judge` belongs inside a step, after the text is known and before the controller learns; `add` after it, when its
    record is complete. A record is taken in with the next step, so that the time for it is charged to a step too: call
    `settle` before reading.

    Attributes:
        requests, prefill_seconds: begun requests, and what their prefills took.
        steps: taken in so far.
        seconds: sums by part of a step.
        arms, drafters: counts by the arm of the record and by drafter.
        values: None as long as no step valued its candidates.
        spans, width: the steps from the first on, `width` in each span; two become one when there is no room left.
        latest: the newest records, oldest first.
        proposed: step id and size of every proposal of the newest step, by drafter.
        faults, latest_fault: how often a drafter was set aside, and why at last.
    """

    def __init__(self) -> None:
        self.requests = 0
        self.prefill_seconds = 0.0
        self.steps = 0
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.arms: dict[str, ArmCounts] = {}
        self.drafters: dict[str, ProposalCounts] = {}
        self.values: ValueCounts | None = None
        self.spans: list[Span] = []
        self.width = 1
        self.latest: deque[StepRecord] = deque(maxlen=LATEST)
        self.proposed: tuple[int, dict[str, int]] = (0, {})
        self.faults = 0
        self.latest_fault: str | None = None
        self._waiting: StepRecord | None = None

    def begin(self, prefill_seconds: float) -> None:
        """A request was prefilled, which gave its first token."""
        self.requests += 1
        self.prefill_seconds += prefill_seconds

    def judge(
        self,
        decision: Decision,
        trees: Mapping[str, DraftTree],
        tokens: np.ndarray,
        *,
        verified: DraftTree,
        valued: Sequence[Candidates] = (),
    ) -> None:
        """What the text of a step says about everything that was proposed, verified or not.

        Args:
            trees: by asked drafter.
            tokens: int64 [T], committed in the step, bonus included.
            verified: a sampled tree is judged only if it is this one: the text depends on its draws.
            valued: `Controller.valued`.
        """
        self.settle()
        self.proposed = decision.step_id, {name: len(tree) for name, tree in trees.items()}
        known = tokens.tolist()
        for name, tree in trees.items():
            counts = self.drafters.get(name)
            if counts is None:
                counts = self.drafters[name] = ProposalCounts()
            if tree.siblings == "deterministic" or tree is verified:
                counts.add(tree, known)
            else:
                counts.unjudged += 1
        for candidates in valued:
            if self.values is None:
                self.values = ValueCounts()
            self.values.add(candidates, known)

    def add(self, record: StepRecord) -> None:
        """A step is over."""
        self.settle()
        self._waiting = record

    def settle(self) -> None:
        """Take in the record that waits."""
        record, self._waiting = self._waiting, None
        if record is None:
            return
        self.steps += 1
        self.latest.append(record)
        total = 0.0
        for part, seconds in zip(PARTS, _SECONDS(record), strict=True):
            self.seconds[part] += seconds
            total += seconds
        counts = self.arms.get(record.arm)
        if counts is None:
            counts = self.arms[record.arm] = ArmCounts()
        counts.steps += 1
        counts.emitted += record.emitted
        counts.verified += record.verified
        counts.accepted += record.accepted
        counts.seconds += total
        span = self._span()
        span.arms[record.arm] = span.arms.get(record.arm, 0) + 1
        span.steps += 1
        span.emitted += record.emitted
        span.verified += record.verified
        span.seconds += total
        if record.fault is not None:
            self.faults += 1
            self.latest_fault = record.fault

    def _span(self) -> Span:
        """The span of the next step."""
        if self.spans and self.spans[-1].steps < self.width:
            return self.spans[-1]
        if len(self.spans) == SPANS:
            for first, second in zip(self.spans[::2], self.spans[1::2], strict=True):
                first.join(second)
            del self.spans[1::2]
            self.width *= 2
        self.spans.append(Span())
        return self.spans[-1]
