"""The contract of the serving policy: inputs, bounded memory, threads, state, and what it costs."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaptspec.control.cost_curve import CostPrior
from adaptspec.serving import Decision, ServingPolicy, StepContext, StepOutcome
from adaptspec.serving.acceptance import Prospects
from adaptspec.serving.merging import merge_states
from adaptspec.serving.planning import Planner
from adaptspec.serving.plans import Load
from adaptspec.serving.seconds import StepSeconds
from adaptspec.serving.strategies import strategy_names
from adaptspec.state_file import save_state
from tests.serving.world import World, affine_pass, names

ARMS = ["eagle3@2", "eagle3@4", "ngram@4", "ngram@8"]


def world(seed: int = 0) -> World:
    return World(
        lambda drafter, *which: {"eagle3": 0.75, "ngram": 0.45}[drafter],
        {"eagle3": lambda rows, length: 0.001 + 0.0008 * length},
        affine_pass(0.02, 0.0001),
        noise=0.05,
        seed=seed,
    )


def accept_all(decision: Decision, *, seconds: float = 0.02) -> StepOutcome:
    return StepOutcome(decision.lengths, decision.lengths, decision.lengths, seconds=seconds)


def test_it_is_usable_without_torch() -> None:
    code = (
        "import sys; from adaptspec.serving import ServingPolicy, StepContext; "
        "ServingPolicy(['eagle3@4']).decide(StepContext(['a'], [9])); "
        "print(sorted({'torch', 'transformers', 'scipy', 'prometheus_client'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


@pytest.mark.parametrize("strategy", [*strategy_names(), "fixed:eagle3@4", "fixed:ar"])
def test_every_strategy_decides_learns_and_goes_on_after_a_restart(strategy: str) -> None:
    stack = world()
    policy = ServingPolicy(ARMS, strategy, seed=3, stateful=["eagle3"])
    stack.run(policy, 25, names(3))
    state = json.loads(json.dumps(policy.state_dict()))
    restored = ServingPolicy(ARMS, strategy, seed=3, stateful=["eagle3"])
    restored.load_state_dict(state)
    twin = copy.deepcopy(stack)
    for number in range(12):
        ids = names(3 + number % 2)
        first, second = stack.step(policy, ids).decision, twin.step(restored, ids).decision
        assert first.arms.tolist() == second.arms.tolist() and first.lengths.tolist() == second.lengths.tolist()
        assert (first.plan, first.reason, first.digest) == (second.plan, second.reason, second.digest)


def test_most_is_gained_of_what_the_best_arm_would_give() -> None:
    """The ragged free choice and the uniform one, against every arm played alone, costs of learning included."""
    fixed = {arm: world(1).run(ServingPolicy(ARMS, f"fixed:{arm}"), 25, names(8)).rate for arm in ["ar", *ARMS]}
    best = max(fixed.values())
    for uniform in (False, True):
        log = world(2).run(ServingPolicy(ARMS, "hedge", uniform=uniform, seed=1), 160, names(8))
        assert log[40:].rate > 0.95 * best > 1.2 * fixed["ar"]
        if uniform:
            for step in log.steps:
                assert len(set(step.decision.arms.tolist())) == 1


def test_limits_of_rows_and_steps_are_kept() -> None:
    for uniform in (False, True):
        for strategy in ("greedy", "fixed:ngram@8"):
            policy = ServingPolicy(ARMS, strategy, guard=None, uniform=uniform)
            decision = policy.decide(
                StepContext(
                    names(6),
                    [10] * 6,
                    remaining=[1, 2, 4, 100, 100, 100],
                    max_lengths=[8, 8, 8, 0, 3, 8],
                    speculate=[True, True, True, True, True, False],
                )
            )
            lengths = decision.lengths.tolist()
            assert lengths[0] == lengths[3] == lengths[5] == 0
            assert lengths[1] <= 1 and lengths[2] <= 3 and lengths[4] <= 3 and sum(lengths) > 0
            budget = policy.decide(StepContext(names(6), [10] * 6, draft_budget=12))
            assert budget.lengths.sum() <= 12
            nobody = policy.decide(StepContext(names(2), [10] * 2, unavailable=["eagle3", "ngram"]))
            assert nobody.off
            if strategy == "greedy":
                only = policy.decide(StepContext(names(2), [10] * 2, unavailable=["eagle3"]))
                assert set(only.drafters) <= {"ngram", None} and not only.off
    empty = ServingPolicy(ARMS).decide(StepContext([], []))
    assert len(empty) == 0 and empty.off


def test_a_decision_tells_rows_and_lengths_by_drafter() -> None:
    decision = Decision(1, ("a", "b", "c"), ("ar", "x@2", "y@4/fr:9"), np.array([0, 1, 2]), np.array([0, 2, 3]))
    assert decision.arm_names == ["ar", "x@2", "y@4/fr:9"]
    assert decision.drafters == [None, "x", "y/fr:9"]
    assert decision.rows("x").tolist() == [1] and decision.rows("z").tolist() == []
    assert decision.length("y/fr:9") == 3 and decision.length("z") == 0 and not decision.off


def test_requests_are_remembered_apart_and_forgotten_when_they_finish() -> None:
    policy = ServingPolicy(["eagle3@4"], "greedy", guard=None, max_requests=8)
    stack = World(lambda drafter, request, *which: 0.95 if request == "good" else 0.05, {}, affine_pass(0.02, 0.002))
    log = stack.run(policy, 60, ["good", "bad"])[30:]
    assert log.mean_length(["good"]) > 3.8 and log.mean_length(["bad"]) < 1.5
    summaries = policy.finish(["good", "bad", "unknown"])
    assert set(summaries) == {"good", "bad"} and policy.status().requests == 0
    good = summaries["good"]
    assert good.mean_acceptance_length > 4.0 and good.draft_acceptance_rate > 0.75
    assert good.num_spec_steps == sum(good.acceptance_histogram)
    assert good.num_accepted_tokens == sum(n * steps for n, steps in enumerate(good.acceptance_histogram))
    assert good.num_tokens == good.num_accepted_tokens + good.num_steps
    assert json.dumps(good.to_dict())


def test_memory_is_bounded_without_finish() -> None:
    policy = ServingPolicy(["eagle3@4"], max_requests=16)
    first = None
    for number in range(300):
        decision = policy.decide(StepContext([f"r{number}", f"s{number}"], [10, 10]))
        first = first or decision
        if number % 50 == 49:
            policy.observe(decision, accept_all(decision))
    assert policy.status().requests == 16
    assert len(policy.state_dict()["requests"]["ids"]) == 16
    assert first is not None
    with pytest.raises(ValueError, match="step_id 1 is not one of the latest 256 decisions"):
        policy.observe(first, accept_all(first))
    with pytest.raises(ValueError, match="at most max_requests = 16 requests, got 17"):
        policy.decide(StepContext(names(17), [1] * 17))


def test_outcomes_may_come_late_in_any_order_or_never() -> None:
    policy = ServingPolicy(ARMS, "hedge")
    decisions = [policy.decide(StepContext(names(3), [10 + n] * 3)) for n in range(12)]
    policy.finish(["r1"])
    for decision in decisions[::-2]:
        policy.observe(decision, accept_all(decision))
    with pytest.raises(ValueError, match="without an outcome"):
        policy.observe(decisions[-1], accept_all(decisions[-1]))
    policy.observe(decisions[0], StepOutcome([0] * 3, [0] * 3, [0] * 3, observed=[False] * 3))


def test_many_threads_may_ask_at_once() -> None:
    policy = ServingPolicy(ARMS, "hedge")
    problems: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for number in range(15):
                ids = names(3, name)
                decision = policy.decide(StepContext(ids, [10 * number + 1] * 3))
                policy.observe(decision, accept_all(decision))
                policy.status()
            policy.finish(ids)
        except BaseException as error:  # noqa: BLE001
            problems.append(error)

    threads = [threading.Thread(target=work, args=(f"t{number}-",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    status = policy.status()
    assert status.steps == 90 and status.requests == 0


def test_deciding_less_often_where_it_takes_too_long() -> None:
    """The stack says what deciding takes; the policy's own clock would differ between ranks."""
    policy = ServingPolicy(ARMS, "greedy", guard=None, policy_share=0.02)
    reasons = []
    for number in range(60):
        decision = policy.decide(StepContext(names(2), [10 + number] * 2))
        reasons.append(decision.reason)
        n = decision.lengths
        policy.observe(decision, StepOutcome(n, n, n, verify_seconds=0.01, policy_seconds=0.001))
    assert reasons.count("reused") > 35
    assert decision.lengths.max() > 0


def test_a_request_that_comes_while_decisions_are_reused_drafts_as_most_do() -> None:
    policy = ServingPolicy(["eagle3@4"], "greedy", guard=None)
    reused = 0
    for number in range(20):
        decision = policy.decide(StepContext(["a", f"new{number}"], [10, 10]))
        n = decision.lengths
        if decision.reason == "reused":
            assert n.tolist() == [4, 4]
        policy.observe(decision, StepOutcome(n, n, n, verify_seconds=0.01, policy_seconds=0.002))
        reused += decision.reason == "reused"
    assert reused > 8


def test_save_load_copy_and_pickle(tmp_path: Path) -> None:
    stack = world()
    policy = ServingPolicy(ARMS, "hedge", seed=5, stateful=["eagle3"], prior=CostPrior(0.01, 0.0002))
    stack.run(policy, 20, names(2))
    policy.save(tmp_path / "policy.json")
    others = [ServingPolicy.load(tmp_path / "policy.json"), copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))]
    context = StepContext(names(3), [500] * 3)
    decision = policy.decide(context)
    for other in others:
        mine = other.decide(context)
        assert mine.digest == decision.digest and mine.lengths.tolist() == decision.lengths.tolist()
    assert others[0].records == policy.records


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version must be 1"),
        ({"arms": ["ar", "x@2"]}, "arms must be"),
        ({"settings": {}}, "settings must be a mapping of strategy"),
        ({"progress": [1, 2]}, "progress must be numbers of shape"),
        ({"acceptance": {}}, "acceptance must be a mapping"),
        ({"seconds": None}, "costs must be a mapping"),
        ({"planner": {"prices": [-1.0, 0.0]}}, "prices must be"),
        ({"chooser": {}}, "chooser must be a mapping"),
        ({"requests": {"ids": []}}, "requests must be a mapping"),
        ({"records": 3}, "records must be a list"),
    ],
)
def test_damaged_states_are_refused_and_change_nothing(change: dict[str, Any], message: str) -> None:
    policy = ServingPolicy(ARMS)
    world().run(policy, 5, names(2))
    before = policy.state_dict()
    with pytest.raises(ValueError, match=message):
        policy.load_state_dict({**before, **change})
    assert policy.state_dict() == before


def test_files_of_other_things_are_refused(tmp_path: Path) -> None:
    save_state(tmp_path / "other.json", {"something": 1})
    with pytest.raises(ValueError, match="holds no serving policy"):
        ServingPolicy.load(tmp_path / "other.json")


def test_replicas_add_up() -> None:
    base = ServingPolicy(ARMS, seed=1)
    world(9).run(base, 10, names(2))
    start = base.state_dict()
    replicas = [copy.deepcopy(base) for _ in range(3)]
    for number, replica in enumerate(replicas):
        world(number).run(replica, 30, names(2, f"q{number}"))
    states = [replica.state_dict() for replica in replicas]
    merged = merge_states(states, base=start)
    trials = [np.array(state["acceptance"]["accepts"])[1] for state in (*states, merged, start)]
    assert np.allclose(trials[3], np.maximum(sum(trials[:3]) - 2 * trials[4], 0.0))
    replicas[0].load_state_dict(merged)
    assert replicas[0].decide(StepContext(["x"], [10])).step_id == states[0]["progress"][0] + 1
    with pytest.raises(ValueError, match="states must agree on arms"):
        merge_states([states[0], ServingPolicy(["x@2"]).state_dict()])
    with pytest.raises(ValueError, match="at least one state"):
        merge_states([])


def test_costs_measured_beforehand_decide_from_the_first_step() -> None:
    def lengths(seconds: dict[int, float]) -> int:
        policy = ServingPolicy(["eagle3@4"], "greedy", guard=None)
        policy.calibrate(seconds)
        return int(policy.decide(StepContext(names(8), [10] * 8)).lengths.sum())

    assert lengths({8: 0.02, 64: 0.021}) > 0
    assert lengths({8: 0.02, 64: 0.2}) == 0
    with pytest.raises(ValueError, match="tokens must be a whole number >= 1"):
        ServingPolicy(ARMS).calibrate({0: 1.0})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"arms": "eagle3@4"}, "arms must be a list"),
        ({"arms": ["ar"]}, "at least one that drafts"),
        ({"arms": ["eagle3@auto"]}, "a draft length that is a number, got 'eagle3@auto'"),
        ({"arms": ["a@2", "a@2"]}, "arms must be different"),
        ({"strategy": "hedgy"}, "unknown strategy 'hedgy'; did you mean 'hedge'"),
        ({"strategy": "fixed:eagle3@9"}, "unknown arm 'eagle3@9'"),
        ({"strategy": None}, "strategy must be a name"),
        ({"objective": "speed"}, "unknown objective"),
        ({"guard": 1.0}, r"guard must be in \(0, 1\)"),
        ({"guard": 0.0}, "guard must be in"),
        ({"seed": -1}, "seed must be"),
        ({"uniform": 1}, "uniform must be True or False"),
        ({"stateful": ["eagle"]}, "unknown drafter in stateful: 'eagle'; did you mean 'eagle3'"),
        ({"stateful": "eagle3"}, "stateful must be a collection"),
        ({"keep_warm": "yes"}, "unknown keep_warm"),
        ({"policy_share": 2.0}, "policy_share must be in"),
        ({"prior": 0.1}, "prior must be a CostPrior"),
        ({"max_requests": 0}, "max_requests must be"),
    ],
)
def test_bad_settings_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServingPolicy(**{"arms": ARMS, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"request_ids": ["a", "a"]}, "request_ids must be different"),
        ({"context_lengths": [1]}, r"context_lengths must have shape \[2\], got \[1\]"),
        ({"context_lengths": [1.0, 2.0]}, "context_lengths must be whole numbers, got float64"),
        ({"context_lengths": [1, -2]}, "context_lengths must be >= 0, got -2 in row 1"),
        ({"speculate": [1, 0]}, "speculate must be bool"),
        ({"prefill_tokens": -1}, "prefill_tokens must be a whole number >= 0"),
        ({"draft_budget": 1.5}, "draft_budget must be a whole number"),
        ({"evidence": {"eagle3": [8, 0]}}, r"evidence of 'eagle3' must be in \[-1, 7\], got 8 in row 0"),
        ({"available": {"eagle3": [-2, 0]}}, "available of 'eagle3' must be >= -1"),
        ({"unavailable": "eagle3"}, "unavailable must be a collection"),
        ({"request_ids": "ab"}, "request_ids must be a list of requests, got the string 'ab'"),
        ({"request_ids": [["a"], "b"]}, "request_ids must be hashable"),
        ({"context_lengths": [1, 2**70]}, "context_lengths must be whole numbers"),
        ({"remaining": [-1, 2]}, "remaining must be >= 0, got -1 in row 0"),
        ({"max_lengths": [1, float("nan")]}, "max_lengths must be whole numbers"),
        ({"evidence": [1, 2]}, "evidence must be a mapping by drafter"),
    ],
)
def test_bad_contexts_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepContext(**{"request_ids": ["a", "b"], "context_lengths": [1, 2], **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"verified": [3, 1]}, "verified must be <= proposed, got 3 of 2 in row 0"),
        ({"accepted": [0, 2]}, "accepted must be <= verified, got 2 of 1 in row 1"),
        ({"emitted": [1]}, "emitted must have shape"),
        ({"censored": [0, 1]}, "censored must be bool"),
        ({"seconds": -1.0}, "seconds must be >= 0 seconds and finite"),
        ({"draft_seconds": {"x": float("nan")}}, "draft_seconds of 'x' must be >= 0 seconds"),
        ({"padding": -1}, "padding must be a whole number"),
        ({"accepted": [-1, 0]}, "accepted must be >= 0, got -1 in row 0"),
        ({"emitted": [2, -3]}, "emitted must be >= 0, got -3 in row 1"),
        ({"proposed": None}, r"proposed must have shape \[1\]"),
        ({"verify_seconds": float("inf")}, "verify_seconds must be >= 0 seconds and finite"),
        ({"policy_seconds": None}, "policy_seconds must be >= 0 seconds"),
        ({"draft_seconds": 0.1}, "draft_seconds must be a mapping by drafter"),
    ],
)
def test_bad_outcomes_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepOutcome(**{"proposed": [2, 1], "verified": [2, 1], "accepted": [1, 0], **arguments})


def test_outcomes_that_do_not_fit_the_decision_are_refused_and_teach_nothing() -> None:
    policy = ServingPolicy(["eagle3@4"], "fixed:eagle3@4")
    decision = policy.decide(StepContext(["a", "b"], [10, 10]))
    before = policy.state_dict()
    with pytest.raises(ValueError, match="one entry per row of the decision: 2, got 1"):
        policy.observe(decision, StepOutcome([1], [1], [1]))
    with pytest.raises(ValueError, match="proposed must be at most what was asked, 4, got 5 in row 1"):
        policy.observe(decision, StepOutcome([1, 5], [1, 5], [1, 1]))
    with pytest.raises(ValueError, match="unknown drafter in draft_seconds: 'eagle'"):
        policy.observe(decision, StepOutcome([1, 1], [1, 1], [1, 1], draft_seconds={"eagle": 1.0}))
    with pytest.raises(TypeError, match="decision must be a Decision of decide"):
        policy.observe(Decision(1, ("a",), ("ar",), np.zeros(1, int), np.zeros(1, int)), StepOutcome([0], [0], [0]))
    with pytest.raises(TypeError, match="outcome must be a StepOutcome"):
        policy.observe(decision, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="context must be a StepContext"):
        policy.decide(["a"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown drafter in available: 'x'"):
        policy.decide(StepContext(["a"], [1], available={"x": [1]}))
    with pytest.raises(ValueError, match="request_ids must be a list of requests"):
        policy.finish("a")
    assert policy.state_dict() == before
    policy.observe(decision, StepOutcome([1, 4], [1, 4], [1, 1]))


def test_decisions_of_another_policy_are_refused() -> None:
    """Its step has the same number, and the policy has told something else before."""
    mine, other = ServingPolicy(["eagle3@4"], "fixed:eagle3@4"), ServingPolicy(["eagle3@2"], "fixed:eagle3@2")
    context = StepContext(["a"], [10])
    decision, theirs = mine.decide(context), other.decide(context)
    before = mine.state_dict()
    with pytest.raises(ValueError, match="step_id 1 is not one of the latest 256 decisions without an outcome"):
        mine.observe(theirs, accept_all(theirs))
    assert mine.state_dict() == before
    mine.observe(decision, accept_all(decision))


def test_a_decision_that_could_not_be_made_changes_nothing() -> None:
    policy = ServingPolicy(ARMS, max_requests=2)
    world().run(policy, 5, names(2))
    before = policy.state_dict()
    with pytest.raises(ValueError, match="at most max_requests = 2"):
        policy.decide(StepContext(names(3), [10] * 3))
    with pytest.raises(ValueError, match="unknown drafter in unavailable: 'ngrams'; did you mean 'ngram'"):
        policy.decide(StepContext(names(2), [10] * 2, unavailable=["ngrams"]))
    assert policy.state_dict() == before


def test_requests_that_end_twice_or_in_the_midst_of_a_step() -> None:
    policy = ServingPolicy(["eagle3@4"], "fixed:eagle3@4")
    decision = policy.decide(StepContext(["a", "b"], [10, 10]))
    assert set(policy.finish(["a", "a"])) == {"a"}
    assert policy.finish(["a"]) == {}
    policy.observe(decision, accept_all(decision))
    assert policy.finish(["b"])["b"].num_tokens == 5
    again = policy.decide(StepContext(["a"], [10]))  # a new request of this name knows nothing of the old one
    policy.observe(again, accept_all(again))
    assert policy.finish(["a"])["a"].num_steps == 1


@pytest.mark.parametrize("strategy", ["hedge", "greedy", "fixed:eagle3@4"])
def test_a_clock_that_shows_no_time(strategy: str) -> None:
    """Steps that took 0 seconds teach no costs, break nothing, and what comes later is learnt."""
    policy = ServingPolicy(ARMS, strategy)
    for number in range(30):
        decision = policy.decide(StepContext(["a"], [10 + number]))
        parts = {"verify_seconds": 0.0} if number % 2 else {"seconds": 0.0}
        policy.observe(decision, StepOutcome(decision.lengths, decision.lengths, decision.lengths, **parts))
    assert policy.status().pass_seconds == {}
    decision = policy.decide(StepContext(["a"], [100]))
    policy.observe(decision, accept_all(decision, seconds=0.5))
    assert len(policy.status().pass_seconds) <= 1
    assert np.isfinite(json.loads(json.dumps(policy.state_dict()))["planner"]["prices"]).all()


def test_states_of_other_settings_are_refused() -> None:
    state = ServingPolicy(ARMS, "hedge").state_dict()
    for changed in ({"strategy": "greedy"}, {"guard": None}, {"uniform": True}, {"seed": 1}, {"stateful": ["ngram"]}):
        other = ServingPolicy(ARMS, **{"strategy": "hedge", **changed})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"state: {next(iter(changed))} must be"):
            other.load_state_dict(state)


def test_costs_measured_beforehand_are_checked() -> None:
    policy = ServingPolicy(ARMS)
    for seconds, context, message in (
        ([0.1], 0.0, "seconds must be a mapping"),
        ({8: 0.0}, 0.0, "seconds must be"),
        ({8: float("nan")}, 0.0, "seconds must be"),
        ({8: 0.1}, float("nan"), "context must be"),
    ):
        with pytest.raises(ValueError, match=message):
            policy.calibrate(seconds, context=context)  # type: ignore[arg-type]


def test_plans_are_those_of_the_formula() -> None:
    """Against a calculation row by row and arm by arm: unequal arms, limits per row, drafters that decline."""
    rng = np.random.default_rng(4)
    whose, lengths = np.array([0, 0, 0, 1, 2, 2]), np.array([1, 3, 4, 2, 1, 4])
    for trial in range(20):
        planner, costs = Planner(whose, lengths, timed=True), StepSeconds(3)
        rows = int(rng.integers(1, 9))
        for tokens in (2, 8, 64):
            costs.observe_verify(tokens, 0.01 + 0.001 * tokens)
        chances = rng.uniform(0.2, 0.9, (4, 3, rows)).astype(np.float32)
        offers = (np.arange(4)[:, None, None] < rng.integers(1, 5, (3 if trial % 2 else 1, rows))).astype(np.float32)
        accepted = np.cumprod(chances, axis=0) * offers
        load = Load(rows, rows, 0.0, costs.verify(rows), np.zeros(3), np.ones(3, bool))
        price = np.array(planner.state_dict()["prices"])
        for _ in range(2):  # at a new load the price follows twice
            best = []
            for drafter in range(3):
                arms = [arm for arm in range(6) if whose[arm] == drafter]
                sure = offers[:, min(drafter, len(offers[0]) - 1)]
                taken = np.zeros(rows, int)  # arms that each row takes
                worth = []
                for rank, arm in enumerate(arms):
                    part = slice(lengths[arms[rank - 1]] if rank else 0, lengths[arm])
                    pays = accepted[part, drafter].sum(0) - price[drafter] * sure[part].sum(0) > 0
                    taken += pays
                    reach = [lengths[arms[: rank + 1]][min(n, rank + 1) - 1] if n else 0 for n in taken]
                    gain = sum(accepted[:n, drafter, row].sum() for row, n in enumerate(reach))
                    passed = sum(sure[:n, row].sum() for row, n in enumerate(reach))
                    worth.append(((rows + gain) / costs.verify(rows + passed), -rank, passed, list(taken)))
                best.append(max(worth))
            price = np.array([rate * costs.price_each(np.array([rows + passed]))[0] for rate, _, passed, _ in best])
        alone, _ = planner.plans(Prospects(accepted, offers), load, costs)
        for drafter, (plan, (rate, _, passed, taken)) in enumerate(zip(alone, best, strict=True)):
            assert plan.rate == pytest.approx(rate, rel=1e-5) and plan.verified == pytest.approx(passed, rel=1e-5)
            first = whose.tolist().index(drafter)
            assert plan.arms is not None
            assert plan.arms.tolist() == [first + n - 1 if n else -1 for n in taken]


def test_a_step_of_256_requests_and_32_arms_is_decided_and_learnt_in_time() -> None:
    """About one millisecond on one core; the bound allows for a loaded one. The fastest of many counts."""
    arms = [f"d{drafter}@{length}" for drafter in range(4) for length in range(1, 9)]
    policy = ServingPolicy(arms, "hedge", policy_share=1.0)
    ids, rng = names(256), np.random.default_rng(0)
    contexts, fastest = rng.integers(100, 2000, 256), float("inf")
    for _ in range(60):
        context = StepContext(ids, contexts)
        start = time.thread_time()
        decision = policy.decide(context)
        middle = time.thread_time()
        accepted = np.minimum(rng.geometric(0.3, 256) - 1, decision.lengths)
        outcome = StepOutcome(decision.lengths, decision.lengths, accepted, verify_seconds=0.02)
        again = time.thread_time()
        policy.observe(decision, outcome)
        if not decision.off:
            fastest = min(fastest, time.thread_time() - again + middle - start)
    assert fastest < 0.004
