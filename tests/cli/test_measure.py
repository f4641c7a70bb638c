from __future__ import annotations

from collections import Counter

import pytest

from adaptspec.cli.measure import Generated, Setting, Turn, rotated, rotation
from adaptspec.cli.prompts import Prompt
from tests.cli.fakes import echo, measurer

SETTINGS = [echo(name, []) for name in "abcd"]


@pytest.mark.parametrize(("prompts", "repeats"), [(4, 1), (8, 1), (4, 3), (8, 2), (6, 2), (1, 4), (3, 4)])
def test_every_setting_takes_every_place_equally_often(prompts: int, repeats: int) -> None:
    places: Counter[tuple[str, int]] = Counter()
    for repeat in range(repeats):
        for index in range(prompts):
            offset = rotation(index, repeat, settings=4, prompts=prompts, repeats=repeats)
            places.update((setting.name, place) for place, setting in enumerate(rotated(SETTINGS, offset)))
    assert len(places) == 16
    assert set(places.values()) == {prompts * repeats // 4}


@pytest.mark.parametrize("prompts", [3, 4, 5, 8])
def test_a_prompt_meets_another_order_in_the_next_repeat(prompts: int) -> None:
    for index in range(prompts):
        offsets = [rotation(index, repeat, settings=4, prompts=prompts, repeats=2) for repeat in range(2)]
        assert offsets[0] != offsets[1]


def test_few_prompts_spread_over_the_places() -> None:
    assert [rotation(index, settings=12, prompts=3) for index in range(3)] == [0, 4, 8]
    assert len({rotation(index, settings=13, prompts=6) for index in range(6)}) == 6


def test_rotation_keeps_all_settings() -> None:
    assert [s.name for s in rotated(SETTINGS, 3)] == ["d", "a", "b", "c"]


def test_runs_every_setting_on_every_prompt_in_rotated_order() -> None:
    log: list[tuple[str, str]] = []
    settings = [echo(name, log) for name in "ab"]
    prompts = [Prompt(number, "x", (f"p{number}",)) for number in range(2)]
    units = list(measurer().run(settings, prompts, repeats=2))
    assert log == [
        *[("a", "p0"), ("b", "p0"), ("b", "p1"), ("a", "p1")],
        *[("b", "p0"), ("a", "p0"), ("a", "p1"), ("b", "p1")],
    ]
    # Whatever the order was, results come in the order of the settings.
    assert [[m.setting for m in unit] for unit in units] == [["a", "b"]] * 4
    assert [unit[0].repeat for unit in units] == [0, 0, 1, 1]


def test_instances_last_for_one_repeat_and_not_longer() -> None:
    prompts = [Prompt(number, "x", ("p",)) for number in range(3)]
    units = list(measurer().run([echo("a", [])], prompts, repeats=2))
    assert [unit[0].turns[0].text for unit in units] == ["1", "2", "3", "1", "2", "3"]


def test_warm_up_leaves_no_trace_in_the_measured_instance() -> None:
    setting, prompts = echo("a", []), [Prompt(0, "x", ("p",))]
    warm = measurer()
    warm.warm_up(setting, prompts[0], max_new_tokens=4)
    assert next(iter(warm.run([setting], prompts)))[0].turns[0].text == "1"


def test_later_turns_see_the_setting_s_own_answers() -> None:
    log: list[tuple[str, str]] = []
    unit = next(iter(measurer().run([echo("a", log)], [Prompt(0, "x", ("one", "two"))])))
    assert log == [("a", "one"), ("a", "one\n\n1\n\ntwo")]
    assert [turn.text for turn in unit[0].turns] == ["1", "2"]
    assert unit[0].new_tokens == 2


def test_interruption_keeps_the_finished_prompts() -> None:
    calls = 0

    def start():
        def generate(input_ids, max_new_tokens):
            nonlocal calls
            calls += 1
            if calls == 4:
                raise KeyboardInterrupt
            return Generated((1,), None, (1,))

        return generate

    settings = [Setting(name, "fixed", start) for name in "ab"]
    finished = []
    with pytest.raises(KeyboardInterrupt):
        for unit in measurer().run(settings, [Prompt(number, "x", ("p",)) for number in range(3)]):
            finished.append(unit)
    assert [[m.prompt.id for m in unit] for unit in finished] == [[0, 0]]


def test_prompts_that_cannot_fit_are_named() -> None:
    fits, too_long = Prompt("short", "x", ("a" * 10,)), Prompt("long", "x", ("a" * 10, "b" * 10))
    limited = measurer(max_new_tokens=8, context_limit=20)
    limited.check_lengths([fits])
    with pytest.raises(ValueError, match="prompt 'long' may need 40 tokens with max_new_tokens = 8, .* context has 20"):
        limited.check_lengths([fits, too_long])
    measurer(max_new_tokens=8).check_lengths([too_long])


def test_expected_seconds_leave_the_prefill_constant() -> None:
    turn = Turn((1,), Generated((1, 2, 3), 1.0, (1, 1, 1)), "", 2.0)
    assert turn.expected_seconds(3) == pytest.approx(2.0)
    assert turn.expected_seconds(11) == pytest.approx(6.0)
    assert Turn((1,), Generated((1,), 1.0, (1,)), "", 1.5).expected_seconds(50) == 1.5
