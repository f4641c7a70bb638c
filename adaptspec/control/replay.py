"""A strategy played on a recorded trace: the very controllers of a live run, with the trace in place of the model.

The output does not depend on what is drafted, so a step at any position is known beforehand: what every drafter
proposes there, and what the target says. A replay is therefore exact, not an estimate: given the same costs, a live run
and its replay choose the same arms and emit the same tokens, step by step. That holds for greedy output and, with
picked drafts, for sampled output, as long as a smaller budget takes the first nodes of a larger one and what drafters
propose depends on the text alone. It does not for those that learn from what was verified (token recycling, Lookahead);
and those that learn over requests know in a shuffled replay what they knew in the recorded order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np

from adaptspec.control.controller import Assembly, Controller, StepContext, StepOutcome
from adaptspec.control.cost_worlds import Costs, StepCosts, StepSeconds
from adaptspec.control.trace import Trace, TracedRequest
from adaptspec.names import unknown_name
from adaptspec.trees import truncate
from adaptspec.types import ROOT, Decision, DraftTree, StepRecord


@dataclass(frozen=True, slots=True)
class ReplayRun:
    """The steps of one strategy over a stream, S of them in R requests.

    Attributes:
        arms: names of the arms that were played.
        order: int64 [R], the trace's requests as they were answered.
        starts: int64 [R + 1], the first step of each request, and S.
        position: int64 [S], where in the request's output a step began: its root is `tokens[position]`.
        arm: int64 [S], into `arms`.
        verified: int64 [S], draft nodes.
        emitted: int64 [S], tokens gained, bonus included.
        seconds: float64 [S], what was charged: verification, all drafters that were asked, and the overhead.
        prefill_seconds: of all requests, charged to no step.
        deciding_seconds: wall time that the controller itself took on this machine, not charged.
    """

    arms: tuple[str, ...]
    order: np.ndarray
    starts: np.ndarray
    position: np.ndarray
    arm: np.ndarray
    verified: np.ndarray
    emitted: np.ndarray
    seconds: np.ndarray
    prefill_seconds: float = 0.0
    deciding_seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens that steps gained; the first of each request comes from the prefill."""
        return int(self.emitted.sum())

    @property
    def total_seconds(self) -> float:
        """Of all steps."""
        return float(self.seconds.sum())

    @property
    def tokens_per_second(self) -> float:
        """The sum of the one over the sum of the other; 0 without steps."""
        return self.tokens / self.total_seconds if len(self.seconds) else 0.0

    def arm_shares(self) -> dict[str, float]:
        """Share of the steps by arm, largest first."""
        counts = np.bincount(self.arm, minlength=len(self.arms))
        ranked = np.argsort(-counts, kind="stable").tolist()
        return {self.arms[i]: counts.item(i) / len(self.arm) for i in ranked if counts[i]}


def replay(
    trace: Trace,
    controller: Controller,
    *,
    costs: Costs,
    order: Sequence[int] | np.ndarray | None = None,
    rng: np.random.Generator | None = None,
    before: Callable[[TracedRequest], None] | None = None,
) -> ReplayRun:
    """Play a controller, which learns as it would live.

    Args:
        costs: what steps take.
        order: which requests, in the order in which they come; as recorded without it.
        rng: of the noise, needed if the costs have any.
        before: called before every request.

    Raises:
        ValueError: the controller asks a drafter that was not recorded or for more nodes than were recorded; a drafter
            without costs; a request that is not there.
    """
    costs.check_drafters(controller.drafters_in_play(list(trace.nodes)))
    player = _Player(trace, controller, costs, rng)
    for index in range(len(trace.requests)) if order is None else order:
        if not 0 <= index < len(trace.requests):
            raise ValueError(f"order must hold requests in [0, {len(trace.requests)}), got {index}")
        if before is not None:
            before(trace.requests[index])
        player.play(int(index))
    return player.run()


def recosted(
    outcome: StepOutcome,
    *,
    decision: Decision,
    assembly: Assembly,
    costs: StepCosts,
    rng: np.random.Generator | None = None,
) -> StepOutcome:
    """The outcome of a live step as a replay with these costs would tell it.

    Times are the costs', and the target's distributions, which a trace does not hold, are left out.
    """
    record = outcome.record
    asked = [arm for arm in decision.asked if arm.drafter in outcome.trees]
    nodes = record.verified + outcome.extra_rows
    seconds = costs.step(nodes, context=record.position, asked=asked, rng=rng)
    catch_up = _catch_up_seconds(outcome.catch_up_tokens, costs)
    record = replace(record, **_times(seconds, assembly, catch_up))
    return replace(outcome, record=record, draft_seconds=seconds.draft, catch_up_seconds=catch_up, target_probs=None)


def accepted_nodes(tree: DraftTree, tokens: Sequence[int], start: int) -> int:
    """How many nodes of a tree the text takes that goes on with `tokens[start]`; `tokens` must end with -1."""
    node, at = ROOT, start
    for child, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True)):
        if parent == node and token == tokens[at]:
            node = child
            at += 1
    return at - start


def _times(seconds: StepSeconds, assembly: Assembly, catch_up: Mapping[str, float]) -> dict[str, float]:
    """The times of a step's record."""
    played, evaluated = _shared_out(seconds.draft, assembly)
    return {
        "draft_seconds": played,
        "evaluate_seconds": evaluated,
        "verify_seconds": seconds.verify,
        "commit_seconds": 0.0,
        "observe_seconds": 0.0,
        "controller_seconds": 0.0,
        "other_seconds": seconds.overhead,
        "catch_up_seconds": sum(catch_up.values()),
    }


def _shared_out(draft: Mapping[str, float], assembly: Assembly) -> tuple[float, float]:
    """Seconds of the drafters whose proposals are played, and of those that were asked only to learn from."""
    used = assembly.used
    return (
        sum([seconds for name, seconds in draft.items() if name in used]),
        sum([seconds for name, seconds in draft.items() if name not in used]),
    )


def _catch_up_seconds(tokens: Mapping[str, int], costs: StepCosts) -> dict[str, float]:
    return {name: costs.catch_up_per_token.get(name, 0.0) * count for name, count in tokens.items()}


@dataclass(slots=True)
class _Player:
    """A stream as it is played."""

    trace: Trace
    controller: Controller
    costs: Costs
    rng: np.random.Generator | None
    token: int = 0
    prefill_seconds: float = 0.0
    deciding_seconds: float = 0.0
    order: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    arms: dict[str, int] = field(default_factory=dict)
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def play(self, index: int) -> None:
        """One request."""
        request = self.trace.requests[index]
        self.prefill_seconds += self.costs.at(self.token).prefill_per_token * request.prompt_length
        self.controller.begin()
        tokens = [*request.tokens.tolist(), -1]
        lags: dict[str, int] = {}
        position, last = 0, len(request.tokens) - 1
        while position < last:
            position += self._step(request, position, tokens=tokens, lags=lags)
        self.order.append(index)
        self.starts.append(len(self.rows))

    def _step(self, request: TracedRequest, position: int, *, tokens: list[int], lags: dict[str, int]) -> int:
        """One step, as `Session.step` makes it. Returns the tokens gained."""
        costs, controller = self.costs.at(self.token), self.controller
        length, remaining = request.prompt_length + position + 1, self.trace.max_new_tokens - position - 1
        context = StepContext(length, remaining, cold_tokens={name: lag for name, lag in lags.items() if lag})
        begun = perf_counter()
        decision = controller.select(context)
        deciding = perf_counter() - begun
        trees = self._propose(request, position, decision) if remaining > 1 else {}
        begun = perf_counter()
        assembly = controller.assemble(decision, trees)
        deciding += perf_counter() - begun
        tree, arm = assembly.tree, str(assembly.arm)
        accepted = accepted_nodes(tree, tokens, position + 1)
        emitted = min(accepted + 1, len(tokens) - 2 - position)
        asked = [arm for arm in decision.asked if arm.drafter in trees]
        seconds = costs.step(len(tree), context=length, asked=asked, rng=self.rng)
        caught_up = {name: lags[name] for name in trees if lags.get(name)}
        catch_up = _catch_up_seconds(caught_up, costs)
        record = StepRecord(
            step_id=decision.step_id,
            position=length,
            arm=arm,
            propensity=decision.propensity,
            drafted=sum(map(len, trees.values())),
            verified=len(tree),
            accepted=accepted,
            emitted=emitted,
            **_times(seconds, assembly, catch_up),
        )
        outcome = StepOutcome(
            record,
            tree,
            trees,
            request.tokens[position + 1 : position + 1 + emitted],
            seconds.draft,
            finished=position + emitted == len(request.tokens) - 1,
            catch_up_tokens=caught_up,
            catch_up_seconds=catch_up,
        )
        begun = perf_counter()
        controller.update(decision, outcome)
        self.deciding_seconds += deciding + perf_counter() - begun
        for name in costs.catch_up_per_token:
            lags[name] = 0 if name in trees else lags.get(name, 0) + emitted
        self.rows.append((position, self.arms.setdefault(arm, len(self.arms)), len(tree), emitted))
        self.seconds.append(record.seconds)
        self.token += emitted
        return emitted

    def _propose(self, request: TracedRequest, position: int, decision: Decision) -> dict[str, DraftTree]:
        trees = {}
        for arm in decision.asked:
            proposals = request.proposals.get(arm.drafter)
            if proposals is None:
                raise unknown_name("drafter in the trace", arm.drafter, request.proposals)
            if arm.budget > self.trace.nodes[arm.drafter]:
                raise ValueError(
                    f"{arm} asks for more nodes than the {self.trace.nodes[arm.drafter]} that were recorded"
                )
            trees[arm.drafter] = truncate(proposals.tree(position), arm.budget)
            if decision.first_only and len(trees[arm.drafter]):
                break
        return trees

    def run(self) -> ReplayRun:
        """All that was played."""
        columns = np.array(self.rows, dtype=np.int64).reshape(-1, 4).T
        return ReplayRun(
            tuple(self.arms),
            np.array(self.order, dtype=np.int64),
            np.array(self.starts, dtype=np.int64),
            *columns,
            np.array(self.seconds, dtype=np.float64),
            self.prefill_seconds,
            self.deciding_seconds,
        )
