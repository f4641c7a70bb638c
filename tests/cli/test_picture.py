from __future__ import annotations

import numpy as np

from adaptspec.cli.picture import Track, draw, running_mean
from adaptspec.cli.prompts import Prompt
from tests.cli.fakes import measurement, step

LAW, CODE = Prompt(1, "law", ("a",)), Prompt(2, "code", ("b",))


def track(name: str, arms: tuple[str, str]) -> Track:
    law = [step(arms[0], verified=4, accepted=2), step(arms[1], verified=4, accepted=0)]
    code = [step(arms[0], verified=4, accepted=4)]
    return Track.of(
        name,
        [
            measurement(name, LAW, range(5), seconds=1.0, steps=law),
            measurement(name, CODE, range(6), seconds=1.0, steps=code),
        ],
    )


def test_a_track_puts_answers_end_to_end() -> None:
    joined = track("hedge", ("x@4", "y@4"))
    assert joined.starts.tolist() == [0.0, 3.0, 4.0]
    assert joined.emitted.tolist() == [3.0, 1.0, 5.0]
    assert joined.arms == ("x@4", "y@4", "x@4")
    assert joined.domains == ("law", "law", "code")


def test_running_mean() -> None:
    values = np.array([1.0, 3.0, 5.0, 7.0])
    assert running_mean(values, 2).tolist() == [1.0, 2.0, 4.0, 6.0]
    assert running_mean(np.zeros(0)).tolist() == []


def size_of(image: bytes) -> tuple[int, int]:
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(image[16:20]), int.from_bytes(image[20:24])


def test_the_picture_is_a_png_with_a_panel_per_switching_setting() -> None:
    steady = [track("ar", ("ar", "ar")), track("x@4", ("x@4", "x@4"))]
    small = size_of(draw(steady, title="steady"))
    large = size_of(draw([*steady, track("hedge", ("x@4", "y@4")), track("ucb", ("x@4", "y@4"))], title="all"))
    assert small[0] == large[0] > 1000
    assert large[1] > small[1] > 300


def test_settings_without_steps_are_left_out() -> None:
    empty = Track.of("hf-generate", [measurement("hf-generate", LAW, range(5), seconds=1.0)])
    with_it = draw([track("ar", ("ar", "ar")), empty], title="x")
    assert size_of(with_it) == size_of(draw([track("ar", ("ar", "ar"))], title="x"))
