"""Requests of all kinds in one engine with the proposer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from vllm import SamplingParams

from .conftest import ARMS, LOOKUPS, PROPOSER, Engine, Open, check_feedback, counted, make_requests


@pytest.fixture(scope="module")
def engine(open_engine: Open) -> Iterator[Engine]:
    """One engine for the tests that can share one."""
    with open_engine(settings=LOOKUPS) as engine:
        yield engine


def test_requests_are_captured_by_the_plugin(engine: Engine) -> None:
    assert engine.drafter.capture_refused is None


def test_structured_output(engine: Engine) -> None:
    """A grammar cuts drafts short; what it cuts is not held against the drafter."""
    from vllm.sampling_params import StructuredOutputsParams

    rng = np.random.default_rng(8)
    prompts = [rng.integers(3, 29, 20).tolist() * 2 for _ in range(4)]
    params = [
        SamplingParams(
            temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(regex=f"([{letters}]+ ?)+")
        )
        for letters in ("ab", "xyz", "a-m", "a-z")
    ]
    plain = engine.plain(prompts, params)
    since = counted(engine)
    recorder = engine.record(*ARMS, seed=9)
    assert engine.generate(prompts, params) == plain
    check_feedback(engine, recorder, since=since, padded=True)
    cut = sum(int((outcome.proposed > outcome.verified).sum()) for _, outcome in recorder.outcomes)
    assert cut > 5


def test_a_request_may_opt_out_or_ask_for_less(engine: Engine) -> None:
    prompts, _ = make_requests(3, seed=10)
    wishes = [{"adaptspec_speculate": False}, {"adaptspec_max_length": 2}, None]
    params = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, extra_args=wish) for wish in wishes]
    recorder = engine.record("token-recycling@6", seed=11)
    engine.generate(prompts, params)
    most: dict[object, int] = {}
    for decision in recorder.decisions:
        for request_id, length in zip(decision.request_ids, decision.lengths.tolist(), strict=True):
            most[request_id] = max(most.get(request_id, 0), length)
    assert sorted(most.values()) == [0, 2, 6]


def test_many_short_requests_leave_nothing_behind(engine: Engine) -> None:
    rng = np.random.default_rng(12)
    prompts = [rng.integers(3, 60, rng.integers(1, 5)).tolist() for _ in range(60)]
    params = [SamplingParams(temperature=0, max_tokens=int(rng.integers(1, 4)), ignore_eos=True) for _ in prompts]
    recorder = engine.record(*ARMS, seed=13)
    texts = engine.generate(prompts, params)
    assert [len(text) for text in texts] == [one.max_tokens for one in params]
    assert len(engine.drafter.requests) <= 4  # those that ended in the last pass
    assert len(recorder.finished) >= 56


def test_a_request_aborted_midway(engine: Engine) -> None:
    prompts, _ = make_requests(3, seed=14)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    plain = [engine.generate([prompt], params)[0] for prompt in prompts]
    recorder = engine.record(*ARMS, seed=15)
    inside = engine.llm.llm_engine
    for number, prompt in enumerate(prompts):
        inside.add_request(f"abort-{number}", {"prompt_token_ids": prompt}, params)
    done = {}
    for step in range(200):
        for output in inside.step():
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
        if step == 5:
            inside.abort_request(["abort-1"])
        if not inside.has_unfinished_requests():
            break
    assert done["abort-0"] == plain[0] and done["abort-2"] == plain[2] and "abort-1" not in done
    assert any(str(request_id).startswith("abort-1") for request_id in recorder.finished)


def test_sampled_requests(engine: Engine) -> None:
    prompts, _ = make_requests(4, seed=16)
    params = [SamplingParams(temperature=1.0, top_p=0.9, seed=number, max_tokens=20) for number in range(4)]
    recorder = engine.record(*ARMS, seed=17)
    texts = engine.generate(prompts, params)
    assert all(0 < len(text) <= 20 for text in texts)
    assert recorder.outcomes


def test_the_name_that_vllm_is_given() -> None:
    import adaptspec.serving.vllm as names

    module, _, name = PROPOSER.rpartition(".")
    assert module == names.__name__
    assert getattr(names, name).__name__ == "AdaptiveProposer"
