"""The cost model: buckets, sums over a step, state, merging, memory and speed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest

from adaptspec.control.cost import MAX_DRAFTERS, MAX_NODES, CostModel, CostPrior
from adaptspec.types import Arm

AR = Arm.autoregressive()


def drive(costs, *, seed, steps=150, factor=1.0):
    """Random measurements of everything."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        batch, context, nodes = int(rng.integers(1, 40)), int(rng.integers(5000)), int(rng.integers(30))
        noise = factor * rng.lognormal(0, 0.2)
        costs.observe_verify(nodes, noise * batch * (0.03 + 0.001 * nodes), batch=batch, context=context)
        name = ("suffix", "eagle3", "recycling")[rng.integers(3)]
        vocab = ("full", "fr:16384")[rng.integers(2)]
        costs.observe_draft(name, nodes, noise * 0.002, vocab=vocab, batch=batch, context=context)
        costs.observe_catch_up(name, 1 + context, noise * 1e-5 * context)
        costs.observe_overhead(noise * 1e-4)


def repeat(observe, *arguments, times=3, **options):
    for _ in range(times):
        observe(*arguments, **options)


def test_priors_serve_before_any_measurement():
    costs = CostModel(verify_prior=CostPrior(0.5, 0.25), draft_priors={"eagle3": CostPrior(0.5, 0.125)})
    assert costs.verify_seconds(4) == 1.5
    assert costs.verify_curve(2).tolist() == [0.5, 0.75, 1.0]
    assert costs.draft_seconds("eagle3", 4) == 1.0
    assert costs.draft_seconds("suffix", 4) == 0.0
    assert costs.step_seconds(Arm("eagle3", 4), 4) == 2.5
    assert costs.step_seconds(AR, 0) == 0.5
    assert costs.catch_up_seconds("eagle3", 100) == costs.overhead_seconds() == 0.0
    assert CostModel().verify_seconds(0) > 0.0
    assert costs.to_table() == []


def test_a_step_adds_up_by_hand():
    costs = CostModel()
    repeat(costs.observe_verify, 8, 4.0)
    repeat(costs.observe_verify, 0, 2.0)
    repeat(costs.observe_draft, "eagle3", 8, 1.0, vocab="fr:16384")
    repeat(costs.observe_draft, "eagle3", 8, 1.5)
    repeat(costs.observe_catch_up, "eagle3", 128, 16.0)
    repeat(costs.observe_overhead, 0.5)
    assert costs.step_seconds(AR, 0) == 2.5
    assert costs.step_seconds(Arm("eagle3", 8), 8) == 6.0
    assert costs.step_seconds(Arm("eagle3", 8), 4) == 5.0  # drafted for 8, verified 4
    assert costs.step_seconds(Arm("eagle3", 8, "fr:16384"), 8) == 5.5
    assert costs.step_seconds(Arm("eagle3", "auto"), 8) == 6.0
    assert costs.step_seconds(Arm("eagle3", 8), 8, cold_tokens=128) == 22.0
    assert costs.draft_seconds("ar", 0) == 0.0


def test_catching_up_takes_the_nearest_measured_length():
    costs = CostModel()
    repeat(costs.observe_catch_up, "eagle3", 1, 1.0)
    repeat(costs.observe_catch_up, "eagle3", 1024, 16.0)
    assert costs.catch_up_seconds("eagle3", 0) == 0.0
    assert costs.catch_up_seconds("eagle3", 2) == 2.0
    assert costs.catch_up_seconds("eagle3", 32) == 32.0  # half way: the dearer one
    assert costs.catch_up_seconds("eagle3", 512) == 8.0
    assert costs.catch_up_seconds("suffix", 512) == 0.0


@pytest.mark.parametrize(
    ("batch", "context", "same"),
    [
        (3, 0, {"batch": 4, "context": 512}),
        (5, 513, {"batch": 8, "context": 1024}),
        (1, 1025, {"batch": 1, "context": 2048}),
    ],
)
def test_buckets_end_at_powers_of_two(batch, context, same):
    costs = CostModel()
    costs.observe_verify(0, 1.0, batch=batch, context=context)
    costs.observe_draft("suffix", 1, 1.0, batch=batch, context=context)
    for row in costs.to_table():
        assert (row["batch"], row["context"]) == (same["batch"], same["context"])
    assert costs.known(AR, **same)
    assert not costs.known(AR, batch=same["batch"] + 1, context=same["context"])
    assert not costs.known(AR, batch=same["batch"], context=same["context"] + 1)


def test_known():
    costs = CostModel()
    assert not costs.known(AR)
    costs.observe_verify(8, 1.0)
    assert costs.known(AR) and costs.known(AR, 8) and not costs.known(AR, 0)
    assert not costs.known(Arm("suffix", 8))
    costs.observe_draft("suffix", 8, 1.0)
    assert costs.known(Arm("suffix", 8)) and costs.known(Arm("suffix", "auto"), 8)
    assert not costs.known(Arm("suffix", 9))
    assert not costs.known(Arm("suffix", 8, "fr:16384"))
    assert not costs.known(Arm("suffix", 8), batch=2)


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_cost_change_of_one_drafter_is_followed_and_leaves_the_others(factor):
    costs = CostModel()
    for _ in range(60):
        costs.observe_draft("eagle3", 8, 1.0)
        costs.observe_draft("suffix", 8, 1.0)
    for _ in range(50):
        costs.observe_draft("eagle3", 8, factor)
        costs.observe_draft("suffix", 8, 1.0)
    assert costs.draft_seconds("eagle3", 8) == pytest.approx(factor, rel=0.01)
    assert costs.draft_seconds("suffix", 8) == 1.0


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_cost_change_decides_between_drafting_and_not_within_fifty_steps(factor):
    """A load change turns speculation from a gain into a loss and back although acceptance stays as it is."""
    costs = CostModel()
    for nodes, seconds in ((0, 1.0), (8, 1.2)):
        repeat(costs.observe_verify, nodes, seconds, times=40)
        repeat(costs.observe_verify, nodes, factor * seconds * (3 if nodes else 1), times=40, batch=8)
    arm, tokens = Arm("suffix", 8), 2.0
    assert tokens / costs.step_seconds(arm, 8) > 1.0 / costs.step_seconds(AR, 0)
    assert tokens / costs.step_seconds(arm, 8, batch=8) < 1.0 / costs.step_seconds(AR, 0, batch=8)
    for step in range(50):
        nodes = (0, 8)[step % 2]
        costs.observe_verify(nodes, 3.0 if nodes else 1.0)
    assert tokens / costs.step_seconds(arm, 8) < 1.0 / costs.step_seconds(AR, 0)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), "1"])
@pytest.mark.parametrize(
    "observe",
    [
        lambda costs, s: costs.observe_verify(1, s),
        lambda costs, s: costs.observe_draft("suffix", 1, s),
        lambda costs, s: costs.observe_catch_up("suffix", 1, s),
        lambda costs, s: costs.observe_overhead(s),
    ],
)
def test_bad_seconds_teach_nothing(observe, seconds):
    costs = CostModel()
    with pytest.raises(ValueError, match="seconds must be a finite number >= 0, got"):
        observe(costs, seconds)
    assert costs.state_dict() == CostModel().state_dict()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.observe_verify(-1, 1.0), r"nodes must be a whole number >= 0, got -1"),
        (lambda c: c.observe_verify(1025, 1.0), r"nodes must be a whole number in \[0, 1024\], got 1025"),
        (lambda c: c.observe_verify(1.5, 1.0), "nodes must be a whole number"),
        (lambda c: c.observe_verify(True, 1.0), "nodes must be a whole number"),
        (lambda c: c.observe_verify(1, 1.0, batch=0), "batch must be a whole number >= 1, got 0"),
        (lambda c: c.observe_verify(1, 1.0, context=-1), "context must be a whole number >= 0, got -1"),
        (lambda c: c.observe_draft("ar", 0, 1.0), "drafter must not be 'ar'"),
        (lambda c: c.observe_draft("", 0, 1.0), "drafter must be a name, got ''"),
        (lambda c: c.observe_draft("suffix", 1, 1.0, vocab=None), "vocab must be a name, got None"),
        (lambda c: c.observe_draft("suffix", "auto", 1.0), "budget must be a whole number"),
        (lambda c: c.observe_catch_up("suffix", 0, 1.0), "tokens must be a whole number >= 1, got 0"),
        (lambda c: c.catch_up_seconds("suffix", -1), "tokens must be a whole number >= 0"),
        (lambda c: c.verify_curve(1025), r"max_nodes must be a whole number in \[0, 1024\]"),
        (lambda c: c.draft_seconds(None, 1), "drafter must be a name, got None"),
        (lambda c: c.step_seconds(AR, 1), "nodes must be 0 for the arm 'ar', got 1"),
        (lambda c: CostModel(verify_prior=0.1), "verify_prior must be a CostPrior, got 0.1"),
        (lambda c: CostModel(draft_priors={"suffix": (1, 2)}), "suffix must be a CostPrior"),
        (lambda c: CostModel.merge([]), "states must hold at least one state"),
    ],
)
def test_bad_input_names_field_value_and_what_is_allowed(call, message):
    costs = CostModel()
    with pytest.raises(ValueError, match=message):
        call(costs)
    assert costs.state_dict() == CostModel().state_dict()


def test_arms_must_be_arms():
    for call in (CostModel().step_seconds, CostModel().known):
        with pytest.raises(TypeError, match="arm must be an Arm, got str"):
            call("suffix@8", 8)


def test_numpy_numbers_are_numbers():
    costs = CostModel()
    costs.observe_verify(np.int64(3), np.float32(0.5), batch=np.int32(2), context=np.int64(600))
    assert costs.to_table()[0] == {
        "part": "verify",
        "drafter": None,
        "vocab": "full",
        "nodes": 3,
        "batch": 2,
        "context": 1024,
        "seconds": 0.5,
        "count": 1,
    }
    json.dumps(costs.state_dict(), allow_nan=False)


def test_the_table_has_a_row_per_cell():
    costs = CostModel()
    drive(costs, seed=0)
    rows = costs.to_table()
    for part, count in (("verify", 150), ("draft", 150), ("catch_up", 150), ("overhead", 150)):
        assert sum(row["count"] for row in rows if row["part"] == part) == count
    assert {row["drafter"] for row in rows if row["part"] == "draft"} == {"suffix", "eagle3", "recycling"}
    assert {row["vocab"] for row in rows if row["part"] == "draft"} == {"full", "fr:16384"}
    row = next(row for row in rows if row["part"] == "catch_up" and row["nodes"] == 1024)
    seconds = costs.catch_up_seconds(row["drafter"], 1024)
    assert seconds == pytest.approx(1024 * row["seconds"])


def test_a_restored_model_has_the_same_future():
    costs = CostModel(verify_prior=CostPrior(0.02, 0.002), draft_priors={"eagle3": CostPrior(0.01)})
    drive(costs, seed=1)
    twin = CostModel(verify_prior=CostPrior(0.02, 0.002), draft_priors={"eagle3": CostPrior(0.01)})
    twin.load_state_dict(json.loads(json.dumps(costs.state_dict(), allow_nan=False)))
    for seed, factor in ((2, 1.0), (3, 3.0), (4, 0.5)):
        for model in (costs, twin):
            drive(model, seed=seed, factor=factor, steps=60)
        assert twin.state_dict() == costs.state_dict()
        for batch, context in ((1, 0), (7, 3000), (64, 100_000)):
            curves = [model.verify_curve(MAX_NODES, batch=batch, context=context) for model in (costs, twin)]
            assert (curves[0] == curves[1]).all()
            for arm in (Arm("eagle3", 8), Arm("suffix", 20, "fr:16384")):
                seconds = [m.step_seconds(arm, 8, batch=batch, context=context, cold_tokens=9) for m in (costs, twin)]
                assert seconds[0] == seconds[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version must be 1, got 2"),
        ({"priors": {"verify": [1.0, 0.0], "draft": {}}}, "priors must be"),
        ({"more": 1}, "unknown field of the costs 'more'"),
        ({"clock": -1}, "clock must be a whole number"),
        ({"verify": None}, "a cost table must be a mapping"),
        ({"overhead": {}}, "value of a cost cell is missing"),
        ({"drafters": []}, "drafters must be a mapping of at most 64"),
        ({"drafters": {"": {}}}, "drafter must be a name"),
        ({"drafters": {"suffix": {}}}, "table of a drafter's costs is missing"),
    ],
)
def test_damaged_states_change_nothing(change, message):
    costs = CostModel()
    drive(costs, seed=5, steps=20)
    before = costs.state_dict()
    with pytest.raises(ValueError, match=message):
        costs.load_state_dict(before | change)
    assert costs.state_dict() == before


def test_damaged_catch_up_is_refused():
    costs = CostModel()
    costs.observe_catch_up("suffix", 8, 1.0)
    for damage, message in (({}, "list of pairs"), ([[-1, {}]], "catch_up must be a whole number")):
        state = costs.state_dict()
        state["drafters"]["suffix"]["catch_up"] = damage
        with pytest.raises(ValueError, match=message):
            CostModel().load_state_dict(state)


def test_merge_equals_pooled():
    rng = np.random.default_rng(6)
    streams = [rng.uniform(1.0, 1.5, 10).tolist() for _ in range(3)]
    replicas = [CostModel() for _ in streams]
    pooled = CostModel()
    for observe in ("observe_verify", "observe_draft", "observe_catch_up", "observe_overhead"):
        where = {"observe_verify": (4,), "observe_draft": ("suffix", 4), "observe_catch_up": ("suffix", 1)}
        arguments = where.get(observe, ())
        getattr(pooled, observe)(*arguments, 1.2)
        for replica, stream in zip(replicas, streams, strict=True):
            getattr(replica, observe)(*arguments, 1.2)  # the first is discounted
            for seconds in stream:
                getattr(replica, observe)(*arguments, seconds)
                getattr(pooled, observe)(*arguments, seconds)
    states = [replica.state_dict() for replica in replicas]
    merged = CostModel()
    merged.load_state_dict(CostModel.merge(states))
    mean = float(np.mean(streams))
    for found, expected in zip(merged.to_table(), pooled.to_table(), strict=True):
        assert found["seconds"] == pytest.approx(expected["seconds"]) == pytest.approx(mean)
        assert found["count"] == expected["count"] + 2
    assert merged.verify_seconds(4) == pytest.approx(mean)
    assert states == [replica.state_dict() for replica in replicas]


def test_merge_takes_cells_that_only_one_replica_has():
    one, two = CostModel(), CostModel()
    repeat(one.observe_verify, 0, 1.0)
    repeat(two.observe_verify, 8, 2.0)
    repeat(two.observe_draft, "suffix", 8, 0.5)
    repeat(two.observe_overhead, 0.25)
    merged = CostModel()
    merged.load_state_dict(CostModel.merge([one.state_dict(), two.state_dict()]))
    assert merged.step_seconds(Arm("suffix", 8), 8) == 2.75
    assert merged.verify_seconds(0) == 1.0


def test_merging_from_a_base_counts_it_once():
    base = CostModel()
    drive(base, seed=7, steps=60)
    idle, busy = CostModel(), CostModel()
    for replica in (idle, busy):
        replica.load_state_dict(base.state_dict())
    drive(busy, seed=8, steps=60)
    states = [idle.state_dict(), busy.state_dict()]
    merged = CostModel()
    merged.load_state_dict(CostModel.merge(states, base=base.state_dict()))

    def summary(model):
        return {tuple(list(row.values())[:6]): (row["seconds"], row["count"]) for row in model.to_table()}

    found, expected = summary(merged), summary(busy)
    assert found.keys() == expected.keys()
    for key, (seconds, count) in expected.items():
        assert found[key] == (pytest.approx(seconds), count)
    again = CostModel.merge([base.state_dict()] * 2, base=base.state_dict())
    restored = CostModel()
    restored.load_state_dict(again)
    for key, value in summary(base).items():
        assert summary(restored)[key] == (pytest.approx(value[0]), value[1])


def test_merging_needs_the_same_priors():
    one, two = CostModel(), CostModel(verify_prior=CostPrior(9.0))
    for states, base in (([one, two], None), ([one], two)):
        with pytest.raises(ValueError, match="states must agree on priors"):
            CostModel.merge([m.state_dict() for m in states], base=None if base is None else base.state_dict())
    for damage in (
        {"priors": None},
        {"priors": {"verify": [1.0], "draft": {}}},
        {"priors": {"verify": [], "draft": 3}},
    ):
        with pytest.raises(ValueError, match="priors|verify"):
            CostModel.merge([one.state_dict() | damage])


def test_the_drafter_measured_longest_ago_is_forgotten():
    costs = CostModel()
    for index in range(MAX_DRAFTERS + 6):
        costs.observe_draft(f"drafter-{index}", 8, 1.0)
        costs.observe_draft("drafter-0", 8, 1.0)
    names = list(costs.state_dict()["drafters"])
    assert len(names) == MAX_DRAFTERS
    assert "drafter-0" in names and "drafter-6" not in names and "drafter-7" in names


def test_memory_does_not_grow_with_steps():
    costs, rng = CostModel(), np.random.default_rng(9)

    def run(steps):
        for _ in range(steps):
            nodes, seconds = int(rng.integers(16)), float(rng.lognormal(0, 0.5))
            costs.observe_verify(nodes, seconds)
            costs.observe_draft("suffix", nodes, seconds)
            costs.observe_catch_up("suffix", 1 + nodes, seconds)
            costs.observe_overhead(seconds)
            costs.step_seconds(Arm("suffix", 8), 8, context=512 << (nodes % 8))

    run(1000)
    tracemalloc.start()
    run(300)
    before = tracemalloc.get_traced_memory()[0]
    run(1000)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 50_000 + 8 * 2 * 8 * (MAX_NODES + 1)  # curves may be cached in 8 context buckets or not


def test_the_hot_path_takes_microseconds():
    costs, rng = CostModel(), np.random.default_rng(13)
    for batch in (1, 2, 4, 8):
        for context in (512, 2048, 8192):
            for nodes in rng.permutation(64).tolist() * 3:
                costs.observe_verify(nodes, batch * (0.03 + 0.001 * nodes), batch=batch, context=context)
    costs.observe_draft("suffix", 32, 0.001)
    measured = (0.05 * rng.uniform(0.97, 1.03, 100_000)).tolist()
    source = iter(measured)

    def fastest(call, repeats, rounds=15):
        times = []
        for _ in range(rounds):
            start = time.thread_time()
            for _ in range(repeats):
                call()
            times.append((time.thread_time() - start) / repeats * 1e6)
        return min(times)

    def rebuild():
        costs._verify._forget(("full", 2, 11))
        costs.verify_curve(64, batch=4, context=2000)

    # The limits are for one idle core of an ordinary server; a busy small machine may take several times as long.
    assert fastest(lambda: costs.verify_curve(64, batch=4, context=2000), 500) <= 3 * 2
    assert fastest(lambda: costs.observe_verify(20, next(source)), 300) <= 3 * 10
    assert fastest(lambda: costs.observe_draft("suffix", 32, next(source)), 300) <= 3 * 10
    assert fastest(rebuild, 30) <= 3 * 100


def test_only_numpy_and_the_policy_layer_are_imported():
    code = "import sys, adaptspec.control.cost; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "scipy", "transformers"} & {name.partition(".")[0] for name in modules}
