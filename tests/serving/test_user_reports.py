"""What users of serving stacks report about speculation, one test each, in a world of chances and costs."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from adaptspec import AdaptiveSpec
from adaptspec.serving import ServingPolicy, StepContext, StepOutcome
from adaptspec.serving.types import count_drafts
from adaptspec.types import DraftTree, Observation, Verdict
from adaptspec.vocab import FrequencyList, HeadData, VocabHeads
from tests.serving.world import World, affine_pass, names
from tests.target.families import FAMILIES

EAGLE = ["eagle3@1", "eagle3@2", "eagle3@3", "eagle3@4"]
NGRAM = ["ngram@2", "ngram@4", "ngram@8"]


def eagle_seconds(rows: int, length: int) -> float:
    """A drafter that runs as a batch: as dear for one row as for all."""
    return 0.001 + 0.0008 * length


def good(drafter: str, request: str, context: int, step: int) -> float:
    return {"eagle3": 0.8, "ngram": 0.5}[drafter]


def test_no_oscillation_across_a_batch_threshold() -> None:
    """The best length changes at 32 rows, and the batch goes to and fro across it."""

    def pass_seconds(tokens: int, context: int) -> float:
        return 0.02 + 0.004 * (tokens > 96) + 0.00004 * tokens

    world = World(good, {"eagle3": eagle_seconds}, pass_seconds, noise=0.02)
    policy = ServingPolicy(EAGLE, "greedy", uniform=True)
    log = world.run(policy, 160, lambda step: names(31 + step % 3))
    lengths = [step.decision.length("eagle3") for step in log[60:].steps if step.decision.reason != "baseline"]
    changes = sum(a != b for a, b in zip(lengths, lengths[1:], strict=False))
    assert changes <= 6, lengths  # without hysteresis it changes in most steps


def test_prefill_rows_do_not_count_as_decode_batch() -> None:
    policy = ServingPolicy(EAGLE, "greedy", guard=None)
    decision = policy.decide(
        StepContext(["a", "b", "c"], [100, 50, 60], decoding=[True, False, False], prefill_tokens=100)
    )
    assert decision.lengths[0] > 0
    assert decision.lengths[1:].tolist() == [0, 0]
    assert decision.expected_tokens is not None and decision.expected_tokens < 1 + 4 + 1
    assert decision.memo.batch.load.rows == 1


def test_a_burst_of_prefills_does_not_change_the_lengths() -> None:
    world = World(good, {"eagle3": eagle_seconds}, affine_pass(0.02, 0.00005))
    policy = ServingPolicy(EAGLE, "greedy", uniform=True)
    world.run(policy, 40, names(4))
    plans = set()
    for number in range(20):
        ids = names(4) + (names(12, "new") if number % 2 else [])
        decoding = [True] * 4 + [False] * (len(ids) - 4)
        step = world.step(policy, ids, decoding=decoding, prefill_tokens=16 * (len(ids) - 4))
        plans.add(step.decision.length("eagle3"))
    assert plans <= {3, 4}


def test_stale_draft_state_is_named_and_not_taken_for_bad_drafts() -> None:
    """Length 0 leaves the drafter's state behind: it must catch up, and what it drafts before that does not count."""
    policy = ServingPolicy(EAGLE, "greedy", guard=None, stateful=["eagle3"], keep_warm="never")
    contexts = np.array([100, 200])
    first = policy.decide(StepContext(["a", "b"], contexts))
    assert first.cold_tokens is not None and first.cold_tokens.tolist() == [0, 0]
    policy.observe(first, StepOutcome(first.lengths, first.lengths, first.lengths, seconds=0.02))
    for more in range(1, 6):
        off = policy.decide(StepContext(["a", "b"], contexts + more, speculate=[False, False]))
        assert off.off and off.refresh == ()
        policy.observe(off, StepOutcome([0, 0], [0, 0], [0, 0], seconds=0.02))
    resumed = policy.decide(StepContext(["a", "b"], contexts + 6))
    assert resumed.cold_tokens is not None and resumed.cold_tokens.tolist() == [6, 6]
    before = policy.status().acceptance["eagle3"]
    zeros = np.zeros_like(resumed.lengths)
    policy.observe(resumed, StepOutcome(resumed.lengths, resumed.lengths, zeros, stale=[True, True], seconds=0.02))
    assert policy.status().acceptance["eagle3"] == pytest.approx(before, abs=1e-3)


def test_the_state_of_a_drafter_is_kept_warm_for_a_while_only() -> None:
    policy = ServingPolicy(EAGLE, "greedy", guard=None, stateful=["eagle3"])
    first = policy.decide(StepContext(["a"], [100]))
    assert first.plan == "eagle3"
    policy.observe(first, StepOutcome([1], [1], [1], seconds=0.02))
    refreshed = []
    for more in range(2, 30):
        decision = policy.decide(StepContext(["a", "b"], [100 + more, 100 + more], speculate=[False, False]))
        refreshed.append(bool(decision.refresh))
        policy.observe(decision, StepOutcome([0, 0], [0, 0], [0, 0], seconds=0.02))
    assert refreshed[0] and not any(refreshed[10:])
    always = ServingPolicy(EAGLE, "fixed:ar", stateful=["eagle3"], keep_warm="always")
    always.decide(StepContext(["a"], [100]))
    assert always.decide(StepContext(["a"], [101])).refresh == ("eagle3",)


def test_catching_up_is_part_of_the_price_of_switching_back() -> None:
    """A state that is dear to bring up to date makes a short return not worth it."""

    def resumed(catch_up: float) -> bool:
        world = World(
            lambda *which: 0.45, {"eagle3": eagle_seconds}, affine_pass(0.02, 0.0001), catch_up={"eagle3": catch_up}
        )
        policy = ServingPolicy(EAGLE, "greedy", guard=None, stateful=["eagle3"], keep_warm="never")
        world.run(policy, 40, ["a"])
        world.run(policy, 3, ["a"], speculate=[False])
        world.step(policy, ["a"])  # what catching up takes is measured here
        world.run(policy, 3, ["a"], speculate=[False])
        return world.step(policy, ["a"]).decision.plan == "eagle3"

    assert resumed(0.0005)
    assert not resumed(0.5)


def test_off_costs_the_same_as_never_on() -> None:
    """Where nothing pays: next to no drafts, no state kept warm, and hardly a step that is thought about."""
    world = World(lambda *which: 0.1, {"eagle3": eagle_seconds}, affine_pass(0.02, 0.001), catch_up={"eagle3": 0.002})
    policy = ServingPolicy(EAGLE, "hedge", stateful=["eagle3"])
    log = world.run(policy, 300, names(16))
    never = World(lambda *which: 0.1, {}, affine_pass(0.02, 0.001)).run(ServingPolicy(EAGLE, "fixed:ar"), 10, names(16))
    assert log[100:].share("off") > 0.98
    assert log[100:].rate > 0.985 * never.rate
    thought = sum(step.decision.reason not in ("off", "baseline") for step in log[100:].steps)
    assert thought < 0.15 * 200
    assert sum(bool(step.decision.refresh) for step in log[100:].steps) <= 10


def test_off_comes_back_on_by_itself() -> None:
    """Speculation does not pay under load; when the load is gone it returns, also where the load stays and only the
    drafts become better."""

    def accept(drafter: str, request: str, context: int, step: int) -> float:
        return 0.1 if step < 100 else 0.85

    world = World(accept, {"eagle3": eagle_seconds}, affine_pass(0.02, 0.0005))
    policy = ServingPolicy(EAGLE, "hedge")
    log = world.run(policy, 320, names(8))
    assert log[40:100].share("off") > 0.9
    assert log[280:].share("eagle3") > 0.9


def test_length_and_opt_out_per_request() -> None:
    """Creative writing loses where code gains: lengths differ by request, and a request may say no."""

    def accept(drafter: str, request: str, context: int, step: int) -> float:
        return 0.9 if request.startswith("code") else 0.15

    world = World(accept, {"eagle3": eagle_seconds}, affine_pass(0.02, 0.0006))
    policy = ServingPolicy(EAGLE, "greedy")
    code, prose = names(4, "code"), names(4, "prose")
    log = world.run(policy, 120, [*code, *prose])
    assert log[60:].mean_length(code) > 2.5 > 0.5 > log[60:].mean_length(prose)
    ids = [*code, *prose]
    step = world.step(policy, ids, speculate=[request != "code1" for request in ids])
    assert step.decision.lengths[1] == 0 and step.decision.lengths[0] > 0
    step = world.step(policy, ids, max_lengths=[2] * len(ids))
    assert step.decision.lengths.max() == 2


def test_acceptance_that_decays_with_context_switches_off_there() -> None:
    def accept(drafter: str, request: str, context: int, step: int) -> float:
        return 0.8 if context < 8000 else 0.1

    world = World(accept, {"eagle3": eagle_seconds}, affine_pass(0.02, 0.003))
    policy = ServingPolicy(EAGLE, "greedy")
    world.contexts.update({"short": 100, "long": 33000})
    log = world.run(policy, 150, ["short", "long"])
    assert log[75:].mean_length(["short"]) > 2.0
    assert log[75:].mean_length(["long"]) < 0.3
    fresh = world.step(policy, ["short", "new"])  # a new long request is judged by its context at once
    world.contexts["new"] = 40000
    policy.finish(["new"])
    fresh = world.step(policy, ["short", "new"])
    assert fresh.decision.lengths[1] < fresh.decision.lengths[0]


def test_slow_drift_of_acceptance_is_followed() -> None:
    def accept(drafter: str, request: str, context: int, step: int) -> float:
        better = drafter == ("ngram" if step > 120 else "eagle3")
        return 0.85 if better else 0.35

    world = World(accept, {"eagle3": eagle_seconds}, affine_pass(0.02, 0.0002))
    policy = ServingPolicy([*EAGLE, *NGRAM], "hedge")
    log = world.run(policy, 320, names(8))
    assert log[60:120].share("eagle3") > 0.9
    assert log[270:].share("ngram") > 0.9


def test_ngram_hits_and_trained_drafter_misses_share_a_step() -> None:
    """Rows whose text is found are drafted by lookup, which is free; the others by the drafter that runs as a batch."""
    arms = [*EAGLE, "ngram@2", "ngram@4"]

    def offer(drafter: str, request: str, step: int) -> int | None:
        if drafter == "eagle3":
            return None
        return 8 if (step + int(request[1:])) % 2 else 0  # found in every other step

    def make() -> World:
        return World(
            lambda drafter, *which: {"eagle3": 0.7, "ngram": 0.85}[drafter],
            {"eagle3": lambda rows, length: 0.0005 + 0.0004 * length},
            affine_pass(0.02, 0.00005),
            offer=offer,
            told=["ngram"],
        )

    log = make().run(ServingPolicy(arms, "greedy"), 70, names(24))[30:]
    assert log.share("eagle3+ngram") > 0.8
    for step in log.steps:
        if step.decision.plan == "eagle3+ngram":
            found = [
                offer("ngram", step.decision.request_ids[row], step.decision.step_id)
                for row in step.decision.rows("ngram")
            ]
            assert len(found) >= 9 and all(found)
    best = max(make().run(ServingPolicy(arms, f"fixed:{arm}"), 15, names(24)).rate for arm in arms)
    assert log.rate > 1.05 * best


def test_a_batch_drafter_is_not_started_for_one_row() -> None:
    """One row costs the batch drafter as much as all: it is not worth it for the one row without a match."""

    def offer(drafter: str, request: str, step: int) -> int | None:
        return None if drafter == "eagle3" or request != "r0" else 0

    def accept(drafter: str, request: str, context: int, step: int) -> float:
        return {"eagle3": 0.6, "ngram": 0.8}[drafter]

    world = World(
        accept, {"eagle3": lambda rows, length: 0.006}, affine_pass(0.02, 0.0002), offer=offer, told=["ngram"]
    )
    policy = ServingPolicy([*EAGLE, *NGRAM], "greedy")
    log = world.run(policy, 120, names(16))
    assert log[60:].share("ngram") > 0.9
    assert log[60:].mean_length(["r0"]) < 0.2


def test_control_by_acceptance_alone_fails_when_costs_change() -> None:
    """Acceptance stays; passes become dear halfway. Tokens per second are followed, accepted length is not."""

    def make() -> tuple[World, list[float]]:
        price = [0.00005]
        return World(good, {"eagle3": eagle_seconds}, lambda tokens, context: 0.02 + price[0] * tokens), price

    lengths = {}
    for objective in ("throughput", "accepted_length"):
        world, price = make()
        policy = ServingPolicy(EAGLE, "greedy", objective=objective, guard=None)  # type: ignore[arg-type]
        world.run(policy, 40, names(16))
        price[0] = 0.004
        lengths[objective] = world.run(policy, 80, names(16))[50:].mean_length()
    assert lengths["throughput"] < 0.3
    assert lengths["accepted_length"] > 3.0


def test_a_full_accept_is_censored_and_longer_drafts_are_tried() -> None:
    """Every draft is accepted whole at the shortest length: that is no reason to stay there."""
    policy = ServingPolicy(["eagle3@1", "eagle3@8"], "greedy", guard=None)
    for _ in range(60):
        decision = policy.decide(StepContext(["a"], [100], max_lengths=[1]))
        n = decision.lengths
        policy.observe(
            decision, StepOutcome(n, n, n, verify_seconds=0.02, draft_seconds={"eagle3": 0.0001 * int(n[0])})
        )
    assert policy.status().acceptance["eagle3"][7] > 0.9
    assert policy.decide(StepContext(["a"], [100])).lengths[0] == 8


def test_untracked_positions_are_like_the_ones_before_them() -> None:
    """After many steps at a short length nothing wrong is known of deep positions."""
    policy = ServingPolicy(["eagle3@2", "eagle3@6"], "greedy", guard=None)
    for number in range(80):
        decision = policy.decide(StepContext(["a"], [100], max_lengths=[2]))
        n = decision.lengths
        policy.observe(decision, StepOutcome(n, n, np.minimum(n, [0, 1, 2, 2][number % 4]), verify_seconds=0.02))
    curve = policy.status().acceptance["eagle3"]
    assert curve[2:] == pytest.approx([curve[1]] * 4, abs=0.02)


def test_lookups_stop_under_many_running_requests() -> None:
    """Free drafts are not free to verify: with many rows every verified token costs."""
    world = World(lambda *which: 0.35, {}, affine_pass(0.02, 0.0008, free=8))
    policy = ServingPolicy(NGRAM, "hedge")
    few = world.run(policy, 80, names(1))
    many = world.run(policy, 120, names(64, "m"))
    assert few[30:].mean_length() > 1.0
    assert many[60:].mean_length() < 0.2


def test_drafts_that_a_grammar_cut_off_are_not_rejections() -> None:
    """Two of four tokens are verified because the grammar ends there, and both are accepted."""

    def curve(verified: int) -> float:
        policy = ServingPolicy(["eagle3@4"], "fixed:eagle3@4")
        for _ in range(50):
            decision = policy.decide(StepContext(["a"], [100]))
            policy.observe(decision, StepOutcome([4], [verified], [2], seconds=0.02))
        return policy.status().acceptance["eagle3"][2]

    assert curve(2) > 0.9  # cut off
    assert curve(4) < 0.2  # the third was judged, and wrong


def test_drafts_that_the_scheduler_cut_off_are_not_rejections() -> None:
    world = World(lambda *which: 0.9, {"eagle3": eagle_seconds}, affine_pass(0.02, 0.0001))
    policy = ServingPolicy(EAGLE, "greedy")
    log = world.run(policy, 40, names(8), draft_budget=9)
    assert all(step.decision.lengths.sum() <= 9 for step in log.steps)
    assert any(step.decision.lengths.sum() == 9 for step in log.steps)
    assert policy.status().acceptance["eagle3"][0] > 0.8


def test_padding_is_neither_a_draft_nor_a_rejection() -> None:
    """Stacks fill rows up with -1: such positions cost time and say nothing."""
    policy = ServingPolicy(["ngram@4"], "fixed:ngram@4")
    for _ in range(30):
        decision = policy.decide(StepContext(["a", "b"], [100, 100]))
        proposed = count_drafts([[5, 6, -1, -1], [-1, -1, -1, -1]])
        policy.observe(decision, StepOutcome(proposed, proposed, proposed, padding=6, verify_seconds=0.02))
    assert policy.status().acceptance["ngram"][0] > 0.9
    assert list(policy.status().pass_seconds) == [12]  # 2 rows, 2 drafts and 6 fillers: the size that stands for 10


def test_the_end_of_a_text_is_not_a_rejection() -> None:
    policy = ServingPolicy(["eagle3@4"], "fixed:eagle3@4")
    for number in range(40):
        decision = policy.decide(StepContext([number], [100]))
        policy.observe(decision, StepOutcome([4], [4], [1], censored=[True], emitted=[2], seconds=0.02))
        policy.finish([number])
    assert policy.status().acceptance["eagle3"][1] > 0.6


def test_decisions_are_identical_on_all_ranks() -> None:
    """The same contexts, outcomes and seed: the same decisions and the same digest, whatever the clocks say."""
    ranks = [ServingPolicy([*EAGLE, *NGRAM], "hedge", seed=7, stateful=["eagle3"]) for _ in range(2)]
    rng = np.random.default_rng(0)
    for number in range(60):
        ids = names(int(rng.integers(1, 9)))
        context = [int(value) for value in rng.integers(50, 5000, len(ids))]
        decisions = [rank.decide(StepContext(ids, context)) for rank in ranks]
        first, second = decisions
        assert first.arms.tolist() == second.arms.tolist() and first.lengths.tolist() == second.lengths.tolist()
        assert first.digest == second.digest and first.refresh == second.refresh
        accepted = np.minimum(first.lengths, rng.integers(0, 5, len(ids)))
        outcome = StepOutcome(first.lengths, first.lengths, accepted, seconds=float(rng.uniform(0.01, 0.03)))
        for rank, decision in zip(ranks, decisions, strict=True):
            rank.observe(decision, outcome)
        if number == 30:
            digest = first.digest
    assert digest != first.digest
    stray = ranks[0].decide(StepContext(names(2), [1, 1]))
    ranks[0].observe(stray, StepOutcome(stray.lengths, stray.lengths, stray.lengths, seconds=0.5))
    assert ranks[0].decide(StepContext(["a"], [9])).digest != ranks[1].decide(StepContext(["a"], [9])).digest


def test_the_schedule_is_shown() -> None:
    """What was decided and why is told for every step, as plain attributes."""
    policy = ServingPolicy(EAGLE, "greedy")
    World(good, {"eagle3": eagle_seconds}).run(policy, 12, names(2))
    records = policy.records
    assert len(records) == 12
    assert {"adaptspec.step", "adaptspec.plan", "adaptspec.reason", "adaptspec.arms"} <= records[-1].keys()
    assert json.loads(json.dumps(records)) == records
    assert {record["adaptspec.reason"] for record in records} >= {"baseline", "worth most"}


def test_a_drafter_that_declines_without_evidence_beats_one_that_always_spends() -> None:
    """On chat, lookups find nothing: a drafter that says so costs nothing, and is not held to be bad for it."""

    def offer(drafter: str, request: str, step: int) -> int | None:
        return 0 if step % 4 else 4

    def run(told: list[str]) -> float:
        world = World(lambda *which: 0.8, {}, affine_pass(0.02, 0.0002), offer=offer, told=told)
        policy = ServingPolicy(NGRAM, "greedy")
        rate = world.run(policy, 100, names(4)).rate
        assert policy.status().acceptance["ngram"][0] > 0.6
        return rate

    off = World(good, {}, affine_pass(0.02, 0.0002)).run(ServingPolicy(NGRAM, "fixed:ar"), 5, names(4)).rate
    assert run(["ngram"]) > 1.2 * off
    assert run([]) > off


def test_one_stall_does_not_switch_speculation_off() -> None:
    world = World(good, {"eagle3": eagle_seconds}, affine_pass(0.02, 0.0001))
    policy = ServingPolicy(EAGLE, "hedge")
    world.run(policy, 60, names(4))
    decision = policy.decide(StepContext(names(4), [400] * 4))
    policy.observe(decision, StepOutcome(decision.lengths, decision.lengths, decision.lengths, seconds=30.0))
    assert world.run(policy, 40, names(4)).share("eagle3") > 0.7


def test_the_guard_bounds_what_a_bad_drafter_can_cost() -> None:
    """A dear drafter that is never right: at most the allowed share is lost, from the first step on."""
    for strategy in ("hedge", "exp3", "greedy"):
        world = World(lambda *which: 0.02, {"eagle3": lambda rows, length: 0.02}, affine_pass(0.02, 0.0005))
        log = world.run(ServingPolicy(EAGLE, strategy, guard=0.05), 160, names(4))
        never = 4 / affine_pass(0.02, 0.0005)(4, 100)
        assert log.rate > 0.93 * never, strategy


@pytest.mark.parametrize("updates", [True, False])
def test_small_draft_vocabularies_update_themselves(updates: bool) -> None:
    """The text turns to words that are not among the frequent ones. An evolving vocabulary takes them in by itself, and
    drafting goes on; with a fixed one it ends, because nothing is right any more."""
    frequent, topic = np.arange(8), np.arange(40, 48)
    heads = VocabHeads(("evospec:8+8", "fr:8"))
    heads.bind(torch.eye(64), vocab_size=64, data=HeadData(FrequencyList(np.arange(64), 64)))
    head = list(heads)[0 if updates else 1]

    def chance(text: np.ndarray) -> float:
        """Of a draft token to be right: it must be among those that the head computes."""
        ids, _ = head.logits(torch.eye(64)[:1], depth=0)
        return 0.85 * float(np.isin(text, ids.numpy()).mean())

    right = chance(frequent)
    world = World(lambda *which: right, {"eagle3/small": eagle_seconds}, affine_pass(0.02, 0.0006))
    policy = ServingPolicy(["eagle3@2/small", "eagle3@4/small"], "greedy")
    before = world.run(policy, 40, names(4))
    verdict = Verdict(np.arange(len(topic) - 1), topic)
    heads.observe(Observation(DraftTree.empty(), verdict, verdict.token_ids, None))
    right = chance(topic)
    after = world.run(policy, 120, names(4))
    assert before[20:].mean_length() > 1.5
    assert (after[60:].mean_length() > 1.5) if updates else (after[60:].mean_length() < 0.3)


@pytest.mark.parametrize("family", ["mistral-window", "gemma3"])
def test_drafts_past_a_sliding_window(family: str) -> None:
    """Drafts are longer than the window of 8 tokens, and are accepted past it: the text is the model's own."""
    model = FAMILIES[family]("sdpa")
    prompt = torch.tensor([[5, 6, 7] * 6])
    options = {"max_new_tokens": 48, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
    expected = model.generate(prompt, **options)
    spec = AdaptiveSpec(["suffix"], "fixed:suffix@16")
    assert torch.equal(model.generate(prompt, custom_generate=spec, **options), expected)
    assert spec.last_result is not None
    assert spec.last_result.stats.acceptance_rate > 0.0
    assert expected.shape[1] > prompt.shape[1] + 16
