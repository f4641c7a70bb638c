"""Live runs on the model: one setting against no speculation, on the same prompts, in one process, in turns."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adaptspec.cli.answers import spec_bench_answers
from adaptspec.cli.measure import Generate, Generated, Measurement, Measurer, Setting
from adaptspec.cli.prompts import Prompt, by_domain
from adaptspec.types import Arm
from experiments.models import ModelWork, in_blocks, prompts_of
from experiments.tasks import NotAvailable, Outcome, Task

BASE = "ar"


class LiveRun(ModelWork):
    """One setting and no speculation answer the same prompts, taking turns.

    Both run in one process in rotated order, so what slows the machine down hits both alike, and the speed-up stands
    beside the check that both said the same.

    Parameters: `pool` (entries as for `adaptspec bench`, or objects with `drafter` and `options`), `strategy`,
    `budgets`, `vocab`, `guard`, `temperature`, `domains` (None: all), `order`, `experts` (so many stores, one per
    domain, join the pool), `answers` (also write them in Spec-Bench's format).
    """

    def run(self, task: Task) -> Outcome:
        """Answer all prompts; one row per domain."""
        prompts = prompts_of(self.settings, task.parameter("domains"))
        prompts = in_blocks(prompts, task.parameter("order", "shuffle"), seed=task.configuration.seed)
        with tempfile.TemporaryDirectory() as folder:
            pool = [*task.parameter("pool", ()), *self._experts(task, prompts, Path(folder))]
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
        rows = [
            {**_about(task), "domain": domain, **_numbers(units, [p.id for p in found], greedy=self._greedy(task))}
            for domain, found in by_domain(prompts).items()
        ]
        files = {}
        if task.parameter("answers"):
            import json

            lines = spec_bench_answers(units, settings, model=self.settings.model, timestamp=time.time())[name]
            files["answers.jsonl"] = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
        return Outcome(rows=rows, curves={"arms": _arms(units)}, files=files, facts=self.facts)

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

    def _experts(self, task: Task, prompts: Sequence[Prompt], folder: Path) -> list[str]:
        """One store per domain."""
        count = task.parameter("experts", 0)
        if not count:
            return []
        from adaptspec.drafters.datastore import build_datastore

        texts = self.settings.experts
        domains = [domain for domain in by_domain(prompts) if texts.get(domain)]
        if len(domains) < count:
            raise NotAvailable(
                f"{count} experts need texts of as many of the prompts' domains, there are {len(domains)}; "
                "give them by --experts FILE"
            )
        entries = []
        for domain in domains[:count]:
            ids = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts[domain]]
            path = folder / f"{''.join(c if c.isalnum() else '_' for c in domain)}.store"
            build_datastore(ids, path, vocab_size=len(self.tokenizer))
            entries.append(f"rest:{path}")
        return entries


def _about(task: Task) -> dict[str, Any]:
    """What the configuration is, as columns."""
    parameters = task.configuration.parameters
    names = ("method", "strategy", "builder", "temperature", "order", "experts", "head", "draft", "group")
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


def _arms(units: Sequence[Sequence[Measurement]]) -> list[list[Any]]:
    """Per answer its domain, and the steps by drafter: which expert was played where."""
    found = []
    for unit in units:
        for turn in unit[-1].turns:
            counts: dict[str, int] = {}
            for step in turn.generated.steps:
                source = Path(step.arm.rpartition("@")[0] or step.arm).stem
                counts[source] = counts.get(source, 0) + 1
            found.append([unit[-1].prompt.domain, counts])
    return found
