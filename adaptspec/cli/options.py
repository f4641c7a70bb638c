"""Options that several commands take, each defined once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str, typer.Option("--model", metavar="NAME", help="'embedded', a hub id, a local folder, or a GGUF file.")
]
Dtype = Annotated[
    str, typer.Option("--dtype", metavar="DTYPE", help="float32, bfloat16, float16, or auto: as the model was saved.")
]
Device = Annotated[str, typer.Option("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, ..., or auto.")]
Pool = Annotated[
    list[str] | None,
    typer.Option(
        "--pool",
        metavar="NAMES",
        help="Drafters, separated by commas: name, name:PATH, or a whole arm like suffix@16; 'all' for every drafter"
        " that needs no path. See 'adaptspec pool'.",
    ),
]
Budgets = Annotated[str, typer.Option("--budgets", metavar="NUMBERS", help="Draft nodes to verify, like 8,32.")]
Vocab = Annotated[
    str, typer.Option("--vocab", metavar="NAMES", help="Vocabulary heads of trained drafters, like full,fr:16384.")
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", metavar="N", help="Longest answer.")]
Temperature = Annotated[float, typer.Option("--temperature", metavar="T", help="0 is greedy.")]
TopK = Annotated[int, typer.Option("--top-k", metavar="K", help="Sample from the K most likely tokens; 0 is off.")]
TopP = Annotated[float, typer.Option("--top-p", metavar="P", help="Sample from the top share P; 1 is off.")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Seed of everything random.")]
Threads = Annotated[int | None, typer.Option("--threads", metavar="N", help="CPU threads. [default: the library's]")]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat", help="Use the tokenizer's chat template. [default: if it has one]", show_default=False
    ),
]
Strategies = Annotated[
    list[str] | None,
    typer.Option(
        "--strategies",
        metavar="NAMES",
        help="Strategies to compare, separated by commas; 'all' or 'none'. [default: the main ones]",
    ),
]
Prompts = Annotated[
    Path | None, typer.Option("--prompts", metavar="FILE", help="Prompt file (jsonl). [default: the built-in prompts]")
]
Costs = Annotated[
    Path | None,
    typer.Option("--costs", metavar="PROFILE", help="Costs to decide with from the start, of 'adaptspec calibrate'."),
]
ForeignCosts = Annotated[
    bool, typer.Option("--foreign-costs", help="Take the shape of costs that another machine measured.")
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite existing output files.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
