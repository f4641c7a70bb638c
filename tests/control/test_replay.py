"""Replays step by step, against sums done by hand."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from adaptspec.control.controller import Assembly, Controller, FixedController, StepContext, StepNotes, StepOutcome
from adaptspec.control.cost_worlds import CostPhases, StepCosts
from adaptspec.control.oracles import Hindsight
from adaptspec.control.replay import recosted, replay
from adaptspec.control.trace import Trace
from adaptspec.types import Arm, Decision, DraftTree
from tests.control.replay_cases import random_costs, random_trace, request, trace

COSTS = StepCosts(
    np.array([10.0, 11.0, 12.0, 13.0]), draft={"a": 0.5, "b": np.array([0.0, 1.0, 2.0, 3.0])}, overhead=0.25
)


def chains(*tokens: Sequence[int]) -> list[DraftTree]:
    return [DraftTree.chain(chain, -0.1 * np.arange(len(chain))) for chain in tokens]


def small_trace(*, max_new_tokens: int = 100) -> Trace:
    """The text 1 2 3 4 5 6. Drafter a knows two tokens ahead at the start and three later, b is right about one."""
    a = chains([2, 3, 9], [3], [], [5, 6, 7], [6])
    b = chains([2], [9, 4], [4, 9], [5], [6])
    return trace([request([1, 2, 3, 4, 5, 6], {"a": a, "b": b})], nodes=3, max_new_tokens=max_new_tokens)


class Script(Controller):
    """Asks and plays what it was given, step by step, and keeps what it is told."""

    def __init__(self, *steps: tuple[str, ...]) -> None:
        self.steps = [tuple(map(Arm.parse, step)) for step in steps]
        self.begun = 0
        self.contexts: list[StepContext] = []
        self.outcomes: list[StepOutcome] = []

    def drafters_in_play(self, names: Collection[str]) -> list[str]:
        return list(names)

    def begin(self) -> None:
        self.begun += 1

    def select(self, context: StepContext) -> Decision:
        asked = self.steps[min(len(self.contexts), len(self.steps) - 1)]
        self.contexts.append(context)
        return Decision(len(self.contexts), asked[0] if asked else Arm.autoregressive(), asked=asked)

    def update(self, decision: Decision, outcome: StepOutcome) -> StepNotes:
        self.outcomes.append(outcome)
        return StepNotes()


def test_a_fixed_arm_by_hand() -> None:
    run = replay(small_trace(), FixedController(Arm("a", 2)), costs=COSTS)
    # At 0: 2 and 3 of (2, 3) agree, 4 is the bonus. At 3: 5 and 6 agree, and the text is over, so there is no bonus.
    assert run.position.tolist() == [0, 3]
    assert run.emitted.tolist() == [3, 2]
    assert run.verified.tolist() == [2, 2]
    assert run.seconds.tolist() == [12.75, 12.75]
    assert (run.arms, run.arm.tolist(), run.starts.tolist()) == (("a@2",), [0, 0], [0, 2])
    assert (run.tokens, run.total_seconds, run.tokens_per_second) == (5, 25.5, 5 / 25.5)


def test_what_the_controller_is_told() -> None:
    script = Script(("a@3", "b@1"), ("b@2",))
    run = replay(small_trace(), script, costs=COSTS)
    assert script.begun == 1
    assert [(c.length, c.remaining) for c in script.contexts] == [(11, 99), (14, 96)]
    first, second = script.outcomes
    assert first.tokens.tolist() == [2, 3, 4] and second.tokens.tolist() == [5, 6]
    assert (first.finished, second.finished) == (False, True)
    record = first.record
    assert (record.position, record.arm, record.drafted, record.verified, record.accepted) == (11, "a@3", 4, 3, 2)
    assert (record.draft_seconds, record.evaluate_seconds) == (0.5, 1.0)
    assert (record.verify_seconds, record.other_seconds) == (13.0, 0.25)
    assert dict(first.draft_seconds) == {"a": 0.5, "b": 1.0}
    assert run.seconds[0] == record.seconds == 14.75  # the drafter that was only learnt from is charged to the run


def test_the_last_token_is_not_drafted() -> None:
    script = Script(("a@3",))
    run = replay(small_trace(max_new_tokens=6), script, costs=COSTS)
    assert run.emitted.tolist() == [3, 2]
    one_by_one = Script(())
    replay(small_trace(max_new_tokens=6), one_by_one, costs=COSTS)
    assert [c.remaining for c in one_by_one.contexts] == [5, 4, 3, 2, 1]
    late = Script((), (), (), (), ("a@3", "b@3"))
    run = replay(small_trace(max_new_tokens=6), late, costs=COSTS)
    assert not late.outcomes[-1].trees  # one token is left: a session asks nobody
    assert run.seconds[-1] == 10.25
    run = replay(small_trace(max_new_tokens=7), Script((), (), (), (), ("a@3", "b@3")), costs=COSTS)
    assert run.seconds[-1] == 11.0 + 0.5 + 3.0 + 0.25


def test_requests_come_in_order() -> None:
    made = random_trace(1, lengths=[5, 1, 7])
    script = Script(("a@4",))
    seen: list[str] = []
    run = replay(made, script, costs=random_costs(1), order=[2, 1, 0], before=lambda r: seen.append(r.name))
    assert seen == ["2", "1", "0"] and script.begun == 3
    assert run.order.tolist() == [2, 1, 0]
    assert run.starts[2] == run.starts[1]  # the prefill gave that request its only token
    assert [outcome.finished for outcome in script.outcomes].count(True) == 2
    whole = [int(run.emitted[start:stop].sum()) for start, stop in zip(run.starts, run.starts[1:], strict=False)]
    assert whole == [6, 0, 4]
    assert sum(run.arm_shares().values()) == pytest.approx(1.0)


def test_an_empty_stream() -> None:
    run = replay(random_trace(1, lengths=[1]), Script(()), costs=random_costs(1))
    assert (run.tokens, run.total_seconds, run.tokens_per_second, run.arm_shares()) == (0, 0.0, 0.0, {})


def test_costs_change_at_a_token() -> None:
    phases = CostPhases(((0, COSTS), (3, COSTS.scaled(2.0))))
    run = replay(small_trace(), FixedController(Arm("a", 2)), costs=phases)
    assert run.seconds.tolist() == [12.75, 25.5]


def test_noise_has_mean_one_and_a_seed() -> None:
    made = random_trace(3, lengths=[400], nodes=2)
    costs = StepCosts(np.array([1.0, 1.0, 1.0]), draft={"a": 1.0, "b": 1.0}, noise=0.5)
    runs = [replay(made, Script(()), costs=costs, rng=np.random.default_rng(seed)) for seed in (0, 0, 1)]
    assert runs[0].seconds.tolist() == runs[1].seconds.tolist() != runs[2].seconds.tolist()
    assert runs[0].seconds.mean() == pytest.approx(1.0, abs=0.1)
    assert np.log(runs[0].seconds).std() == pytest.approx(0.5, abs=0.05)
    with pytest.raises(ValueError, match=r"rng must be given for costs with noise, got noise = 0\.5"):
        replay(made, Script(()), costs=costs)


def test_a_drafter_that_was_not_asked_must_catch_up() -> None:
    costs = replace(COSTS, catch_up_per_token={"a": 0.125}, prefill_per_token=0.5)
    script = Script(("b@1",), ("b@1",), ("a@1",))
    run = replay(small_trace(), script, costs=costs)
    assert run.emitted.tolist() == [2, 2, 1]
    assert [dict(c.cold_tokens) for c in script.contexts] == [{}, {"a": 2}, {"a": 4}]
    assert dict(script.outcomes[2].catch_up_tokens) == {"a": 4}
    assert dict(script.outcomes[2].catch_up_seconds) == {"a": 0.5}
    assert run.seconds[2] == 11.0 + 0.5 + 0.5 + 0.25
    assert run.prefill_seconds == 5.0  # and in no step


def test_recosted_replaces_times_only() -> None:
    script = Script(("a@3", "b@1"))
    replay(small_trace(), script, costs=COSTS)
    outcome = script.outcomes[0]
    measured = replace(
        outcome,
        record=replace(outcome.record, commit_seconds=1.0, observe_seconds=2.0, controller_seconds=3.0),
        target_probs=np.zeros((3, 9)),
    )
    decision = Decision(1, Arm("a", 3), asked=(Arm("a", 3), Arm("b", 1)))
    assembly = Assembly(outcome.tree, Arm("a", 3), frozenset(["a"]))
    told = recosted(measured, decision=decision, assembly=assembly, costs=COSTS)
    assert told.record == outcome.record
    assert told.draft_seconds == outcome.draft_seconds and told.target_probs is None
    slower = recosted(measured, decision=decision, assembly=assembly, costs=COSTS.scaled(2.0))
    assert slower.record.seconds == 2.0 * outcome.record.seconds


@pytest.mark.parametrize(
    ("steps", "order", "message"),
    [
        ([("c@2",)], None, "unknown drafter in the trace 'c'"),
        ([("a@4",)], None, "a@4 asks for more nodes than the 3 that were recorded"),
        ([()], [1], r"order must hold requests in \[0, 1\), got 1"),
        ([()], [-1], r"order must hold requests in \[0, 1\), got -1"),
    ],
)
def test_what_cannot_be_replayed(steps: list[tuple[str, ...]], order: list[int] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay(small_trace(), Script(*steps), costs=COSTS, order=order)


def test_drafters_without_costs_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown drafter in costs 'b'"):
        replay(small_trace(), Script(()), costs=replace(COSTS, draft={"a": 0.0}))
    with pytest.raises(ValueError, match="unknown drafter in costs 'a'"):
        replay(small_trace(), Script(()), costs=CostPhases(((0, COSTS), (9, replace(COSTS, draft={"b": 0.0})))))


def _one_node(tree: DraftTree, tokens: list[int], start: int) -> int:
    return int(len(tree) > 0 and tree.token_ids[0] == tokens[start])


MUTANTS: Mapping[str, tuple[str, object]] = {
    "stops after a node": ("adaptspec.control.replay.accepted_nodes", _one_node),
    "keeps all nodes": ("adaptspec.control.replay.truncate", lambda tree, budget: tree),
    "drafts for free": ("adaptspec.control.cost_worlds.StepCosts.draft_seconds", lambda self, drafter, budget: 0.0),
    "shares out wrongly": ("adaptspec.control.replay._shared_out", lambda draft, assembly: (0.0, 0.0)),
}


@pytest.mark.parametrize("name", [None, *MUTANTS])
def test_faults_show_against_the_table_of_arms(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Hindsight` computes the same runs from arrays; a replay with a fault is another run."""
    made = random_trace(7, lengths=[30, 20])
    costs = StepCosts(np.array([1.0, 1.1, 1.2, 1.4, 1.8]), draft={"a": 0.1, "b": np.arange(5.0)}, overhead=0.3)
    arms = [Arm.autoregressive(), Arm("a", 2), Arm("b", 4)]
    expected = [Hindsight(made, arms, costs=costs).fixed(arm) for arm in arms]
    if name is not None:
        monkeypatch.setattr(*MUTANTS[name])
    runs = [replay(made, FixedController(arm), costs=costs) for arm in arms]
    same = all(
        run.emitted.tolist() == other.emitted.tolist()
        and run.verified.tolist() == other.verified.tolist()
        and np.allclose(run.seconds, other.seconds)
        for run, other in zip(runs, expected, strict=True)
    )
    assert same == (name is None)
