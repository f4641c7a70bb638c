"""What the vLLM adapter is made of, without vLLM. What it does in an engine is tested in tests_vllm/."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from adaptspec.serving import ServingPolicy, vllm_capture
from adaptspec.serving.chains import Vocabulary, chain_makers
from adaptspec.serving.rows import Judged, Requests, Row, judge
from adaptspec.serving.vllm_capture import Fingerprints, fields_problem, install, signature_problem
from adaptspec.serving.vllm_lengths import Came, LengthControl, Waiting
from adaptspec.serving.vllm_settings import Settings, default_lengths, read_settings, request_limit


@pytest.mark.parametrize(
    ("draft", "sampled", "scheduled", "expected"),
    [
        ([5, 6, 7], [5, 6, 7, 1], [5, 6, 7], Judged(3, 3)),
        ([5, 6, 7], [5, 1], [5, 6, 7], Judged(3, 1)),
        ([5, 6, 7], [5, 6], [5], Judged(1, 1)),  # the token budget cut it off
        ([5, 6, 7], [5, 1], [5, 6, -1], Judged(2, 1, 1)),  # a grammar did
        ([], [1], [-1, -1], Judged(0, 0, 2)),  # a new row, filled up
        ([5, 6], [1], [0, 0], Judged(0, 0, 2)),  # vLLM put something else there
        ([5, 6, 7], [1], (), Judged(0, 0)),
        ([5, 6, 7], [5, 6, 7, 1], None, Judged(3, 3)),
        ([5, 6, 7], [5, 1], None, Judged(3, 1)),
        ([5, 6, 7], [5, 6], None, Judged(1, 1)),
        ([5, 6, 7], [5], None, Judged(0, 0)),
        ([5, 6, 7], [4, 1], None, Judged(0, 0)),  # not what was drafted
        ([5], [5, 6, 7], None, Judged(0, 0)),
    ],
)
def test_what_became_of_a_draft(
    draft: list[int], sampled: list[int], scheduled: list[int] | None, expected: Judged
) -> None:
    assert judge(draft, sampled, scheduled) == expected


def rows_of(*texts: tuple[list[int], int]) -> list[tuple[np.ndarray, int]]:
    return [(np.array(tokens, dtype=np.int32), new) for tokens, new in texts]


def test_rows_are_recognised_wherever_they_move() -> None:
    names = Fingerprints(10)
    (first, second), _ = names.name(rows_of(([1, 2, 3], 1), ([1, 2, 4], 1)))
    assert names.name(rows_of(([1, 2, 4, 9, 9], 2), ([1, 2, 3, 5], 1)))[0] == [second, first]
    (again, new), _ = names.name(rows_of(([1, 2, 3, 5, 6], 1), ([7, 7], 1)))
    assert again == first and new not in (first, second)
    assert names.name(rows_of(([1, 2, 3, 5, 6, 7, 8], 1)))[0] != [first]  # a token was missed


def test_rows_of_equal_content_keep_two_names() -> None:
    names = Fingerprints(10)
    given, _ = names.name(rows_of(([1, 2], 1), ([1, 2], 1)))
    later, _ = names.name(rows_of(([1, 2, 3], 1), ([1, 2, 3], 1)))
    assert sorted(given) == sorted(later) and given[0] != given[1]


def test_the_oldest_rows_are_forgotten() -> None:
    names = Fingerprints(2)
    (old,), _ = names.name(rows_of(([1, 2], 1)))
    names.name(rows_of(([3, 4], 1)))
    _, forgotten = names.name(rows_of(([5, 6], 1)))
    assert forgotten == [old] and len(names) == 2


class Output:
    pass


def made_output(*names: str) -> type:
    return dataclasses.make_dataclass("SchedulerOutput", names)


GOOD_OUTPUT = made_output(
    "num_scheduled_tokens", "scheduled_spec_decode_tokens", "finished_req_ids", "total_num_scheduled_tokens"
)


class Listener(vllm_capture.PassListener):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def begin_pass(self, scheduler_output: Any, runner: Any) -> None:
        self.heard.append(scheduler_output)


def made_runner() -> type:
    class GPUModelRunner:
        drafter: Any = None

        def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> tuple[Any, Any]:
            return scheduler_output, intermediate_tensors

    return GPUModelRunner


def test_the_hook_tells_listeners_once_and_nobody_else() -> None:
    runner_class = made_runner()
    assert install(runner_class, GOOD_OUTPUT) is None
    assert install(runner_class, GOOD_OUTPUT) is None  # a second engine in the process
    runner = runner_class()
    assert runner.execute_model("a", intermediate_tensors="b") == ("a", "b")
    runner.drafter = Listener()
    assert runner.execute_model("c") == ("c", None)
    assert runner.drafter.heard == ["c"]


def test_the_hook_refuses_what_has_changed() -> None:
    class Renamed:
        def execute_model(self, scheduler_output: Any) -> None: ...

    class Gone:
        pass

    assert install(Renamed, GOOD_OUTPUT) == (
        "test_the_hook_refuses_what_has_changed.<locals>.Renamed.execute_model takes (self, scheduler_output), "
        "expected is (self, scheduler_output, intermediate_tensors)"
    )
    assert install(Gone, GOOD_OUTPUT) == "Gone has no execute_model"
    runner_class = made_runner()
    before = runner_class.execute_model
    assert "no field finished_req_ids" in (install(runner_class, made_output(*list_without("finished_req_ids"))) or "")
    assert runner_class.execute_model is before
    assert fields_problem(Output, ["a"]) == "Output has no field a"
    assert signature_problem(lambda self: None, ["self"]) is None


def list_without(name: str) -> list[str]:
    return [field.name for field in dataclasses.fields(GOOD_OUTPUT) if field.name != name]


def test_a_runner_without_rows_is_refused() -> None:
    batch = SimpleNamespace(req_ids=[], num_prompt_tokens=[])
    assert vllm_capture.runner_problem(SimpleNamespace(requests={}, input_batch=batch)) is None
    assert "no num_prompt_tokens" in str(
        vllm_capture.runner_problem(SimpleNamespace(requests={}, input_batch=SimpleNamespace(req_ids=[])))
    )
    assert "no requests" in str(vllm_capture.runner_problem(SimpleNamespace(input_batch=batch)))


def test_settings() -> None:
    assert read_settings({}, longest=8) == Settings(lengths=(2, 4, 8))
    given = {"adaptspec": {"lengths": [3, 1], "strategy": "fixed:ar", "drafters": ["prompt-lookup"]}, "other": 1}
    settings = read_settings(given, longest=8)
    assert (settings.lengths, settings.strategy, settings.drafters) == ((1, 3), "fixed:ar", ("prompt-lookup",))
    assert [default_lengths(k) for k in (1, 2, 3, 5, 16)] == [(1,), (2,), (2, 3), (2, 4, 5), (2, 4, 8, 16)]
    policy = settings.policy(["prompt-lookup"], uniform=False, most_rows=9, stateful=())
    assert policy.names == ("ar", "prompt-lookup@1", "prompt-lookup@3")


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"stratgy": "hedge"}, "did you mean 'strategy'"),
        ({"lengths": [9]}, r"lengths must be in \[1, 8\], got 9"),
        ({"lengths": 4}, "lengths must be a list, got 4"),
        ({"drafters": "suffix"}, "drafters must be a list"),
        ({"drafters": []}, "drafters must name at least one"),
        ({"off_steps": 0}, "off_steps must be >= 1"),
        ({"capture": "yes"}, "capture must be True or False"),
        ({"log_seconds": -1}, "log_seconds must be"),
        ("hedge", "must be a mapping of settings"),
    ],
)
def test_settings_that_make_no_sense(section: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_settings({"adaptspec": section}, longest=8)


@pytest.mark.parametrize(
    ("extra", "limit"),
    [
        (None, 8),
        ({}, 8),
        ({"adaptspec_speculate": False}, 0),
        ({"adaptspec_speculate": "0"}, 0),
        ({"adaptspec_speculate": True}, 8),
        ({"adaptspec_max_length": 3}, 3),
        ({"adaptspec_max_length": 30}, 8),
        ({"adaptspec_max_length": "three"}, 8),
        ({"adaptspec_max_length": -1}, 8),
    ],
)
def test_wishes_of_a_request(extra: dict[str, Any] | None, limit: int) -> None:
    assert request_limit(extra, longest=8) == limit


def row(request_id: str, tokens: list[int], *, new: int = 1) -> Row:
    return Row(0, request_id, np.array(tokens, np.int32), tokens[-new:], len(tokens) - new, 4)


def test_drafters_are_made_when_asked_and_go_with_their_request() -> None:
    requests = Requests(chain_makers(["suffix"], vocabulary=Vocabulary(100)), max_context=10, max_caches=1)
    assert requests.draft(row("a", [1, 2, 1, 2, 1]), "suffix", 0).tokens == []
    assert len(requests) == 0
    assert requests.draft(row("a", [1, 2, 3, 1, 2]), "suffix", 2).tokens == [3, 1]
    assert requests.draft(row("b", [1, 2] * 6), "suffix", 2).tokens == []  # longer than max_context
    assert len(requests) == 2
    assert requests.finish(["a", "c"]) == ["a"]
    assert requests.finish(["b"]) == ["b"]
    assert len(requests) == 0


@pytest.fixture
def control() -> Iterator[LengthControl]:
    policy = ServingPolicy(["ngram@2", "ngram@4"], "fixed:ngram@4", guard=None, uniform=True)
    yield LengthControl(policy, drafter="ngram", longest=4)


def test_lengths_are_decided_and_settled_by_the_pass_that_verifies(control: LengthControl) -> None:
    told: list[tuple[Any, Any]] = []
    control.policy.observe = lambda decision, outcome: told.append((decision, outcome))  # type: ignore[method-assign]
    passes = [object() for _ in range(3)]
    waiting = [Waiting("a", 10, 20, 4), Waiting("b", 10, 20, 1), Waiting("c", 10, 20, 0), Waiting("d", 9, 3, 4)]
    assert control.begin(passes[0], waiting, prefill=0, prefill_left=0, budget=100) == 4
    assert control.lengths == {"a": 4, "b": 1, "c": 0, "d": 2}
    assert control.cut("b", [7, 8, 9]) == [7]
    control.begin(passes[1], waiting[:1], prefill=0, prefill_left=0, budget=100)  # scheduled ahead
    control.end(passes[0], {})
    assert told == []
    control.end(passes[1], {"a": Came(4, 4, 3), "b": Came(1, 0, 1), "d": Came(2, 2, 3)})
    ((decision, outcome),) = told
    assert decision.request_ids == ("a", "b", "c", "d")
    assert outcome.verified.tolist() == [4, 0, 0, 2]
    assert outcome.accepted.tolist() == [2, 0, 0, 2]
    assert outcome.observed.tolist() == [True, True, False, True]
    assert outcome.seconds is not None and outcome.seconds > 0
    assert control.begin(passes[2], [], prefill=5, prefill_left=3, budget=100) == 0


def test_a_pass_with_an_unexpected_prompt_tells_nothing_of_time(control: LengthControl) -> None:
    told: list[Any] = []
    control.policy.observe = lambda decision, outcome: told.append(outcome)  # type: ignore[method-assign]
    keys = [object() for _ in range(3)]
    waiting = [Waiting("a", 10, 20, 4)]
    control.begin(keys[0], waiting, prefill=0, prefill_left=0, budget=9)
    control.end(keys[0], {})
    control.begin(keys[1], waiting, prefill=30, prefill_left=0, budget=9)
    control.end(keys[1], {"a": Came(4, 4, 1)})
    control.end(object(), {"a": Came(4, 4, 1)})  # nobody knows this pass
    assert [outcome.seconds for outcome in told] == [None]
