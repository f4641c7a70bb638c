"""`adaptspec demo`: the whole idea in a few minutes, on the embedded model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import typer

from adaptspec.cli import EXIT_INTERRUPTED, options
from adaptspec.cli.measure import Turn
from adaptspec.cli.prompts import Prompt, built_in_prompts, by_domain

DEFAULT_PLOT = Path("adaptspec-demo.png")
DOMAINS = ("code", "summarisation", "law", "chat", "maths", "retrieval", "translation", "extraction", "medical")
"""In the order in which the demo takes prompts, so that a short one already mixes copying and free text."""

EXPLANATION = """\
speed-up   against ar (no speculation) in the same run, reading the prompt included; decode: without it
length     mean accepted length: tokens per pass of the model, its own (bonus) token included
accepted   share of verified draft tokens that were right, bonus token not included
identical  prompts with exactly the token ids of plain generation by transformers"""

WARM_UP_TOKENS = 8
LEAST_PROMPTS, MOST_PROMPTS = 3, 18
SHORT_ANSWER, LONG_ANSWER = 24, 48


def demo_prompts() -> list[Prompt]:
    """The first turns of the built-in prompts, one of each domain in turn."""
    groups = by_domain(built_in_prompts())
    first_turns = [Prompt(p.id, p.domain, p.turns[:1]) for domain in DOMAINS for p in groups[domain]]
    in_turn = zip_longest(*by_domain(first_turns).values())
    return [prompt for rank in in_turn for prompt in rank if prompt is not None]


def size_that_fits(turns: Sequence[Turn], *, minutes: float, max_new_tokens: int | None) -> tuple[int, int]:
    """How many prompts, and how long answers, all settings manage in about the given time.

    Answers are shortened only where a few prompts would not fit otherwise.

    Args:
        turns: the warm-up's, one per setting.
        max_new_tokens: None to choose.

    Returns:
        The number of prompts and the longest answer.
    """
    lengths = (LONG_ANSWER, SHORT_ANSWER) if max_new_tokens is None else (max_new_tokens,)
    for tokens in lengths:
        fitting = int(60.0 * minutes / sum(turn.expected_seconds(tokens) for turn in turns))
        if fitting >= LEAST_PROMPTS:
            return min(fitting, MOST_PROMPTS), tokens
    return LEAST_PROMPTS, lengths[-1]


def demo(
    pool: options.Pool = None,
    budgets: options.Budgets = "8",
    vocab: options.Vocab = "full",
    strategies: options.Strategies = None,
    minutes: Annotated[
        float, typer.Option("--minutes", metavar="M", help="About how long to measure; sets the number of prompts.")
    ] = 2.5,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", help="Exactly N prompts instead of as many as fit.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", metavar="N", help="Longest answer. [default: 48, less if slow]")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="PNG", help="Where to save the picture. [default: adaptspec-demo.png]"),
    ] = None,
    model: options.Model = "embedded",
    seed: options.Seed = 0,
    threads: options.Threads = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
) -> None:
    """Show what speculation and choosing an arm are worth here: no speculation, every arm, and the strategies.

    The embedded model answers built-in prompts of several domains, greedily, in float32. All settings must give
    exactly the text of plain generation. Ends with a table, and a picture of which arm was played when.
    """
    from adaptspec.cli.common import (
        check_at_least,
        choose_pool,
        choose_strategies,
        console,
        parse_budgets,
        show,
        split_names,
    )
    from adaptspec.cli.comparison import Comparison, Grid
    from adaptspec.cli.outputs import check_output, free_path, write_output
    from adaptspec.cli.picture import Track, draw
    from adaptspec.cli.progress import reporter
    from adaptspec.cli.table import category_table, results_table

    check_at_least(1, max_new_tokens=max_new_tokens, threads=threads, limit=limit)
    if not minutes > 0:
        raise ValueError(f"minutes must be > 0, got {minutes}")
    picture = free_path(DEFAULT_PLOT) if plot is None else check_output(plot, force=force)
    grid = Grid(
        pool=choose_pool(pool),
        budgets=parse_budgets(budgets),
        vocab=split_names([vocab]),
        strategies=choose_strategies(strategies),
        references="plain",
    )
    prompts = demo_prompts()
    with reporter(quiet=quiet) as progress:
        progress.note(f"loading the model {model} in float32")
        comparison = Comparison.prepare(
            grid, model=model, dtype="float32", threads=threads, max_new_tokens=LONG_ANSWER, seed=seed
        )
        turns = comparison.warm_up(prompts[0], progress, max_new_tokens=WARM_UP_TOKENS)
        fitting, tokens = size_that_fits(turns, minutes=minutes, max_new_tokens=max_new_tokens)
        prompts = prompts[: fitting if limit is None else limit]
        expected = len(prompts) * sum(turn.expected_seconds(tokens) for turn in turns)
        progress.note(
            f"{len(turns)} settings answer {len(prompts)} prompts, up to {tokens} tokens each;"
            f" about {expected / 60:.1f} minutes"
        )
        comparison = replace(comparison, measurer=replace(comparison.measurer, max_new_tokens=tokens))
        comparison.measurer.check_lengths(prompts)
        outcome = comparison.measure(prompts, progress)

    report = outcome.summary()
    output = console()
    show(output, results_table(report, title=f"{report['prompts']} prompts, greedy, {model} in float32"))
    show(output, category_table(report))
    output.print(EXPLANATION, markup=False)
    if outcome.units:
        names = [setting.name for setting in comparison.settings]
        tracks = [Track.of(name, [unit[index] for unit in outcome.units]) for index, name in enumerate(names)]
        image = draw(tracks, title="Which arm was played when, and what it gained")
        typer.echo(f"picture: {write_output(picture, image, force=force)}")
    if outcome.interrupted:
        typer.echo(f"adaptspec: interrupted after {report['finished']} finished prompts", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)
