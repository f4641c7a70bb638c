"""One call of `generate`: what a transformers generation config asks for, run as a `Session`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np
import torch

from adaptspec.control.controller import Controller
from adaptspec.control.history import History
from adaptspec.drafters import Drafter
from adaptspec.proposing import Proposer
from adaptspec.results import GenerationResult, stats_of
from adaptspec.session import Limits, OnStep, Session
from adaptspec.target.hf import HFTarget
from adaptspec.target.rows import check_processors
from adaptspec.types import Sampling, StepRecord
from adaptspec.verify import VERIFIERS

_KNOWN_MODEL_ARGUMENTS = frozenset(
    ["attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep", "token_type_ids"]
)
_UNSUPPORTED_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


class Engine:
    """What the requests of one `AdaptiveSpec` share: drafters, controller, and a target per model. One request runs at
    a time; others wait. `vocab` names the vocabularies that a drafter may be asked with, where that is not its own
    business."""

    def __init__(
        self,
        *,
        drafters: dict[str, Drafter],
        controller: Controller,
        verifier: str,
        draft_timeout: float,
        vocab: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.drafters = drafters
        self.vocab = dict(vocab or {})
        self.controller = controller
        self.verifier = verifier
        self.draft_timeout = draft_timeout
        self.lock = threading.RLock()
        self.history = History()
        self.last_result: GenerationResult | None = None
        self._busy = False

    @contextmanager
    def request(self, model: torch.nn.Module, tokenizer: Any) -> Iterator[HFTarget]:
        """A target for one request, met by the drafters in play. Other threads wait for this object and for the model.

        The target is made anew each time: it holds the model, and what it knows of it may have changed since.

        Raises:
            RuntimeError: called from inside a request of the same object, or a drafter is in use elsewhere.
        """
        with self.lock, _lock_of(model):
            if self._busy:
                raise RuntimeError("this AdaptiveSpec is already generating in this thread")
            taken: list[Drafter] = []
            self._busy = True
            try:
                for name in self.controller.drafters_in_play(self.drafters):
                    drafter = self.drafters[name]
                    if drafter in _IN_USE:
                        raise RuntimeError(
                            f"drafter {name!r} is in use by another request; give each AdaptiveSpec its own"
                        )
                    _IN_USE.add(drafter)
                    taken.append(drafter)
                yield self.target(model, tokenizer)
            finally:
                self._busy = False
                for drafter in taken:
                    _IN_USE.discard(drafter)

    def target(self, model: torch.nn.Module, tokenizer: Any) -> HFTarget:
        """A new target for a model, met by the drafters in play."""
        target = HFTarget(model, tokenizer=tokenizer)
        for name in self.controller.drafters_in_play(self.drafters):
            drafter = self.drafters[name]
            vocab = self.vocab.get(name, drafter.vocab)
            if drafter.vocab != vocab:  # another object has told the drafter otherwise since
                drafter.use_vocab(vocab)
            drafter.bind(target)
        return target


_IN_USE: weakref.WeakSet[Drafter] = weakref.WeakSet()
_MODEL_LOCKS: weakref.WeakKeyDictionary[torch.nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_MODEL_LOCKS_LOCK = threading.Lock()


def _lock_of(model: torch.nn.Module) -> threading.RLock:
    """One lock per model: a request switches the attention implementation in its config."""
    with _MODEL_LOCKS_LOCK:
        return _MODEL_LOCKS.setdefault(model, threading.RLock())


class Request:
    """One call of `custom_generate`."""

    def __init__(
        self,
        engine: Engine,
        *,
        tokenizer: Any,
        streamer: Any,
        on_step: OnStep | None,
        seed: int | None,
        criteria: Sequence[Any] = (),
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.streamer = streamer
        self.on_step = on_step
        self.seed = seed
        self.criteria = list(criteria)
        self.result: GenerationResult | None = None

    def __call__(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        tokenizer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        started = perf_counter()
        check_generation_config(generation_config)
        check_input_ids(input_ids, model)
        check_processors(logits_processor)
        padding = _left_padding(input_ids, model_kwargs)
        sampling = sampling_of(generation_config)
        limits = limits_of(
            [*(stopping_criteria or ()), *self.criteria], generation_config, prompt_length=input_ids.shape[1]
        )
        seed = self.seed if self.seed is not None else int(torch.randint(2**62, ()).item())
        engine = self.engine
        with engine.request(model, self.tokenizer or tokenizer) as target:
            session = Session(
                target=target,
                drafters={name: engine.drafters[name] for name in engine.controller.drafters_in_play(engine.drafters)},
                controller=engine.controller,
                proposer=Proposer(vocab_size=target.vocab_size, timeout=engine.draft_timeout),
                sampling=sampling,
                processors=logits_processor,
                verifier=engine.verifier,
                limits=limits,
                rng=np.random.default_rng(seed),
                on_step=self._step_sink(),
                history=engine.history,
            )
            if self.streamer is not None:
                self.streamer.put(input_ids.cpu())
            try:
                sequences = session.run(input_ids[0, padding:], prefix=input_ids[0, :padding] if padding else None)
            finally:
                if self.streamer is not None:
                    self.streamer.end()
        stats = stats_of(
            session,
            seconds=perf_counter() - started,
            lossless=engine.verifier == "auto" or VERIFIERS[engine.verifier].lossless,
        )
        self.result = GenerationResult(sequences.to(input_ids.device), stats, session.trace)
        engine.last_result = self.result
        if getattr(generation_config, "return_dict_in_generate", False):
            from transformers.generation import GenerateDecoderOnlyOutput

            return GenerateDecoderOnlyOutput(sequences=self.result.sequences)
        return self.result.sequences

    def _step_sink(self) -> OnStep | None:
        if self.streamer is None:
            return self.on_step

        def sink(record: StepRecord, tokens: list[int]) -> None:
            self.streamer.put(torch.tensor(tokens))
            if self.on_step is not None:
                self.on_step(record, tokens)

        return sink


def check_input_ids(input_ids: Any, model: Any) -> None:
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2:
        shape = list(input_ids.shape) if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
        raise ValueError(f"input_ids must be a tensor of shape [1, T], got {shape}")
    if input_ids.shape[0] != 1:
        raise ValueError(f"input_ids must hold one sequence, got a batch of {input_ids.shape[0]}")
    if input_ids.shape[1] == 0:
        raise ValueError("input_ids must not be empty")
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"input_ids must be int64 or int32, got {input_ids.dtype}")
    if hasattr(model, "get_input_embeddings") and (embeddings := model.get_input_embeddings()) is not None:
        size = embeddings.weight.shape[0]
        low, high = int(input_ids.min()), int(input_ids.max())
        if low < 0 or high >= size:
            raise ValueError(f"input_ids must be in [0, {size}), got {low if low < 0 else high}")


def check_generation_config(config: Any) -> None:
    """Refuse what a single tree-verified sequence cannot honour."""
    for name in ("num_beams", "num_return_sequences"):
        if (value := getattr(config, name, 1) or 1) != 1:
            raise ValueError(f"{name} must be 1, got {value}")
    for name in ("penalty_alpha", "dola_layers", "assistant_model", "prompt_lookup_num_tokens", "force_words_ids"):
        if (value := getattr(config, name, None)) is not None:
            raise ValueError(f"{name} asks for another decoding method, got {value!r}")
    for name in _UNSUPPORTED_OUTPUTS:
        if getattr(config, name, False):
            raise ValueError(f"{name} is not supported with speculative decoding")


def _left_padding(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> int:
    """Number of masked columns at the left."""
    if unknown := sorted(set(model_kwargs) - _KNOWN_MODEL_ARGUMENTS):
        raise ValueError(f"unsupported model arguments {', '.join(unknown)}; supported: input_ids and attention_mask")
    cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError("a cache that already holds tokens is not supported; pass the whole input_ids")
    if model_kwargs.get("token_type_ids") is not None:
        raise ValueError("token_type_ids is not supported with speculative decoding")
    padding = _masked_columns(input_ids, model_kwargs.get("attention_mask"))
    positions = model_kwargs.get("position_ids")
    if positions is not None and positions[0, padding:].tolist() != list(range(input_ids.shape[1] - padding)):
        raise ValueError("position_ids must count the unmasked tokens from 0, got other positions")
    return padding


def _masked_columns(input_ids: torch.Tensor, mask: torch.Tensor | None) -> int:
    if mask is None:
        return 0
    if tuple(mask.shape) != tuple(input_ids.shape):
        raise ValueError(f"attention_mask must have shape {list(input_ids.shape)}, got {list(mask.shape)}")
    kept = mask[0].bool()
    padding = int((~kept).sum())
    if padding == len(kept):
        raise ValueError("attention_mask must keep at least one token")
    if not bool(kept[padding:].all()):
        raise ValueError("attention_mask may mask tokens at the left end only")
    return padding


def sampling_of(config: Any) -> Sampling:
    """How a generation config chooses tokens."""
    if config is None or not config.do_sample:
        return Sampling()
    temperature = 1.0 if config.temperature is None else float(config.temperature)
    return Sampling(temperature, int(config.top_k or 0), float(1.0 if config.top_p is None else config.top_p))


def stop_criteria(stop_strings: str | Sequence[str] | None, tokenizer: Any) -> list[Any]:
    """Criteria that end a text after any of these strings; none if there are none.

    Raises:
        ValueError: something else than text, or no tokenizer.
    """
    strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings or ())
    if not strings:
        return []
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop_strings must be text that is not empty, got {string!r}")
    if tokenizer is None:
        raise ValueError(
            "stop_strings (of the call, or of the model's generation config) needs the tokenizer: pass tokenizer="
        )
    from transformers import StopStringCriteria

    return [StopStringCriteria(tokenizer=tokenizer, stop_strings=strings)]


def limits_of(criteria: Any, config: Any, *, prompt_length: int) -> Limits:
    """End-of-sequence tokens and lengths are read off the criteria; what else there is, is asked after every token."""
    from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

    longest: list[int] = []
    eos: set[int] = set()
    others = StoppingCriteriaList()
    for criterion in criteria or ():
        if type(criterion) is MaxLengthCriteria:
            longest.append(criterion.max_length - prompt_length)
        elif type(criterion) is EosTokenCriteria:
            eos.update(int(token) for token in criterion.eos_token_id.reshape(-1).tolist())
        else:
            others.append(criterion)
    if not longest:
        longest = [(getattr(config, "max_length", None) or prompt_length + 20) - prompt_length]
    if min(longest) < 1:
        raise ValueError(f"max_new_tokens must be >= 1, got {min(longest)} (max_length minus the prompt)")

    def should_stop(tokens: torch.Tensor) -> bool:
        return bool(others(tokens, None).any())

    return Limits(min(longest), frozenset(eos), should_stop if others else None)
