"""Prompts to measure on: the built-in ones, and readers for prompt files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np

Order = Literal["shuffle", "blocks"]
ORDERS: tuple[Order, ...] = ("shuffle", "blocks")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation to be answered: `turns` are the user's messages in order."""

    id: int | str
    domain: str
    turns: tuple[str, ...]


def built_in_prompts() -> list[Prompt]:
    """The prompts that ship with the package: nine domains, written for it."""
    text = resources.files("adaptspec.cli").joinpath("prompts.jsonl").read_text(encoding="utf-8")
    return _parse(text, "built-in prompts")


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a prompt file with one JSON object a line.

    A line has `turns` (a list of texts) or `prompt` (one text). Optional: `question_id` or `id` (the line number
    without one), and `category` or `domain` ("general" without one). Other fields are ignored, empty lines skipped.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is wrong; names the file, the line and what is wrong with it.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a UTF-8 text file: {error.reason} at byte {error.start}") from None
    return _parse(text, str(path))


def _parse(text: str, source: str) -> list[Prompt]:
    prompts: list[Prompt] = []
    first_line: dict[int | str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{source}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from None
        prompt = _prompt(record, number, where)
        if prompt.id in first_line:
            raise ValueError(f"{where}: the id {prompt.id!r} is already used in line {first_line[prompt.id]}")
        first_line[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{source} holds no prompts")
    return prompts


def _prompt(record: Any, number: int, where: str) -> Prompt:
    if not isinstance(record, dict):
        raise ValueError(f"{where}: must be a JSON object, got {type(record).__name__}")
    if "turns" in record:
        turns = record["turns"]
        if not isinstance(turns, list) or not turns:
            raise ValueError(f"{where}: 'turns' must be a list of at least one text, got {_short(turns)}")
    elif "prompt" in record:
        turns = [record["prompt"]]
    else:
        fields = ", ".join(repr(key) for key in record) or "none"
        raise ValueError(f"{where}: needs the field 'turns' or 'prompt', the fields are {fields}")
    for turn in turns:
        if not isinstance(turn, str) or not turn.strip():
            name = "every turn" if "turns" in record else "'prompt'"
            raise ValueError(f"{where}: {name} must be a text that is not empty, got {_short(turn)}")
    identity = record.get("question_id", record.get("id", number))
    if isinstance(identity, bool) or not isinstance(identity, int | str) or identity == "":
        raise ValueError(f"{where}: the id must be a whole number or a text, got {_short(identity)}")
    domain = record.get("category", record.get("domain", "general"))
    if not isinstance(domain, str) or not domain:
        raise ValueError(f"{where}: the domain must be a text that is not empty, got {_short(domain)}")
    return Prompt(identity, domain, tuple(turns))


def _short(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def by_domain(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    """Prompts grouped by domain; domains in order of first appearance, prompts in their own order."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.domain, []).append(prompt)
    return groups


def select_prompts(
    prompts: Sequence[Prompt],
    *,
    limit: int | None = None,
    per_category: int | None = None,
    order: Order = "shuffle",
    seed: int = 0,
) -> list[Prompt]:
    """Choose prompts and put them in order.

    The choice depends on neither `order` nor `seed`, so that two orders are compared on the same prompts: the first
    `per_category` of every domain, then one of each domain in turn until there are `limit`.

    Args:
        order: "shuffle" mixes the domains with `seed`, "blocks" keeps every domain together.

    Raises:
        ValueError: a count below 1 or an unknown order.
    """
    for name, count in (("limit", limit), ("per_category", per_category)):
        if count is not None and count < 1:
            raise ValueError(f"{name} must be >= 1, got {count}")
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    groups = [group[:per_category] for group in by_domain(prompts).values()]
    deepest = max((len(group) for group in groups), default=0)
    chosen = [group[rank] for rank in range(deepest) for group in groups if rank < len(group)][:limit]
    if order == "blocks":
        return [prompt for group in by_domain(chosen).values() for prompt in group]
    permutation = np.random.default_rng(seed).permutation(len(chosen))
    return [chosen[i] for i in permutation]
