"""Live runs on the model: one setting against no speculation, on the same prompts, in one process, in turns."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adaptspec.cli.answers import spec_bench_answers
from adaptspec.cli.measure import Generate, Generated, Measurement, Measurer, Setting
from adaptspec.cli.prompts import Prompt, by_domain
from adaptspec.names import unknown_name
from adaptspec.pretrained import is_weights_folder
from adaptspec.types import Arm
from experiments.expert_folder import domain_folder
from experiments.models import ModelWork, in_blocks, prompts_of
from experiments.tasks import NotAvailable, Outcome, Task

BASE = "ar"
EXPERTS = {"rest": "REST store", "eagle3": "EAGLE head"}
"""Kinds of domain experts, drafters that take a path, and what one of them is called."""


class LiveRun(ModelWork):
    """One setting and no speculation answer the same prompts, taking turns.

    Both run in one process in rotated order, so what slows the machine down hits both alike, and the speed-up stands
    beside the check that both said the same.

    Parameters: `pool` (entries as for `adaptspec bench`, or objects with `drafter` and `options`), `strategy`,
    `budgets`, `vocab`, `guard`, `temperature`, `domains` (None: all), `order`, `experts` (those for so many domains
    join the pool), `expert` (their kind: "rest", a store of text each, "eagle3", a trained head each, or
    "rest+eagle3"), `answers` (also write them in Spec-Bench's format).
    """

    def run(self, task: Task) -> Outcome:
        """Answer all prompts; one row per domain."""
        prompts = prompts_of(self.settings, task.parameter("domains"))
        prompts = in_blocks(prompts, task.parameter("order", "shuffle"), seed=task.configuration.seed)
        with tempfile.TemporaryDirectory() as folder:
            experts = self._experts(task, prompts, Path(folder))
            pool = [*task.parameter("pool", ()), *experts]
            name = task.configuration.id
            settings = [
                Setting(BASE, "fixed", lambda: self._generate(task, [], strategy="fixed:ar")),
                Setting(name, "strategy", lambda: self._generate(task, pool, strategy=task.parameter("strategy"))),
            ]
            if task.parameter("strategy") == "fixed:ar":
                settings = settings[1:]
            try:
                settings[-1].start()  # weights that are missing show here
            except (ValueError, FileNotFoundError, ImportError) as error:
                raise NotAvailable(str(error)) from error
            measurer = Measurer.for_model(self.network, self.conversation, max_new_tokens=self.settings.max_new_tokens)
            for setting in settings:
                measurer.warm_up(setting, prompts[0], max_new_tokens=16)
            units = list(measurer.run(settings, prompts))
        about = _about(task)
        if experts:
            about["experts_for"] = ", ".join(sorted(experts.values()))
        rows = [
            {**about, "domain": domain, **_numbers(units, [p.id for p in found], greedy=self._greedy(task))}
            for domain, found in by_domain(prompts).items()
        ]
        files = {}
        if task.parameter("answers"):
            import json

            lines = spec_bench_answers(units, settings, model=self.settings.model, timestamp=time.time())[name]
            files["answers.jsonl"] = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
        return Outcome(rows=rows, curves={"arms": _arms(units, experts)}, files=files, facts=self.facts)

    @staticmethod
    def _greedy(task: Task) -> bool:
        return task.parameter("temperature", 0.0) == 0.0

    def _generate(self, task: Task, pool: Sequence[Any], *, strategy: str) -> Generate:
        """A fresh instance that has learnt nothing."""
        import torch

        from adaptspec import AdaptiveSpec

        spec = AdaptiveSpec(
            [self._drafter(entry) for entry in pool],
            strategy=strategy,
            budgets=tuple(task.parameter("budgets", (8,))),
            vocab=tuple(task.parameter("vocab", ("full",))) if pool else ("full",),
            guard=task.parameter("guard", 0.05),
            seed=task.configuration.seed,
        )
        spec.engine.target(self.network, self.tokenizer)  # drafters meet the target now, and no prompt pays for it
        temperature = float(task.parameter("temperature", 0.0))

        def generate(input_ids: Sequence[int], max_new_tokens: int) -> Generated:
            result = spec.generate(
                self.network,
                torch.tensor([list(input_ids)], device=self.network.device),
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                tokenizer=self.tokenizer,
            )
            return Generated.of(result, prompt_length=len(input_ids))

        return generate

    def _drafter(self, entry: Any) -> Any:
        """A name with its weights, or a drafter made with options."""
        if not isinstance(entry, Mapping):
            return self.pool_entry(entry) if isinstance(entry, str) else entry
        from adaptspec.drafters import make_drafter

        return make_drafter(self.pool_entry(entry["drafter"]), **entry["options"])

    def _experts(self, task: Task, prompts: Sequence[Prompt], folder: Path) -> dict[str, str]:
        """Pool entries of experts for the first domains that have them, and what to call each of them."""
        count = task.parameter("experts", 0)
        if not count:
            return {}
        kinds = str(task.parameter("expert", "rest")).split("+")
        found: dict[str, str] = {}
        for kind in kinds:
            if kind not in EXPERTS:
                raise unknown_name("kind of expert", kind, EXPERTS)
            make = self._store if kind == "rest" else self._trained_head
            for domain in self._domains(kind, count, prompts):
                name = domain if len(kinds) == 1 else f"{domain} ({EXPERTS[kind]})"
                found[f"{kind}:{make(domain, folder)}"] = name
        return found

    def _domains(self, kind: str, count: int, prompts: Sequence[Prompt]) -> list[str]:
        """The first `count` domains of the prompts that there are experts of this kind for."""
        known = self.settings.experts if kind == "rest" else self.settings.heads
        found = [domain for domain in by_domain(prompts) if known.get(domain)]
        if len(found) < count:
            what, how = "texts", "give them by --experts FILE"
            if kind == "eagle3":
                what, how = "heads", "train them with python -m experiments.experts and give them by --heads DIR"
            here = f"{len(found)} ({', '.join(found)})" if found else "0"
            raise NotAvailable(
                f"{count} experts need {what} of as many of the prompts' domains, there are {here}; {how}"
            )
        return found[:count]

    def _store(self, domain: str, folder: Path) -> Path:
        """A store of a domain's texts."""
        from adaptspec.drafters.datastore import build_datastore

        ids = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in self.settings.experts[domain]]
        path = folder / f"{domain_folder(domain)}.store"
        build_datastore(ids, path, vocab_size=len(self.tokenizer))
        return path

    def _trained_head(self, domain: str, folder: Path) -> Path:
        """The weights of a domain's head, which lie on this machine."""
        path = Path(self.settings.heads[domain])
        if not is_weights_folder(path):
            raise NotAvailable(f"the head of the domain {domain!r} is not at {path} on {socket.gethostname()}")
        return path


def _about(task: Task) -> dict[str, Any]:
    """What the configuration is, as columns."""
    parameters = task.configuration.parameters
    names = ("method", "strategy", "builder", "temperature", "order", "experts", "expert", "head", "draft", "group")
    known = {name: parameters[name] for name in names if name in parameters}
    arm = str(parameters.get("strategy", "")).removeprefix("fixed:")
    if arm != parameters.get("strategy") and arm != "ar":
        parsed = Arm.parse(arm)
        known |= {"drafter": parsed.drafter, "budget": parsed.budget, "vocab": parsed.vocab}
    return {**known, "seed": task.configuration.seed}


def _numbers(units: Sequence[Sequence[Measurement]], ids: Sequence[Any], *, greedy: bool) -> dict[str, Any]:
    """Sums over the prompts of one domain, for the setting and for no speculation."""
    chosen = [unit for unit in units if unit[-1].prompt.id in set(ids)]
    turns = [turn for unit in chosen for turn in unit[-1].turns]
    steps = [step for turn in turns for step in turn.generated.steps]
    lengths = [length for turn in turns for length in turn.generated.accept_lengths]
    row: dict[str, Any] = {
        "prompts": len(chosen),
        "new_tokens": sum(unit[-1].new_tokens for unit in chosen),
        "seconds": sum(unit[-1].seconds for unit in chosen),
        "prefill_seconds": sum(turn.generated.prefill_seconds or 0.0 for turn in turns),
        "answers": len(turns),
        "steps": len(lengths),
        "gained": sum(lengths),
        "verified": sum(step.verified for step in steps),
        "accepted": sum(step.accepted for step in steps),
        "draft_seconds": sum(step.draft_seconds for step in steps),
        "controller_seconds": sum(step.controller_seconds for step in steps),
        "faults": sum(step.fault is not None for step in steps),
    }
    if chosen and len(chosen[0]) > 1:
        base = [unit[0] for unit in chosen]
        row |= {
            "ar_new_tokens": sum(m.new_tokens for m in base),
            "ar_seconds": sum(m.seconds for m in base),
            "ar_prefill_seconds": sum(t.generated.prefill_seconds or 0.0 for m in base for t in m.turns),
        }
        if greedy:
            same = [
                all(
                    a.generated.token_ids == b.generated.token_ids
                    for a, b in zip(unit[0].turns, unit[1].turns, strict=True)
                )
                for unit in chosen
            ]
            row |= {"identical": sum(same), "compared": len(same)}
    return row


def _arms(units: Sequence[Sequence[Measurement]], experts: Mapping[str, str]) -> list[list[Any]]:
    """Per answer its domain, and the steps by drafter: which expert was played where.

    Args:
        experts: what to call a drafter, by pool entry.
    """
    found = []
    for unit in units:
        for turn in unit[-1].turns:
            counts: dict[str, int] = {}
            for step in turn.generated.steps:
                source = step.arm.rpartition("@")[0] or step.arm
                source = experts.get(source, Path(source).stem)
                counts[source] = counts.get(source, 0) + 1
            found.append([unit[-1].prompt.domain, counts])
    return found
