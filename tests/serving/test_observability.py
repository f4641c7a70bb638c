"""Metrics, records, summaries and explanations say what was done, with names that dashboards can rely on."""

from __future__ import annotations

import builtins
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from adaptspec import AdaptiveSpec
from adaptspec.cli import main
from adaptspec.serving import ServingPolicy, StepContext, StepOutcome
from adaptspec.serving.choosing import REASONS
from adaptspec.serving.explaining import explain_step
from adaptspec.serving.metrics import ServingMetrics, metric_names
from adaptspec.serving.records import read_records, step_attributes, write_records
from tests.serving.world import World, affine_pass, names

ROOT = Path(__file__).parents[2]
ARMS = ["eagle3@2", "eagle3@4", "ngram@4"]


def played() -> ServingPolicy:
    policy = ServingPolicy(ARMS, "hedge", seed=2)
    World(lambda drafter, *which: 0.7, {}, affine_pass(0.02, 0.0001)).run(policy, 20, names(3))
    return policy


def test_metrics_count_what_happened() -> None:
    registry = CollectorRegistry()
    metrics, policy = ServingMetrics(registry), ServingPolicy(["eagle3@4"], "fixed:eagle3@4")
    for _ in range(3):
        decision = policy.decide(StepContext(["a", "b"], [10, 20]))
        outcome = StepOutcome([4, 2], [4, 1], [2, 1], seconds=0.5, policy_seconds=0.01)
        policy.observe(decision, outcome)
        metrics.record(policy, decision, outcome)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"adaptspec:{name}", labels)

    arm = {"arm": "eagle3@4"}
    assert value("spec_decode_num_drafts_total", **arm) == 6
    assert value("spec_decode_num_proposed_tokens_total", **arm) == 18
    assert value("spec_decode_num_draft_tokens_total", **arm) == 15
    assert value("spec_decode_num_accepted_tokens_total", **arm) == 9
    assert value("spec_decode_num_accepted_tokens_per_pos_total", **arm, position="0") == 6
    assert value("spec_decode_num_accepted_tokens_per_pos_total", **arm, position="1") == 3
    assert value("decisions_total", plan="eagle3", reason="fixed") == 3
    assert value("decision_rows_total", **arm) == 6
    assert value("step_seconds_total") == 1.5
    assert value("controller_seconds_total") == pytest.approx(0.03)
    assert value("requests") == 2


def test_metrics_show_the_strategy_and_the_guard() -> None:
    registry = CollectorRegistry()
    metrics, policy = ServingMetrics(registry), ServingPolicy(ARMS, "hedge", seed=2)
    world = World(lambda drafter, *which: 0.7, {}, affine_pass(0.02, 0.0001))
    for _ in range(6):
        decision = world.step(policy, names(2)).decision
    metrics.record(policy, decision, StepOutcome([0, 0], [0, 0], [0, 0]))
    weights = [
        registry.get_sample_value("adaptspec:arm_probability", {"arm": arm})
        for arm in ("free", "ar", "eagle3", "ngram")
    ]
    assert sum(weight for weight in weights if weight is not None) == pytest.approx(1.0)
    balance = registry.get_sample_value("adaptspec:guard_balance")
    assert balance is not None and balance == policy.status().guard_balance
    shown = {sample.name for family in registry.collect() for sample in family.samples}
    assert set(metric_names()) <= shown | {"adaptspec:spec_decode_num_drafts_total"} | {
        name for name in metric_names() if "spec_decode" in name
    }


def test_metrics_without_the_library_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **options: Any) -> Any:
        if name == "prometheus_client":
            raise ImportError(name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"pip install 'adaptspec\[serving\]'"):
        ServingMetrics()


def test_records_are_plain_attributes_and_survive_a_file(tmp_path: Path) -> None:
    policy = played()
    records = policy.records
    for record in records:
        for key, value in record.items():
            assert key.startswith("adaptspec.")
            assert isinstance(value, (str, bool, int, float)) or (
                isinstance(value, list) and all(isinstance(item, (str, int)) for item in value)
            )
    file = write_records(tmp_path / "steps.jsonl", records[:5])
    write_records(file, records[5:])
    assert read_records(file) == records
    (tmp_path / "bad.jsonl").write_text("{}\nnonsense\n")
    with pytest.raises(ValueError, match="line 2 is no step record"):
        read_records(tmp_path / "bad.jsonl")


def test_attributes_before_the_outcome_leave_it_out() -> None:
    policy = ServingPolicy(ARMS, "fixed:eagle3@2")
    attributes = step_attributes(policy.decide(StepContext(["a", "b"], [10, 20])))
    assert attributes["adaptspec.arms"] == ["eagle3@2"] and attributes["adaptspec.arm_rows"] == [2]
    assert "adaptspec.tokens" not in attributes and "adaptspec.seconds" not in attributes


def test_an_explanation_reads_as_a_sentence() -> None:
    record = {
        "adaptspec.step": 8,
        "adaptspec.plan": "eagle3",
        "adaptspec.reason": "worth most",
        "adaptspec.rows": 3,
        "adaptspec.asked": 6,
        "adaptspec.drafting_rows": 2,
        "adaptspec.arms": ["eagle3@2", "eagle3@4"],
        "adaptspec.arm_rows": [1, 1],
        "adaptspec.expected_tokens": 6.5,
        "adaptspec.expected_seconds": 0.02,
        "adaptspec.tokens": 7,
        "adaptspec.seconds": 0.021,
        "adaptspec.verified": 6,
        "adaptspec.accepted": 4,
        "adaptspec.refresh": ["draft-model"],
    }
    assert explain_step(record) == (
        "Step 8: 6 tokens asked for on 2 of 3 rows (eagle3@2 on 1, eagle3@4 on 1), because it is expected to give the "
        "most tokens per second of the whole step. Expected were 6.5 tokens in 20.0 ms; it gave 7 tokens in 21.0 ms; 4 "
        "of 6 verified draft tokens were accepted. The state of draft-model was kept up to date."
    )
    with pytest.raises(ValueError, match=r"must have adaptspec\.asked"):
        explain_step({"adaptspec.step": 1})


def test_every_reason_is_explained() -> None:
    for reason, words in REASONS.items():
        record = {"step": 1, "plan": "off", "reason": reason, "rows": 1, "asked": 0}
        assert words in explain_step({f"adaptspec.{key}": value for key, value in record.items()})


def test_explain_reads_states_and_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = played()
    policy.save(tmp_path / "state.json")
    assert main(["explain", str(tmp_path / "state.json"), "--last", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Serving policy: strategy hedge, arms ar, eagle3@2, eagle3@4 and ngram@4."
    assert "may" not in lines[1] and "lets speculation lose 5 %" in lines[1]
    assert [line.split(":")[0] for line in lines[-3:]] == ["Step 18", "Step 19", "Step 20"]
    file = write_records(tmp_path / "steps.jsonl", policy.records)
    assert main(["explain", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == lines[-1]


def test_explain_reads_what_adaptivespec_saved(
    tiny_llama: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    spec = AdaptiveSpec(["suffix"], "mixture")
    spec.save(tmp_path / "fresh.json")
    assert main(["explain", str(tmp_path / "fresh.json")]) == 0
    assert "No step was taken before it was saved." in capsys.readouterr().out
    result = spec.generate(tiny_llama, torch.tensor([[3, 4, 5, 6] * 4]), max_new_tokens=12)
    spec.save(tmp_path / "state.json")
    assert main(["explain", str(tmp_path / "state.json"), "--last", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "AdaptiveSpec: strategy mixture, drafters suffix." and len(lines) == 3
    assert lines[-1].startswith(f"Step {result.trace[-1].step_id} ")
    file = write_records(tmp_path / "steps.jsonl", map(asdict, result.trace))
    assert main(["explain", str(file), "--last", "1"]) == 0
    assert capsys.readouterr().out.startswith(f"Step {result.trace[-1].step_id} ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no step records"),
        (b"PAR1....", "holds no decisions"),
        (b"[1]\n", "line 1 must be a JSON object"),
        (b'{"a": 1}\n', "no step records: they have a"),
        (b'{"step_id": 1, "arm": "ar", "reason": "fixed"}\n', "a step record does not fit"),
    ],
)
def test_explain_refuses_other_files(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(content)
    assert main(["explain", str(tmp_path / "file")]) == 2
    assert message in capsys.readouterr().err
    assert main(["explain", str(tmp_path / "missing")]) == 2


def test_every_panel_of_the_dashboard_asks_for_a_metric_that_exists() -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) >= 6
    used = {name for query in queries for name in re.findall(r"adaptspec:\w+", query)}
    assert used <= set(metric_names())
    assert used >= {name for name in metric_names() if "spec_decode" in name or "decision" in name}
    assert all(re.search(r"adaptspec:\w+", query) for query in queries)
