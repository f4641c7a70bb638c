"""Works that run a model: recording, live runs, heads; and the regret path gives what a live run gives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaptspec import AdaptiveSpec
from adaptspec.cli.prompts import Prompt
from adaptspec.control.cost_worlds import profile_costs, recorded_costs
from adaptspec.control.trace_file import parse_trace
from experiments.heads import HeadSeconds
from experiments.live import LiveRun
from experiments.recording import FILE, RecordTrace, joined_trace
from experiments.replaying import arms_of, play_comparators, play_policy, unpack_runs
from experiments.sweeps import Configuration
from experiments.tasks import NotAvailable, Outcome, Settings, Task
from tests.control.test_replay_live import Recosted

PROMPTS = tuple(
    Prompt(f"p{n}", domain, (text,))
    for n, (domain, text) in enumerate([("law", "abcdabcdab"), ("code", "xyxyxyxyx"), ("law", "cdefcdefcd")])
)


@pytest.fixture(scope="module")
def settings(tiny_folder: Path) -> Settings:
    return Settings(model=str(tiny_folder), dtype="float32", device="cpu", prompts=PROMPTS, max_new_tokens=20)


@pytest.fixture(scope="module")
def live(settings: Settings) -> LiveRun:
    return LiveRun(settings, threads=1)


@pytest.fixture(scope="module")
def shards(settings: Settings) -> dict[str, dict[str, bytes]]:
    recorder = RecordTrace(settings, threads=1)
    found = {}
    for shard in range(2):
        outcome = recorder.run(
            task(settings, pool=("prompt-lookup", "sam"), nodes=4, shard=shard, shards=2, work="RecordTrace")
        )
        found[f"trace-{shard}"] = dict(outcome.files)
    return found


def task(
    settings: Settings, *, inputs: Mapping[str, Any] | None = None, seed: int = 0, work: str = "", **parameters: Any
) -> Task:
    configuration = Configuration("it-s0", f"x:{work}", parameters, seed=seed, needs=tuple(inputs or ()))
    return Task(configuration, settings, inputs or {})


def run(live: LiveRun, **parameters: Any) -> Outcome:
    return live.run(task(live.settings, **parameters))


def test_a_setting_is_measured_beside_no_speculation(live: LiveRun) -> None:
    outcome = run(live, pool=("suffix",), strategy="fixed:suffix@4", budgets=(4,), answers=True, method="suffix@4")
    assert [row["domain"] for row in outcome.rows] == ["law", "code"] or {r["domain"] for r in outcome.rows} == {
        "law",
        "code",
    }
    for row in outcome.rows:
        assert row["identical"] == row["compared"] == row["prompts"]
        assert row["new_tokens"] == row["ar_new_tokens"] and row["seconds"] > 0.0 < row["ar_seconds"]
        assert (row["drafter"], row["budget"], row["vocab"]) == ("suffix", 4, "full")
        assert row["gained"] + row["answers"] == row["new_tokens"]
    lines = [json.loads(line) for line in outcome.files["answers.jsonl"].decode().splitlines()]
    assert {line["question_id"] for line in lines} == {"p0", "p1", "p2"}
    assert outcome.facts["dtype"] == "float32" and outcome.facts["threads"] == 1


def test_sampling_has_no_exactness_check_and_options_reach_drafters(live: LiveRun) -> None:
    chain = {"drafter": "suffix", "options": {"tree": False}}
    outcome = run(live, pool=(chain,), strategy="fixed:suffix@4", budgets=(4,), temperature=0.7, domains=("code",))
    (row,) = outcome.rows
    assert row["domain"] == "code" and "identical" not in row and row["temperature"] == 0.7


def test_what_is_not_there_is_said(live: LiveRun) -> None:
    for parameters, reason in (
        ({"pool": ("eagle9",), "strategy": "fixed:eagle9@4"}, "unknown drafter 'eagle9'"),
        ({"pool": ({"drafter": "suffix", "options": {"shape": 1}},), "strategy": "fixed:suffix@4"}, "unknown option"),
        ({"pool": ("draft-model:nowhere/at-all",), "strategy": "hedge"}, "nowhere/at-all"),
        ({"pool": ("suffix",), "strategy": "hedge", "domains": ("chat",)}, "no prompts of the domain chat"),
        ({"pool": (), "strategy": "hedge", "experts": 2}, "2 experts need texts"),
    ):
        with pytest.raises(NotAvailable, match=reason):
            run(live, budgets=(4,), **parameters)


def test_experts_are_stores_of_one_domain_each(settings: Settings, live: LiveRun) -> None:
    texts = {"law": ["abcdabcd"], "code": ["xyxyxyxy"], "chat": ["zz"]}
    own = LiveRun.__new__(LiveRun)
    own.__dict__ |= live.__dict__
    own.settings = Settings(
        model=settings.model, prompts=PROMPTS, max_new_tokens=8, experts=texts, device="cpu", dtype="float32"
    )
    outcome = own.run(task(own.settings, pool=(), strategy="ucb", budgets=(4,), experts=2, order="blocks"))
    arms = {source for _, counts in outcome.curves["arms"] for source in counts}
    assert {"law", "code"} & arms and "chat" not in arms
    with pytest.raises(NotAvailable, match="3 experts need texts of as many of the prompts' domains, there are 2"):
        own.run(task(own.settings, pool=(), strategy="ucb", budgets=(4,), experts=3))


def test_shards_are_one_trace(shards: dict[str, dict[str, bytes]]) -> None:
    trace = joined_trace(shards)
    trace.validate()
    assert {request.name for request in trace.requests} == {"p0", "p1", "p2"}
    assert len(parse_trace(shards["trace-0"][FILE]).requests) == 2
    assert joined_trace(shards) is trace  # read once per worker


@pytest.mark.parametrize("policy", ["ucb", "hedge"])
def test_the_regret_path_plays_what_a_live_run_plays(
    policy: str, settings: Settings, live: LiveRun, shards: dict[str, dict[str, bytes]]
) -> None:
    """Told the costs of the replay, the live controller takes as many steps and gains the same tokens."""
    common = {"costs": "h100", "order": "as-recorded", "budgets": (2, 4), "guard": None}
    oracle = play_comparators(task(settings, inputs=shards, **common))
    inputs = {**shards, "oracle": dict(oracle.files)}
    replayed = play_policy(task(settings, inputs=inputs, policy=policy, **common))
    trace = joined_trace(shards)
    costs = profile_costs("h100", recorded_costs(trace.costs))
    spec = AdaptiveSpec(list(trace.nodes), policy, budgets=(2, 4), guard=None, seed=0)
    spec.engine.controller = Recosted(spec.engine.controller, costs=costs)
    steps = []
    texts = {prompt.id: prompt.turns[0] for prompt in PROMPTS}
    for request in trace.requests:
        import torch

        ids = torch.tensor([live.conversation.encode([texts[request.name]])])
        result = spec.generate(live.network, ids, max_new_tokens=20)
        assert result.sequences[0, ids.shape[1] :].tolist() == request.tokens.tolist()
        steps += list(result.trace)
    (row,) = replayed.rows
    assert (row["steps"], row["tokens"]) == (len(steps), sum(step.emitted for step in steps))
    assert row["mean_verified"] == pytest.approx(np.mean([step.verified for step in steps]))
    assert row["tokens"] > 1.03 * row["steps"]
    best = unpack_runs(oracle.files["comparators.npz"])
    for name, run_ in best.items():
        assert row[f"of_{name}"] == pytest.approx(run_.total_seconds / row["seconds"])
        assert row[f"regret_seconds_{name}"] == pytest.approx(row["seconds"] - run_.total_seconds)
    assert replayed.curves["regret"]["best-fixed"]["seconds"][-1] == pytest.approx(
        row["regret_seconds_best-fixed"], rel=1e-4
    )
    shares = np.array(replayed.curves["shares"]["shares"])
    assert shares.sum(axis=0).max() == pytest.approx(1.0)
    assert {arms.split("@")[0] for arms in map(str, arms_of(trace, (2, 4)))} >= set(
        replayed.curves["shares"]["drafters"]
    )


def test_a_given_trace_takes_the_place_of_recording(shards: dict[str, dict[str, bytes]]) -> None:
    data = shards["trace-1"][FILE]
    recorder = RecordTrace(Settings(trace=data), threads=1)
    first = recorder.run(task(recorder.settings, shard=0, shards=2))
    other = recorder.run(task(recorder.settings, shard=1, shards=2))
    assert dict(first.files) == {FILE: data} and not other.files
    assert first.rows[0]["bytes"] == len(data)


def test_heads_are_timed_beside_the_full_one(settings: Settings) -> None:
    heads = HeadSeconds(settings, threads=1)
    for name, rows in (("full", 64), ("microspec", None)):
        outcome = heads.run(task(settings, head=name, rows=(1, 3)))
        assert [row["hidden_states"] for row in outcome.rows] == [1, 3]
        assert all(row["head_milliseconds"] > 0.0 < row["full_milliseconds"] for row in outcome.rows)
        assert 0 < outcome.rows[0]["head_rows"] <= 64
        assert rows is None or outcome.rows[0]["head_rows"] == rows
    with pytest.raises(NotAvailable, match="fr"):
        heads.run(task(settings, head="fr:many"))
