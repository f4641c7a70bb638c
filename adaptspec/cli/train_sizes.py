"""`adaptspec train griffin-gs` and `griffin-ltd`: rules for depth and size of a feature-recursive drafter's trees."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from adaptspec.cli import options

Drafter = Annotated[
    str, typer.Option("--drafter", metavar="NAME", help="A feature-recursive drafter: name or name:PATH.")
]
Limit = Annotated[int | None, typer.Option("--limit", metavar="N", help="At most N prompts, from all domains.")]


def griffin_gs(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="What was found, and the whole table.")],
    drafter: Drafter = "griffin",
    model: options.Model = "embedded",
    prompts: options.Prompts = None,
    limit: Limit = None,
    max_new_tokens: options.MaxNewTokens = 128,
    depths: Annotated[
        str, typer.Option("--depths", metavar="NUMBERS", help="Depths to measure, like 3,5,7.")
    ] = "1,2,3,5,7",
    sizes: Annotated[
        str, typer.Option("--sizes", metavar="NUMBERS", help="Sizes to measure, like 8,32.")
    ] = "4,8,16,32,60",
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", help="Rounds over all prompts.")] = 1,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    seed: options.Seed = 0,
    chat: options.Chat = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure static trees of every depth and size here, and write the fastest for the drafter 'griffin-gs:FILE'.

    Every setting answers every first turn greedily. What is best belongs to this machine, model and drafter; the file
    says which they were.
    """
    from adaptspec import AdaptiveSpec
    from adaptspec.cli.calibrate import parse_whole_numbers
    from adaptspec.cli.common import check_at_least
    from adaptspec.cli.outputs import check_output, write_output
    from adaptspec.cli.progress import reporter
    from adaptspec.drafters.griffin_gs import StaticTree
    from adaptspec.drafters.sized import make_backbone
    from adaptspec.machine import machine_fingerprint
    from adaptspec.target.hf import HFTarget
    from adaptspec.tracing.static_grid import search_grid

    check_at_least(1, max_new_tokens=max_new_tokens, repeats=repeats, threads=threads, limit=limit)
    grid = parse_whole_numbers("depths", depths), parse_whole_numbers("sizes", sizes)
    for name, values in zip(("depths", "sizes"), grid, strict=True):
        if min(values) < 1:
            raise ValueError(f"{name} must be >= 1, got {min(values)}")
    backbone = make_backbone(drafter, max_depth=max(grid[0]))
    check_output(out, force=force)
    with reporter(quiet=quiet) as progress:
        network, tokenizer, texts, names = _load(
            progress, model, prompts, limit, seed=seed, dtype=dtype, device=device, threads=threads, chat=chat
        )
        players = {size: AdaptiveSpec([backbone], f"fixed:{backbone.name}@{size}") for size in grid[1]}

        def run(depth: int, size: int, prompt: int) -> tuple[int, int, float]:
            import torch

            progress.step(f"depth {depth}, {size} nodes: {names[prompt]}")
            backbone.max_depth = depth
            ids = torch.tensor([texts[prompt]], device=network.device)
            result = players[size].generate(network, ids, max_new_tokens=max_new_tokens)
            if result.stats.set_aside:
                raise ValueError(f"the drafter failed: {'; '.join(result.stats.set_aside.values())}")
            return (
                sum(record.emitted for record in result.trace),
                len(result.trace),
                sum(record.seconds for record in result.trace),
            )

        progress.total(1 + len(grid[0]) * len(grid[1]) * len(texts) * repeats)
        run(max(grid[0]), max(grid[1]), 0)  # what happens once, at the first use of anything, is nobody's time
        table = search_grid(run, depths=grid[0], sizes=grid[1], prompts=len(texts), repeats=repeats)
    best = table[0]
    card = {
        **_card(context, network, model=model, prompts=prompts, count=len(texts), seed=seed),
        "machine": machine_fingerprint(HFTarget(network, tokenizer=tokenizer)),
        "max_new_tokens": max_new_tokens,
        "table": [measured.to_dict() for measured in table],
    }
    path = write_output(out, StaticTree(best.depth, best.size, drafter, card).to_json(), force=force)
    typer.echo(
        f"wrote {path}: depth {best.depth}, {best.size} nodes: {best.tokens_per_second:.1f} tokens/s, "
        f"{best.accepted_length:.2f} tokens per step with the bonus",
        err=True,
    )


def griffin_ltd(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The policies (.safetensors).")],
    drafter: Drafter = "griffin",
    model: options.Model = "embedded",
    prompts: options.Prompts = None,
    limit: Limit = None,
    max_new_tokens: options.MaxNewTokens = 128,
    records: Annotated[
        Path | None,
        typer.Option("--records", metavar="FILE", help="Records of growing trees (.npz): used if there, else written."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Steps of the optimiser.")] = 1500,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    seed: options.Seed = 0,
    chat: options.Chat = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
) -> None:
    """Record how trees grow at every position of the model's own answers, and train the policies of 'griffin-ltd:FILE'.

    Answers first turns greedily, one token per pass, and measures what every depth and size takes here. The policies
    are then trained offline on what each choice would have earned. Records are of one drafter, model and machine.
    """
    from adaptspec.cli.common import check_at_least
    from adaptspec.cli.outputs import check_output
    from adaptspec.cli.progress import reporter
    from adaptspec.drafters.draft_policies import MOST_DEPTH, save_policies
    from adaptspec.drafters.sized import make_backbone
    from adaptspec.machine import machine_fingerprint
    from adaptspec.target.hf import HFTarget
    from adaptspec.tracing import TracePrompt
    from adaptspec.tracing.growth import read_growth, record_growth
    from adaptspec.training.draft_policies import PolicySettings, train_policies

    check_at_least(1, max_new_tokens=max_new_tokens, steps=steps, threads=threads, limit=limit)
    make_backbone(drafter, max_depth=MOST_DEPTH)
    check_output(out, force=force)
    if records is not None and not records.exists():
        check_output(records, force=False)
    with reporter(quiet=quiet) as progress:
        network, tokenizer, texts, names = _load(
            progress, model, prompts, limit, seed=seed, dtype=dtype, device=device, threads=threads, chat=chat
        )
        card = _card(context, network, model=model, prompts=prompts, count=len(texts), seed=seed)
        card["machine"] = machine_fingerprint(HFTarget(network, tokenizer=tokenizer))
        if records is not None and records.exists():
            found = read_growth(records)
            progress.note(f"{records} holds {len(found.features)} positions")
        else:
            progress.total(len(texts))
            asked = [TracePrompt(name, "", ids) for name, ids in zip(names, texts, strict=True)]
            found, _ = record_growth(
                network,
                drafter,
                asked,
                max_new_tokens=max_new_tokens,
                tokenizer=tokenizer,
                progress=progress.step,
            )
            if records is not None:
                found.save(records)
        progress.total(steps)
        policies = train_policies(
            found.features,
            found.accepted,
            found.seconds,
            prompts=found.prompts,
            drafter=drafter,
            settings=PolicySettings(steps=steps, seed=seed),
            card=card,
            report=lambda step, reward: progress.step(f"step {step}: {reward:.1f} tokens/s"),
        )
    save_policies(out, policies)
    seen, figures = "held-out", policies.card.get("held_out")
    if figures is None:
        seen, figures = "its own", policies.card["reward"]
    typer.echo(
        f"wrote {out}: on {seen} positions {figures['policies']:.1f} tokens/s, the best static tree "
        f"{figures['static']:.1f}",
        err=True,
    )


def _load(
    progress: Any,
    model: str,
    prompts: Path | None,
    limit: int | None,
    *,
    seed: int,
    dtype: str,
    device: str,
    threads: int | None,
    chat: bool | None,
) -> tuple[Any, Any, list[list[int]], list[str]]:
    """Model, tokenizer, and the first turn of every prompt: its tokens and its name."""
    from adaptspec.cli.common import load_model
    from adaptspec.cli.conversation import Conversation
    from adaptspec.cli.prompts import built_in_prompts, read_prompts, select_prompts

    texts = built_in_prompts() if prompts is None else read_prompts(prompts)
    chosen = select_prompts(texts, limit=limit, per_category=None, order="shuffle", seed=seed)
    progress.note(f"loading the model {model}")
    network, tokenizer = load_model(model, dtype=dtype, device=device, threads=threads)
    conversation = Conversation.choose(tokenizer, chat)
    encoded = [conversation.encode(prompt.turns[:1]) for prompt in chosen]
    return network, tokenizer, encoded, [f"prompt {i + 1} of {len(chosen)}" for i in range(len(chosen))]


def _card(
    context: typer.Context, network: Any, *, model: str, prompts: Path | None, count: int, seed: int
) -> dict[str, Any]:
    """Where a rule comes from, and which target it is for."""
    from adaptspec.cli.common import dtype_name
    from adaptspec.cli.provenance import provenance
    from adaptspec.drafters.cell_weights import target_fingerprint

    argv: Sequence[str] = sys.argv[1:] if context.obj is None else context.obj
    origin = provenance(argv=argv, model=model, device=network.device, dtype=dtype_name(network), seed=seed)
    return {
        "target": target_fingerprint(network),
        "prompts": {"from": "built-in" if prompts is None else str(prompts), "count": count},
        "provenance": origin,
    }
