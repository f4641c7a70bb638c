"""`adaptspec datastore`: index text files for retrieval drafting."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from adaptspec.cli import options


def datastore(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="UTF-8 text files, one document each.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="OUT", help="The datastore to write.")],
    model: options.Model = "embedded",
    force: options.Force = False,
) -> None:
    """Build a datastore for the drafter 'rest' from text files, with the tokenizer of a model."""
    from adaptspec.cli.common import load_model
    from adaptspec.cli.outputs import check_output

    check_output(out, force=force)
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"there is no text file {file}")
    _, tokenizer = load_model(model)

    from adaptspec.drafters.datastore import build_from_text

    tokens = build_from_text(files, tokenizer, out)
    typer.echo(f"{out}: {tokens} tokens from {len(files)} {'file' if len(files) == 1 else 'files'}")
