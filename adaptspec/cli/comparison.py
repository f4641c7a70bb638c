"""A whole comparison: load the model, build the settings, warm up, measure, and add up. Used by `bench` and `demo`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from adaptspec.cli.calibrate import check_costs
from adaptspec.cli.common import load_model, make_pool
from adaptspec.cli.conversation import Conversation
from adaptspec.cli.measure import Measurement, Measurer, Setting, Turn
from adaptspec.cli.progress import Reporter
from adaptspec.cli.prompts import Prompt
from adaptspec.cli.report import summarise, top_two_margin
from adaptspec.cli.settings import Workbench, distinct
from adaptspec.vocab import check_vocab


@dataclass(frozen=True, slots=True)
class Grid:
    """What is compared.

    Attributes:
        pool: drafters and whole arms.
        budgets, vocab: crossed with the drafters.
        strategies: names; they choose from all of the pool.
        references: also measure generation by transformers: "none", "plain", or "all" of its ways.
    """

    pool: tuple[str, ...]
    budgets: tuple[Any, ...]
    vocab: tuple[str, ...]
    strategies: tuple[str, ...]
    references: Literal["none", "plain", "all"]

    def __post_init__(self) -> None:
        make_pool(self.pool)  # unknown names should show before a model is loaded
        check_vocab(self.vocab)

    def settings(self, bench: Workbench, *, draft_model: tuple[Any, Any] | None = None) -> list[Setting]:
        """References, no speculation, every arm, and the strategies, in this order."""
        references = []
        if self.references != "none":
            references = bench.references(prompt_lookup=self.references == "all", draft_model=draft_model)
        return distinct(
            [
                *references,
                bench.no_speculation(),
                *bench.arms(self.pool, budgets=self.budgets, vocab=self.vocab),
                *bench.strategies(self.strategies, self.pool, budgets=self.budgets, vocab=self.vocab),
            ]
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """A loaded model with the settings to compare on it."""

    model: Any
    settings: list[Setting]
    measurer: Measurer
    greedy: bool
    seed: int

    @classmethod
    def prepare(
        cls,
        grid: Grid,
        *,
        model: str,
        dtype: str = "auto",
        device: str = "auto",
        draft_model: str | None = None,
        threads: int | None = None,
        chat: bool | None = None,
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        costs: Path | None = None,
        foreign_costs: bool = False,
    ) -> Comparison:
        """Load the model and build the settings.

        Raises:
            ValueError: whatever the model, the pool or the strategies object to.
        """
        target, tokenizer = load_model(model, dtype=dtype, device=device, threads=threads)
        if costs is not None:
            check_costs(target, costs, foreign=foreign_costs)
        draft = None if draft_model is None else load_model(draft_model, dtype=dtype, device=device)
        bench = Workbench(
            target, tokenizer, temperature=temperature, seed=seed, costs=costs, foreign_costs=foreign_costs
        )
        conversation = Conversation.choose(tokenizer, chat)
        measurer = Measurer.for_model(target, conversation, max_new_tokens=max_new_tokens)
        return cls(target, grid.settings(bench, draft_model=draft), measurer, temperature == 0.0, seed)

    def warm_up(self, prompt: Prompt, progress: Reporter, *, max_new_tokens: int = 16) -> list[Turn]:
        """Run every setting once for nothing; returns what it took, in the order of the settings."""
        progress.total(len(self.settings))
        turns = []
        for setting in self.settings:
            progress.step(f"warm-up: {setting.name}")
            turns.append(self.measurer.warm_up(setting, prompt, max_new_tokens=max_new_tokens))
        return turns

    def measure(self, prompts: Sequence[Prompt], progress: Reporter, *, repeats: int = 1) -> Outcome:
        """Measure until done or Ctrl-C; what is finished by then is kept."""
        units: list[list[Measurement]] = []
        progress.total(repeats * len(prompts) * len(self.settings))

        def before(setting: Setting, prompt: Prompt, repeat: int) -> None:
            progress.step(f"{prompt.id}: {setting.name}")

        interrupted = False
        try:
            for unit in self.measurer.run(self.settings, prompts, repeats=repeats, before=before):
                units.append(unit)
        except KeyboardInterrupt:
            interrupted = True
        return Outcome(self, units, interrupted)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Measurements of all finished prompts: per prompt and repeat one per setting, in the order of the settings."""

    comparison: Comparison
    units: list[list[Measurement]]
    interrupted: bool

    def summary(self) -> dict[str, Any]:
        """The fields `interrupted`, `prompts`, `runs` and `by_category` of the report."""
        run = self.comparison
        # After Ctrl-C nobody wants to wait for more forward passes.
        margin = (lambda tokens: None) if self.interrupted else top_two_margin(run.model)
        numbers = summarise(self.units, run.settings, greedy=run.greedy, margin=margin, seed=run.seed)
        return {"interrupted": self.interrupted, **numbers}
