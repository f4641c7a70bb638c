"""`adaptspec trace`: record what every drafter would have proposed at every position of a model's own answers."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from adaptspec.cli import EXIT_INTERRUPTED, options
from adaptspec.cli.prompts import Prompt

if TYPE_CHECKING:
    from rich.table import Table

    from adaptspec.control.cost import CostModel
    from adaptspec.control.trace import Trace

BUDGETS = (4, 8, 16, 32)
"""Of the final table, as far as they do not exceed the recorded trees."""


def trace(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="TRACE", help="The trace to write (Parquet).")],
    model: options.Model = "embedded",
    prompts: options.Prompts = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", help="At most N prompts, from all domains.")
    ] = None,
    per_category: Annotated[
        int | None, typer.Option("--per-category", metavar="N", help="At most N prompts of each domain.")
    ] = None,
    max_new_tokens: options.MaxNewTokens = 128,
    pool: Annotated[
        list[str] | None,
        typer.Option(
            "--pool",
            metavar="NAMES",
            help="Drafters, separated by commas: name or name:PATH. See 'adaptspec pool'.",
        ),
    ] = None,
    nodes: Annotated[
        int, typer.Option("--nodes", metavar="N", help="Budget of every proposal; smaller ones are cut out of it.")
    ] = 64,
    temperature: options.Temperature = 0.0,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    chat: options.Chat = None,
    order: Annotated[
        str, typer.Option("--order", metavar="ORDER", help="'shuffle', or 'blocks': one domain after the other.")
    ] = "shuffle",
    seed: options.Seed = 0,
    threads: options.Threads = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
) -> None:
    """Record a position-indexed trace: the model's own answers, and what every drafter would have proposed on the way.

    The answers are those of plain generation, since drafts never change them; so one trace can be replayed under every
    strategy. Takes about one forward pass per token. Ctrl-C keeps the finished answers.
    """
    from adaptspec.cli.common import check_at_least, choose_pool, console, dtype_name, load_model, show
    from adaptspec.cli.conversation import Conversation
    from adaptspec.cli.measure import Measurer
    from adaptspec.cli.outputs import check_output, write_output
    from adaptspec.cli.progress import reporter
    from adaptspec.cli.prompts import built_in_prompts, read_prompts, select_prompts
    from adaptspec.cli.provenance import provenance
    from adaptspec.control.cost import MAX_NODES
    from adaptspec.control.trace_file import bytes_by_drafter, require_pyarrow, trace_bytes
    from adaptspec.tracing import TracePrompt, TraceRecorder, measured_costs

    check_at_least(1, max_new_tokens=max_new_tokens, nodes=nodes, threads=threads)
    check_at_least(0, seed=seed)
    if nodes > MAX_NODES:
        raise ValueError(f"nodes must be <= {MAX_NODES}, got {nodes}")
    chosen = select_prompts(
        built_in_prompts() if prompts is None else read_prompts(prompts),
        limit=limit,
        per_category=per_category,
        order=order,
        seed=seed,
    )
    check_names(chosen)
    check_output(out, force=force)
    require_pyarrow()
    drafters = make_drafters(choose_pool(pool), temperature=temperature)
    with reporter(quiet=quiet) as progress:
        progress.note(f"loading the model {model}")
        network, tokenizer = load_model(model, dtype=dtype, device=device, threads=threads)
        conversation = Conversation.choose(tokenizer, chat)
        Measurer.for_model(network, conversation, max_new_tokens=max_new_tokens).check_lengths(chosen)
        lengths = [len(conversation.encode(prompt.turns[:1])) + max_new_tokens // 2 for prompt in chosen]
        progress.note("measuring what verification costs")
        costs, fingerprint = measured_costs(network, nodes=nodes, contexts=contexts_of(lengths), tokenizer=tokenizer)
        recorder = TraceRecorder(
            network,
            drafters,
            nodes=nodes,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            costs=costs,
            tokenizer=tokenizer,
        )
        progress.total(sum(len(prompt.turns) for prompt in chosen))
        interrupted = False
        try:
            for prompt in chosen:
                answers: list[str] = []
                for turn, name in enumerate(request_names(prompt)):
                    progress.step(name)
                    ids = conversation.encode(prompt.turns[: turn + 1], answers)
                    request = recorder.record(TracePrompt(name, prompt.domain, ids))
                    answers.append(conversation.decode(request.tokens.tolist()))
        except KeyboardInterrupt:
            interrupted = True

    for problem, count in Counter(why for found in recorder.set_aside.values() for why in found.values()).items():
        typer.echo(f"adaptspec: set aside in {count} requests: {problem}", err=True)
    if recorder.requests:
        origin = provenance(
            argv=sys.argv[1:] if context.obj is None else context.obj,
            model=model,
            device=network.device,
            dtype=dtype_name(network),
            seed=seed,
        )
        origin |= {
            "prompts": "built-in" if prompts is None else str(prompts),
            "order": order,
            "chat": conversation.chat,
        }
        recorded = recorder.trace(fingerprint=fingerprint, provenance=origin | {"interrupted": interrupted})
        data = trace_bytes(recorded)
        typer.echo(f"wrote {write_output(out, data, force=force)}", err=True)
        show(console(), summary_table(recorded, costs, sizes=bytes_by_drafter(data)))
    if interrupted:
        typer.echo(f"adaptspec: interrupted after {len(recorder.requests)} finished answers", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)


def request_names(prompt: Prompt) -> list[str]:
    """What the answers to a prompt are called in the trace: its id, and with several turns the turn's number."""
    if len(prompt.turns) == 1:
        return [str(prompt.id)]
    return [f"{prompt.id}/{turn}" for turn in range(1, len(prompt.turns) + 1)]


def check_names(prompts: Sequence[Prompt]) -> None:
    """Raises ValueError for prompts whose answers would have the same name, such as the ids 7 and "7"."""
    counts = Counter(name for prompt in prompts for name in request_names(prompt))
    name, count = counts.most_common(1)[0]
    if count > 1:
        raise ValueError(f"ids of prompts must differ as text, got {name!r} {count} times")


def make_drafters(pool: Sequence[str], *, temperature: float) -> dict[str, object]:
    """The drafters of a pool by name.

    Raises:
        ValueError: unknown names, whole arms, drafters that cannot be traced, or an impossible temperature.
    """
    from adaptspec import AdaptiveSpec
    from adaptspec.cli.common import is_arm
    from adaptspec.tracing import check_traceable
    from adaptspec.types import Sampling

    for entry in pool:
        if entry == "ar" or is_arm(entry):
            raise ValueError(f"pool must hold drafters, their budget is --nodes; got the arm {entry!r}")
    greedy = Sampling(temperature).greedy
    drafters = AdaptiveSpec(list(pool)).drafters
    for name, drafter in drafters.items():
        check_traceable(name, drafter, greedy=greedy)
    return dict(drafters)


def contexts_of(lengths: Sequence[int]) -> list[int]:
    """Lengths of text to time verification at: the median of those in each context bucket of the cost model."""
    from adaptspec.control.cost_table import SMALLEST_CONTEXT

    buckets: dict[int, list[int]] = {}
    for length in sorted(lengths):
        buckets.setdefault(max(SMALLEST_CONTEXT, (length - 1).bit_length()), []).append(length)
    return [bucket[len(bucket) // 2] for bucket in buckets.values()]


def summary_table(recorded: Trace, costs: CostModel, *, sizes: Mapping[str, int]) -> Table:
    """One row per drafter: how often it proposes, and what it gains when it is played from the start of every answer.

    Args:
        sizes: bytes by drafter.
    """
    from rich import box
    from rich.table import Table

    from adaptspec.control.trace_reach import reaches, stops

    positions = sum(request.positions for request in recorded.requests)
    tokens = sum(len(request.tokens) for request in recorded.requests)
    table = Table(
        title=f"{len(recorded.requests)} answers, {tokens} tokens; length: mean accepted length, bonus token included",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    widest = max(recorded.nodes.values())
    budgets = [budget for budget in BUDGETS if budget <= widest] or [widest]
    heads = ["proposes", *(f"length @{budget}" for budget in budgets), "draft ms", "bytes/position"]
    table.add_column("drafter", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for drafter in recorded.nodes:
        found = [reaches(request, drafter) for request in recorded.requests]
        proposing = sum(int((request.proposals[drafter].sizes() > 0).sum()) for request in recorded.requests)
        cells = [f"{100 * proposing / positions:.0f} %" if positions else "–"]
        for budget in budgets:
            steps = sum(len(stops(reached.lengths(budget))) for reached in found)
            cells.append(f"{positions / steps:.2f}" if steps else "–")
        cells.append(f"{1000 * costs.draft_seconds(drafter, recorded.nodes[drafter]):.2f}")
        cells.append(f"{sizes.get(drafter, 0) / positions:.0f}" if positions else "–")
        table.add_row(drafter, *cells)
    return table
