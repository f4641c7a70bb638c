"""The proposer in real engines: the text never changes, and the policy hears what really happened."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from vllm import SamplingParams

from .conftest import ARMS, LOOKUPS, Open, check_feedback, counted, make_requests, save_llama


@pytest.fixture(scope="module")
def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    return make_requests(20, seed=1)


@pytest.fixture(scope="module")
def plain(open_engine: Open, requests: tuple[list[list[int]], list[SamplingParams]]) -> list[list[int]]:
    """What the engine writes without speculation."""
    with open_engine() as engine:
        return engine.generate(*requests)


def test_ragged_drafts_and_the_real_policy_leave_the_text_as_it_is(
    open_engine: Open, requests: tuple[list[list[int]], list[SamplingParams]], plain: list[list[int]]
) -> None:
    with open_engine(settings=LOOKUPS) as engine:
        policy = engine.drafter.policy
        assert engine.generate(*requests) == plain
        assert policy.state_dict()
        since = counted(engine)
        assert since[0] > 0
        assert engine.plain(*requests) == plain
        assert counted(engine) == since

        engine.core.scheduler.reset_prefix_cache()
        recorder = engine.record(*ARMS)
        assert engine.generate(*requests) == plain
        check_feedback(engine, recorder, since=since)
        lengths = np.concatenate([decision.lengths for decision in recorder.decisions])
        assert set(lengths.tolist()) >= {0, 1, 3, 4, 6}
        assert max(len(decision) for decision in recorder.decisions) == 4
        assert recorder.accepted > 20
        assert sum(int((outcome.verified > outcome.accepted).sum()) for _, outcome in recorder.outcomes) > 20
        assert all(outcome.observed.all() for _, outcome in recorder.outcomes)  # nobody was preempted


def test_ragged_drafts_without_the_plugin(
    open_engine: Open, requests: tuple[list[list[int]], list[SamplingParams]], plain: list[list[int]]
) -> None:
    """Rows are recognised by what they hold, and what was cut off is told from the text."""
    with open_engine(settings={**LOOKUPS, "capture": False, "max_requests": 8}) as engine:
        assert engine.drafter.capture_refused == "the settings say so"
        recorder = engine.record(*ARMS)
        assert engine.generate(*requests) == plain
        assert counted(engine)[1] == recorder.accepted > 20
        assert len(engine.drafter.requests) <= 8


def test_preempted_requests_and_moved_rows(open_engine: Open) -> None:
    prompts, params = make_requests(8, seed=2, longest=85)
    tight = {"num_gpu_blocks_override": 12, "block_size": 32}
    with open_engine(settings=LOOKUPS, **tight) as engine:
        plain = engine.plain(prompts, params)
        preemptions = engine.metric("num_preemptions")
        recorder = engine.record(*ARMS, seed=3)
        assert engine.generate(prompts, params) == plain
        assert engine.metric("num_preemptions") > preemptions
        check_feedback(engine, recorder, padded=True)


def test_chunked_prefill(open_engine: Open) -> None:
    prompts, params = make_requests(8, seed=4, longest=30)
    prompts = [(prompt * 3)[:120] for prompt in prompts]
    with open_engine(settings=LOOKUPS, max_num_batched_tokens=32) as engine:
        plain = engine.plain(prompts, params)
        engine.core.scheduler.reset_prefix_cache()
        recorder = engine.record(*ARMS, seed=5)
        assert engine.generate(prompts, params) == plain
        assert any(context.prefill_tokens for context in recorder.contexts)
        assert all(context.draft_budget <= 32 for context in recorder.contexts)
        check_feedback(engine, recorder, padded=True)


def test_the_end_of_the_context(open_engine: Open) -> None:
    """Near max_model_len vLLM stops asking and pads all rows: neither the text nor the feedback may notice."""
    rng = np.random.default_rng(6)
    prompts = [rng.integers(3, 60, size).tolist() for size in (30, 40, 58, 62, 63, 10)]
    params = [SamplingParams(temperature=0, max_tokens=100, ignore_eos=True) for _ in prompts]
    with open_engine(settings=LOOKUPS, max_model_len=64) as engine:
        plain = engine.plain(prompts, params)
        assert [len(text) for text in plain] == [34, 24, 6, 2, 1, 54]
        recorder = engine.record(*ARMS, seed=7)
        assert engine.generate(prompts, params) == plain
        for decision, outcome in recorder.outcomes:
            assert (outcome.verified <= decision.lengths).all()
        assert recorder.accepted <= counted(engine)[1]


def test_a_draft_model(open_engine: Open, target: Path) -> None:
    """The target drafts for itself: next to nothing is rejected, rows that sit out catch up, caches are bounded."""
    prompts, params = make_requests(6, seed=18, longest=25)
    settings = {"drafters": [f"draft-model:{target}"], "max_caches": 3, "log_seconds": 0}
    with open_engine(settings=settings) as engine:
        plain = engine.plain(prompts, params)
        recorder = engine.record("draft-model@2", "draft-model@4", seed=19)
        assert engine.generate(prompts, params) == plain
        check_feedback(engine, recorder, padded=True)
        assert recorder.accepted >= 0.95 * recorder.verified > 30
        assert any(outcome.stale is not None and outcome.stale.any() for _, outcome in recorder.outcomes)
        declined = sum(int(((d.lengths > 0) & (o.proposed == 0)).sum()) for d, o in recorder.outcomes)
        assert declined > 0  # the fourth row has no cache


def test_a_draft_model_with_other_tokens_is_refused(open_engine: Open, tmp_path: Path) -> None:
    import torch
    from transformers import LlamaForCausalLM

    folder = save_llama(tmp_path / "other", layers=1, seed=1, spread=0.1)
    model = LlamaForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(96)
    model.to(torch.float32).save_pretrained(folder)
    with (
        pytest.raises(RuntimeError, match="vocabulary has 96 entries"),
        open_engine(settings={"drafters": [f"draft-model:{folder}"]}),
    ):
        pass


def test_wrong_settings_are_refused_when_the_engine_starts(open_engine: Open) -> None:
    with pytest.raises(RuntimeError, match="did you mean 'strategy'"), open_engine(settings={"stratgy": "hedge"}):
        pass


def test_off_asks_nobody(open_engine: Open) -> None:
    prompts, params = make_requests(4, seed=20, longest=20)
    with open_engine(settings={"strategy": "fixed:ar"}) as engine:
        engine.generate(prompts, params)
        assert engine.metric("spec_decode_num_draft_tokens") == 0
        assert len(engine.drafter.requests) == 0


def test_the_embedded_model(open_engine: Open) -> None:
    """A real model, a real policy, four requests at once."""
    from tokenizers import Tokenizer

    from adaptspec.target.embedded import embedded_folder

    folder = embedded_folder()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [
        tokenizer.encode(text).ids
        for text in (
            "Here is a list of the months: January, February, March, April, May, June. The list of the months is",
            "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
            "Once upon a time",
            json.dumps([{"name": name, "age": 3} for name in ("Ann", "Bob", "Cid")])[:-20],
        )
    ]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with open_engine(folder, settings=LOOKUPS, max_model_len=256, num_gpu_blocks_override=32) as engine:
        plain = engine.plain(prompts, params)
        recorder = engine.record(*ARMS, seed=21)
        assert engine.generate(prompts, params) == plain
        assert recorder.accepted > 10
