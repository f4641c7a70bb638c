"""Faulty drafters cost speed, never the output; faulty input gets one clear error and no output."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from adaptspec import AdaptiveSpec
from adaptspec.drafters import Drafter
from adaptspec.drafters.draft_model import DraftModel
from adaptspec.types import DraftContext, DraftTree
from tests import tiny_models
from tests.lossless.test_greedy import prompt, reference
from tests.target.families import FAMILIES, VOCAB


@pytest.fixture(scope="module")
def model() -> Any:
    return FAMILIES["llama"]("sdpa")


class Faulty(Drafter):
    """Proposes what it is told to, from the third proposal on."""

    name = "faulty"
    isolate = False

    def __init__(self, fault: Callable[[], Any], where: str = "propose") -> None:
        self.fault = fault
        self.where = where
        self.calls = 0

    def prefill(self, token_ids: np.ndarray, features: Any = None) -> None:
        if self.where == "prefill":
            self.fault()

    def propose(self, context: DraftContext, budget: int) -> Any:
        self.calls += 1
        if self.where == "propose" and self.calls >= 3:
            return self.fault()
        return DraftTree.empty()

    def observe(self, observation: Any) -> None:
        if self.where == "observe":
            self.fault()

    def finish(self) -> None:
        if self.where == "finish":
            self.fault()


def fail() -> None:
    raise KeyError("lost")


def tree(tokens: list[int], parents: list[int], scores: list[float] | None = None, **fields: Any) -> DraftTree:
    values = np.zeros(len(tokens)) if scores is None else np.array(scores)
    return DraftTree(np.array(tokens), np.array(parents), values, **fields)


INVALID = {
    "raises": (fail, "KeyError: 'lost'"),
    "no tree": (lambda: [1, 2], "must return a DraftTree, got list"),
    "parent not smaller": (
        lambda: tree([1, 2], [-1, 1]),
        r"parents must satisfy -1 <= parents\[i\] < i, got 1 at node 1",
    ),
    "parent below root": (lambda: tree([1], [-2]), "got -2 at node 0"),
    "token too large": (lambda: tree([VOCAB], [-1]), rf"token_ids must be in \[0, {VOCAB}\), got {VOCAB} at node 0"),
    "token negative": (lambda: tree([-1], [-1]), "got -1 at node 0"),
    "over budget": (lambda: tree(list(range(9)), [-1] * 9), "at most budget = 8 nodes, got 9"),
    "duplicate siblings": (lambda: tree([4, 4], [-1, -1]), "siblings must carry different tokens"),
    "NaN score": (lambda: tree([4], [-1], [float("nan")]), "got nan at node 0"),
    "positive score": (lambda: tree([4], [-1], [0.5]), "must be <= 0, got 0.5"),
    "float tokens": (lambda: tree([4.0], [-1]), "signed integer dtype"),
    "wrong shape": (lambda: tree([4, 5], [-1]), r"shape \[2\]"),
    "too deep": (lambda: DraftTree.chain(range(8)), None),
    "sampled without q": (lambda: tree([4], [-1], siblings="iid"), "needs draft_probs"),
    "unknown siblings": (lambda: tree([4], [-1], siblings="magic"), "siblings must be one of"),
}


@pytest.mark.parametrize("case", INVALID)
def test_a_faulty_proposal_sets_the_drafter_aside(case: str, model: Any, caplog: pytest.LogCaptureFixture) -> None:
    fault, message = INVALID[case]
    drafter = Faulty(fault)
    spec = AdaptiveSpec([drafter], "fixed:faulty@8")
    expected = reference(model, prompt(), max_new_tokens=12)
    with caplog.at_level(logging.WARNING, logger="adaptspec"):
        result = spec.generate(model, prompt(), max_new_tokens=12)
    assert torch.equal(result.sequences, expected)
    if message is None:  # a tree that fits early in the request is too deep near its end
        assert "depth must be <=" in result.stats.set_aside["faulty"]
    else:
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(result.stats.set_aside["faulty"])
    assert sum("set aside" in record.message for record in caplog.records) == 1
    assert sum(record.fault is not None for record in result.trace) == 1
    calls = drafter.calls
    again = spec.generate(model, prompt(), max_new_tokens=12)  # the next request asks it again
    assert torch.equal(again.sequences, expected)
    assert drafter.calls > calls


@pytest.mark.parametrize("where", ["prefill", "observe", "finish"])
def test_faults_elsewhere(where: str, model: Any) -> None:
    spec = AdaptiveSpec([Faulty(fail, where)], "fixed:faulty@8")
    result = spec.generate(model, prompt(), max_new_tokens=12)
    assert torch.equal(result.sequences, reference(model, prompt(), max_new_tokens=12))
    assert "KeyError" in result.stats.set_aside["faulty"]


class Sleeper(Faulty):
    """Never answers in time, and is not trusted not to block."""

    name = "sleeper"
    isolate = True


@pytest.mark.parametrize("isolate", [True, False])
def test_a_hanging_drafter_is_given_up(isolate: bool, model: Any) -> None:
    def sleep() -> DraftTree:
        time.sleep(30.0 if isolate else 0.6)
        return DraftTree.empty()

    drafter = Sleeper(sleep)
    drafter.isolate = isolate
    spec = AdaptiveSpec([drafter], "fixed:sleeper@8", draft_timeout=0.3)
    started = time.perf_counter()
    result = spec.generate(model, prompt(), max_new_tokens=12)
    assert time.perf_counter() - started < 15.0
    assert torch.equal(result.sequences, reference(model, prompt(), max_new_tokens=12))
    assert "DraftTimeout" in result.stats.set_aside["sleeper"]


def test_an_interrupt_passes_through(model: Any) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    spec = AdaptiveSpec([Faulty(interrupt)], "fixed:faulty@8")
    with pytest.raises(KeyboardInterrupt):
        spec.generate(model, prompt(), max_new_tokens=12)
    spec.drafters["faulty"].fault = DraftTree.empty  # and leaves the object usable
    result = spec.generate(model, prompt(), max_new_tokens=12)
    assert torch.equal(result.sequences, reference(model, prompt(), max_new_tokens=12))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"repetition_penalty": 1.2}])
def test_bad_target_logits_are_one_error(value: float, options: dict[str, Any]) -> None:
    broken = FAMILIES["llama"]("sdpa")
    with torch.no_grad():
        broken.lm_head.weight[5] = value
    with pytest.raises(ValueError, match="target logits must be finite and not NaN"):
        AdaptiveSpec(["suffix"]).generate(broken, prompt(), max_new_tokens=12, **options)


BAD_CALLS = [
    ({"input_ids": torch.zeros((1, 0), dtype=torch.long)}, "input_ids must not be empty"),
    ({"input_ids": torch.zeros((2, 4), dtype=torch.long)}, "one sequence, got a batch of 2"),
    ({"input_ids": torch.zeros(4, dtype=torch.long)}, r"shape \[1, T\], got \[4\]"),
    ({"input_ids": [[1, 2]]}, "got list"),
    ({"input_ids": torch.zeros((1, 4))}, "int64 or int32, got torch.float32"),
    ({"input_ids": torch.full((1, 4), VOCAB)}, rf"in \[0, {VOCAB}\), got {VOCAB}"),
    ({"input_ids": torch.full((1, 4), -3)}, "got -3"),
    ({"input_ids": torch.ones((1, 300), dtype=torch.long)}, "300 tokens, the model's context holds 256"),
    ({"max_new_tokens": 0}, "max_new_tokens must be a whole number >= 1, got 0"),
    ({"max_new_tokens": 2.5}, "got 2.5"),
    ({"min_new_tokens": -1}, "min_new_tokens must be a whole number >= 0, got -1"),
    ({"temperature": -0.1}, "temperature must be >= 0 and finite, got -0.1"),
    ({"temperature": float("nan")}, "got nan"),
    ({"temperature": 1.0, "top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
    ({"temperature": 1.0, "top_k": -2}, "top_k must be a whole number >= 0"),
    ({"repetition_penalty": 0.0}, "repetition_penalty must be > 0"),
    ({"stop_strings": "x"}, "needs the tokenizer"),
]


@pytest.mark.parametrize(("options", "message"), BAD_CALLS, ids=[message for _, message in BAD_CALLS])
def test_bad_arguments_name_field_value_and_range(options: dict[str, Any], message: str, model: Any) -> None:
    arguments = {"input_ids": prompt(), **options}
    with pytest.raises(ValueError, match=message):
        AdaptiveSpec(["suffix"]).generate(model, **arguments)


BAD_SPECS = [
    ({"pool": ["sufix"]}, "unknown drafter 'sufix'; did you mean 'suffix'"),
    ({"pool": "suffix"}, "pool must be a list"),
    ({"pool": ["suffix", "suffix"]}, "twice"),
    ({"pool": ["suffix:here"]}, "takes no path"),
    ({"pool": ["suffix"], "strategy": "fixed:sam@8"}, "not in the pool: suffix"),
    ({"pool": ["suffix"], "strategy": "fixed:suffix"}, "arm must look like"),
    ({"pool": ["suffix"], "strategy": "fixd:suffix@8"}, "unknown strategy"),
    ({"pool": ["suffix"], "strategy": "fixed:suffix@0"}, "must be >= 1"),
    ({"budgets": (8, -1)}, r"budgets must be whole numbers in \[0, 1024\] or 'auto', got -1"),
    ({"budgets": ()}, "budgets must not be empty"),
    ({"budgets": 8}, "budgets must be a sequence"),
    ({"verifier": "blok"}, "unknown verifier 'blok'; did you mean 'block'"),
    ({"draft_timeout": 0}, "draft_timeout must be > 0"),
    ({"seed": -1}, "seed must be a whole number >= 0, got -1"),
    ({"vocab": ("frr:16",)}, "unknown vocab 'frr'; did you mean 'fr'"),
    ({"vocab": ("fr",)}, "vocab 'fr' must give a number of rows >= 1 behind the colon, got ''"),
]


@pytest.mark.parametrize(("options", "message"), BAD_SPECS, ids=[message for _, message in BAD_SPECS])
def test_bad_specs(options: dict[str, Any], message: str) -> None:
    arguments = {"strategy": "fixed:ar", **options}
    with pytest.raises(ValueError, match=message):
        AdaptiveSpec(**arguments)


def test_other_decoding_methods_are_refused(model: Any) -> None:
    spec = AdaptiveSpec(["suffix"], "fixed:suffix@8")
    for options, message in (
        ({"num_beams": 2}, "num_beams must be 1|batch of 2"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences must be 1|batch of 2"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores is not supported"),
        ({"guidance_scale": 2.0}, "keeps state between calls"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(
                prompt(), attention_mask=torch.ones_like(prompt()), custom_generate=spec, max_new_tokens=4, **options
            )


def test_masks_in_the_middle_are_refused(model: Any) -> None:
    mask = torch.ones_like(prompt())
    mask[0, 3] = 0
    with pytest.raises(ValueError, match="left end only"):
        model.generate(prompt(), attention_mask=mask, custom_generate=AdaptiveSpec(["suffix"]), max_new_tokens=4)


def test_a_draft_model_with_other_tokens_is_refused(model: Any) -> None:
    other = tiny_models.make_llama(vocab_size=VOCAB + 8)
    spec = AdaptiveSpec([DraftModel(other)], "fixed:draft-model@4")
    with pytest.raises(ValueError, match=f"vocabulary has {VOCAB + 8} entries, the target's {VOCAB}"):
        spec.generate(model, prompt(), max_new_tokens=4)


def test_typical_is_for_sampling_only(model: Any) -> None:
    spec = AdaptiveSpec(["suffix"], "fixed:suffix@8", verifier="typical")
    result = spec.generate(model, prompt(), max_new_tokens=20)
    assert torch.equal(result.sequences, reference(model, prompt(), max_new_tokens=20))


def test_processors_may_write_into_the_scores(model: Any) -> None:
    from transformers import LogitsProcessor, LogitsProcessorList

    class Ban(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            scores[:, 3] = -1e9
            return scores

    spec = AdaptiveSpec(["token-recycling"], "fixed:token-recycling@8")
    options = {"max_new_tokens": 20, "logits_processor": LogitsProcessorList([Ban()])}
    expected = reference(model, prompt(), **options)
    assert torch.equal(reference(model, prompt(), custom_generate=spec, **options), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_ids": torch.arange(24)[None] + 10}, "must count the unmasked tokens from 0"),
        ({"token_type_ids": torch.ones((1, 24), dtype=torch.long)}, "token_type_ids is not supported"),
    ],
)
def test_arguments_that_would_be_ignored_are_refused(options: dict[str, Any], message: str) -> None:
    gpt2 = FAMILIES["gpt2"]("sdpa")
    spec = AdaptiveSpec(["suffix"], "fixed:ar")
    with pytest.raises(ValueError, match=message):
        reference(gpt2, prompt(), max_new_tokens=4, custom_generate=spec, **options)


def test_one_object_serves_models_in_turn() -> None:
    wide, narrow = FAMILIES["llama"]("sdpa"), tiny_models.make_llama(vocab_size=VOCAB - 32)
    for arm in ("layer-skip@4", "lookahead@8"):
        spec = AdaptiveSpec(["layer-skip", "lookahead"], f"fixed:{arm}")
        for model in (wide, narrow, wide):
            result = spec.generate(model, prompt(), max_new_tokens=10)
            assert torch.equal(result.sequences, reference(model, prompt(), max_new_tokens=10))
            assert result.stats.set_aside == {}


def test_a_request_inside_a_request_is_refused_and_not_a_deadlock(model: Any) -> None:
    spec = AdaptiveSpec(["suffix"], "fixed:suffix@8")
    with pytest.raises(RuntimeError, match="already generating in this thread"):
        spec.generate(model, prompt(), max_new_tokens=8, on_step=lambda *_: spec.generate(model, prompt()))
    assert spec.generate(model, prompt(), max_new_tokens=8).stats.new_tokens == 8


def test_a_drafter_serves_one_request_at_a_time(model: Any) -> None:
    from adaptspec.drafters import make_drafter

    shared = make_drafter("suffix")
    one, other = (AdaptiveSpec([shared], "fixed:suffix@8") for _ in range(2))
    with pytest.raises(RuntimeError, match="in use by another request"):
        one.generate(model, prompt(), max_new_tokens=8, on_step=lambda *_: other.generate(model, prompt()))


def test_threads_on_one_model_wait_for_each_other(model: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    expected = reference(model, prompt(), max_new_tokens=12)
    specs = [AdaptiveSpec(["suffix"], "fixed:suffix@8") for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda spec: spec.generate(model, prompt(), max_new_tokens=12), specs * 3))
    assert all(torch.equal(result.sequences, expected) for result in results)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_is_not_kept_alive() -> None:
    import gc
    import weakref

    model = tiny_models.make_llama()
    spec = AdaptiveSpec(["suffix"], "fixed:suffix@8")
    spec.generate(model, torch.tensor([[3, 4, 5]]), max_new_tokens=4)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_training_mode_with_dropout_is_refused() -> None:
    model = FAMILIES["gpt2"]("sdpa").train()
    with pytest.raises(ValueError, match=r"call model.eval\(\)"):
        AdaptiveSpec(["suffix"], "fixed:ar").generate(model, prompt(), max_new_tokens=4)


def test_contexts_end_where_rotary_embeddings_change() -> None:
    from transformers import Phi3Config, Phi3ForCausalLM

    config = Phi3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        original_max_position_embeddings=40,
        pad_token_id=0,
        sliding_window=None,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [3.0, 4.0, 5.0, 6.0],
            "original_max_position_embeddings": 40,
        },
    )
    model = Phi3ForCausalLM(config).eval()
    result = AdaptiveSpec(["suffix"], "fixed:suffix@8").generate(model, prompt(), max_new_tokens=60)
    assert result.finish_reason == "context"
    assert torch.equal(result.sequences, reference(model, prompt(), max_new_tokens=17))


def test_row_order_attention_is_refused() -> None:
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    config = GPTNeoConfig(
        vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
    )
    with pytest.raises(ValueError, match="from the row order"):
        AdaptiveSpec(["suffix"]).generate(GPTNeoForCausalLM(config).eval(), prompt(), max_new_tokens=4)
