"""`adaptspec bench`: compare settings on prompts and write the result."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from adaptspec.cli import EXIT_INTERRUPTED, options


def bench(
    context: typer.Context,
    model: options.Model = "embedded",
    prompts: options.Prompts = None,
    limit: Annotated[
        int | None, typer.Option("--limit", "--max-prompts", metavar="N", help="At most N prompts, from all domains.")
    ] = None,
    per_category: Annotated[
        int | None, typer.Option("--per-category", metavar="N", help="At most N prompts of each domain.")
    ] = None,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 0.0,
    pool: options.Pool = None,
    budgets: options.Budgets = "8,32",
    vocab: options.Vocab = "full",
    strategies: options.Strategies = None,
    references: Annotated[
        bool, typer.Option("--references/--no-references", help="Also measure generation by transformers.")
    ] = True,
    draft_model: Annotated[
        str | None, typer.Option("--draft-model", metavar="NAME", help="Draft model of the reference hf-assisted.")
    ] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    chat: options.Chat = None,
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", help="Measure all prompts N times.")] = 1,
    order: Annotated[
        str, typer.Option("--order", metavar="ORDER", help="'shuffle', or 'blocks': one domain after the other.")
    ] = "shuffle",
    seed: options.Seed = 0,
    threads: options.Threads = None,
    costs: options.Costs = None,
    foreign_costs: options.ForeignCosts = False,
    json_out: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write the result as JSON.")] = None,
    answers: Annotated[
        Path | None,
        typer.Option(
            "--answers",
            metavar="OUT",
            help="Write Spec-Bench answers: a file, or an existing folder for one file per setting.",
        ),
    ] = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
) -> None:
    """Compare no speculation, every arm and the strategies, in one process and in rotated order.

    Every prompt is answered by every setting before the next prompt begins. Speed-ups are against 'ar' (no
    speculation) of the same run, prefill included; 'identical' counts prompts whose token ids are exactly those of
    plain greedy generation. Ctrl-C keeps the finished prompts.
    """
    from adaptspec.cli.answers import check_answers, spec_bench_answers, write_answers
    from adaptspec.cli.calibrate import check_foreign
    from adaptspec.cli.common import (
        check_at_least,
        choose_pool,
        choose_strategies,
        console,
        dtype_name,
        parse_budgets,
        show,
        split_names,
    )
    from adaptspec.cli.comparison import Comparison, Grid
    from adaptspec.cli.outputs import check_output, write_output
    from adaptspec.cli.progress import reporter
    from adaptspec.cli.prompts import built_in_prompts, read_prompts, select_prompts
    from adaptspec.cli.provenance import provenance
    from adaptspec.cli.table import category_table, results_table

    check_at_least(1, max_new_tokens=max_new_tokens, repeats=repeats, threads=threads)
    check_foreign(costs, foreign_costs)
    chosen = select_prompts(
        built_in_prompts() if prompts is None else read_prompts(prompts),
        limit=limit,
        per_category=per_category,
        order=order,
        seed=seed,
    )
    if json_out is not None:
        check_output(json_out, force=force)
    if answers is not None:
        check_answers(answers, [], force=force)
    grid = Grid(
        pool=choose_pool(pool),
        budgets=parse_budgets(budgets),
        vocab=split_names([vocab]),
        strategies=choose_strategies(strategies),
        references="all" if references else "none",
    )
    with reporter(quiet=quiet) as progress:
        progress.note(f"loading the model {model}")
        comparison = Comparison.prepare(
            grid,
            model=model,
            dtype=dtype,
            device=device,
            draft_model=draft_model,
            threads=threads,
            chat=chat,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            costs=costs,
            foreign_costs=foreign_costs,
        )
        if answers is not None:
            check_answers(answers, [setting.name for setting in comparison.settings], force=force)
        comparison.measurer.check_lengths(chosen)
        comparison.warm_up(chosen[0], progress)
        outcome = comparison.measure(chosen, progress, repeats=repeats)

    network = comparison.model
    report = {
        "provenance": provenance(
            argv=sys.argv[1:] if context.obj is None else context.obj,
            model=model,
            device=network.device,
            dtype=dtype_name(network),
            seed=seed,
        ),
        "options": {
            "prompts": "built-in" if prompts is None else str(prompts),
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "order": order,
            "repeats": repeats,
            "costs": None if costs is None else str(costs),
            "chat": comparison.measurer.conversation.chat,
        },
        **outcome.summary(),
    }
    if json_out is not None:
        written = write_output(json_out, json.dumps(report, indent=1, ensure_ascii=False) + "\n", force=force)
        typer.echo(f"wrote {written}", err=True)
    if answers is not None:
        files = spec_bench_answers(outcome.units, comparison.settings, model=model, timestamp=time.time())
        for written in write_answers(answers, files, force=force):
            typer.echo(f"wrote {written}", err=True)
    output = console()
    place = f"{model} in {dtype_name(network)} on {network.device}"
    title = f"{report['prompts']} prompts, up to {max_new_tokens} tokens, {place}"
    show(output, results_table(report, title=title))
    if len(report["by_category"]) > 1:
        show(output, category_table(report))
    if outcome.interrupted:
        typer.echo(f"adaptspec: interrupted after {report['finished']} finished prompts", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)
