"""`adaptspec train`: data for small drafters, and the drafters themselves."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adaptspec.cli import options
from adaptspec.cli.layers import layers

if TYPE_CHECKING:
    from adaptspec.cli.conversation import Conversation
    from adaptspec.cli.prompts import Prompt
    from adaptspec.training.answers import AnswersProgress
    from adaptspec.training.jobs import PromptTokens

train = typer.Typer(
    name="train", help="Make training data for drafters of a model, and train them.", no_args_is_help=True
)

Minutes = Annotated[float | None, typer.Option("--minutes", metavar="M", help="Stop after so long.")]
Answers = Annotated[Path, typer.Option("--answers", metavar="FOLDER", help="Answers of 'adaptspec train answers'.")]
Features = Annotated[
    Path | None,
    typer.Option("--features", metavar="FOLDER", help="Where hidden states are kept. [default: with the answers]"),
]


@train.command()
def answers(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Where the answers go.")],
    prompts: options.Prompts = None,
    model: options.Model = "embedded",
    samples: Annotated[int, typer.Option("--samples", metavar="N", help="Answers per prompt, the first greedy.")] = 4,
    temperatures: Annotated[
        str, typer.Option("--temperatures", metavar="NUMBERS", help="Of the other answers, in turn.")
    ] = "0.7,1.0",
    max_new_tokens: options.MaxNewTokens = 256,
    max_prompt_tokens: Annotated[
        int | None, typer.Option("--max-prompt-tokens", metavar="N", help="Leave longer prompts out.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", metavar="N", help="Answers written at the same time.")] = 64,
    minutes: Minutes = None,
    part: Annotated[
        str,
        typer.Option("--part", metavar="K/N", help="Be the K-th of N processes that share the prompts and the folder."),
    ] = "1/1",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    seed: options.Seed = 0,
    chat: options.Chat = None,
    quiet: options.Quiet = False,
) -> None:
    """Let the model answer the first turn of every prompt: what drafters are trained on.

    Domains of the prompt file take turns, and small ones are sampled more often. Interrupt it at any time: the same
    command goes on where it was.
    """
    from adaptspec.cli.common import check_at_least, load_model, split_names
    from adaptspec.cli.conversation import Conversation
    from adaptspec.cli.progress import reporter
    from adaptspec.cli.prompts import built_in_prompts, read_prompts

    check_at_least(1, samples=samples, batch=batch, max_new_tokens=max_new_tokens, threads=threads)
    heat = parse_numbers("temperatures", split_names([temperatures]))
    share = parse_part(part)
    texts = built_in_prompts() if prompts is None else read_prompts(prompts)
    with reporter(quiet=quiet) as progress:
        progress.note(f"loading the model {model}")
        target, tokenizer = load_model(model, dtype=dtype, device=device, threads=threads)
        done = answer_prompts(
            target,
            Conversation.choose(tokenizer, chat),
            texts,
            out,
            model=model,
            samples=samples,
            temperatures=heat,
            max_new_tokens=max_new_tokens,
            max_prompt_tokens=max_prompt_tokens,
            batch=batch,
            minutes=minutes,
            part=share,
            seed=seed,
            stages=Stages(progress),
        )
    typer.echo(f"{out}: {answers_line(done)}", err=True)


@train.command()
def counts(
    answers: Answers,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The list: .safetensors, .json or .npy.")],
    force: options.Force = False,
) -> None:
    """Count the tokens of answers: the list by frequency that reduced vocabularies like fr:8192 are cut from."""
    from adaptspec.cli.outputs import check_output
    from adaptspec.training.corpus import answer_tokens, read_answers, read_description
    from adaptspec.vocab.counts import count_tokens, save_frequencies

    check_output(out, force=force)
    found, origin = read_answers(answers), read_description(answers)
    if not found:
        raise ValueError(f"{answers} holds no answers yet")
    frequencies = count_tokens(
        (answer.token_ids[answer.prompt_length :] for answer in found),
        vocab_size=origin["vocab_size"],
        source=f"{answer_tokens(found)} tokens answered by {origin.get('model', 'a model')}",
    )
    save_frequencies(out, frequencies)
    typer.echo(f"wrote {out}: {frequencies.source}", err=True)


@train.command()
def pack(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Weights of 'adaptspec train'.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Where the smaller ones go.")],
    bits: Annotated[int, typer.Option("--bits", metavar="N", help="Of matrices: 4, 8, 16 or 32.")] = 4,
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="NAME", help="Leave out what the shipped weights NAME hold just so."),
    ] = None,
) -> None:
    """Keep weights in fewer bits: 4 are half as large as the 8 that training writes."""
    from adaptspec.pretrained import is_weights_folder, load_weights, save_weights, without_base

    if is_weights_folder(out):
        raise ValueError(f"{out} already holds weights; choose another folder")
    state, card = load_weights(folder)
    if base is not None:
        state, card = without_base(state, card, base)
    save_weights(out, state, card, bits=bits)
    size = sum(path.stat().st_size for path in out.iterdir())
    typer.echo(f"wrote {out}: {size / 1e6:.1f} MB", err=True)


def _add_kind(kind: str, summary: str) -> None:
    def run(
        context: typer.Context,
        answers: Answers,
        out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Where the weights go.")],
        model: options.Model = "embedded",
        minutes: Minutes = None,
        steps: Annotated[
            int | None, typer.Option("--steps", metavar="N", help="Stop after N steps: can be repeated exactly.")
        ] = None,
        loss: Annotated[
            str | None,
            typer.Option(
                "--loss", metavar="NAME", help="ce, kl, lk-alpha, lk-lambda, feature, griffin. [default: the kind's]"
            ),
        ] = None,
        eta: Annotated[float, typer.Option("--eta", metavar="X", help="Of lk-lambda.")] = 3.0,
        unroll: Annotated[
            int | None, typer.Option("--unroll", metavar="N", help="Steps of its own recursion. [default: the kind's]")
        ] = None,
        decay: Annotated[float, typer.Option("--decay", metavar="X", help="Step k counts X^k.")] = 0.8,
        lr: Annotated[float | None, typer.Option("--lr", metavar="X", help="Peak learning rate of matrices.")] = None,
        optimiser: Annotated[str, typer.Option("--optimiser", metavar="NAME", help="muon or adamw.")] = "muon",
        precision: Annotated[
            str, typer.Option("--precision", metavar="DTYPE", help="Of matrix products: float32 or bfloat16.")
        ] = "float32",
        rows: Annotated[int, typer.Option("--rows", metavar="N", help="Output rows computed in training.")] = 8192,
        intermediate: Annotated[
            int | None,
            typer.Option("--intermediate", metavar="N", help="Units of a cell's MLP. [default: the target's]"),
        ] = None,
        taps: Annotated[
            str | None, typer.Option("--taps", metavar="NUMBERS", help="Layers that are read, like 2,15,27 by eagle3.")
        ] = None,
        start: Annotated[
            str | None,
            typer.Option(
                "--start",
                metavar="FOLDER",
                help="Go on from weights of this kind, also shipped ones by name; confu also from eagle3.",
            ),
        ] = None,
        frozen: Annotated[
            bool, typer.Option("--frozen", help="Of confu: keep the eagle3 of --start as it is, train what is added.")
        ] = False,
        backbone: Annotated[
            str | None,
            typer.Option("--backbone", metavar="FOLDER", help="Of treeflash and taps: a dflash. [default: shipped]"),
        ] = None,
        fresh: Annotated[
            bool, typer.Option("--fresh", help="Begin with random weights, not the last layer's.")
        ] = False,
        features: Features = None,
        batch: Annotated[int, typer.Option("--batch", metavar="N", help="Rows per step.")] = 2048,
        checks: Annotated[
            int, typer.Option("--checks", metavar="N", help="Looks at held-out texts over the run.")
        ] = 10,
        dtype: options.Dtype = "auto",
        device: options.Device = "auto",
        threads: options.Threads = None,
        seed: options.Seed = 0,
        quiet: options.Quiet = False,
    ) -> None:
        from adaptspec.cli.common import check_at_least, load_model
        from adaptspec.cli.progress import reporter

        check_at_least(1, checks=checks, batch=batch, rows=rows, threads=threads, unroll=unroll, steps=steps)
        check_at_least(1, intermediate=intermediate)
        if steps is None and minutes is None:
            raise ValueError("give --minutes or --steps")
        layers = None if taps is None else tuple(parse_layers(taps))

        from adaptspec.training.recipes import recipe
        from adaptspec.training.trainer import TrainingSettings
        from adaptspec.training.training import TrainOptions, train_drafter

        chosen = recipe(kind)
        settings = TrainingSettings(
            minutes=minutes,
            steps=steps,
            lr=(chosen.lr if optimiser == "muon" else 1e-3) if lr is None else lr,
            optimiser=optimiser,
            precision=precision,
            evaluations=checks,
            seed=seed,
        )
        how = TrainOptions(
            loss=loss,
            eta=eta,
            unroll=unroll,
            decay=decay,
            rows=rows,
            intermediate=intermediate,
            taps=layers,
            start=start,
            frozen=frozen,
            backbone=backbone,
            copy=not fresh,
            batch_rows=batch,
        )
        with reporter(quiet=quiet) as progress:
            progress.note(f"loading the model {model}")
            target, tokenizer = load_model(model, dtype=dtype, device=device, threads=threads)
            stages = Stages(progress)
            done = train_drafter(
                kind,
                target,
                answers=answers,
                folder=out,
                settings=settings,
                options=how,
                features=features,
                special_ids=stop_ids(target, tokenizer),
                command=["adaptspec", *(sys.argv[1:] if context.obj is None else context.obj)],
                note=progress.note,
                prepared=stages.features,
                report=stages.training,
            )
        typer.echo(f"wrote {out}: {held_out_line(done.best)}", err=True)

    run.__doc__ = f"Train {summary} on answers of the model."
    train.command(kind)(run)


for _kind, _summary in (
    ("eagle1", "the cell of EAGLE and EAGLE-2"),
    ("eagle3", "the cell of EAGLE-3"),
    ("confu", "the cell of ConFu"),
    ("griffin", "the cell of GRIFFIN"),
    ("mtp1", "one multi-token-prediction layer"),
    ("mtp3", "three multi-token-prediction layers"),
    ("medusa", "Medusa's heads"),
    ("hydra", "Hydra's heads"),
    ("kangaroo", "the adapter of Kangaroo"),
    ("cats", "the adapters of CATS"),
    ("dflash", "the backbone of DFlash and DDTree"),
    ("treeflash", "the correction of TreeFlash"),
    ("taps", "the scorer of TAPS"),
    ("draft-model", "an independent small language model"),
):
    _add_kind(_kind, _summary)


def _add_router(kind: str, summary: str) -> None:
    def run(
        context: typer.Context,
        answers: Answers,
        out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Where the weights go.")],
        model: options.Model = "embedded",
        drafter: Annotated[
            Path | None,
            typer.Option("--drafter", metavar="FOLDER", help="Learn from this cell's head inputs, not the model's."),
        ] = None,
        steps: Annotated[int, typer.Option("--steps", metavar="N", help="Steps of the optimiser.")] = 500,
        positions: Annotated[int, typer.Option("--positions", metavar="N", help="Most positions learnt from.")] = 50000,
        rows: Annotated[int, typer.Option("--rows", metavar="N", help="As for the drafters sharing features.")] = 8192,
        features: Features = None,
        dtype: options.Dtype = "auto",
        device: options.Device = "auto",
        threads: options.Threads = None,
        seed: options.Seed = 0,
        quiet: options.Quiet = False,
    ) -> None:
        from adaptspec.cli.common import check_at_least, load_model
        from adaptspec.cli.progress import reporter

        check_at_least(1, steps=steps, positions=positions, rows=rows, threads=threads)

        from adaptspec.training.head_routers import train_head_router

        with reporter(quiet=quiet) as progress:
            progress.note(f"loading the model {model}")
            target, tokenizer = load_model(model, dtype=dtype, device=device, threads=threads)
            report = train_head_router(
                kind,
                target,
                answers=answers,
                folder=out,
                drafter=drafter,
                features=features,
                positions=positions,
                rows=rows,
                steps=steps,
                seed=seed,
                special_ids=stop_ids(target, tokenizer),
                command=["adaptspec", *(sys.argv[1:] if context.obj is None else context.obj)],
                prepared=Stages(progress).features,
            )
        shares = " ".join(f"{value:.2f}" for value in report.coverage[:4])
        typer.echo(f"wrote {out}: the most likely token is in the 1, 2, 3, 4 best groups: {shares}", err=True)

    run.__doc__ = f"Train {summary} on answers of the model."
    train.command(kind)(run)


for _kind, _summary in (
    ("coral", "the router of the vocabulary head 'coral'"),
    ("dynaspec", "the router of the vocabulary head 'dynaspec'"),
):
    _add_router(_kind, _summary)


train.command()(layers)


class Stages:
    """Progress in per cent, so that bars and estimates follow a budget of minutes as well as one of steps."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self._stage = ""
        self._percent = 0
        self._checks = 0

    def show(self, stage: str, share: float, text: str) -> None:
        """A stage is `share` done; another name begins a new bar."""
        if stage != self._stage:
            self._stage, self._percent = stage, 0
            self._progress.total(100)
            self._progress.step(text)
        while self._percent < min(100, int(100 * share)):
            self._percent += 1
            self._progress.step(text)

    def answers(self, state: Any) -> None:
        """For `write_answers`."""
        self.show("answers", state.answers / state.total, answers_line(state))

    def features(self, done: int, total: int) -> None:
        """For `train_drafter`."""
        self.show("features", done / total, f"features of {done} of {total} tokens")

    def training(self, state: Any, share: float) -> None:
        """For `train_drafter`."""
        for check in state.history[self._checks :]:
            self._progress.note(f"step {check['step']}: {held_out_line(check)}")
        self._checks = len(state.history)
        text = f"step {state.step}, loss {state.loss:.3f}, {state.positions_per_second:.0f} positions/s"
        self.show("training", share, text)


def answer_prompts(
    target: Any,
    conversation: Conversation,
    prompts: Sequence[Prompt],
    out: Path,
    *,
    model: str,
    samples: int,
    temperatures: Sequence[float],
    max_new_tokens: int,
    max_prompt_tokens: int | None = None,
    batch: int = 64,
    minutes: float | None = None,
    part: tuple[int, int] = (1, 1),
    seed: int = 0,
    stages: Stages,
) -> AnswersProgress:
    """Let a loaded target answer the first turn of every prompt into a folder that says where the answers are from.

    Args:
        conversation: with the target's tokenizer.
        model: as the user named it.
        stages: told what goes on.

    The others are those of `adaptspec.training.answers.write_answers`, and so are the errors.
    """
    from adaptspec.cli.common import dtype_name
    from adaptspec.cli.provenance import library_versions
    from adaptspec.drafters.cell_weights import target_fingerprint
    from adaptspec.training.answers import write_answers

    return write_answers(
        target,
        [prompt_tokens(conversation, prompt) for prompt in prompts],
        out,
        origin={
            "model": model,
            "target": target_fingerprint(target),
            "dtype": dtype_name(target),
            "chat": conversation.chat,
            "versions": library_versions(),
            "device": target.device.type,
        },
        samples=samples,
        temperatures=temperatures,
        max_new_tokens=max_new_tokens,
        max_prompt_tokens=max_prompt_tokens,
        batch=batch,
        minutes=minutes,
        part=part,
        seed=seed,
        stop_ids=stop_ids(target, conversation.tokenizer),
        report=stages.answers,
    )


def prompt_tokens(conversation: Conversation, prompt: Prompt) -> PromptTokens:
    """The first turn of a prompt as `write_answers` takes it."""
    from adaptspec.training.jobs import PromptTokens

    return PromptTokens(conversation.encode(prompt.turns[:1]), prompt.domain)


def answers_line(state: Any) -> str:
    """Progress of `write_answers` in one line."""
    return (
        f"{state.answers}/{state.total} answers, {state.answer_tokens} tokens, {state.tokens_per_second:.0f} tokens/s"
    )


def held_out_line(figures: Any) -> str:
    """Held-out acceptance in one line."""
    by_depth = "; ".join(
        f"{name} " + " ".join(f"{value:.2f}" for value in figures[name]) for name in ("top1", "top3", "top8")
    )
    return f"held-out chain {figures['length']:.2f} tokens with the bonus, by depth {by_depth}"


def parse_layers(text: str) -> list[int]:
    """Layers of an option like 2,15,27."""
    from adaptspec.cli.calibrate import parse_whole_numbers

    return parse_whole_numbers("taps", text)


def stop_ids(model: Any, tokenizer: Any) -> list[int]:
    """End-of-text tokens of the generation config and of the tokenizer."""
    config = getattr(model, "generation_config", None)
    found = getattr(config, "eos_token_id", None)
    ids = list(found) if isinstance(found, list | tuple) else [found]
    return sorted({int(token) for token in (*ids, getattr(tokenizer, "eos_token_id", None)) if token is not None})


def parse_numbers(name: str, texts: tuple[str, ...]) -> list[float]:
    """Numbers of an option.

    Raises:
        ValueError: one is not a number.
    """
    numbers = []
    for text in texts:
        try:
            numbers.append(float(text))
        except ValueError:
            raise ValueError(f"{name} must be numbers separated by commas, got {text!r}") from None
    return numbers


def parse_part(text: str) -> tuple[int, int]:
    """(K, N) of "K/N".

    Raises:
        ValueError: something else, or K outside 1 to N.
    """
    match = re.fullmatch(r"([1-9]\d{0,5})/([1-9]\d{0,5})", text)
    part = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= part[0] <= part[1]:
        raise ValueError(f"part must be K/N with 1 <= K <= N, got {text!r}")
    return part
