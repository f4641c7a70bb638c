"""`AdaptiveSpec`, the facade: a pool of drafters, a strategy, and `generate`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch

from adaptspec.bandits import Policy
from adaptspec.control.arms import Budget, check_budgets, make_arms
from adaptspec.control.learning import Objective
from adaptspec.control.strategies import make_controller
from adaptspec.drafters import Drafter, make_drafter
from adaptspec.generation import Engine, Request, check_input_ids
from adaptspec.names import unknown_name
from adaptspec.results import GenerationResult
from adaptspec.session import OnStep
from adaptspec.state_file import load_state, save_state
from adaptspec.types import Arm, Sampling
from adaptspec.verify import VERIFIERS


class AdaptiveSpec:
    """Speculative decoding with a pool of drafters and a strategy that picks among them.

    Args:
        pool: drafter names, "name:path-or-hub-id", `Drafter` objects, `Arm` objects or arm strings ("suffix@16").
        strategy: a policy's name ("hedge", "ucb", "exp3", ...), a `Policy` object, or "fixed:<arm>", for example
            "fixed:suffix@16" or "fixed:ar" (no speculation).
        budgets: draft nodes to verify, root not counted.
        vocab: vocabularies of the draft head, for drafters that have one.
        objective: "throughput" learns tokens per second, "accepted_length" tokens per step.
        guard: share of the speed without speculation that learning may cost at most, None for no guard.
        seed: of everything random in this object.
        verifier: a rule of `adaptspec.verify.VERIFIERS` for sampled generation, or "auto". "typical" is lossy.
        draft_timeout: seconds after which a drafter is set aside for the request.

    Raises:
        ValueError: unknown names, impossible budgets, or a fixed arm that is not in the pool.

    One object serves one request at a time (concurrent calls wait); what drafters learn stays in it.
    """

    def __init__(
        self,
        pool: Sequence[str | Drafter | Arm] = ("suffix", "token-recycling"),
        strategy: str | Policy = "hedge",
        *,
        budgets: Sequence[Budget] = (8, 16, 32, 64),
        vocab: Sequence[str] = ("full",),
        objective: Objective = "throughput",
        guard: float | None = 0.05,
        seed: int = 0,
        verifier: str = "auto",
        draft_timeout: float = 10.0,
    ) -> None:
        if isinstance(pool, str):
            raise ValueError(f"pool must be a list of drafters, got the string {pool!r}")
        if not draft_timeout > 0:
            raise ValueError(f"draft_timeout must be > 0 seconds, got {draft_timeout}")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed must be a whole number >= 0, got {seed!r}")
        if verifier != "auto" and (verifier not in VERIFIERS or verifier == "greedy"):
            raise unknown_name("verifier", verifier, (VERIFIERS.keys() | {"auto"}) - {"greedy"})
        self.budgets = check_budgets(budgets)
        self.drafters, explicit, plain = _read_pool(pool)
        for name in vocab:
            if name != "full":
                raise ValueError(f"unknown vocab {name!r}. Valid: full")
        self.arms = make_arms(plain, budgets=self.budgets, vocab=vocab, explicit=explicit)
        self.strategy = strategy
        self.engine = Engine(
            drafters=self.drafters,
            controller=make_controller(
                strategy, arms=self.arms, drafters=self.drafters, objective=objective, guard=guard, seed=seed
            ),
            verifier=verifier,
            draft_timeout=draft_timeout,
        )
        self._rng = np.random.default_rng(seed)
        self._settings: dict[str, Any] = {
            "pool": [str(entry) if isinstance(entry, (str, Arm)) else None for entry in pool],
            "strategy": strategy if isinstance(strategy, str) else None,
            "budgets": list(self.budgets),
            "vocab": list(vocab),
            "objective": objective,
            "guard": guard,
            "seed": seed,
            "verifier": verifier,
            "draft_timeout": draft_timeout,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what was learnt, between requests: policy, costs, calibration, drafters, random state.

        Raises:
            TypeError: a custom drafter's `state_dict` holds something that cannot be saved.
            OSError: the file cannot be written.
        """
        with self.engine.lock:
            save_state(
                path,
                {
                    "settings": self._settings,
                    "rng": self._rng.bit_generator.state,
                    "controller": self.engine.controller.state_dict(),
                    "drafters": {name: drafter.state_dict() for name, drafter in self.drafters.items()},
                },
            )

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        pool: Sequence[str | Drafter | Arm] | None = None,
        strategy: str | Policy | None = None,
    ) -> AdaptiveSpec:
        """The object that `save` wrote: its future decisions are those the saved one would have taken.

        Args:
            pool, strategy: needed only where the saved object was given objects and not names.

        Raises:
            FileNotFoundError: no such file.
            ValueError: a foreign or damaged file, or objects that are missing or do not fit.
        """
        state = load_state(path)
        if missing := {"settings", "rng", "controller", "drafters"} - state.keys():
            raise ValueError(f"{path} is damaged: it lacks {', '.join(sorted(missing))}")
        settings = dict(state["settings"])
        for name, given in (("pool", pool), ("strategy", strategy)):
            saved = settings[name]
            if given is not None:
                settings[name] = given
            elif saved is None or (name == "pool" and None in saved):
                raise ValueError(f"{path} was saved with objects in {name}; pass {name}=")
        spec = cls(**settings)
        if state["drafters"].keys() != spec.drafters.keys():
            raise ValueError(
                f"{path} holds the drafters {', '.join(state['drafters'])}, the pool has {', '.join(spec.drafters)}"
            )
        for name, drafter in spec.drafters.items():
            drafter.load_state_dict(state["drafters"][name])
        spec.engine.controller.load_state_dict(state["controller"])
        spec._rng.bit_generator.state = state["rng"]
        return spec

    @property
    def last_result(self) -> GenerationResult | None:
        """The result of the latest request, which `custom_generate=` has no other way to return."""
        return self.engine.last_result

    def generate(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        *,
        max_new_tokens: int = 128,
        min_new_tokens: int = 0,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        repetition_penalty: float | None = None,
        logits_processor: Sequence[Any] | None = None,
        stopping_criteria: Sequence[Any] | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        stop_strings: str | Sequence[str] | None = None,
        tokenizer: Any = None,
        streamer: Any = None,
        on_step: OnStep | None = None,
    ) -> GenerationResult:
        """Continue `input_ids` [1, T] with a transformers causal language model.

        Args:
            temperature: 0 is greedy.
            top_k, top_p: 0 and 1 switch them off.
            repetition_penalty: 1 is off, None leaves it to the model's generation config; applied to every draft node
                along its own path, like all processors.
            logits_processor, stopping_criteria: further transformers processors and criteria.
            eos_token_id: default: the model's generation config.
            stop_strings: end after any of these was produced; needs `tokenizer`.
            tokenizer: also used to check that a draft model's vocabulary is the target's.
            streamer: a transformers streamer; gets the prompt and then the tokens of each step.
            on_step: called with (StepRecord, new tokens) after the prefill and after every step.

        Raises:
            ValueError: a bad value, an unsupported model or option, a prompt that does not fit.
        """
        from transformers import StoppingCriteriaList, StopStringCriteria

        check_input_ids(input_ids, model)
        sampling = Sampling(temperature, top_k, top_p)
        _check_at_least("max_new_tokens", max_new_tokens, 1)
        _check_at_least("min_new_tokens", min_new_tokens, 0)
        if repetition_penalty is not None and not 0.0 < repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty must be > 0 and finite, got {repetition_penalty}")
        criteria = StoppingCriteriaList(stopping_criteria or [])
        if stop_strings:
            if tokenizer is None:
                raise ValueError("stop_strings needs the tokenizer: pass tokenizer=")
            criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=stop_strings))
        options: dict[str, Any] = {"do_sample": not sampling.greedy}
        if not sampling.greedy:
            options |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        if eos_token_id is not None:
            options["eos_token_id"] = eos_token_id
        if repetition_penalty is not None:
            options["repetition_penalty"] = repetition_penalty
        if min_new_tokens:
            options["min_new_tokens"] = min_new_tokens
        request = Request(
            self.engine,
            tokenizer=tokenizer,
            streamer=streamer,
            on_step=on_step,
            seed=int(self._rng.integers(2**62)),
        )
        model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_new_tokens,
            num_beams=1,
            num_return_sequences=1,
            pad_token_id=_pad_token(model, eos_token_id),
            logits_processor=logits_processor,
            stopping_criteria=criteria,
            custom_generate=request,
            **options,
        )
        assert request.result is not None
        return request.result

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
        """The transformers way: `model.generate(..., custom_generate=spec)`. Samples follow `torch.manual_seed`.

        transformers hands no `streamer=` to a function: bind it with `custom_generate=spec.hf(streamer=...)`.
        """
        request = self.hf(tokenizer=tokenizer)
        return request(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs)

    def hf(self, *, tokenizer: Any = None, streamer: Any = None, on_step: OnStep | None = None) -> Request:
        """A callable for `custom_generate=` with extras that transformers does not hand on, such as a streamer."""
        return Request(self.engine, tokenizer=tokenizer, streamer=streamer, on_step=on_step, seed=None)


def _read_pool(pool: Sequence[str | Drafter | Arm]) -> tuple[dict[str, Drafter], list[Arm], list[str]]:
    """Drafters by label, arms given whole, and the labels that take all budgets.

    A drafter's label is its name; drafters of one name ("rest:law.bin", "rest:code.bin") keep what was written.
    """
    arms = [_as_arm(entry) for entry in pool]
    entries = [entry for entry, arm in zip(pool, arms, strict=True) if arm is None]
    made = [make_drafter(entry) for entry in entries]
    for drafter in made:
        if not drafter.name:
            raise ValueError(f"{type(drafter).__name__} has no name; register it or set its class attribute `name`")
    names = [drafter.name for drafter in made]
    drafters: dict[str, Drafter] = {}
    for entry, drafter in zip(entries, made, strict=True):
        label = entry if names.count(drafter.name) > 1 and isinstance(entry, str) else drafter.name
        if label in drafters:
            raise ValueError(f"pool names the drafter {label!r} twice")
        drafters[label] = drafter
    plain = list(drafters)
    explicit = [arm for arm in arms if arm is not None]
    for arm in explicit:
        if arm.drafter != "ar" and arm.drafter not in drafters:
            drafters[arm.drafter] = make_drafter(arm.drafter)
    return drafters, explicit, plain


def _as_arm(entry: object) -> Arm | None:
    """The arm that an entry of a pool gives whole, else None."""
    if isinstance(entry, Arm):
        return entry
    return Arm.parse(entry) if isinstance(entry, str) and (entry == "ar" or "@" in entry) else None


def _check_at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")


def _pad_token(model: Any, eos_token_id: Any) -> int | None:
    """Quietens a warning of transformers; padding is never produced for one sequence."""
    pad = model.generation_config.pad_token_id
    if pad is not None:
        return int(pad)
    eos = eos_token_id if eos_token_id is not None else model.generation_config.eos_token_id
    if isinstance(eos, Sequence):
        return int(eos[0]) if eos else None
    return eos
