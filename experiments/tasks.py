"""What a worker is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from adaptspec.cli.prompts import Prompt
from experiments.sweeps import Configuration


@dataclass(frozen=True, slots=True)
class Settings:
    """What all configurations of a run share. Everything a worker may need travels in it, since it may sit on another
    machine than the one that reads the files.

    Attributes:
        model, dtype, device: of the target, as for `adaptspec bench`.
        prompts: all that may be asked.
        max_new_tokens: longest answer.
        weights: by drafter, the folder or hub id of its weights, a path on the worker's machine.
        experts: per domain, texts to build a store from.
        heads: per domain, the folder of a draft head trained for it, a path on the worker's machine.
        trace: the content of a trace file that is used instead of recording one.
        small: a quick run.
    """

    model: str = "embedded"
    dtype: str = "float32"
    device: str = "auto"
    prompts: tuple[Prompt, ...] = ()
    max_new_tokens: int = 96
    weights: Mapping[str, str] = field(default_factory=dict)
    experts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    heads: Mapping[str, str] = field(default_factory=dict)
    trace: bytes | None = None
    small: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    """One configuration to be computed.

    Attributes:
        inputs: per needed configuration, its files by name.
        attempt: 0, 1, ...: how often a worker died over it.
    """

    configuration: Configuration
    settings: Settings
    inputs: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    attempt: int = 0

    def parameter(self, name: str, default: Any = None) -> Any:
        """Of the configuration."""
        return self.configuration.parameters.get(name, default)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it.

    Attributes:
        rows: plain values by column, any number of rows.
        curves: plain data too long for columns.
        files: content by name.
        facts: about the machine and model, for the provenance of every row.
    """

    rows: Sequence[Mapping[str, Any]] = ()
    curves: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


class NotAvailable(Exception):
    """A configuration that cannot be computed here, and why: weights that are not there, prompts that were not given.

    It is reported and no failure of the run.
    """
