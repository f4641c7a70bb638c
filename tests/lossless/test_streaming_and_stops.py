"""Streamers get every token once, stop strings and criteria end generation where transformers ends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, MaxTimeCriteria, StoppingCriteria, StoppingCriteriaList

from adaptspec import AdaptiveSpec
from tests.lossless.test_greedy import reference


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_folder)


def prompt() -> torch.Tensor:
    return torch.tensor([[3, 4, 5, 6] * 5])


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value.reshape(-1).tolist())

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("arm", ["ar", "suffix@16"])
def test_streamer_and_on_step_see_every_token_once(arm: str, tiny_llama: Any) -> None:
    spec = AdaptiveSpec(["suffix"], f"fixed:{arm}")
    recorder, seen = Recorder(), []
    result = spec.generate(
        tiny_llama, prompt(), max_new_tokens=20, streamer=recorder, on_step=lambda record, tokens: seen.extend(tokens)
    )
    assert recorder.puts[0] == prompt()[0].tolist()
    assert [token for put in recorder.puts[1:] for token in put] == seen == result.sequences[0, 20:].tolist()
    assert recorder.ended == 1


def test_hf_binds_a_streamer(tiny_llama: Any) -> None:
    recorder = Recorder()
    spec = AdaptiveSpec(["suffix"], "fixed:suffix@16")
    output = reference(tiny_llama, prompt(), max_new_tokens=20, custom_generate=spec.hf(streamer=recorder))
    assert [token for put in recorder.puts[1:] for token in put] == output[0, 20:].tolist()


@pytest.mark.parametrize("arm", ["ar", "suffix@16"])
def test_stop_strings_end_where_transformers_ends(arm: str, tiny_llama: Any, tokenizer: Any) -> None:
    spec = AdaptiveSpec(["suffix"], f"fixed:{arm}")
    free = reference(tiny_llama, prompt(), max_new_tokens=30)
    text = tokenizer.decode(free[0, 20:])
    for start in range(0, max(1, len(text) - 3), 5):
        stop = text[start : start + 3]
        expected = reference(tiny_llama, prompt(), max_new_tokens=30, stop_strings=stop, tokenizer=tokenizer)
        result = spec.generate(tiny_llama, prompt(), max_new_tokens=30, stop_strings=stop, tokenizer=tokenizer)
        assert torch.equal(result.sequences, expected)


class StopAt(StoppingCriteria):
    """Ends when the sequence has a given length, and notes the lengths it was asked about."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.asked: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        self.asked.append(input_ids.shape[1])
        return torch.tensor([input_ids.shape[1] >= self.length])


def test_criteria_are_asked_after_every_token(tiny_llama: Any) -> None:
    spec = AdaptiveSpec(["suffix"], "fixed:suffix@16")
    criterion = StopAt(33)
    result = spec.generate(tiny_llama, prompt(), max_new_tokens=40, stopping_criteria=[criterion])
    assert criterion.asked == list(range(21, 34))
    assert result.finish_reason == "stop"
    assert torch.equal(result.sequences, reference(tiny_llama, prompt(), max_new_tokens=13))


def test_time_limits_are_honoured(tiny_llama: Any) -> None:
    criteria = StoppingCriteriaList([MaxTimeCriteria(0.0)])
    result = AdaptiveSpec(["suffix"]).generate(tiny_llama, prompt(), max_new_tokens=40, stopping_criteria=criteria)
    assert result.stats.new_tokens == 1
