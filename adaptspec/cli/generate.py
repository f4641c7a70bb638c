"""`adaptspec generate`: one answer, streamed."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from adaptspec.cli import options


def generate(
    context: typer.Context,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The prompt; '-' reads it from stdin.")],
    model: options.Model = "embedded",
    pool: options.Pool = None,
    strategy: Annotated[
        str | None, typer.Option("--strategy", metavar="NAME", help="A strategy, or one arm like fixed:suffix@16.")
    ] = None,
    budgets: options.Budgets = "8,16,32",
    vocab: options.Vocab = "full",
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    max_new_tokens: options.MaxNewTokens = 128,
    seed: options.Seed = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    chat: options.Chat = None,
    threads: options.Threads = None,
    costs: options.Costs = None,
    foreign_costs: options.ForeignCosts = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Also print what the answer cost, on stderr.")] = False,
) -> None:
    """Answer one prompt; the answer goes to stdout as it is generated."""
    from adaptspec.cli.calibrate import check_foreign
    from adaptspec.cli.common import (
        check_at_least,
        choose_pool,
        default_strategy,
        dtype_name,
        load_model,
        make_pool,
        parse_budgets,
        split_names,
    )
    from adaptspec.control.strategies import check_strategy
    from adaptspec.types import Sampling

    check_at_least(1, max_new_tokens=max_new_tokens, threads=threads)
    check_foreign(costs, foreign_costs)
    Sampling(temperature, top_k, top_p)
    prompt = sys.stdin.read() if text == "-" else text
    if not prompt.strip():
        raise ValueError("the prompt must not be empty")

    from adaptspec import AdaptiveSpec

    names = choose_pool(pool)
    spec = AdaptiveSpec(
        make_pool(names),
        strategy=default_strategy(names) if strategy is None else check_strategy(strategy),
        budgets=parse_budgets(budgets),
        vocab=split_names([vocab]),
        seed=seed,
    )

    import torch

    from adaptspec.cli.conversation import Conversation
    from adaptspec.cli.provenance import provenance

    target, tokenizer = load_model(model, dtype=dtype, device=device, threads=threads)
    if costs is not None:
        spec.load_costs(target, costs, foreign=foreign_costs)
    conversation = Conversation.choose(tokenizer, chat)
    input_ids = torch.tensor([conversation.encode([prompt])], device=target.device)
    result = spec.generate(
        target,
        input_ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        tokenizer=tokenizer,
        streamer=None if as_json else _text_streamer(tokenizer),
    )
    if as_json:
        token_ids = result.sequences[0, input_ids.shape[1] :].tolist()
        answer = {
            "text": tokenizer.decode(token_ids, skip_special_tokens=True),
            "token_ids": token_ids,
            "prompt_tokens": input_ids.shape[1],
            "finish_reason": result.finish_reason,
            "strategy": spec.strategy,
            "stats": result.stats.to_dict(),
            "provenance": provenance(
                argv=sys.argv[1:] if context.obj is None else context.obj,
                model=model,
                device=target.device,
                dtype=dtype_name(target),
                seed=seed,
            ),
        }
        typer.echo(json.dumps(answer, indent=1, ensure_ascii=False))
    if stats:
        typer.echo(stats_line(result.stats), err=True)


def stats_line(stats: Any) -> str:
    """What an answer cost, in one line. Mean accepted length includes the bonus token, acceptance rate does not."""
    arms = ", ".join(f"{arm} {count}" for arm, count in stats.arms.items())
    return (
        f"{stats.new_tokens} tokens in {stats.seconds:.2f} s ({stats.tokens_per_second:.1f} tokens/s, "
        f"prefill {stats.prefill_seconds:.2f} s), {stats.steps} steps, "
        f"mean accepted length {stats.mean_accepted_length:.2f}, acceptance rate {stats.acceptance_rate:.2f}, "
        f"steps per arm: {arms or 'none'}; finished by {stats.finish_reason}"
    )


def _text_streamer(tokenizer: Any) -> Any:
    from transformers import TextStreamer

    return TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
