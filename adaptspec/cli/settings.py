"""The settings a run compares: references of transformers, no speculation, every arm, and the strategies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from adaptspec.cli.common import is_arm, make_pool
from adaptspec.cli.measure import Generate, Generated, Setting
from adaptspec.drafters import DRAFTERS, Drafter
from adaptspec.types import Arm

PROMPT_LOOKUP_TOKENS = 10
"""Draft length of the prompt-lookup reference, the default in transformers' documentation."""


@dataclass(frozen=True, slots=True)
class Workbench:
    """What all settings of a run have in common.

    Attributes:
        model: a transformers causal language model.
        tokenizer: its tokenizer.
        temperature, top_k, top_p: how the target samples; temperature 0 is greedy.
        seed: of every instance.
        shared: drafters that all instances use, by pool entry.
        costs: a profile with which strategies begin; None to let them learn.
        foreign_costs: it may be of another machine.
    """

    model: Any
    tokenizer: Any
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    shared: dict[str, Drafter] = field(default_factory=dict)
    costs: Path | None = None
    foreign_costs: bool = False

    def references(self, *, prompt_lookup: bool = True, draft_model: tuple[Any, Any] | None = None) -> list[Setting]:
        """Generation by transformers itself: plain, with prompt lookup, and with a draft model if one is given."""
        arguments: dict[str, dict[str, Any]] = {"hf-generate": {}}
        if prompt_lookup:
            arguments["hf-prompt-lookup"] = {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}
        if draft_model is not None:
            assistant, tokenizer = draft_model
            arguments["hf-assisted"] = {"assistant_model": assistant}
            if tokenizer.get_vocab() != self.tokenizer.get_vocab():
                arguments["hf-assisted"] |= {"tokenizer": self.tokenizer, "assistant_tokenizer": tokenizer}
        return [Setting(name, "reference", partial(self._transformers, extra)) for name, extra in arguments.items()]

    def no_speculation(self) -> Setting:
        """The arm `ar`, which all speed-ups are measured against."""
        return Setting("ar", "fixed", partial(self._adaptive, [], strategy="fixed:ar"))

    def arms(self, pool: Sequence[str], *, budgets: Sequence[Any], vocab: Sequence[str]) -> list[Setting]:
        """Every drafter of the pool at every budget and vocabulary, each with only its own drafter loaded."""
        return [
            Setting(
                str(arm),
                "fixed",
                partial(self._adaptive, [entry], strategy=f"fixed:{arm}", budgets=(arm.budget,), vocab=(arm.vocab,)),
            )
            for entry in pool
            for arm in arms_of(entry, budgets=budgets, vocab=vocab)
        ]

    def strategies(
        self, names: Sequence[str], pool: Sequence[str], *, budgets: Sequence[Any], vocab: Sequence[str]
    ) -> list[Setting]:
        """Strategies that choose from the whole pool."""
        return [
            Setting(name, "strategy", partial(self._adaptive, pool, strategy=name, budgets=budgets, vocab=vocab))
            for name in names
        ]

    def _adaptive(
        self, pool: Sequence[str], *, strategy: str, budgets: Sequence[Any] = (8,), vocab: Sequence[str] = ("full",)
    ) -> Generate:
        import torch

        from adaptspec import AdaptiveSpec

        spec = AdaptiveSpec(
            self._drafters(pool, vocab), strategy=strategy, budgets=tuple(budgets), vocab=tuple(vocab), seed=self.seed
        )
        # Drafters meet the target here (loading weights, mapping files), so that no prompt pays for it.
        spec.engine.target(self.model, self.tokenizer)
        if self.costs is not None and hasattr(spec.engine.controller, "cost"):
            spec.load_costs(self.model, self.costs, foreign=self.foreign_costs)

        def generate(input_ids: Sequence[int], max_new_tokens: int) -> Generated:
            result = spec.generate(
                self.model,
                torch.tensor([list(input_ids)], device=self.model.device),
                max_new_tokens=max_new_tokens,
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                tokenizer=self.tokenizer,
            )
            return Generated.of(result, prompt_length=len(input_ids))

        return generate

    def _drafters(self, pool: Sequence[str], vocab: Sequence[str] = ("full",)) -> list[Any]:
        """Fresh drafters, so that each setting learns from its own run only. Those that learn nothing over requests
        are shared, because some of them hold the weights of a whole model."""
        made = []
        for entry, drafter in zip(pool, make_pool(pool), strict=True):
            if isinstance(drafter, Drafter) and type(drafter).state_dict is Drafter.state_dict:
                # A drafter that runs the target's layers keeps the target of the instance it was bound to.
                key = f"{entry} {','.join(vocab)}" if drafter.takes_vocab else entry
                drafter = drafter if drafter.needs.target else self.shared.setdefault(key, drafter)
            made.append(drafter)
        return made

    def _transformers(self, extra: dict[str, Any]) -> Generate:
        import torch

        own = self.model.generation_config
        eos = own.eos_token_id[0] if isinstance(own.eos_token_id, list | tuple) else own.eos_token_id
        arguments: dict[str, Any] = {
            "do_sample": self.temperature > 0.0,
            "repetition_penalty": 1.0,
            "pad_token_id": next((i for i in (own.pad_token_id, eos) if i is not None), 0),
            **extra,
        }
        if self.temperature > 0.0:
            arguments |= {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        seeds = count(self.seed)

        def generate(input_ids: Sequence[int], max_new_tokens: int) -> Generated:
            torch.manual_seed(next(seeds))
            ids = torch.tensor([list(input_ids)], device=self.model.device)
            counter = StepCounter()
            started = time.perf_counter()
            output = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                streamer=counter,
                **arguments,
            )
            new = tuple(output[0, len(input_ids) :].tolist())
            prefill = None if counter.first_seconds is None else counter.first_seconds - started
            return Generated(new, prefill, tuple(counter.lengths))

        return generate


@dataclass(slots=True)
class StepCounter:
    """A transformers streamer that notes how many tokens arrived at a time, and when the first ones did."""

    lengths: list[int] = field(default_factory=list)
    first_seconds: float | None = None
    _prompt_seen: bool = False

    def put(self, value: Any) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        if self.first_seconds is None:
            self.first_seconds = time.perf_counter()
        self.lengths.append(int(value.numel()))

    def end(self) -> None:
        """Nothing to flush."""


def arms_of(entry: str, *, budgets: Sequence[Any], vocab: Sequence[str]) -> list[Arm]:
    """Arms of one pool entry: a whole arm is itself; a drafter is crossed with budgets, and with vocabularies if it has
    a head that takes them."""
    if entry == "ar":
        return []
    if is_arm(entry):
        return [Arm.parse(entry)]
    name = entry.partition(":")[0]
    vocab = vocab if DRAFTERS[name].takes_vocab else ("full",)
    return [Arm(name, budget, head) for head in vocab for budget in budgets if budget != 0]


def distinct(settings: Sequence[Setting]) -> list[Setting]:
    """The settings in order, a name that was asked for twice kept once."""
    first: dict[str, Setting] = {}
    for setting in settings:
        first.setdefault(setting.name, setting)
    return list(first.values())
