"""Tiny models and engines. These tests need vLLM: `make test-vllm` runs them in an environment of their own."""

from __future__ import annotations

import copy
import gc
import os

# Before anything of vLLM is imported: the engine in this process, on one thread.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
)

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaptspec.serving import Decision, ServingPolicy, StepContext, StepOutcome
from tests.tiny_models import TOKENS, save_tokenizer

PROPOSER = "adaptspec.serving.vllm.AdaptiveProposer"
LONGEST = 6


def save_llama(folder: Path, *, layers: int, seed: int, spread: float) -> Path:
    """A random Llama that vLLM's attention on a CPU can run: heads of 32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=spread,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its greedy texts wander: near-ties are rare, and so are repetitions."""
    return save_llama(tmp_path_factory.mktemp("target"), layers=2, seed=0, spread=0.3)


@dataclass
class Recorder(ServingPolicy):
    """Plays a drafter and a length drawn anew for every row, and keeps what it is told.

    It is a policy that the proposer takes for any other, and the hardest one: every ragged batch comes up.
    """

    names: tuple[str, ...]
    seed: int = 0
    contexts: list[StepContext] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    outcomes: list[tuple[Decision, StepOutcome]] = field(default_factory=list)
    finished: set[Any] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def decide(self, context: StepContext) -> Decision:
        count = len(context)
        caps = np.full(count, LONGEST)
        for limit in (context.max_lengths, None if context.remaining is None else context.remaining - 1):
            if limit is not None:
                caps = np.clip(caps, 0, limit)
        arms = self.draw(count)
        budgets = [0 if name == "ar" else int(name.rpartition("@")[2]) for name in self.names]
        lengths = np.minimum(np.array(budgets)[arms], np.maximum(caps, 0))
        decision = Decision(
            len(self.decisions) + 1, context.request_ids, self.names, arms, lengths, plan="drawn", refresh=()
        )
        self.contexts.append(context)
        self.decisions.append(decision)
        return decision

    def draw(self, count: int) -> np.ndarray:
        return self.rng.integers(0, len(self.names), count)

    def observe(self, decision: Decision, outcome: StepOutcome) -> None:
        self.outcomes.append((decision, outcome))

    def finish(self, request_ids: Any) -> None:
        self.finished.update(request_ids)

    @property
    def verified(self) -> int:
        return sum(int(outcome.verified.sum()) for _, outcome in self.outcomes)

    @property
    def accepted(self) -> int:
        return sum(int(outcome.accepted.sum()) for _, outcome in self.outcomes)


@dataclass
class Engine:
    """A vLLM engine in this process and what is inside."""

    llm: Any

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def runner(self) -> Any:
        return self.core.model_executor.driver_worker.worker.model_runner

    @property
    def drafter(self) -> Any:
        return self.runner.drafter

    def record(self, *names: str, seed: int = 0) -> Recorder:
        """From now on, arms are drawn."""
        recorder = Recorder(("ar", *names), seed)
        self.drafter.policy = recorder
        return recorder

    def plain(self, prompts: list[list[int]], params: Any) -> list[list[int]]:
        """What the requests give when they opt out of speculation; of an engine without it if there is no drafter."""
        opted_out = [copy.deepcopy(one) for one in (params if isinstance(params, list) else [params] * len(prompts))]
        for one in opted_out:
            one.extra_args = {"adaptspec_speculate": False}
        return self.generate(prompts, opted_out)

    def generate(self, prompts: list[list[int]], params: Any) -> list[list[int]]:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(one.outputs[0].token_ids) for one in self.llm.generate(given, params, use_tqdm=False)]

    def metric(self, name: str) -> int:
        return next((one.value for one in self.llm.get_metrics() if one.name == f"vllm:{name}"), 0)


Open = Callable[..., Any]


@pytest.fixture(scope="session")
def open_engine(target: Path) -> Open:
    """Makes engines: `with open_engine(settings={...}) as engine`; without settings one without speculation."""

    @contextmanager
    def make(model: Path = target, *, settings: dict[str, Any] | None = None, **options: Any) -> Iterator[Engine]:
        from vllm import LLM

        arguments = {
            "enforce_eager": True,
            "gpu_memory_utilization": 0.1,
            "dtype": "float32",
            "max_model_len": 224,
            "max_num_seqs": 4,
            "num_gpu_blocks_override": 64,
            "disable_log_stats": False,
            "seed": 0,
            **options,
        }
        if settings is not None:
            arguments.setdefault(
                "speculative_config",
                {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": LONGEST},
            )
            arguments["additional_config"] = {"adaptspec": settings}
        engine = Engine(LLM(str(model), **arguments))
        try:
            yield engine
        finally:
            engine.core.shutdown()
            engine.llm = None
            gc.collect()

    return make


ARMS = ("suffix@1", "suffix@4", "token-recycling@3", "token-recycling@6", "prompt-lookup@6")
LOOKUPS = {"drafters": ["suffix", "token-recycling", "prompt-lookup"], "log_seconds": 0}


def make_requests(count: int, *, seed: int, longest: int = 80) -> tuple[list[list[int]], list[Any]]:
    """Prompts of 2 to 70 tokens, answers of 1 to `longest`, so that requests join and leave at every step."""
    from vllm import SamplingParams

    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, 60, rng.integers(2, 70)).tolist() for _ in range(count)]
    for prompt in prompts[::3]:
        prompt.extend(prompt[: len(prompt) // 2])  # something to copy
    params = [
        SamplingParams(temperature=0, max_tokens=int(rng.integers(1, longest)), ignore_eos=True) for _ in range(count)
    ]
    return prompts, params


def check_feedback(
    engine: Engine, recorder: Recorder, *, since: tuple[int, int] = (0, 0), padded: bool = False
) -> None:
    """What the policy was told is what vLLM counted, which counts padding as drafts: that is none of ours."""
    drafted, accepted = (now - then for now, then in zip(counted(engine), since, strict=True))
    assert recorder.accepted == accepted
    if padded:
        assert recorder.verified <= drafted
    else:
        assert recorder.verified == drafted
        assert all(outcome.padding == 0 for _, outcome in recorder.outcomes)


def counted(engine: Engine) -> tuple[int, int]:
    """Draft tokens and accepted ones, by vLLM's own count."""
    drafted, accepted = (engine.metric(f"spec_decode_num_{name}_tokens") for name in ("draft", "accepted"))
    return drafted, accepted
