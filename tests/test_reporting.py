"""The report tells what happened: its numbers are those of the results, in print, as a dictionary and as a picture."""

from __future__ import annotations

import json
import re
import struct
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from adaptspec import AdaptiveSpec, Drafter
from adaptspec.control.arms import make_arms
from adaptspec.control.controller import REASONS
from adaptspec.control.history import PARTS, History
from adaptspec.control.learning import PolicyController
from adaptspec.control.strategies import make_controller
from adaptspec.reporting import Report, make_report
from adaptspec.reporting.picture import draw
from adaptspec.reporting.report import RECENT, GuardLine
from adaptspec.reporting.sentence import seconds, why
from adaptspec.results import GenerationStats
from adaptspec.types import Arm, Decision, DraftTree, StepRecord
from tests.lossless.test_greedy import prompt
from tests.target.families import FAMILIES

POOL = ("prompt-lookup", "suffix", "token-recycling")
STRATEGIES = ("hedge", "ucb", "mixture", "draft-then-choose", "lookup-else", "fixed:ar", "fixed:suffix@auto")


@pytest.fixture(scope="module")
def model() -> Any:
    return FAMILIES["llama"]("sdpa")


def generate(strategy: str, model: Any, **options: Any) -> tuple[AdaptiveSpec, list[GenerationStats]]:
    spec = AdaptiveSpec(POOL, strategy, budgets=options.pop("budgets", (2, 8)), **options)
    return spec, [spec.generate(model, prompt(20 + request), max_new_tokens=40).stats for request in range(3)]


def total(stats: list[GenerationStats], name: str) -> Any:
    return sum(getattr(s, name) for s in stats)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_numbers_are_those_of_the_results(strategy: str, model: Any) -> None:
    spec, stats = generate(strategy, model)
    report, steps = spec.report(), total(stats, "steps")
    assert (report.strategy, report.requests, report.steps) == (strategy, 3, steps)
    assert report.new_tokens == total(stats, "new_tokens")
    assert report.prefill_seconds == pytest.approx(total(stats, "prefill_seconds"))
    assert report.parts == pytest.approx({part: total(stats, f"{part}_seconds") for part in PARTS})
    assert report.seconds == pytest.approx(sum(report.parts.values()))
    assert report.mean_accepted_length == pytest.approx(sum(s.mean_accepted_length * s.steps for s in stats) / steps)
    played: dict[str, int] = {}
    for s in stats:
        for arm, count in s.arms.items():
            played[arm] = played.get(arm, 0) + count
    assert {line.arm: line.steps for line in report.arms} == played
    assert sum(line.share for line in report.arms) == pytest.approx(1.0)
    assert sum(span.steps for span in report.spans) == steps
    assert sum(report.reasons.values()) == min(steps, RECENT)
    assert report.last is not None and spec.last_result is not None
    assert report.last == spec.last_result.trace[-1]

    text = str(report)
    assert f"3 requests, {steps} steps, {report.new_tokens} new tokens" in text
    assert f"{report.mean_accepted_length:.2f} tokens per step" in text
    assert f"Step {report.last.step_id} " in text
    for arm, count in played.items():
        assert re.search(rf"^  {re.escape(arm)} +{count} ", text, re.MULTILINE)
    if strategy == "fixed:ar":
        assert "no node was verified" in text
        assert (report.acceptance_rate, report.drafters, report.calibration, report.costs) == (None, (), (), None)
    else:
        verified = sum(record.verified for record in spec.engine.history.latest)
        accepted = sum(record.accepted for record in spec.engine.history.latest)
        assert f"of {verified} verified nodes {100 * accepted / verified:.1f} % were accepted" in text
        assert {line.drafter for line in report.drafters} <= set(POOL)
        assert all(line.asked <= steps for line in report.drafters)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_dictionary_survives_json(strategy: str, model: Any) -> None:
    spec, _ = generate(strategy, model)
    values = spec.report().to_dict()
    assert json.loads(json.dumps(values)) == values
    assert values["steps"] == spec.report().steps
    assert values["last"]["step_id"] == values["steps"]


def test_what_strategies_value_is_calibrated_and_others_have_none(model: Any) -> None:
    for strategy in ("mixture", "draft-then-choose", "fixed:suffix@auto"):
        report = generate(strategy, model)[0].report()
        assert report.calibration
        assert all(line.low <= line.predicted <= line.high for line in report.calibration)
        assert all(line.hits <= line.candidates for line in report.calibration)
        assert "taken to be" in str(report)
    assert generate("hedge", model)[0].report().calibration == ()
    assert generate("hedge", model, budgets=("auto",), guard=None)[0].report().calibration
    # The one drafter's valued candidates are what it proposed.
    report = generate("fixed:suffix@auto", model)[0].report()
    (line,) = report.drafters
    assert sum(depth.candidates for depth in line.depths) == sum(bin.candidates for bin in report.calibration)
    assert sum(depth.hits for depth in line.depths) == sum(bin.hits for bin in report.calibration)


def test_costs_and_guard_are_those_learnt(model: Any) -> None:
    spec, stats = generate("hedge", model)
    report, text = spec.report(), str(spec.report())
    controller = spec.engine.controller
    assert isinstance(controller, PolicyController)
    assert report.costs is not None and report.guard is not None
    table = controller.cost.to_table()
    verify = {row["nodes"]: row["seconds"] for row in table if row["part"] == "verify"}
    assert {line.size: line.seconds for line in report.costs.verify} == verify
    draft = {(row["drafter"], row["nodes"]): row["seconds"] for row in table if row["part"] == "draft"}
    assert {(line.drafter, line.size): line.seconds for line in report.costs.draft} == draft
    assert report.costs.overhead == controller.cost.overhead_seconds()
    assert report.running_rate == controller.rate.value
    guard = controller.policy
    assert (report.guard.balance, report.guard.allowance) == (guard.balance, 0.05)  # type: ignore[attr-defined]
    assert report.guard.baseline_tokens_per_second == guard.baseline_rate  # type: ignore[attr-defined]
    assert f"Without speculation: {report.guard.baseline_tokens_per_second:.1f} tokens/s" in text
    assert "draft with suffix: " in text
    without = generate("hedge", model, guard=None)[0].report()
    assert without.guard is None
    assert "Guard\n  none" in str(without)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_before_the_first_request(strategy: str, tmp_path: Path) -> None:
    report = AdaptiveSpec(POOL, strategy).report()
    text = str(report)
    assert "Nothing was seen yet" in text
    assert report.why in text
    assert (report.steps, report.last, report.arms, report.mean_accepted_length) == (0, None, (), None)
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    with pytest.raises(ValueError, match="nothing to plot: no step was taken yet"):
        report.plot(tmp_path / "report.png")


def test_the_time_for_it_is_charged_to_the_steps(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = History.judge

    def slow(history: History, *args: Any, **options: Any) -> None:
        time.sleep(0.02)
        judge(history, *args, **options)

    monkeypatch.setattr(History, "judge", slow)
    spec = AdaptiveSpec(POOL, "fixed:suffix@8")
    result = spec.generate(model, prompt(), max_new_tokens=8)
    assert all(record.observe_seconds >= 0.02 for record in result.trace)


def test_a_request_of_one_token_has_no_steps(model: Any) -> None:
    spec = AdaptiveSpec(POOL, "hedge")
    spec.generate(model, prompt(), max_new_tokens=1)
    report = spec.report()
    assert (report.requests, report.steps, report.new_tokens) == (1, 0, 1)
    assert "1 request, 0 steps, 1 new tokens" in str(report)


def test_a_loaded_object_has_learnt_and_seen_nothing(model: Any, tmp_path: Path) -> None:
    spec, _ = generate("hedge", model)
    spec.save(tmp_path / "state.json")
    before, after = spec.report(), AdaptiveSpec.load(tmp_path / "state.json").report()
    assert (after.requests, after.steps, after.arms, after.drafters, after.last) == (0, 0, (), (), None)
    assert (after.costs, after.guard) == (before.costs, before.guard)
    assert "Nothing was seen yet" in str(after)
    assert "verify, context" in str(after)


def test_reports_may_be_asked_for_at_every_step(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10**9))
    monkeypatch.setattr("adaptspec.session.perf_counter", lambda: next(ticks) * 1e-3)
    spec, seen = AdaptiveSpec(POOL, "mixture", budgets=(2, 8)), []
    spec.generate(model, prompt(), max_new_tokens=20, on_step=lambda record, tokens: seen.append(spec.report()))
    assert [report.steps for report in seen] == list(range(len(seen)))
    assert [report.requests for report in seen] == [1] * len(seen)
    assert all(report.last.step_id == report.steps for report in seen[1:])
    plain = AdaptiveSpec(POOL, "mixture", budgets=(2, 8))
    plain.generate(model, prompt(), max_new_tokens=20)
    kept = [(line.arm, line.steps, line.tokens_per_step) for line in plain.report().arms]
    assert kept == [(line.arm, line.steps, line.tokens_per_step) for line in seen[-1].arms]
    assert plain.report().drafters == seen[-1].drafters


class Lost(Drafter):
    """Fails when it is asked."""

    name = "lost"
    isolate = False

    def prefill(self, token_ids: Any, features: Any = None) -> None:
        pass

    def observe(self, observation: Any) -> None:
        pass

    def propose(self, context: Any, budget: int) -> DraftTree:
        raise KeyError("gone")


def test_faults_are_told(model: Any) -> None:
    spec = AdaptiveSpec([Lost(), "suffix"], "fixed:lost@8")
    spec.generate(model, prompt(), max_new_tokens=10)
    report = spec.report()
    assert report.faults == 1
    assert "drafters set aside: 1, at last lost: KeyError: 'gone'" in str(report)
    assert report.reasons == {"set aside": report.steps - 1, "fixed": 1}


RECORD = StepRecord(812, 900, "suffix@8", 0.25, 14, 6, 2, 3, 0.001, 0.0, 0.07, 0.0, 0.0, 0.0, 0.0, reason="policy")
PROPOSED = {"suffix": 8, "token-recycling": 6, "rest": 0}
GUARD = GuardLine(0.05, 3.25, 20.0, 40, 3, 12, 100)


def sentence(guard: GuardLine | None = None, rate: float | None = 29.8, **fields: Any) -> str:
    return why(replace(RECORD, **fields), proposed=PROPOSED, rate=rate, guard=guard)


def test_a_sentence_says_what_was_done_and_expected_and_came_of_it() -> None:
    text = sentence(reason="pays", arm="mixture@auto", expected_tokens=2.4, expected_seconds=0.0719)
    assert text == (
        "Step 812 verified 6 of the 14 nodes that suffix and token-recycling proposed, because they were worth their "
        "seconds. Expected were 2.4 tokens in 71.9 ms, 12 % above the running 29.8 tokens/s; it gave 3 tokens in "
        "71.0 ms."
    )
    assert "9 % below the running 36.7 tokens/s" in sentence(expected_tokens=2.4, expected_seconds=0.0719, rate=36.7)
    assert sentence().startswith("Step 812 played suffix@8 with 6 nodes, which the policy chose with probability 0.25.")
    assert "Nothing was expected of it; it gave 3 tokens in 71.0 ms." in sentence()
    assert "it gave 1 token in 71.0 ms. A drafter was set aside in it: rest: gone." in sentence(
        emitted=1, fault="rest: gone"
    )
    off = {"arm": "ar", "verified": 0, "accepted": 0}
    assert sentence(reason="nothing pays", **off).startswith("Step 812 verified none of the 14 nodes")
    assert sentence(reason="no draft", **off).startswith("Step 812 verified nothing, because no drafter had")
    assert why(None, proposed={}, rate=None, guard=None) == "No step was taken yet."


@pytest.mark.parametrize(
    ("fields", "guard", "expected"),
    [
        ({"arm": "ar", "verified": 0}, {"balance": -1.3}, "speculation is 1.3 tokens short of its allowance of 5 %"),
        ({"arm": "ar", "verified": 0}, {}, "it may lose 3.2 tokens at most"),
        ({"arm": "ar", "verified": 0}, {"baseline_steps": 2}, "first measures no speculation (2 of 3 steps)"),
        ({}, {}, "the guard tries an arm again after 100 steps without speculation"),
    ],
)
def test_a_sentence_on_the_guard(fields: dict[str, Any], guard: dict[str, Any], expected: str) -> None:
    assert expected in sentence(replace(GUARD, **guard), reason="guard", **fields)


def test_every_reason_has_its_sentence() -> None:
    texts = {reason: sentence(GUARD, reason=reason) for reason in REASONS}
    assert len(set(texts.values())) == len(REASONS)
    assert not any("does not tell" in text for text in texts.values())
    assert "for a reason that the strategy does not tell" in sentence(reason="")


def test_times_have_digits_that_count() -> None:
    shown = [seconds(value) for value in (0.00012, 0.0123, 0.123, 1.26, 126.4)]
    assert shown == ["0.12 ms", "12.3 ms", "123 ms", "1.3 s", "126 s"]


def made_up(arms: int, *, steps: int = 300) -> Report:
    """The report of a run over so many arms whose shares drift."""
    rng = np.random.default_rng(arms)
    drafters = [f"drafter-{number}" for number in range(max(1, (arms - 1) // 8))]
    budgets = (8,) if arms == 2 else (1, 2, 4, 8, 16, 32, 64, "auto")
    pool = make_arms(drafters, budgets=budgets, vocab=("full",), explicit=())[:arms]
    controller, history = make_controller("hedge", arms=pool, drafters=drafters, guard=0.05), History()
    assert isinstance(controller, PolicyController)
    for nodes in (0, 8, 64):
        controller.cost.observe_verify(nodes, 0.05 + 0.001 * nodes)
        controller.cost.observe_draft(drafters[0], nodes, 0.0001)
    history.begin(0.3)
    for number in range(1, steps + 1):
        weights = np.exp(2.0 * np.sin(np.arange(len(pool)) + 6.0 * number / steps))
        arm = pool[rng.choice(len(pool), p=weights / weights.sum())]
        text = np.ones(rng.geometric(0.4), dtype=np.int64)
        trees = {name: DraftTree.chain(np.where(rng.random(5) < 0.7, 1, 2)) for name in drafters}
        history.judge(Decision(number, arm), trees, text, verified=DraftTree.empty())
        verified = 0 if arm.drafter == "ar" else 6
        history.add(replace(RECORD, step_id=number, arm=str(arm), verified=verified, emitted=len(text)))
    return make_report(history, controller, strategy="hedge")


def size_of_png(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


@pytest.mark.parametrize("arms", [2, 41])
def test_a_picture_holds_all_that_is_named(arms: int) -> None:
    report = made_up(arms)
    figure = draw(report)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    axes = [axis for part in figure.subfigs for axis in part.axes]
    named = [text.get_text() for axis in axes if axis.get_legend() for text in axis.get_legend().get_texts()]
    for arm in report.arms[: 12 if arms == 2 else 0]:
        assert any(name.startswith(f"{arm.arm} ") for name in named)
    assert sum(name.startswith("drafter-") and "%" in name for name in named) == (1 if arms == 2 else 5)
    for axis in axes:
        if (legend := axis.get_legend()) is not None:
            box = legend.get_window_extent(canvas.get_renderer())
            assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, "a legend is cut off"
            assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1
    shares = axes[0].patches[-1].get_data()
    assert shares.values == pytest.approx(np.ones(37)), "shares add up to one in every span"


@pytest.mark.parametrize("strategy", ["mixture", "fixed:ar"])
def test_pictures_of_real_runs(strategy: str, model: Any, tmp_path: Path) -> None:
    report = generate(strategy, model)[0].report()
    path = tmp_path / "report.png"
    path.write_text("an older file is replaced")
    assert report.plot(str(path)) == path
    width, height = size_of_png(path)
    assert 1200 < width < 2500
    assert 800 < height < 2000
    assert path.stat().st_size > 20_000


def test_other_formats(tmp_path: Path) -> None:
    report = made_up(2, steps=10)
    assert report.plot(tmp_path / "report.svg").read_text().lstrip().startswith("<?xml")
    assert report.plot(tmp_path / "report.PDF").read_bytes().startswith(b"%PDF")


def test_pictures_that_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = made_up(2, steps=10)
    with pytest.raises(ValueError, match=r"path must end in .png, .pdf or .svg, got '.*report.jpeg'"):
        report.plot(tmp_path / "report.jpeg")
    with pytest.raises(FileNotFoundError, match="the folder .*none to write report.png into does not exist"):
        report.plot(tmp_path / "none" / "report.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(IsADirectoryError, match="folder.png is a folder, name a file"):
        report.plot(tmp_path / "folder.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"plots need the package matplotlib: pip install 'adaptspec\[cli\]'"):
        report.plot(tmp_path / "report.png")
    assert not (tmp_path / "report.png").exists()


def test_many_arms_are_told_in_few_lines() -> None:
    report = made_up(41)
    text = str(report)
    assert re.search(r"^  2\d others +\d+ ", text, re.MULTILINE)
    assert max(len(line) for line in text.splitlines() if not line.startswith("  Step")) < 140
    assert text.isascii()
    periods = re.search(r"^  arm .*$", text, re.MULTILINE)
    assert periods is not None
    assert re.findall(r"\d+-\d+", periods[0])[0].startswith("1-")


def test_acceptance_in_print_is_what_was_drawn() -> None:
    """Drafters that are right in 70 % of the cases, of which each step's text shows a few."""
    report = made_up(2, steps=3000)
    (line,) = report.drafters
    for depth in line.depths[:3]:
        assert depth.judged > 200
        assert depth.hits / depth.judged == pytest.approx(0.7, abs=0.07)
    shown = [f"{100 * depth.hits / depth.judged:.0f} %" for depth in line.depths[:4]]
    assert re.search(rf"^  drafter-0 +3,000 +3,000 +{' +'.join(shown)} ", str(report), re.MULTILINE)
    cut = sum(depth.unknown for depth in line.depths)
    assert f"{cut:,} proposals went on where their step's text ended" in str(report)


def test_an_arm_string_parses_back(model: Any) -> None:
    for line in generate("hedge", model)[0].report().arms:
        assert str(Arm.parse(line.arm)) == line.arm
