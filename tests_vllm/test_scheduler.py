"""The schedulers in real engines, with drafters of vLLM's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from vllm import SamplingParams

from .conftest import LONGEST, Engine, Open, Recorder, counted, make_requests

SCHEDULER = "adaptspec.serving.vllm.AdaptiveScheduler"
ASYNC_SCHEDULER = "adaptspec.serving.vllm.AdaptiveAsyncScheduler"
NGRAM = {"method": "ngram", "num_speculative_tokens": LONGEST, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


class UniformRecorder(Recorder):
    """Draws one arm for all rows."""

    def draw(self, count: int) -> np.ndarray:
        return np.full(count, super().draw(1)[0])


def record(engine: Engine, method: str, *lengths: int, seed: int) -> Recorder:
    recorder = UniformRecorder(("ar", *(f"{method}@{length}" for length in lengths)), seed)
    engine.core.scheduler.length_control.policy = recorder
    return recorder


@pytest.fixture(scope="module")
def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    return make_requests(12, seed=31, longest=60)


@pytest.fixture(scope="module")
def plain(open_engine: Open, requests: tuple[list[list[int]], list[SamplingParams]]) -> list[list[int]]:
    with open_engine() as engine:
        return engine.generate(*requests)


def check(engine: Engine, recorder: Recorder, *, least: int, since: tuple[int, int] = (0, 0)) -> None:
    """Lengths changed, drafts followed them, and the feedback is what vLLM counted."""
    lengths = {int(decision.lengths.max(initial=0)) for decision in recorder.decisions}
    assert lengths >= {0, 1, 3, 6} and max(lengths) == 6
    assert recorder.accepted == counted(engine)[1] - since[1] >= least
    assert all((outcome.verified <= decision.lengths).all() for decision, outcome in recorder.outcomes)
    seconds = [outcome.seconds for _, outcome in recorder.outcomes if outcome.seconds is not None]
    assert len(seconds) > 10 and all(value > 0 for value in seconds)


@pytest.mark.parametrize(("scheduler", "ahead"), [(SCHEDULER, False), (ASYNC_SCHEDULER, True)])
def test_a_draft_model_of_changing_length(
    open_engine: Open,
    target: Path,
    requests: tuple[list[list[int]], list[SamplingParams]],
    plain: list[list[int]],
    scheduler: str,
    ahead: bool,
) -> None:
    """The target drafts for itself. Its cache stays whole through steps of length 0, or acceptance would fall."""
    own = {"method": "draft_model", "model": str(target), "num_speculative_tokens": LONGEST}
    with open_engine(settings={}, speculative_config=own, scheduler_cls=scheduler, async_scheduling=ahead) as engine:
        recorder = record(engine, "draft_model", 1, 3, 6, seed=33)
        assert engine.generate(*requests) == plain
        check(engine, recorder, least=100)
        assert recorder.accepted > 0.9 * recorder.verified


def test_what_the_scheduler_refuses(open_engine: Open) -> None:
    with pytest.raises(ValueError, match="needs speculative_config"), open_engine(scheduler_cls=SCHEDULER):
        pass
    with (
        pytest.raises(ValueError, match="sets its own draft lengths"),
        open_engine(settings={}, scheduler_cls=SCHEDULER),
    ):
        pass


# The last engine of the process: vLLM 0.32 makes none on a CPU once its n-gram drafter has imported numba.
def test_ngram_drafts_of_changing_length(
    open_engine: Open, requests: tuple[list[list[int]], list[SamplingParams]], plain: list[list[int]]
) -> None:
    with open_engine(settings={}, speculative_config=NGRAM, scheduler_cls=SCHEDULER) as engine:
        assert engine.generate(*requests) == plain  # by the real policy
        assert engine.plain(*requests) == plain
        since = counted(engine)
        assert engine.plain(*requests) == plain
        assert counted(engine) == since  # nobody drafted for
        recorder = record(engine, "ngram", 1, 3, 6, seed=32)
        assert engine.generate(*requests) == plain
        check(engine, recorder, least=5, since=since)
        assert len(recorder.finished) >= 11
