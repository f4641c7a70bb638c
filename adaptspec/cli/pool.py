"""`adaptspec pool`: what there is to draft with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

import typer


def describe_drafter(name: str, cls: Any) -> dict[str, Any]:
    """What a drafter is and needs, as plain values.

    `path` says whether it takes weights or data: "none", "optional" or "required"; `weights_for` names the targets that
    the weights called `weights` are shipped for. Every drafter is lossless, since drafts only suggest; what can be
    lossy is a verification rule.
    """
    from adaptspec.cli.common import weights_argument
    from adaptspec.drafters import make_drafter

    path = weights_argument(cls)
    needs = cls.needs
    if path != "required":
        with suppress(ValueError):  # weights that are not shipped
            needs = make_drafter(name).needs  # an instance may need more than its class
    return {
        "name": name,
        "summary": cls.summary or (cls.__doc__ or "").strip().partition("\n")[0],
        "lossless": True,
        "path": path,
        "weights": cls.weights,
        "weights_for": weights_for(cls.weights),
        "needs": {
            "target_top_k": needs.target_top_k,
            "taps": list(needs.taps),
            "extra_rows": needs.extra_rows,
            "target": needs.target,
            "prompt_top_k": needs.prompt_top_k,
        },
        "takes_vocab": cls.takes_vocab,
    }


def weights_for(name: str) -> list[str]:
    """Targets that come with weights of this name, by the name they are loaded with."""
    from adaptspec.drafters.draft_policies import read_policies
    from adaptspec.drafters.griffin_gs import read_static_tree
    from adaptspec.pretrained import read_card, shipped_folder, shipped_rule

    if (folder := shipped_folder(name)) is not None:
        return [read_card(folder)["answers"]["origin"]["model"]]
    if name and (rule := shipped_rule(name)) is not None:
        read = read_static_tree if rule.suffix == ".json" else read_policies
        return [read(rule).card["provenance"]["model"]]
    return []


def describe_vocab_head(kind: str, cls: Any) -> dict[str, Any]:
    """What a vocabulary head is and needs, as plain values. Lossless, since q is known exactly over the rows in use.

    `weights_for` names the targets that a router is shipped for, or the sizes of vocabulary that a list is.
    """
    from adaptspec.vocab.counts import shipped_sizes

    listed = [f"{size} tokens" for size in shipped_sizes()] if cls.weights == "frequency list" else []
    return {
        "name": kind,
        "summary": cls.summary,
        "lossless": True,
        "weights": cls.weights,
        "weights_for": listed or weights_for(kind),
        "needs": {"target_top_k": cls.needs_top_k, "prompt_top_k": cls.needs_prompt_top_k},
    }


def needs_text(drafter: Mapping[str, Any]) -> str:
    """The needs of a drafter in words."""
    needs = drafter["needs"]
    words = []
    if needs["target_top_k"]:
        words.append(f"the target's top {needs['target_top_k']} tokens")
    if needs["taps"]:
        words.append(f"hidden states after layers {', '.join(map(str, needs['taps']))}")
    if needs["extra_rows"]:
        words.append("rows of its own in the verify pass")
    if needs["target"]:
        words.append("the target's layers")
    if drafter["path"] == "required":
        words.append(f"a path: {drafter['name']}:PATH")
    if drafter["weights"]:
        known = f" (there for: {', '.join(drafter['weights_for'])})" if drafter["weights_for"] else ""
        words.append(f"trained weights{known}: {drafter['name']}:PATH")
    if not words:
        words.append("only the text so far")
    if drafter["path"] == "optional" and not drafter["weights"]:
        words.append(f"takes {drafter['name']}:PATH, too")
    return "; ".join(words)


def vocab_needs_text(head: Mapping[str, Any]) -> str:
    """The needs of a vocabulary head in words."""
    needs = head["needs"]
    words = [] if head["weights"] == "none" else [f"a {head['weights']}"]
    if head["weights_for"]:
        words[0] += f" (there for: {', '.join(head['weights_for'])})"
    if needs["target_top_k"]:
        words.append(f"the target's top {needs['target_top_k']} tokens")
    if needs["prompt_top_k"]:
        words.append(f"its top {needs['prompt_top_k']} in the prompt")
    return "; ".join(words) or "nothing"


def pool(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List every drafter and vocabulary head: what it needs, and whether it is lossless."""
    from adaptspec.cli.common import console
    from adaptspec.drafters import DRAFTERS
    from adaptspec.vocab import VOCAB_HEADS

    drafters = [describe_drafter(name, cls) for name, cls in sorted(DRAFTERS.items())]
    heads = [describe_vocab_head(kind, cls) for kind, cls in sorted(VOCAB_HEADS.items())]
    if as_json:
        typer.echo(json.dumps({"drafters": drafters, "vocab_heads": heads}, indent=2))
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column, fixed in (("drafter", True), ("lossless", True), ("needs", False), ("what it does", False)):
        table.add_column(column, no_wrap=fixed)
    for drafter in drafters:
        lossless = "yes" if drafter["lossless"] else "no"
        table.add_row(drafter["name"], lossless, needs_text(drafter), drafter["summary"])
    output = console()
    output.print(table, markup=False)
    vocabulary = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns = (("vocabulary head", True), ("lossless", True), ("needs", False), ("what it does", False))
    for column, fixed in columns:
        vocabulary.add_column(column, no_wrap=fixed)
    for head in heads:
        vocabulary.add_row(head["name"], "yes", vocab_needs_text(head), head["summary"])
    output.print(vocabulary, markup=False)
