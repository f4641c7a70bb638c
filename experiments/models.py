"""Works that run a model: it is loaded once per worker and serves many configurations."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

from adaptspec.cli.prompts import Prompt
from adaptspec.processor import prefer_fast_kernels
from experiments.tasks import NotAvailable, Settings, Task


class ModelWork:
    """A loaded target with its tokenizer.

    Args:
        settings: which model.
        threads: CPU threads that it may use.
    """

    def __init__(self, settings: Settings, *, threads: int = 1) -> None:
        prefer_fast_kernels()  # before torch is imported
        from adaptspec.cli.common import load_model
        from adaptspec.cli.conversation import Conversation

        self.settings = settings
        self.network, self.tokenizer = load_model(
            settings.model, dtype=settings.dtype, device=settings.device, threads=threads
        )
        self.conversation = Conversation.choose(self.tokenizer, None)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What provenance says of model and machine."""
        from adaptspec.cli.common import dtype_name
        from adaptspec.cli.provenance import provenance

        found = provenance(
            argv=[],
            model=self.settings.model,
            device=self.network.device,
            dtype=dtype_name(self.network),
            seed=0,
        )
        return {key: found[key] for key in ("model", "device", "dtype", "threads", "environment")}

    def pool_entry(self, name: str) -> str:
        """A drafter with its weights, where the settings give some: "eagle3" becomes "eagle3:FOLDER"."""
        drafter, at, rest = name.partition("@")
        path = self.settings.weights.get(drafter)
        return name if path is None else f"{drafter}:{path}{at}{rest}"


def prompts_of(settings: Settings, domains: Collection[str] | None) -> list[Prompt]:
    """The prompts of these domains, all of them for None.

    Raises:
        NotAvailable: there is none.
    """
    found = [p for p in settings.prompts if domains is None or p.domain in domains]
    if not found:
        wanted = "prompts" if domains is None else f"prompts of the domain {' or '.join(domains)}"
        raise NotAvailable(f"no {wanted}; give some by --prompts FILE")
    return found


def in_blocks(prompts: Sequence[Prompt], order: str, *, seed: int) -> list[Prompt]:
    """Prompts as a stream: "shuffle", or "blocks" of one domain after the other."""
    from adaptspec.cli.prompts import select_prompts

    return select_prompts(prompts, order=order, seed=seed)  # type: ignore[arg-type]


def part_of(prompts: Sequence[Prompt], task: Task) -> list[Prompt]:
    """Every `shards`-th prompt from `shard` on; all without these parameters."""
    return list(prompts[task.parameter("shard", 0) :: task.parameter("shards", 1)])
