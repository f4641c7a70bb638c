from __future__ import annotations

import json

import pytest

from adaptspec.cli.measure import Generated, Measurement, Setting, Turn
from adaptspec.cli.prompts import Prompt
from adaptspec.cli.report import agreement, summarise, totals
from tests.cli.fakes import echo, measurement, step

LAW, CODE = Prompt(1, "law", ("a",)), Prompt(2, "code", ("b",))


def no_margin(tokens: tuple[int, ...]) -> float:
    raise AssertionError("there is nothing to ask about")


def test_totals_count_the_bonus_in_lengths_but_not_in_rates() -> None:
    steps = [
        step("x@4", verified=4, accepted=2),
        step("x@4", verified=4, accepted=0),
        step("ar", verified=0, accepted=0),
    ]
    numbers = totals([measurement("x@4", LAW, range(6), seconds=2.5, steps=steps)])
    assert numbers["new_tokens"] == 6
    assert numbers["tokens_per_second"] == pytest.approx(2.4)
    assert numbers["steps"] == 3
    assert numbers["mean_accepted_length"] == pytest.approx((3 + 1 + 1) / 3)
    assert numbers["acceptance_rate"] == pytest.approx(2 / 8)
    assert numbers["prefill_seconds"] == 0.5
    assert numbers["decode_tokens_per_second"] == pytest.approx(5 / 2.0)
    assert numbers["arms"] == {"x@4": pytest.approx(2 / 3), "ar": pytest.approx(1 / 3)}
    assert numbers["controller_seconds"] == pytest.approx(0.003)


def test_faults_are_counted() -> None:
    steps = [step("x@4", verified=0, accepted=0, fault="x: broke"), step("ar", verified=0, accepted=0)]
    assert totals([measurement("x@4", LAW, range(3), seconds=1.0, steps=steps)])["faults"] == {"x: broke": 1}


def test_a_setting_without_prefill_time_has_no_decode_figures() -> None:
    numbers = totals([measurement("ref", LAW, range(4), seconds=1.0, prefill_seconds=None)])
    assert "decode_tokens_per_second" not in numbers and "arms" not in numbers
    assert numbers["mean_accepted_length"] == 1.0


def comparison() -> tuple[list[list[Measurement]], list[Setting]]:
    settings = [
        echo("hf-generate", [], "reference"),
        echo("ar", [], "fixed"),
        echo("x@4", [], "fixed"),
        echo("hedge", [], "strategy"),
    ]
    units = []
    for repeat, factor in ((0, 1.0), (1, 2.0)):
        for prompt, tokens in ((LAW, [1, 2, 3, 4]), (CODE, [5, 6])):
            fast = [step("x@4", verified=4, accepted=len(tokens) - 2)]
            units.append(
                [
                    measurement("hf-generate", prompt, tokens, seconds=4.0 * factor, repeat=repeat),
                    measurement("ar", prompt, tokens, seconds=4.0 * factor, repeat=repeat),
                    measurement("x@4", prompt, tokens, seconds=2.0 * factor, repeat=repeat, steps=fast),
                    measurement("hedge", prompt, tokens, seconds=2.5 * factor, repeat=repeat, steps=fast),
                ]
            )
    return units, settings


def test_summary_has_the_contract_s_fields() -> None:
    units, settings = comparison()
    report = summarise(units, settings, greedy=True, margin=no_margin, seed=0)
    json.dumps(report)
    assert report["prompts"] == 2 and report["finished"] == 4
    runs = {run["name"]: run for run in report["runs"]}
    assert [run["name"] for run in report["runs"]] == ["hf-generate", "ar", "x@4", "hedge"]
    assert {name: run["kind"] for name, run in runs.items()} == {
        "hf-generate": "reference",
        "ar": "fixed",
        "x@4": "fixed",
        "hedge": "strategy",
    }
    for run in runs.values():
        assert {"new_tokens", "seconds", "tokens_per_second", "speedup", "mean_accepted_length"} <= run.keys()
    x = runs["x@4"]
    assert x["new_tokens"] == 12 and x["seconds"] == pytest.approx(12.0)
    assert x["speedup"] == pytest.approx(2.0) and x["speedup_interval"] == pytest.approx([2.0, 2.0])
    assert x["tokens_per_second_repeats"] == pytest.approx([6 / 4, 6 / 8])
    assert (x["identical"], x["compared"], x["compared_with"]) == (2, 2, "hf-generate")
    assert {"acceptance_rate", "controller_seconds", "draft_seconds", "verify_seconds"} <= x.keys()
    hedge = runs["hedge"]
    assert hedge["best_fixed"] == "x@4" and hedge["vs_best_fixed"] == pytest.approx(0.8)
    assert hedge["arms"] == {"x@4": 1.0}
    assert runs["ar"]["speedup"] == 1.0
    assert "identical" not in runs["hf-generate"]


def test_by_category() -> None:
    units, settings = comparison()
    table = summarise(units, settings, greedy=True, margin=no_margin, seed=0)["by_category"]
    assert list(table) == ["law", "code"]
    assert table["law"]["x@4"]["tokens_per_second"] == pytest.approx(8 / 6)
    assert table["code"]["x@4"]["speedup"] == pytest.approx(2.0)


def test_without_references_no_speculation_is_the_reference() -> None:
    units, settings = comparison()
    report = summarise([unit[1:] for unit in units], settings[1:], greedy=True, margin=no_margin, seed=0)
    runs = {run["name"]: run for run in report["runs"]}
    assert "identical" not in runs["ar"]
    assert runs["x@4"]["compared_with"] == "ar" and runs["x@4"]["identical"] == 2


def test_sampled_output_is_not_compared() -> None:
    units, settings = comparison()
    report = summarise(units, settings, greedy=False, margin=no_margin, seed=0)
    assert not any("identical" in run for run in report["runs"])


def test_nothing_finished_is_still_a_report() -> None:
    _, settings = comparison()
    report = summarise([], settings, greedy=True, margin=no_margin, seed=0)
    json.dumps(report)
    assert report["prompts"] == 0 and report["by_category"] == {}
    assert all(run["tokens_per_second"] == 0.0 and run["speedup"] is None for run in report["runs"])


def test_divergences_name_the_place_and_the_margin_there() -> None:
    reference = [measurement("ref", LAW, [1, 2, 3, 4], seconds=1.0), measurement("ref", CODE, [5, 6], seconds=1.0)]
    ours = [measurement("x", LAW, [1, 2, 9, 4], seconds=1.0), measurement("x", CODE, [5], seconds=1.0)]
    asked = []

    def margin(tokens: tuple[int, ...]) -> float:
        asked.append(tuple(tokens))
        return 0.25 if len(asked) == 1 else 0.125

    result = agreement(ours, reference, margin=margin)
    assert asked == [(7, 8, 1, 2), (7, 8, 5)]
    assert (result["identical"], result["compared"], result["max_margin"]) == (0, 2, 0.25)
    assert result["divergences"] == [
        {"prompt": 1, "repeat": 0, "turn": 0, "position": 2, "margin": 0.25},
        {"prompt": 2, "repeat": 0, "turn": 0, "position": 1, "margin": 0.125},
    ]


def test_a_prompt_counts_once_over_repeats_and_turns() -> None:
    def answer(setting: str, repeat: int, turns: list[list[int]]) -> Measurement:
        made = [Turn((7, number), Generated(tuple(ids), 0.1, (1,)), "", 1.0) for number, ids in enumerate(turns)]
        return Measurement(setting, LAW, repeat, tuple(made))

    reference = [answer("ref", repeat, [[1], [2]]) for repeat in range(3)]
    ours = [answer("x", 0, [[1], [2]]), answer("x", 1, [[1], [3]]), answer("x", 2, [[4], [5]])]
    result = agreement(ours, reference, margin=lambda tokens: None)
    assert (result["identical"], result["compared"], result["max_margin"]) == (0, 1, None)
    assert result["divergences"] == [{"prompt": 1, "repeat": 1, "turn": 1, "position": 0, "margin": None}]
