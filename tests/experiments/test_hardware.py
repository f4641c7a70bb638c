"""Profiles of hardware: every number has a source, and passes cost what the roofline says."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest

from adaptspec.control.cost_worlds import PROFILES, StepCosts
from experiments.hardware import FOLDER, batch_costs, find_hardware, hardware_names, parse_hardware

RECORDED = StepCosts(np.full(1025, 0.03), draft={"a": 0.0002, "b": np.full(1025, 0.001)}, overhead=0.01)


def test_every_number_has_a_source() -> None:
    assert hardware_names() == ("a40", "a800", "cpu", "h100", "h200")
    for name in hardware_names():
        hardware = find_hardware(name)
        assert hardware.name == name
        assert hardware.values.keys() == hardware.sources.keys()
        assert all(len(source) > 20 for source in hardware.sources.values())


def test_one_row_takes_what_decoding_was_measured_to_take() -> None:
    h100 = find_hardware("h100")
    one = float(h100.seconds(np.array(1), batch=1))
    assert one == pytest.approx(1.0 / 68.03, rel=0.01)  # and the cache of one request beside the weights
    assert float(h100.seconds(np.array(100), batch=1)) == one  # bound by memory
    assert float(h100.seconds(np.array(4096), batch=1)) == pytest.approx(4096 / 10815.51)
    assert float(h100.seconds(np.array(64), batch=64)) > 1.2 * one  # 64 caches
    faster = [float(find_hardware(name).seconds(np.array(1), batch=1)) for name in ("a40", "a800", "h100", "h200")]
    assert faster == sorted(faster, reverse=True)


def test_the_processor_costs_what_the_profile_of_the_package_says() -> None:
    cpu, ours = find_hardware("cpu"), PROFILES["cpu-fp32"].curve(1)
    for nodes in (0, 31, 63, 200):
        assert float(cpu.seconds(np.array(nodes + 1), batch=1)) == pytest.approx(ours[nodes], rel=0.02)


def test_costs_of_a_batch() -> None:
    costs = batch_costs(find_hardware("a40"), 32, RECORDED)
    assert costs.verify_seconds(63, context=9) == pytest.approx(32 * 64 / 4203.75)
    assert costs.draft_seconds("a", 1) == pytest.approx(2 * 0.0002)  # 32 requests on 16 threads
    assert costs.draft_seconds("b", 1) == pytest.approx(2 * 0.001)
    assert costs.overhead == 0.0
    with pytest.raises(ValueError, match="batch must be a whole number >= 1, got 0"):
        batch_costs(find_hardware("a40"), 0, RECORDED)


def test_profiles_that_are_not_sound() -> None:
    good = json.loads((FOLDER / "a40.json").read_text())
    for change, problem in (
        (lambda c: c.pop("weight_bytes"), "the field 'weight_bytes' is missing"),
        (lambda c: c["context"].pop("source"), "context must have a value and its source"),
        (lambda c: c["context"].update(value=0), "context must be > 0, got 0"),
        (lambda c: c.update(speed=1), "unknown field of profile 'speed'"),
    ):
        content = copy.deepcopy(good)
        change(content)
        with pytest.raises(ValueError, match=problem):
            parse_hardware(content)
    with pytest.raises(ValueError, match="unknown hardware 'h1000'; did you mean 'h100'"):
        find_hardware("h1000")
