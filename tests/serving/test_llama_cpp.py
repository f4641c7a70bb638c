"""The draft model for llama-cpp-python, called as `Llama.generate` calls one. A real model: `make test-llama`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from adaptspec.serving import llama_cpp
from adaptspec.serving.llama_cpp import AdaptiveDraft


class FakeLlama:
    """One sequence: the text that would come is known; a pass takes as long as `seconds(rows)` says."""

    def __init__(self, draft: Callable[..., Any], clock: list[float], seconds: Callable[[int], float]) -> None:
        self.draft, self.clock, self.seconds = draft, clock, seconds

    def generate(self, prompt: list[int], answer: list[int]) -> int:
        """Returns the number of passes."""
        text, passes = list(prompt), 0
        drafted: list[int] = []
        whole = [*prompt, *answer]
        while len(text) < len(whole):
            self.clock[0] += self.seconds(1 + len(drafted))
            passes += 1
            ahead = whole[len(text) :]
            right = next((i for i, (a, b) in enumerate(zip(drafted, ahead, strict=False)) if a != b), None)
            right = min(len(drafted), len(ahead)) if right is None else right
            text = whole[: min(len(text) + right + 1, len(whole))]
            found = self.draft(np.array(text, dtype=np.intc))
            assert isinstance(found, np.ndarray) and found.ndim == 1 and found.dtype == np.intc
            drafted = found.tolist()
        return passes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that tests let pass; drafting itself takes none."""
    now = [0.0]
    monkeypatch.setattr(llama_cpp, "perf_counter", lambda: now[0])
    return now


def copying(rng: np.random.Generator) -> tuple[list[int], list[int]]:
    source = rng.integers(0, 5000, 90).tolist()
    return source, [7, *source[10:80]]


def writing(rng: np.random.Generator) -> tuple[list[int], list[int]]:
    return rng.integers(0, 40, 60).tolist(), rng.integers(0, 40, 80).tolist()


def free(rows: int) -> float:
    return 0.010


def dear(rows: int) -> float:
    """As measured with a quantised model on a CPU: rows are hardly cheaper together."""
    return 0.010 * (0.2 + 0.8 * rows)


def test_copies_are_drafted_and_accepted(clock: list[float]) -> None:
    llama = FakeLlama(AdaptiveDraft(strategy="fixed:suffix@8", guard=None), clock, free)
    prompt, answer = copying(np.random.default_rng(0))
    assert llama.generate(prompt, answer) < len(answer) / 3


def test_it_turns_itself_off_where_verification_is_not_free(clock: list[float]) -> None:
    """The floor: 0.97 of no draft over ten requests, the first included."""
    draft = AdaptiveDraft(seed=1)
    llama = FakeLlama(draft, clock, dear)
    rng = np.random.default_rng(1)
    tokens = 0
    for _ in range(10):
        prompt, answer = writing(rng)
        llama.generate(prompt, answer)
        tokens += len(answer)
    assert tokens * dear(1) / clock[0] >= 0.97


def test_it_gains_where_verification_is_cheap(clock: list[float]) -> None:
    llama = FakeLlama(AdaptiveDraft(seed=2), clock, lambda rows: 0.010 + 0.0005 * (rows - 1))
    rng = np.random.default_rng(2)
    tokens = 0
    for _ in range(10):
        prompt, answer = copying(rng)
        llama.generate(prompt, answer)
        tokens += len(answer)
    assert tokens * 0.010 / clock[0] > 1.5


def test_feedback_is_the_difference_between_two_calls(clock: list[float]) -> None:
    draft = AdaptiveDraft(["prompt-lookup"], strategy="fixed:prompt-lookup@4", lengths=[4], guard=None)
    told: list[tuple[int, int, int]] = []
    draft.policy.observe = lambda decision, outcome: told.append(  # type: ignore[method-assign]
        (int(outcome.proposed[0]), int(outcome.verified[0]), int(outcome.accepted[0]))
    )

    def call(*tokens: int) -> list[int]:
        return draft(np.array(tokens, dtype=np.intc)).tolist()

    assert call(1, 2, 3, 4, 1, 2) == [3, 4, 1, 2]
    assert call(1, 2, 3, 4, 1, 2, 3, 9) == []  # one accepted, then a rejection
    call(1, 2, 3, 4, 1, 2, 3, 9, 1)
    call(6, 6, 6)  # another request: nothing is told of the last round
    call(6, 6, 6, 6, 6, 6, 6, 6)
    assert told == [(4, 4, 1), (4, 4, 4)]  # of a round in which nothing could be drafted, nothing


def test_a_text_that_goes_on_by_more_than_the_draft_is_another_request(clock: list[float]) -> None:
    draft = AdaptiveDraft(strategy="fixed:suffix@2", guard=None)
    finished: list[Any] = []
    draft.policy.finish = lambda ids: finished.extend(ids)  # type: ignore[method-assign]
    draft(np.array([1, 2, 1, 2], dtype=np.intc))
    draft(np.array([1, 2, 1, 2, 1, 2, 1], dtype=np.intc))
    assert finished == [0]
    draft(np.array([1, 2, 1, 2, 1, 2, 1, 4, 4, 4, 4, 4], dtype=np.intc))
    draft(np.array([1, 2, 1], dtype=np.intc))
    assert finished == [0, 1, 2]


def test_off_is_off(clock: list[float]) -> None:
    draft = AdaptiveDraft(strategy="fixed:ar")
    assert draft(np.array([1, 2, 1, 2, 1], dtype=np.intc)).tolist() == []
    assert AdaptiveDraft()(np.zeros(0, np.intc)).tolist() == []


class Attachable:
    """What `attach` looks at in a `Llama`: every draft model makes it keep all logits."""

    def __init__(self, draft: Any) -> None:
        self.draft_model = draft
        self._logits_all = True
        self.scores = np.zeros((8, 50), dtype=np.single)
        self.kept: list[bool] = []

    def n_ctx(self) -> int:
        return 32

    def eval(self, tokens: Any) -> None:
        self.kept.append(self._logits_all)


def test_logits_are_kept_only_where_a_draft_is_verified() -> None:
    draft = AdaptiveDraft(strategy="fixed:suffix@4", guard=None)
    llama = Attachable(draft)
    draft.attach(llama)
    assert llama.scores.shape == (32, 50)
    llama.eval([5, 6, 5])  # the prompt
    drafted = draft(np.array([5, 6, 5, 6], dtype=np.intc)).tolist()
    assert drafted
    llama.eval([6, *drafted])
    llama.eval([6, *drafted[:1]])  # cut off at the end of the context
    llama.eval([6])
    llama.eval([1, 2, 3, 4])  # another prompt
    assert llama.kept == [False, True, True, False, False]


def test_attach_refuses_what_it_was_not_written_for() -> None:
    draft = AdaptiveDraft()
    with pytest.raises(ValueError, match="must be made with draft_model="):
        draft.attach(Attachable(AdaptiveDraft()))

    class Renamed(Attachable):
        def eval(self, batch: Any) -> None: ...

    class Typed(Attachable):
        def __init__(self, draft: Any) -> None:
            super().__init__(draft)
            self._logits_all = "all"  # type: ignore[assignment]

    for changed, problem in ((Renamed, r"eval takes \(batch\)"), (Typed, "_logits_all is 'all'")):
        with pytest.raises(ValueError, match=problem):
            draft.attach(changed(draft))
    llama = Attachable(draft)
    del llama.scores
    with pytest.raises(ValueError, match="Attachable has no scores"):
        draft.attach(llama)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"drafters": "suffix"}, "drafters must be a list of names"),
        ({"drafters": []}, "drafters must be a list of names"),
        ({"drafters": ["draft-model:x"]}, "use lookups"),
        ({"drafters": ["sufix"]}, "did you mean 'suffix'"),
        ({"lengths": []}, "lengths must name at least one"),
        ({"lengths": [0]}, "lengths must be >= 1, got 0"),
        ({"off_rounds": 0}, "off_rounds must be >= 1"),
        ({"max_context": 0}, "max_context must be >= 1"),
        ({"strategy": "hegde"}, "did you mean 'hedge'"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        AdaptiveDraft(**options)
