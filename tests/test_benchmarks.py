"""The benchmarks still run on the code they measure."""

from __future__ import annotations

from benchmarks.step_profile import measure, parts_of
from tests import tiny_models


def test_every_part_of_a_step_is_measured() -> None:
    seconds = measure(parts_of(tiny_models.make_llama(), nodes=8, prefix=12), rounds=2)
    assert len(seconds) == 9 and all(len(values) == 2 and min(values) > 0.0 for values in seconds.values())
