"""What every arm does at every position of a trace, as arrays: what short replays run on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adaptspec.control.cost_worlds import StepCosts
from adaptspec.control.oracles import ArmTable, arm_table, check_arms
from adaptspec.control.trace import Proposals, Trace
from adaptspec.control.trace_reach import Reaches, reaches
from adaptspec.types import Arm


@dataclass(frozen=True, slots=True)
class PositionTable:
    """What every arm does at every position of a trace. P positions of all requests, A arms, D drafters.

    Attributes:
        arms: no speculation first.
        starts: int64 [R + 1], the first position of each request, and P.
        gains: int64 [P, A], tokens that a step gains.
        nodes: int64 [P, A], nodes that it verifies.
        verify: float64 [P, A], seconds of that verification.
        overhead: seconds of everything else in a step.
        drafting: bool [P], False where nothing is drafted because one token is left.
        draft: float64 [A], seconds of the arm's proposal at its own budget.
        drafter: int64 [A], into the drafters; -1 for no speculation.
        widest: float64 [D], seconds of a drafter's proposal at its largest budget.
        lengths: int64 [P, A], tokens that the arm's proposal was right about and one more, whatever the text has left.
        judged_at: int64 [P, D], the position at which the text has judged a drafter's widest proposal; P where it ends
            before.
        expected: float64 [P, A], seconds that the arm's step is expected to take if it asks for the widest proposal.
        no_speculation: float64 [P], the same for a step without speculation, nothing drafted.
    """

    arms: tuple[Arm, ...]
    starts: np.ndarray
    gains: np.ndarray
    nodes: np.ndarray
    verify: np.ndarray
    overhead: float
    drafting: np.ndarray
    draft: np.ndarray
    drafter: np.ndarray
    widest: np.ndarray
    lengths: np.ndarray
    judged_at: np.ndarray
    expected: np.ndarray
    no_speculation: np.ndarray
    prefill: np.ndarray

    @classmethod
    def of(
        cls, trace: Trace, arms: Sequence[Arm], *, costs: StepCosts, tables: Sequence[ArmTable] | None = None
    ) -> PositionTable:
        """The table of a trace.

        Args:
            tables: `arm_table` of every request, if they are there already.

        Raises:
            ValueError: arms that cannot be played, costs that change, are noisy, or charge catching up.
        """
        check_arms(trace, arms)
        if not isinstance(costs, StepCosts) or costs.noise or costs.catch_up_per_token:
            raise ValueError("costs must be constant, without noise and without catching up")
        names = list(dict.fromkeys(arm.drafter for arm in arms[1:]))
        costs.check_drafters(names)
        if tables is None:
            tables = [arm_table(request, arms, max_new_tokens=trace.max_new_tokens) for request in trace.requests]
        budgets = np.array([arm.budget for arm in arms], dtype=np.int64)
        drafter = np.array([-1, *(names.index(arm.drafter) for arm in arms[1:])], dtype=np.int64)
        widest = [int(budgets[drafter == index].max()) for index in range(len(names))]
        starts = np.cumsum([0, *(request.positions for request in trace.requests)], dtype=np.int64)
        lengths, judged, full_nodes = [], [], []
        for number, request in enumerate(trace.requests):
            columns = np.ones((request.positions, len(arms)), dtype=np.int64)
            sizes = np.zeros((request.positions, len(arms)), dtype=np.int64)
            found = []
            for place, name in enumerate(names):
                proposals, reached = request.proposals[name], reaches(request, name)
                found.append(_judge(proposals, reached, widest[place]))
                for index in np.flatnonzero(drafter == place).tolist():
                    columns[:, index] = reached.lengths(int(budgets[index]))
                    sizes[:, index] = np.minimum(proposals.sizes(), budgets[index])
            lengths.append(columns)
            full_nodes.append(sizes)
            at = np.arange(request.positions) + np.stack(found)
            judged.append(np.where(at <= request.positions, at, 2**62).T + starts[number])
        contexts = np.concatenate([r.prompt_length + 1 + np.arange(r.positions) for r in trace.requests])
        nodes = np.concatenate([table.nodes for table in tables])
        verify = costs.verify_seconds_of(nodes.T, contexts).T
        wide = np.array([costs.draft_seconds(name, most) for name, most in zip(names, widest, strict=True)])
        expected = costs.verify_seconds_of(np.concatenate(full_nodes).T, contexts).T
        expected += np.array([costs.overhead, *(wide[drafter[1:]] + costs.overhead)])
        return cls(
            arms=tuple(arms),
            starts=starts,
            gains=np.concatenate([table.gains for table in tables]),
            nodes=nodes,
            verify=verify,
            overhead=costs.overhead,
            drafting=np.concatenate([table.drafting for table in tables]),
            draft=np.array([costs.draft_seconds(arm.drafter, int(arm.budget)) for arm in arms]),
            drafter=drafter,
            widest=wide,
            lengths=np.concatenate(lengths),
            judged_at=np.concatenate(judged),
            expected=expected,
            no_speculation=costs.verify_seconds_of(np.zeros(len(contexts), np.int64), contexts),
            prefill=np.array([costs.prefill_per_token * request.prompt_length for request in trace.requests]),
        )


def _judge(proposals: Proposals, reached: Reaches, budget: int) -> np.ndarray:
    """int64 [P], how many tokens after the root it takes to know how far a drafter's `budget` first nodes are right.

    One more than the accepted ones, where the last of them (or the root) has children left that could have been right.
    """
    positions, above = proposals.places()
    count = len(positions)
    ranks = np.full(count + 1, -1, dtype=np.int64)
    ranks[:count] = node_ranks(proposals)
    inside = ranks[:count] < budget
    inner = np.zeros(count + 1, dtype=bool)
    inner[above[inside]] = True
    accepted = reached.lengths(budget) - 1
    sizes = np.minimum(proposals.sizes(), budget)
    # The row of the last accepted node, by its rank inside the position's tree.
    by_rank = np.full(count + 1, count, dtype=np.int64)
    by_rank[proposals.offsets[positions] + ranks[:count]] = np.arange(count)
    last = reached.offsets[:-1] + accepted - 1
    rank = reached.ranks[np.maximum(last, 0)] if len(reached.ranks) else np.zeros(len(accepted), np.int64)
    row = by_rank[np.minimum(proposals.offsets[:-1] + rank, count)]
    more = np.where(accepted > 0, inner[row], sizes > 0)
    return accepted + more


def node_ranks(proposals: Proposals) -> np.ndarray:
    """int64 [M], the place of every node in `adaptspec.trees.budget_order` of its own tree."""
    positions, above = proposals.places()
    count = len(positions)
    above = np.append(above, count)  # the root, above itself
    lowest = np.append(proposals.scores, np.inf)
    while (above != count).any():  # reaches twice as far up the paths with every round
        lowest = np.minimum(lowest, lowest[above])
        above = above[above]
    ranks = np.empty(count, dtype=np.int64)
    ranks[np.lexsort((-lowest[:count], positions))] = np.arange(count) - proposals.offsets[positions]
    return ranks
