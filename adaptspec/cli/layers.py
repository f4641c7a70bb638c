"""`adaptspec train layers`: which sub-layers the drafter 'draft-verify' leaves out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from adaptspec.cli import options


def layers(
    context: typer.Context,
    answers: Annotated[Path, typer.Option("--answers", metavar="FOLDER", help="Answers of 'adaptspec train answers'.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where the list of layers goes, as JSON.")],
    model: options.Model = "embedded",
    texts: Annotated[int, typer.Option("--texts", metavar="N", help="Answers that are looked at.")] = 12,
    most_tokens: Annotated[int, typer.Option("--most-tokens", metavar="N", help="Tokens of each, at most.")] = 256,
    tries: Annotated[int, typer.Option("--tries", metavar="N", help="Sets of sub-layers that are tried.")] = 100,
    max_depth: Annotated[
        int, typer.Option("--max-depth", metavar="N", help="Longest chain that is reckoned with.")
    ] = 8,
    force: options.Force = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    seed: options.Seed = 0,
    quiet: options.Quiet = False,
) -> None:
    """Search the attention and feed-forward layers that the model can draft without.

    The search goes by the tokens per second that greedy chains would bring: from the share of tokens on which the
    shortened model agrees with the whole one, and from measured seconds. Give the file to the drafter as
    draft-verify:FILE.
    """
    from adaptspec.cli.common import check_at_least, load_model
    from adaptspec.cli.outputs import check_output
    from adaptspec.cli.progress import reporter

    check_at_least(1, texts=texts, tries=tries, max_depth=max_depth, threads=threads)
    check_at_least(2, most_tokens=most_tokens)
    check_output(out, force=force)

    import torch

    from adaptspec.drafters.cell_weights import target_fingerprint
    from adaptspec.drafters.early_exit.skipped import save_skipped
    from adaptspec.target.hf import HFTarget
    from adaptspec.training.corpus import choose_texts, read_answers
    from adaptspec.training.layer_search import Found, measure_seconds, search_layers

    chosen = choose_texts(read_answers(answers), count=texts, most_tokens=most_tokens, seed=seed)
    if not chosen:
        raise ValueError(f"{answers} holds no answers with a prompt below {most_tokens} tokens")
    with reporter(quiet=quiet) as progress:
        progress.note(f"loading the model {model}")
        network, _ = load_model(model, dtype=dtype, device=device, threads=threads)
        target = HFTarget(network)
        seconds = measure_seconds(target, prompt=torch.from_numpy(chosen[0][0]))
        progress.total(tries)
        done = 0

        def report(tried: int, best: Found) -> None:
            nonlocal done
            while done < tried:
                done += 1
                progress.step(f"{best.agreement:.2f} agree, {best.tokens_per_second:.1f} tokens/s expected")

        found = search_layers(
            target, chosen, seconds=seconds, tries=tries, max_depth=max_depth, seed=seed, report=report
        )
    card = {
        "target": target_fingerprint(network),
        "agreement": round(found.agreement, 4),
        "tokens_per_second": round(found.tokens_per_second, 3),
        "autoregressive": round(found.autoregressive, 3),
        "depth": found.depth,
        "tried": found.tried,
        "texts": len(chosen),
        "seed": seed,
        "command": ["adaptspec", *(sys.argv[1:] if context.obj is None else context.obj)],
    }
    save_skipped(out, found.skipped, card)
    skipped = found.skipped
    typer.echo(
        f"wrote {out}: without the attention of layers {list(skipped.attention)} and the feed-forward part of "
        f"{list(skipped.mlp)} {found.agreement:.2f} of tokens agree; {found.tokens_per_second:.1f} tokens/s expected, "
        f"{found.autoregressive:.1f} without drafts",
        err=True,
    )
