"""`python -m experiments.experts`: draft heads that are experts for one domain each, as HedgeSpec chooses among.

Per domain of a prompt file the target answers the prompts, and an EAGLE-3 head that knows all domains is fine-tuned on
the answers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adaptspec.cli import EXIT_INTERRUPTED, options
from adaptspec.cli.common import check_at_least, dtype_name, load_model, split_names
from adaptspec.cli.progress import reporter
from adaptspec.cli.prompts import Prompt, by_domain, read_prompts
from adaptspec.cli.provenance import provenance
from adaptspec.cli.train import Minutes, Stages, answer_prompts, held_out_line, parse_numbers, prompt_tokens, stop_ids
from adaptspec.names import unknown_name
from adaptspec.pretrained import is_weights_folder, read_card
from adaptspec.processor import prefer_fast_kernels
from experiments.expert_folder import KIND, ExpertFolder, short_digest
from experiments.run import run_app

if TYPE_CHECKING:
    from adaptspec.cli.conversation import Conversation
    from adaptspec.cli.progress import Reporter
    from adaptspec.training.trainer import TrainingSettings

LEAST_PROMPTS = 2
"""Of a domain: one to learn from, one to be held out."""
LR = 0.005
"""A quarter of what a new head is trained with: fine-tuning starts near the end."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def experts(
    texts: Annotated[Path, typer.Option("--experts", metavar="FILE", help="Prompts with domains (jsonl).")],
    start: Annotated[
        str, typer.Option("--start", metavar="FOLDER", help="EAGLE-3 weights to begin with; shipped ones by name.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Where the experts go, or go on.")],
    model: options.Model = "embedded",
    domains: Annotated[
        str | None, typer.Option("--domains", metavar="NAMES", help="Of the file, like law,code. [default: all]")
    ] = None,
    samples: Annotated[int, typer.Option("--samples", metavar="N", help="Answers per prompt, the first greedy.")] = 4,
    temperatures: Annotated[
        str, typer.Option("--temperatures", metavar="NUMBERS", help="Of the other answers, in turn.")
    ] = "0.7,1.0",
    max_new_tokens: options.MaxNewTokens = 256,
    minutes: Minutes = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", help="Stop training after N steps: can be repeated exactly.")
    ] = None,
    lr: Annotated[float, typer.Option("--lr", metavar="X", help="Peak learning rate of matrices.")] = LR,
    precision: Annotated[
        str, typer.Option("--precision", metavar="DTYPE", help="Of matrix products in training: float32 or bfloat16.")
    ] = "float32",
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
    threads: options.Threads = None,
    seed: options.Seed = 0,
    quiet: options.Quiet = False,
) -> None:
    """Fine-tune one EAGLE-3 head per domain. --minutes or --steps are of training, per domain.

    Interrupt it at any time: the same command goes on where it was and leaves finished domains alone.
    """
    check_at_least(1, samples=samples, max_new_tokens=max_new_tokens, steps=steps, threads=threads)
    if minutes is None and steps is None:
        raise ValueError("give --minutes or --steps")
    heat = parse_numbers("temperatures", split_names([temperatures]))
    chosen = chosen_domains(read_prompts(texts), split_names([domains] if domains else None))
    prefer_fast_kernels()  # before torch is imported
    from adaptspec.cli.conversation import Conversation
    from adaptspec.drafters.cell_weights import target_fingerprint
    from adaptspec.training.recipes import find_start, load_start
    from adaptspec.training.trainer import TrainingSettings

    settings = TrainingSettings(minutes=minutes, steps=steps, lr=lr, precision=precision, seed=seed)
    found = Path(find_start(KIND, start))
    try:
        with reporter(quiet=quiet) as progress:
            progress.note(f"loading the model {model}")
            target, tokenizer = load_model(model, dtype=dtype, device=device, threads=threads)
            load_start(KIND, start, target)  # what is wrong with it shows before hours of answers
            conversation = Conversation.choose(tokenizer, None)
            fingerprint = target_fingerprint(target)
            about = {
                "target": {
                    "model": model,
                    "dtype": dtype_name(target),
                    **fingerprint,
                    "weights": short_digest(json.dumps(fingerprint["weights"])),
                },
                "options": {
                    "start": str(found.resolve()) if Path(start).exists() else start,
                    "start_sha256": read_card(found)["sha256"] if is_weights_folder(found) else None,
                    "chat": conversation.chat,
                    "samples": samples,
                    "temperatures": heat,
                    "max_new_tokens": max_new_tokens,
                    "minutes": minutes,
                    "steps": steps,
                    "lr": lr,
                    "precision": precision,
                    "seed": seed,
                },
            }
            folder = ExpertFolder.begin(out, about)
            work = _Work(folder, target, conversation, about["options"], settings, model, progress)
            with folder.locked():
                for domain, prompts in chosen.items():
                    work.make(domain, prompts)
    except KeyboardInterrupt:
        typer.echo(f"experiments: interrupted; the same command goes on in {out}", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    typer.echo(f"experiments: choose among them: python -m experiments.run strategies --heads {out}", err=True)


def chosen_domains(prompts: Sequence[Prompt], names: Sequence[str]) -> dict[str, list[Prompt]]:
    """The prompts of these domains, of all without names.

    Raises:
        ValueError: an unknown domain, or one with too few prompts.
    """
    groups = by_domain(prompts)
    for name in names:
        if name not in groups:
            raise unknown_name("domain", name, groups)
    chosen = {name: groups[name] for name in names or groups}
    for name, group in chosen.items():
        if len(group) < LEAST_PROMPTS:
            raise ValueError(
                f"the domain {name!r} must have at least {LEAST_PROMPTS} prompts, one to learn from and one to be held "
                f"out, got {len(group)}"
            )
    return chosen


@dataclass(frozen=True, slots=True)
class _Work:
    """A loaded target, and what is the same for every domain."""

    folder: ExpertFolder
    target: Any
    conversation: Conversation
    options: Mapping[str, Any]
    settings: TrainingSettings
    model: str
    progress: Reporter

    def make(self, domain: str, prompts: Sequence[Prompt]) -> None:
        """Answers, features, weights and the entry of a domain, as far as they are not there."""
        weights = self.folder.part(domain, "weights")
        if is_weights_folder(weights):  # its card is written last
            self._check_prompts(domain, prompts)
        else:
            self._train(domain, prompts)
        card = read_card(weights)
        before = {name: card["history"][0][name] for name in card["held_out"]}
        self.progress.note(f"{domain}: before: {held_out_line(before)}")
        self.progress.note(f"{domain}: after: {held_out_line(card['held_out'])}")
        if domain in self.folder.listing()["domains"]:
            return
        made_by = provenance(
            argv=[],
            model=self.model,
            device=self.target.device,
            dtype=dtype_name(self.target),
            seed=self.options["seed"],
        )
        entry = {
            "start": self.options["start"],
            "prompts": len(prompts),
            "turns": [short_digest(prompt.turns[0]) for prompt in prompts],
            "answer_tokens": card["answers"]["tokens"],
            "before": before,
            "after": card["held_out"],
            "steps": card["steps"],
            "seconds": card["seconds"],
            "sha256": card["sha256"],
            "provenance": {**made_by, "argv": card["command"]},
        }
        self.folder.finish(domain, entry)

    def _train(self, domain: str, prompts: Sequence[Prompt]) -> None:
        from adaptspec.training.training import TrainOptions, train_drafter

        answers = self.folder.part(domain, "answers")
        stages = Stages(self.progress)
        self.progress.note(f"{domain}: {len(prompts)} prompts")
        answer_prompts(
            self.target,
            self.conversation,
            prompts,
            answers,
            model=self.model,
            samples=self.options["samples"],
            temperatures=self.options["temperatures"],
            max_new_tokens=self.options["max_new_tokens"],
            seed=self.options["seed"],
            stages=stages,
        )
        train_drafter(
            KIND,
            self.target,
            answers=answers,
            folder=self.folder.part(domain, "weights"),
            settings=self.settings,
            options=TrainOptions(start=self.options["start"]),
            features=self.folder.part(domain, "features"),
            special_ids=stop_ids(self.target, self.conversation.tokenizer),
            command=["python", "-m", "experiments.experts", *sys.argv[1:]],
            note=self.progress.note,
            prepared=stages.features,
            report=stages.training,
        )

    def _check_prompts(self, domain: str, prompts: Sequence[Prompt]) -> None:
        """Raise ValueError unless a finished head was trained on these prompts."""
        from adaptspec.training.answers import prompts_digest

        tokens = [prompt_tokens(self.conversation, prompt) for prompt in prompts]
        if read_card(self.folder.part(domain, "weights"))["answers"]["origin"]["prompts"] != prompts_digest(tokens):
            raise ValueError(
                f"the head in {self.folder.part(domain, 'weights')} was trained on other prompts of the domain "
                f"{domain!r} than these {len(prompts)}; choose another --out, or the same prompts to continue"
            )


if __name__ == "__main__":
    run_app(app)
