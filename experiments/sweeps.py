"""What an experiment is: configurations with names, as plain data, and how they are to be analysed.

A folder `experiments/<name>/` holds `README.md`, `sweep.py` with the sweeps `QUICK` and `FULL`, and `analysis.py` with
`score(frame)`, `tables(...)` and `plots(...)`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from adaptspec.names import unknown_name

_NAME = re.compile(r"[a-z0-9][a-z0-9.+@_-]*")
"""Names are parts of file names on every system."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """One thing to be computed.

    Attributes:
        id: unique in a sweep, like `suffix-b16-law`; with `seeded`, `-s0`, `-s1`, ... are added.
        work: what computes it, "module:name": a function of a `Task`, or a class whose instances keep a model loaded
            and have such a method `run`.
        parameters: plain data for it.
        needs: ids of configurations whose files it reads, seeds left out.
        seeded: there is one for every seed.
        seed: set by `Sweep.configurations`.
        cpus, gpus: that it occupies.
    """

    id: str
    work: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    seeded: bool = True
    seed: int = 0
    cpus: float = 1.0
    gpus: float = 0.0


@dataclass(frozen=True, slots=True)
class Sweep:
    """The configurations of an experiment.

    Attributes:
        points: without their seeds.
        seeds: how many.
        max_new_tokens, per_category, limit: how much text, unless the command line says otherwise.
    """

    points: tuple[Configuration, ...]
    seeds: int = 3
    max_new_tokens: int = 96
    per_category: int | None = None
    limit: int | None = None

    def configurations(self, seeds: int | None = None) -> tuple[Configuration, ...]:
        """All of them, seed by seed, those that others need first.

        Raises:
            ValueError: no seeds, impossible or repeated ids, a need that is not there or goes round in a circle.
        """
        count = self.seeds if seeds is None else seeds
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"seeds must be a whole number >= 1, got {count!r}")
        seeded = {point.id: point.seeded for point in self.points}
        if len(seeded) < len(self.points):
            ids = [point.id for point in self.points]
            raise ValueError(f"ids must be unique, got {max(ids, key=ids.count)!r} twice")
        found = [point for point in self.points if not point.seeded]
        for seed in range(count):
            found += [replace(_of_seed(p, seed, seeded), seed=seed) for p in self.points if p.seeded]
        for point in found:
            _check(point, seeded)
        by_id = {point.id: point for point in found}
        try:
            order = list(TopologicalSorter({p.id: [n for n in p.needs if n in by_id] for p in found}).static_order())
        except CycleError as error:
            raise ValueError(f"needs go round in a circle: {' -> '.join(error.args[1])}") from error
        missing = [(p.id, name) for p in found for name in p.needs if name not in by_id]
        if missing:
            raise ValueError(f"configuration {missing[0][0]!r} needs {missing[0][1]!r}, which is not in the sweep")
        rank = {name: place for place, name in enumerate(order)}
        depth: dict[str, int] = {}
        for name in sorted(by_id, key=rank.__getitem__):
            depth[name] = 1 + max((depth[need] for need in by_id[name].needs), default=-1)
        return tuple(sorted(found, key=lambda point: depth[point.id]))  # stable: the sweep's own order otherwise


def _of_seed(point: Configuration, seed: int, seeded: Mapping[str, bool]) -> Configuration:
    needs = tuple(f"{name}-s{seed}" if seeded.get(name) else name for name in point.needs)
    return replace(point, id=f"{point.id}-s{seed}", needs=needs)


def _check(point: Configuration, seeded: Mapping[str, bool]) -> None:
    if not _NAME.fullmatch(point.id):
        raise ValueError(f"ids must be lower-case letters, digits and any of . + @ _ - , got {point.id!r}")
    for name in ("cpus", "gpus"):
        if not getattr(point, name) >= 0.0:
            raise ValueError(f"{name} of configuration {point.id!r} must be >= 0, got {getattr(point, name)!r}")
    if not seeded.get(point.id, True) and any(seeded.get(name) for name in point.needs):
        raise ValueError(f"configuration {point.id!r} has no seed, so it cannot need one that has")


@dataclass(frozen=True)
class Experiment:
    """An experiment's folder."""

    name: str
    package: str = "experiments"

    @cached_property
    def _sweeps(self) -> ModuleType:
        return import_module(f"{self.package}.{self.name}.sweep")

    @cached_property
    def analysis(self) -> ModuleType:
        """`score`, `tables`, `plots`."""
        return import_module(f"{self.package}.{self.name}.analysis")

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return Path(self._sweeps.__file__ or "").parent

    def sweep(self, *, quick: bool) -> Sweep:
        """`QUICK` or `FULL`."""
        return self._sweeps.QUICK if quick else self._sweeps.FULL


def experiment_names() -> tuple[str, ...]:
    """The folders beside this file that hold a sweep."""
    return tuple(sorted(path.parent.name for path in Path(__file__).parent.glob("*/sweep.py")))


def find_experiment(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in experiment_names():
        raise unknown_name("experiment", name, experiment_names())
    return Experiment(name)


Work = Callable[..., Any]


def load_work(path: str) -> Work:
    """The function or class of a configuration's `work`.

    Raises:
        ValueError: it is not there.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"work must be 'module:name' of something that exists, got {path!r} ({error})") from error


def drafter_slug(text: str) -> str:
    """A pool entry or arm as a part of an id.

    >>> drafter_slug("eagle3@32/fr:16384")
    'eagle3@32-fr16384'
    """
    return text.lower().replace("/", "-").replace(":", "")
