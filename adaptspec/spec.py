"""`AdaptiveSpec`, the facade: a pool of drafters, a strategy, and `generate`."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adaptspec.bandits import Policy
from adaptspec.calibrating import CONTEXT, SIZES, machine_fingerprint, measure_samples, profile_path
from adaptspec.control.arms import Budget, check_budgets, make_arms
from adaptspec.control.cost import CostModel
from adaptspec.control.learning import Objective
from adaptspec.control.merging import merge_controllers
from adaptspec.control.strategies import make_controller
from adaptspec.drafters import Drafter, make_drafter
from adaptspec.generation import Engine, Request, check_input_ids, stop_criteria
from adaptspec.names import unknown_name
from adaptspec.reporting import Report, make_report
from adaptspec.results import GenerationResult
from adaptspec.serving.from_settings import policy_from_settings
from adaptspec.serving.policy import STATE_KEY, ServingPolicy
from adaptspec.serving.types import Decision, StepContext, StepOutcome
from adaptspec.session import OnStep
from adaptspec.state_file import load_state, save_state
from adaptspec.target.hf import HFTarget
from adaptspec.types import Arm, Sampling
from adaptspec.verify import VERIFIERS
from adaptspec.vocab import check_vocab

SAVED_RECORDS = 20
"""Latest step records that are saved."""


class AdaptiveSpec:
    """Speculative decoding with a pool of drafters and a strategy that picks among them.

    Args:
        pool: drafter names, "name:path-or-hub-id", `Drafter` objects, `Arm` objects or arm strings ("suffix@16").
        strategy: a policy's name ("hedge", "ucb", "exp3", ...), a `Policy` object, or "fixed:<arm>", for example
            "fixed:suffix@16" or "fixed:ar" (no speculation).
        budgets: draft nodes to verify, root not counted.
        vocab: vocabularies of the draft head ("full", "fr:16384", ...: `adaptspec.vocab.VOCAB_HEADS`), for the drafters
            of the pool that have one; the others have one arm per budget. Arms given whole name their own.
        objective: "throughput" learns tokens per second, "accepted_length" tokens per step.
        guard: share of the speed without speculation that learning may cost at most, None for no guard.
        seed: of everything random in this object.
        verifier: a rule of `adaptspec.verify.VERIFIERS` for sampled generation, or "auto". "typical" is lossy.
        draft_timeout: seconds after which a drafter is set aside for the request.

    Raises:
        ValueError: unknown names, impossible budgets, a vocabulary that no drafter of the pool could use, or a fixed
            arm that is not in the pool.

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
        by_drafter = _vocab_of(self.drafters, plain, vocab=check_vocab(vocab), explicit=[*explicit, *_fixed(strategy)])
        for name, names in by_drafter.items():
            self.drafters[name].use_vocab(names)
        crossed = {name: vocab if self.drafters[name].takes_vocab else ("full",) for name in plain}
        self.arms = make_arms(plain, budgets=self.budgets, vocab=crossed, explicit=explicit)
        self.strategy = strategy
        self.engine = Engine(
            drafters=self.drafters,
            controller=make_controller(
                strategy, arms=self.arms, drafters=self.drafters, objective=objective, guard=guard, seed=seed
            ),
            verifier=verifier,
            draft_timeout=draft_timeout,
            vocab=by_drafter,
        )
        self._rng = np.random.default_rng(seed)
        self._serving: ServingPolicy | None = None
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
        save_state(path, self._state())

    def _state(self) -> dict[str, Any]:
        """What `save` writes; the latest step records are there for `adaptspec explain` only."""
        with self.engine.lock:
            self.engine.history.settle()
            serving = self._serving
            return {
                "settings": self._settings,
                "rng": self._rng.bit_generator.state,
                "controller": self.engine.controller.state_dict(),
                "drafters": {name: drafter.state_dict() for name, drafter in self.drafters.items()},
                "records": [asdict(record) for record in list(self.engine.history.latest)[-SAVED_RECORDS:]],
                **({} if serving is None else {STATE_KEY: serving.state_dict()}),
            }

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
        return cls._restored(load_state(path), str(path), pool=pool, strategy=strategy)

    @classmethod
    def _restored(
        cls,
        state: Mapping[str, Any],
        path: str,
        *,
        pool: Sequence[str | Drafter | Arm] | None,
        strategy: str | Policy | None,
    ) -> AdaptiveSpec:
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
        if STATE_KEY in state:
            spec.serving.load_state_dict(state[STATE_KEY])
        return spec

    def __deepcopy__(self, memo: dict[int, Any]) -> AdaptiveSpec:
        """An object of its own with the same knowledge, as if saved and loaded. What was seen stays with the original.

        Raises:
            TypeError: made from `Drafter` or `Policy` objects, which belong to one object.
        """
        for name in ("pool", "strategy"):
            saved = self._settings[name]
            if saved is None or (name == "pool" and None in saved):
                raise TypeError(f"an AdaptiveSpec with objects in {name} cannot be copied; make another with its own")
        return type(self)._restored(copy.deepcopy(self._state()), "the copy", pool=None, strategy=None)

    @property
    def serving(self) -> ServingPolicy:
        """The policy behind `decide` and `observe`, made at first use; see `adaptspec.serving`.

        Whoever needs nothing but this makes a `ServingPolicy`, which needs neither torch nor transformers.
        """
        with self.engine.lock:
            if self._serving is None:
                settings = self._settings
                self._serving = policy_from_settings(
                    arms=self.arms,
                    strategy=self.strategy,
                    objective=settings["objective"],
                    guard=settings["guard"],
                    seed=settings["seed"],
                )
            return self._serving

    def decide(self, context: StepContext) -> Decision:
        """What a serving stack should do in its next step: drafter and draft length for every row of the batch.

        Independent of `generate`: the stack drafts and verifies, and tells `observe` what came of it. Any thread.
        """
        return self.serving.decide(context)

    def observe(self, decision: Decision, outcome: StepOutcome) -> None:
        """What came of a step of `decide`."""
        self.serving.observe(decision, outcome)

    @staticmethod
    def merge(
        paths: Sequence[str | os.PathLike[str]],
        out: str | os.PathLike[str],
        *,
        base: str | os.PathLike[str] | None = None,
    ) -> None:
        """Write one state file with what several replicas of one object learnt.

        Policies, calibration and costs are merged (`adaptspec.control.merging`); what drafters keep of past outputs is
        the first replica's.

        Args:
            paths: files of `save`, by objects with equal settings; the seeds may differ.
            base: the state that all of them were loaded from, so that it counts once.

        Raises:
            FileNotFoundError: no such file.
            ValueError: no files, a foreign or damaged one, or objects with different settings.
        """
        if isinstance(paths, (str, os.PathLike)) or not paths:
            raise ValueError(f"paths must be a list of one or more state files, got {paths!r}")
        states = [load_state(path) for path in paths]
        start = None if base is None else load_state(base)
        own = {**states[0].get("settings", {}), "seed": None}
        for path, state in zip([*paths, base], [*states, start], strict=True):
            if state is not None and {**state.get("settings", {}), "seed": None} != own:
                raise ValueError(f"{path} was saved with other settings than {paths[0]}")
        controllers = [state.get("controller", {}) for state in states]
        merged = merge_controllers(controllers, base=None if start is None else start["controller"])
        save_state(out, {**states[0], "controller": merged})

    def calibrate(
        self,
        model: torch.nn.Module,
        tokenizer: Any = None,
        *,
        sizes: Sequence[int] | None = None,
        contexts: Sequence[int] | None = None,
        repeats: int = 5,
        save: str | os.PathLike[str] | None = None,
    ) -> dict[str, Any]:
        """Measure what steps take here, before the first request: see `adaptspec.calibrating.measure_samples`.

        What was learnt of costs before stays, and the run counts as so many more measurements: it outweighs a few
        steps, and many of them only where it is off by a quarter or more, as after a change of speed. Arms that a
        guard has not measured yet are known to it afterwards, and strategies that would try sizes out at first do not.

        Args:
            sizes: draft nodes to verify and to draft; default: 0, powers of two, and the budgets, up to the largest.
            contexts: committed tokens at which to measure; default: 256, or what the model holds.
            repeats: counted uses of every size.
            save: also write a profile, see `save_costs`.

        Returns:
            `CostSamples.summary()` and the machine's "fingerprint".

        Raises:
            ValueError: the strategy uses no costs, a value out of range, or a drafter that fails.
        """
        costs = self._costs()
        controller = self.engine.controller
        if sizes is None:
            budgets = {arm.budget for arm in self.arms if arm.budget != "auto"}
            most = max(budgets) or max(SIZES)
            sizes = sorted({size for size in SIZES if size <= most} | budgets)
        with self.engine.request(model, tokenizer) as target:
            if contexts is None:
                contexts = (min(CONTEXT, target.context_limit or CONTEXT),)
            drafters = {name: self.drafters[name] for name in controller.drafters_in_play(self.drafters)}
            samples = measure_samples(target, drafters, sizes=sizes, contexts=contexts, repeats=repeats)
            samples.teach(costs)
            controller.trust_costs()
            if save is not None:
                costs.save_profile(save, fingerprint=machine_fingerprint(target))
            return {"fingerprint": machine_fingerprint(target), **samples.summary()}

    def save_costs(self, model: torch.nn.Module, path: str | os.PathLike[str] | None = None) -> Path:
        """Write what was learnt of costs as a profile of this machine, this model and these library versions.

        Args:
            path: default: a file in the user's cache folder, one per fingerprint.

        Returns:
            The path.

        Raises:
            ValueError: the strategy uses no costs, or the file holds something else than a profile of this fingerprint.
        """
        costs = self._costs()
        with self.engine.lock:
            fingerprint = machine_fingerprint(HFTarget(model))
            file = profile_path(fingerprint) if path is None else Path(path)
            if path is None:
                file.parent.mkdir(parents=True, exist_ok=True)
            costs.save_profile(file, fingerprint=fingerprint)
        return file

    def load_costs(
        self, model: torch.nn.Module, path: str | os.PathLike[str] | None = None, *, foreign: bool = False
    ) -> None:
        """Decide with the costs of a profile from the first step on. They replace what was learnt of costs.

        Args:
            path: default: the profile that `save_costs` or `adaptspec calibrate` left in the user's cache folder.
            foreign: take the shape from a profile of another machine or model; the first steps here set the scale, and
                what was learnt here stays.

        Raises:
            FileNotFoundError: no such profile.
            ValueError: the strategy uses no costs, or the profile is damaged, or another machine's and not `foreign`.
        """
        costs = self._costs()
        with self.engine.lock:
            fingerprint = machine_fingerprint(HFTarget(model))
            file = profile_path(fingerprint) if path is None else Path(path)
            if path is None and not file.is_file():
                raise FileNotFoundError(f"no costs are kept in {file} for {fingerprint}; calibrate and save them first")
            costs.load_profile(file, fingerprint=fingerprint, foreign=foreign)
            if not foreign:
                self.engine.controller.trust_costs()

    def _costs(self) -> CostModel:
        costs = getattr(self.engine.controller, "cost", None)
        if costs is None:
            raise ValueError(f"strategy {self.strategy!r} decides without costs: it has no use for them")
        return costs

    def report(self) -> Report:
        """What was seen, learnt and decided so far, and why: print it, or take its `to_dict()` or `plot(path)`.

        It begins with this object. `save` keeps what was learnt and not what was seen, so that the report of a loaded
        object shows its costs and its guard and no steps. Waits for a request that another thread runs.
        """
        strategy = self.strategy if isinstance(self.strategy, str) else self.strategy.name
        with self.engine.lock:
            return make_report(self.engine.history, self.engine.controller, strategy=strategy)

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
            stop_strings: end after any of these was produced; needs `tokenizer`. Default: the model's generation
                config; an empty list for none.
            tokenizer: also used to check that a draft model's vocabulary is the target's.
            streamer: a transformers streamer; gets the prompt and then the tokens of each step.
            on_step: called with (StepRecord, new tokens) after the prefill and after every step.

        Raises:
            ValueError: a bad value, an unsupported model or option, a prompt that does not fit.
        """
        from transformers import StoppingCriteriaList

        check_input_ids(input_ids, model)
        sampling = Sampling(temperature, top_k, top_p)
        _check_at_least("max_new_tokens", max_new_tokens, 1)
        _check_at_least("min_new_tokens", min_new_tokens, 0)
        if repetition_penalty is not None and not 0.0 < repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty must be > 0 and finite, got {repetition_penalty}")
        criteria = StoppingCriteriaList(stopping_criteria or [])
        if stop_strings is None and (config := getattr(model, "generation_config", None)) is not None:
            stop_strings = config.stop_strings
        criteria += stop_criteria(stop_strings, tokenizer)
        # transformers would look for a tokenizer of its own, which it does not hand on to a function.
        options: dict[str, Any] = {"do_sample": not sampling.greedy, "stop_strings": None}
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

        transformers hands neither `streamer=` nor `tokenizer=` to a function, and refuses stop strings without a
        tokenizer: bind them with `custom_generate=spec.hf(streamer=..., tokenizer=..., stop_strings=...)`.
        """
        request = self.hf(tokenizer=tokenizer)
        return request(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs)

    def hf(
        self,
        *,
        tokenizer: Any = None,
        streamer: Any = None,
        stop_strings: str | Sequence[str] | None = None,
        on_step: OnStep | None = None,
    ) -> Request:
        """A callable for `custom_generate=` with extras that transformers does not hand on, such as a streamer.

        Args:
            stop_strings: end after any of these was produced; needs `tokenizer`. Where the model's generation config
                has some, call `model.generate(..., stop_strings=None)`, or transformers refuses.

        Raises:
            ValueError: stop strings without a tokenizer, or something else than text.
        """
        return Request(
            self.engine,
            tokenizer=tokenizer,
            streamer=streamer,
            on_step=on_step,
            seed=None,
            criteria=stop_criteria(stop_strings, tokenizer),
        )


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


def _vocab_of(
    drafters: Mapping[str, Drafter], plain: Sequence[str], *, vocab: Sequence[str], explicit: Sequence[Arm]
) -> dict[str, tuple[str, ...]]:
    """By drafter, the vocabularies that it may be asked with: those of the pool, and those of its arms."""
    takers = [name for name, drafter in drafters.items() if drafter.takes_vocab]
    if not takers and tuple(vocab) != ("full",):
        other = next((name for name in vocab if name != "full"), vocab[0])
        raise ValueError(f"no drafter of the pool has a head of its own: vocab must be 'full', got {other!r}")
    named: dict[str, list[str]] = {
        name: list(vocab) if name in plain and name in takers else [] if name not in plain else ["full"]
        for name in drafters
    }
    for arm in explicit:
        if arm.drafter in named and arm.vocab not in named[arm.drafter]:
            check_vocab([arm.vocab])
            named[arm.drafter].append(arm.vocab)
    return {name: tuple(names) for name, names in named.items()}


def _fixed(strategy: object) -> list[Arm]:
    """The arm of a strategy "fixed:<arm>"."""
    fixed = isinstance(strategy, str) and strategy.startswith("fixed:")
    return [Arm.parse(strategy.removeprefix("fixed:"))] if fixed else []


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
