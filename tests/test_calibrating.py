"""Calibration on a tiny model under a clock that only the work under test moves, so that every number is exact."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch

from adaptspec import AdaptiveSpec, calibrating, machine
from adaptspec.calibrating import (
    CONTEXT,
    SIZES,
    machine_fingerprint,
    measure_costs,
    measure_samples,
    profile_path,
)
from adaptspec.control.cost import CostModel
from adaptspec.drafters import DRAFTERS, Drafter, Needs, make_drafter
from adaptspec.target.base import Scored
from adaptspec.target.hf import HFTarget
from adaptspec.types import Arm, DraftContext, DraftTree, ExtraRows, Observation
from tests.contracts.checks import same_state
from tests.tiny_models import make_llama

TICK = 2.0**-10
"""About a millisecond; sums of its multiples are exact."""

Cost = Callable[[int, int], float]
"""Seconds of a pass, given its draft nodes and how often that size was used before."""


def linear(nodes: int, use: int = 1) -> float:
    return (32 + nodes) * TICK


def flat(nodes: int, use: int = 1) -> float:
    return 32 * TICK


def cliff(nodes: int, use: int = 1) -> float:
    """Like 16-bit numbers on a processor without matrix units: beyond some rows everything takes ten times as long."""
    return (32 if nodes <= 16 else 320 if nodes <= 32 else 4096) * TICK


def loaded(nodes: int, use: int = 1) -> float:
    """A busy device: every row waits for its turn."""
    return (32 + 64 * nodes) * TICK


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("adaptspec.session.perf_counter", lambda: clock.now)
    return clock


class Clock:
    """Seconds since the start."""

    now: float = 0.0


class TimedTarget(HFTarget):
    """The tiny model on a machine whose passes take what `cost` says."""

    def __init__(self, model: Any, clock: Clock, cost: Cost, *, tokenizer: Any = None) -> None:
        super().__init__(model, tokenizer=tokenizer)
        self.clock, self.cost = clock, cost
        self.uses: Counter[int] = Counter()
        self.passes: list[tuple[int, int]] = []  # nodes, committed tokens

    def score(self, root: int, tree: DraftTree, extra: ExtraRows | None = None) -> Scored:
        self.clock.now += self.cost(len(tree), self.uses[len(tree)])
        self.uses[len(tree)] += 1
        self.passes.append((len(tree), self.length + 1))
        return super().score(root, tree, extra)

    def commit(self, path: np.ndarray) -> None:
        self.clock.now += 2 * TICK
        super().commit(path)


class Timed(Drafter):
    """Takes a tick, and one more per node, to propose nothing; remembers how many requests it has seen."""

    name = "timed"
    isolate = False

    def __init__(self, clock: Clock, *, per_node: int = 1) -> None:
        self.clock, self.per_node, self.requests, self.texts = clock, per_node, 0, []

    def prefill(self, token_ids: np.ndarray, features: Mapping[int, Any] | None = None) -> None:
        self.texts.append(token_ids.tolist())

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        self.clock.now += (1 + self.per_node * budget) * TICK
        return DraftTree.empty()

    def observe(self, observation: Observation) -> None:
        self.clock.now += TICK

    def finish(self) -> None:
        self.requests += 1

    def state_dict(self) -> dict[str, Any]:
        return {"requests": self.requests}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.requests = state["requests"]


def check_curve(target: HFTarget, cost: Cost, **options: Any) -> CostModel:
    """The measured curve is the machine's, exactly."""
    costs = measure_costs(target, {}, **options)
    sizes = list(options.get("sizes", SIZES))
    assert costs.verify_curve(max(sizes))[sizes].tolist() == [cost(nodes, 1) for nodes in sizes]
    return costs


@pytest.mark.parametrize("cost", [linear, flat, cliff, loaded])
@pytest.mark.parametrize("repeats", [1, 4])
def test_the_curve_is_recovered(tiny_llama: Any, clock: Clock, cost: Cost, repeats: int) -> None:
    costs = check_curve(TimedTarget(tiny_llama, clock, cost), cost, repeats=repeats)
    assert all(costs.known(Arm.autoregressive(), nodes) for nodes in SIZES)
    assert {row["count"] for row in costs.to_table()} == {max(repeats + 1, 7)}


def uneven(nodes: int, use: int = 1) -> float:
    """A first use that compiles, and one stall, at another time for every size."""
    return linear(nodes) * (100 if use == 0 else 50 if use == 1 + nodes % 5 else 1)


def test_first_uses_and_stalls_do_not_count(tiny_llama: Any, clock: Clock) -> None:
    costs = measure_costs(TimedTarget(tiny_llama, clock, uneven), {})
    assert costs.verify_curve(64)[list(SIZES)].tolist() == [linear(nodes) for nodes in SIZES]


def test_the_first_use_does_not_count_at_all(tiny_llama: Any, clock: Clock) -> None:
    target = TimedTarget(tiny_llama, clock, lambda nodes, use: linear(nodes) * (1 if use else 100))
    costs = measure_costs(target, {}, sizes=(0, 8), repeats=1)
    assert (costs.verify_seconds(0), costs.verify_seconds(8)) == (linear(0), linear(8))


def test_means_would_be_noticed(tiny_llama: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrating, "median", fmean)
    with pytest.raises(AssertionError):
        test_first_uses_and_stalls_do_not_count(tiny_llama, clock)


def test_drafting_and_the_rest_of_a_step(tiny_llama: Any, clock: Clock) -> None:
    drafters = {"timed": Timed(clock), "slow": Timed(clock, per_node=3)}
    costs = measure_costs(TimedTarget(tiny_llama, clock, linear), drafters, sizes=(0, 4, 8), repeats=3)
    for budget in (4, 8):
        assert costs.draft_seconds("timed", budget) == (1 + budget) * TICK
        assert costs.draft_seconds("slow", budget) == (1 + 3 * budget) * TICK
        assert costs.known(Arm("slow", budget), budget)
    assert costs.overhead_seconds() == 4 * TICK  # a commit, and two drafters that observe
    assert costs.step_seconds(Arm("timed", 8), 8) == linear(8) + 9 * TICK + 4 * TICK


def test_every_size_takes_turns(tiny_llama: Any, clock: Clock) -> None:
    target = TimedTarget(tiny_llama, clock, linear)
    measure_costs(target, {}, sizes=(0, 2, 4, 8), repeats=4)
    rounds = [[nodes for nodes, _ in target.passes[start : start + 4]] for start in range(0, 20, 4)]
    assert all(sorted(order) == [0, 2, 4, 8] for order in rounds) and len(target.passes) == 20
    assert rounds[0] == [0, 2, 4, 8] and rounds[1] == [0, 8, 4, 2] and rounds[2] == [4, 8, 0, 2]
    assert len({tuple(order) for order in rounds}) > 3


def test_contexts_have_their_own_curves(clock: Clock) -> None:
    model = make_llama()
    model.config.max_position_embeddings = 2048
    target = TimedTarget(model, clock, linear)
    target.cost = lambda nodes, use: linear(nodes) * (1 if target.length < 512 else 4)
    costs = measure_costs(target, {}, sizes=(0, 4), contexts=(256, 1024), repeats=2)
    assert costs.verify_seconds(4, context=256) == linear(4)
    assert costs.verify_seconds(4, context=1024) == 4 * linear(4)
    for context, passes in ((256, target.passes[:6]), (1024, target.passes[6:])):
        lengths = [length for _, length in passes]
        assert lengths[0] == context - 5 and lengths[-1] == context  # random drafts were not accepted here


def test_the_end_of_the_context_is_not_crossed(clock: Clock) -> None:
    """The trees are refused a place beyond the model's last position, even if all of them were accepted."""
    target = TimedTarget(make_llama(), clock, linear)
    assert target.context_limit == CONTEXT
    measure_costs(target, {}, contexts=(CONTEXT,))
    assert max(length for _, length in target.passes) < CONTEXT
    with pytest.raises(ValueError, match=r"contexts must be whole numbers in \[50, 256\], got 257"):
        measure_costs(target, {}, contexts=(128, 257))
    with pytest.raises(ValueError, match=r"contexts must be whole numbers in \[50, 256\], got 49"):
        measure_costs(target, {}, contexts=(49,))
    with pytest.raises(ValueError, match="sizes and repeats must be fewer: 88 steps of up to 64 nodes do not fit"):
        measure_costs(target, {}, repeats=10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": ()}, "sizes must not be empty"),
        ({"sizes": (0, -1)}, r"sizes must be whole numbers in \[0, 1024\], got -1"),
        ({"sizes": (0, 2000)}, r"sizes must be whole numbers in \[0, 1024\], got 2000"),
        ({"sizes": (0, 1.5)}, r"sizes must be whole numbers in \[0, 1024\], got 1.5"),
        ({"contexts": ()}, "contexts must not be empty"),
        ({"repeats": 0}, "repeats must be a whole number >= 1, got 0"),
        ({"seed": -1}, "seed must be a whole number >= 0, got -1"),
        ({"tokens": ()}, "tokens must not be empty"),
        ({"tokens": (3, 64)}, r"tokens must be whole numbers in \[0, \d+\], got 64"),
    ],
)
def test_bad_options_are_refused(tiny_llama: Any, options: dict[str, Any], message: str) -> None:
    target = HFTarget(tiny_llama)
    options = {**options, **({"tokens": (3, target.vocab_size)} if options.get("tokens") == (3, 64) else {})}
    with pytest.raises(ValueError, match=message.replace("64", str(target.vocab_size))):
        measure_samples(target, {}, **options)


def test_an_open_sequence_is_not_thrown_away(tiny_llama: Any) -> None:
    target = HFTarget(tiny_llama)
    target.prefill(torch.tensor([3, 4, 5]))
    with pytest.raises(RuntimeError, match="a sequence is open"):
        measure_costs(target, {})
    assert target.length == 3


def test_the_target_is_closed_again(tiny_llama: Any, clock: Clock) -> None:
    class Tapping(Timed):
        needs = Needs(taps=(1,))

    target = HFTarget(tiny_llama)
    measure_costs(target, {"suffix": make_drafter("suffix"), "tapping": Tapping(clock)}, sizes=(0, 3), repeats=1)
    assert (target.length, target.cache) == (0, None)
    assert target.prefill(torch.tensor([3])).features == {}


def test_a_drafter_that_fails_is_named(tiny_llama: Any, clock: Clock) -> None:
    class Failing(Timed):
        def propose(self, context: DraftContext, budget: int) -> DraftTree:
            raise KeyError("nothing here")

    drafter = Failing(clock)
    drafter.requests = 5
    target = HFTarget(tiny_llama)
    with pytest.raises(ValueError, match="a drafter cannot be measured: broken: KeyError: 'nothing here'"):
        measure_costs(target, {"broken": drafter}, sizes=(0, 3), repeats=1)
    assert drafter.requests == 5 and target.length == 0


def test_drafters_keep_what_they_had_learnt(tiny_llama: Any) -> None:
    """All drafters that need no weights, after requests of which they remember something."""
    names = [name for name, cls in DRAFTERS.items() if not cls.takes_vocab]
    spec = AdaptiveSpec(names, "mixture", budgets=(8,))
    twin = AdaptiveSpec(names, "mixture", budgets=(8,))
    prompt = ((torch.arange(24) % 7) * 5 + 3)[None]
    for each in (spec, twin):
        each.generate(tiny_llama, prompt, max_new_tokens=20)
    before = {name: copy.deepcopy(drafter.state_dict()) for name, drafter in spec.drafters.items()}
    target = HFTarget(tiny_llama)
    measure_costs(target, spec.drafters, sizes=(0, 2, 8), repeats=2, contexts=(128,))
    after = {name: drafter.state_dict() for name, drafter in spec.drafters.items()}
    assert all(same_state(before[name], after[name]) for name in names)
    assert any(state for state in before.values())
    for name in names:  # and what they propose next is the same
        trees = []
        for each in (spec, twin):
            drafter = each.drafters[name]
            drafter.bind(target)
            target.prefill(prompt[0, :-1])
            drafter.prefill(prompt[0].numpy())
            context = DraftContext(int(prompt[0, -1]), 24, 64, calibrating.Sampling(), np.random.default_rng(0))
            trees.append(drafter.propose(context, 16))
            drafter.finish()
        assert trees[0].state_bytes() == trees[1].state_bytes()


def test_forgetting_to_put_the_state_back_would_be_noticed(tiny_llama: Any, clock: Clock) -> None:
    drafter = Timed(clock)
    drafter.load_state_dict = lambda state: None  # type: ignore[method-assign]
    measure_costs(TimedTarget(tiny_llama, clock, linear), {"timed": drafter}, sizes=(0, 2), repeats=1)
    assert drafter.requests == 1


def test_the_text(tiny_llama: Any, tiny_folder: Path, clock: Clock) -> None:
    from transformers import AutoTokenizer

    drafter = Timed(clock)

    def read(tokenizer: Any = None, **options: Any) -> list[int]:
        target = HFTarget(tiny_llama, tokenizer=tokenizer)
        measure_samples(target, {"timed": drafter}, sizes=(0, 2), repeats=1, contexts=(100,), **options)
        return drafter.texts.pop()[:-1]

    assert read(tokens=[5, 6, 7]) == ([5, 6, 7] * 40)[:96]
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    assert read(tokenizer) == tokenizer(calibrating.TEXT, add_special_tokens=False)["input_ids"][:96]
    made_up = read()
    assert made_up == read() != read(seed=1)
    grams = Counter(zip(made_up, made_up[1:], made_up[2:], strict=False))
    assert max(grams.values()) > 1 and len(set(made_up)) > 10  # phrases come again, as in real text


def test_what_was_learnt_of_costs_stays(tiny_llama: Any, clock: Clock) -> None:
    costs = CostModel()
    for _ in range(200):
        costs.observe_verify(0, 36 * TICK)
        costs.observe_verify(5, 40 * TICK)
    measure_costs(TimedTarget(tiny_llama, clock, linear), {}, sizes=(0, 8), costs=costs)
    assert 32 * TICK < costs.verify_seconds(0) < 36 * TICK  # 12 % apart: seven measurements more among the last 32
    expected = 36 * TICK - 4 * TICK * (1 - (31 / 32) ** 7)
    assert costs.verify_seconds(0) == pytest.approx(expected, rel=0.01)  # curves follow moves of more than 1 %
    assert costs.verify_seconds(5) == 40 * TICK == costs.verify_seconds(8)
    changed = CostModel()
    for _ in range(200):
        changed.observe_verify(0, 320 * TICK)
        changed.observe_verify(5, 370 * TICK)
    measure_costs(TimedTarget(tiny_llama, clock, linear), {}, sizes=(0, 8), costs=changed)
    assert changed.verify_seconds(0) == pytest.approx(linear(0), rel=0.02)  # ten times as fast: a change, and adopted
    assert changed.verify_seconds(5) == pytest.approx(linear(5), rel=0.02)  # though not measured again itself
    single = CostModel()
    for _ in range(200):
        for nodes in (0, 5, 8):
            single.observe_verify(nodes, (2 if nodes == 8 else 1) * linear(nodes))
    measure_costs(TimedTarget(tiny_llama, clock, linear), {}, sizes=(0, 8), costs=single)
    assert [single.verify_seconds(nodes) for nodes in (0, 5, 8)] == [linear(nodes) for nodes in (0, 5, 8)]


# The facade


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Clock:
    """Requests run on a `TimedTarget` with the clock's `cost`."""

    def target(model: Any, *, tokenizer: Any = None) -> TimedTarget:
        return TimedTarget(model, clock, clock.cost, tokenizer=tokenizer)  # type: ignore[attr-defined]

    monkeypatch.setattr("adaptspec.generation.HFTarget", target)
    clock.cost = linear  # type: ignore[attr-defined]
    return clock


PROMPT = ((torch.arange(40) % 4) * 5 + 3)[None]


def verified(spec: AdaptiveSpec, model: Any, *, steps: int = 6) -> list[int]:
    result = spec.generate(model, PROMPT, max_new_tokens=64)
    return [record.verified for record in result.trace[:steps]]


def test_calibrate_fills_the_costs_and_says_what_it_found(tiny_llama: Any, timed: Clock, tmp_path: Path) -> None:
    spec = AdaptiveSpec([Timed(timed)], "hedge", budgets=(4, 12))
    summary = spec.calibrate(tiny_llama, save=tmp_path / "costs.json")
    assert [row["nodes"] for row in summary["verify"]] == [0, 1, 2, 4, 8, 12]
    for row in summary["verify"]:
        assert row == {
            "context": 256,
            "nodes": row["nodes"],
            "seconds": linear(row["nodes"]),
            "fastest": linear(row["nodes"]),
            "slowest": linear(row["nodes"]),
            "relative": linear(row["nodes"]) / linear(0),
        }
    assert [(row["drafter"], row["budget"]) for row in summary["draft"]] == [("timed", n) for n in (1, 2, 4, 8, 12)]
    assert summary["overhead_seconds"] == 3 * TICK
    assert summary["fingerprint"] == machine_fingerprint(HFTarget(tiny_llama))
    assert json.loads(json.dumps(summary)) == summary
    other = AdaptiveSpec([Timed(timed)], "mixture", budgets=(4,))
    other.load_costs(tiny_llama, tmp_path / "costs.json")
    assert other.engine.controller.cost.state_dict() == spec.engine.controller.cost.state_dict()
    assert spec.drafters["timed"].requests == 0


def test_a_fixed_arm_has_no_use_for_costs(tiny_llama: Any, tmp_path: Path) -> None:
    spec = AdaptiveSpec(["suffix"], "fixed:suffix@8")
    for call in (spec.calibrate, spec.load_costs, spec.save_costs):
        with pytest.raises(ValueError, match="strategy 'fixed:suffix@8' decides without costs: it has no use"):
            call(tiny_llama)
    AdaptiveSpec(["suffix"], "fixed:suffix@auto").calibrate(tiny_llama, sizes=(0, 2), repeats=1)


@pytest.mark.parametrize("strategy", ["mixture", "draft-then-choose", "fixed:prompt-lookup@auto"])
def test_sizes_follow_the_profile_from_the_first_step_on(strategy: str, tiny_llama: Any, timed: Clock) -> None:
    pool = ["prompt-lookup"] if strategy.startswith("fixed") else ["prompt-lookup", "suffix"]

    def spec() -> AdaptiveSpec:
        return AdaptiveSpec(pool, strategy, budgets=(16,))

    learning = spec()
    timed.cost = flat  # type: ignore[attr-defined]
    first_of_default = verified(learning, tiny_llama, steps=2)
    assert first_of_default[0] == 0 < first_of_default[1]  # it must try sizes out
    busy, idle = spec(), spec()
    idle.calibrate(tiny_llama)
    assert verified(idle, tiny_llama, steps=1)[0] >= 8
    timed.cost = loaded  # type: ignore[attr-defined]
    busy.calibrate(tiny_llama)
    assert verified(busy, tiny_llama) == [0] * 6


def test_a_drafter_known_to_be_slow_is_not_asked_to_learn_from(tiny_llama: Any, timed: Clock) -> None:
    def asked(spec: AdaptiveSpec) -> float:
        record = spec.generate(tiny_llama, PROMPT, max_new_tokens=32).trace[0]
        return record.draft_seconds + record.evaluate_seconds

    fresh = AdaptiveSpec([Timed(timed)], "hedge", budgets=(8,))
    assert asked(fresh) == 9 * TICK
    calibrated = AdaptiveSpec([Timed(timed)], "hedge", budgets=(8,))
    calibrated.calibrate(tiny_llama)
    assert asked(calibrated) == 0.0  # the guard begins with no speculation


def test_a_guard_is_told_what_arms_take(tiny_llama: Any, timed: Clock) -> None:
    spec = AdaptiveSpec([Timed(timed)], "ucb", budgets=(4, 8))
    controller = spec.engine.controller
    spec.calibrate(tiny_llama)
    learnt = controller.policy.state_dict()["learned"]
    expected = [linear(0) + 3 * TICK, linear(4) + 8 * TICK, linear(8) + 12 * TICK]
    assert learnt["peak_seconds"] == learnt["mean_seconds"] == expected
    assert learnt["last_played"] == [-1.0] * 3
    spec.generate(tiny_llama, PROMPT, max_new_tokens=2)  # no speculation at first
    played = controller.policy.state_dict()["learned"]
    assert played["last_played"][0] >= 0.0 and played["last_played"][2] < 0.0
    timed.cost = lambda nodes, use: 2 * linear(nodes)  # type: ignore[attr-defined]
    spec.calibrate(tiny_llama, repeats=9, contexts=(200,), sizes=(0, 4, 8))
    after = controller.policy.state_dict()["learned"]
    assert after["peak_seconds"][0] == played["peak_seconds"][0]  # measured on its own steps
    assert after["peak_seconds"][2] > 1.5 * expected[2]
    AdaptiveSpec(["suffix"], "ucb", guard=None).calibrate(tiny_llama, sizes=(0, 2), repeats=1)


def test_costs_are_kept_in_the_cache_and_read_only_when_asked(
    tiny_llama: Any, timed: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADAPTSPEC_CACHE", str(tmp_path / "cache"))
    spec = AdaptiveSpec(["suffix"], "mixture", budgets=(4,))
    with pytest.raises(FileNotFoundError, match="no costs are kept in .*/cache/costs/.*json for device=cpu"):
        spec.load_costs(tiny_llama)
    spec.calibrate(tiny_llama, sizes=(0, 4), repeats=1)
    path = spec.save_costs(tiny_llama)
    assert path == profile_path(machine_fingerprint(HFTarget(tiny_llama))) and path.parent == tmp_path / "cache/costs"
    assert spec.save_costs(tiny_llama) == path
    fresh = AdaptiveSpec(["suffix"], "mixture", budgets=(4,))
    assert fresh.engine.controller.cost.to_table() == []
    fresh.load_costs(tiny_llama)
    assert fresh.engine.controller.cost.state_dict() == spec.engine.controller.cost.state_dict()
    path.write_text(path.read_text()[:100])
    with pytest.raises(ValueError, match="is not a cost profile"):
        fresh.load_costs(tiny_llama)
    assert fresh.engine.controller.cost.state_dict() == spec.engine.controller.cost.state_dict()


def test_a_profile_of_another_machine_is_refused(tiny_llama: Any, timed: Clock, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    spec = AdaptiveSpec(["prompt-lookup"], "mixture", budgets=(16,))
    timed.cost = flat  # type: ignore[attr-defined]
    spec.calibrate(tiny_llama, save=path)
    half = copy.deepcopy(tiny_llama).to(torch.bfloat16)
    other = AdaptiveSpec(["prompt-lookup"], "mixture", budgets=(16,))
    with pytest.raises(ValueError, match="was measured with dtype=float32; .*here it is dtype=bfloat16"):
        other.load_costs(half, path)
    with pytest.raises(ValueError, match="give another path"):
        other.save_costs(half, path)
    with pytest.raises(ValueError, match=r"was measured with model=.* 2 layers.*, here it is model=.* 3 layers"):
        other.load_costs(make_llama(layers=3), path)
    assert other.engine.controller.cost.to_table() == []
    other.load_costs(half, path, foreign=True)
    costs = other.engine.controller.cost
    assert costs.verify_seconds(16) == flat(16) and not costs.known(Arm.autoregressive())
    costs.observe_verify(0, 1.0)
    assert costs.verify_seconds(16) == 1.0
    assert verified(other, tiny_llama, steps=1) == [0]  # its scale must still be found out


def test_the_fingerprint(tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine_fingerprint(HFTarget(tiny_llama))
    parts = dict(part.split("=", 1) for part in here.split("; "))
    assert parts.keys() == {"device", "dtype", "model", "adaptspec", "torch", "transformers"}
    assert parts["torch"] == torch.__version__ and parts["dtype"] == "float32"
    assert parts["device"].startswith("cpu, ") and f"threads {torch.get_num_threads()}" in parts["device"]
    assert machine_fingerprint(HFTarget(make_llama(seed=1))) == here  # sizes count, weights do not
    other = make_llama()
    other.config._name_or_path = other.name_or_path = "/somewhere/else"
    assert machine_fingerprint(HFTarget(other)) == here
    others = {here, machine_fingerprint(HFTarget(make_llama(layers=3)))}
    others.add(machine_fingerprint(HFTarget(make_llama().to(torch.float16))))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    others.add(machine_fingerprint(HFTarget(tiny_llama)))
    monkeypatch.setenv("MKL_CBWR", "AVX512,STRICT; x")
    others.add(machine_fingerprint(HFTarget(tiny_llama)))
    monkeypatch.setattr(machine, "processor_name", lambda: "Another; processor")
    others.add(machine_fingerprint(HFTarget(tiny_llama)))
    assert len(others) == 6
    assert len({profile_path(fingerprint) for fingerprint in others}) == 6
