"""`python -m adaptspec.pretrained`: what is known about the weights that come along, as a table in Markdown."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from adaptspec.pretrained import WEIGHTS_FILE, read_card, shipped_folder, shipped_names

_HEADER = "| weights | parameters | MB | bits | trained on | loss | chain | top-1 by depth | alpha by depth |"


def markdown() -> str:
    """One row per shipped weights folder; lengths and shares are those of held-out answers, see `HeldOut`."""
    columns = _HEADER.count("|") - 1
    return "\n".join([_HEADER, "|" + "---|" * columns, *_rows()]) + "\n"


def _rows() -> Iterator[str]:
    for name in shipped_names():
        folder = shipped_folder(name)
        assert folder is not None
        card = read_card(folder)
        yield "| " + " | ".join([f"`{name}`", *_size(folder, card), *_training(card)]) + " |"


def _size(folder: Path, card: dict[str, Any]) -> list[str]:
    parameters = sum(prod(shape) for shape in card["tensors"].values())
    size = (folder / WEIGHTS_FILE).stat().st_size
    return [f"{parameters / 1e6:.2f} M", f"{size / 1e6:.1f}", str(card["bits"])]


def _training(card: dict[str, Any]) -> list[str]:
    answers = f"{card['answers']['tokens']:,} answer tokens"
    if "held_out" not in card:  # a router: its own figure is how often the most likely token is in the groups it picks
        coverage = " ".join(f"{share:.2f}" for share in card["coverage"][:4])
        return [f"{answers}, {card['steps']} steps", f"{card['loss']:.3f}", "", f"in 1 to 4 groups: {coverage}", ""]
    found, loss = card["held_out"], card["loss"]
    described = loss["name"] if loss["name"] != "lk-lambda" else f"lk-lambda, eta {loss['eta']:g}"
    return [
        f"{answers}, {card['steps']} steps of {card['seconds'] / 60:.0f} min",
        described,
        f"{found['length']:.2f}",
        " ".join(f"{share:.2f}" for share in found["top1"]),
        " ".join(f"{share:.2f}" for share in found["alpha"]),
    ]


if __name__ == "__main__":
    sys.stdout.write(markdown())
