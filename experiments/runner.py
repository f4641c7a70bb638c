"""Runs the configurations of a sweep on Ray: each at most once, none twice, and none lost but those under way."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from adaptspec.cli.provenance import run_provenance
from experiments.cluster import Node, nodes_of
from experiments.store import RunFolder
from experiments.sweeps import Configuration, load_work
from experiments.tasks import NotAvailable, Outcome, Settings, Task

POLL_SECONDS = 0.5
LOOK_SECONDS = 10.0
"""How often the machines of the cluster are counted: some may come, some may go."""

PATIENCE_SECONDS = 300.0
"""How long a configuration waits for a machine that could take it, before it counts as failed."""


class Watcher(Protocol):
    """Is told how a run goes on."""

    def begin(self, total: int, done: int) -> None:
        """So many configurations, of which some were finished before."""

    def update(self, *, done: int, problems: int, running: Sequence[str]) -> None:
        """Called at least every half second."""

    def note(self, text: str) -> None:
        """A line that stays."""


@dataclass(slots=True)
class Summary:
    """How a run ended."""

    finished: int = 0
    unavailable: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False


def run_sweep(
    ray: Any,
    configurations: Sequence[Configuration],
    *,
    folder: RunFolder,
    settings: Settings,
    argv: Sequence[str],
    watcher: Watcher,
    retries: int = 2,
) -> Summary:
    """Compute what is not finished yet. Ctrl-C stops it; what is finished then is kept.

    Args:
        ray: the module, connected.
        configurations: those that others need first.
        argv: for the provenance.
        retries: how often a configuration is tried again whose worker died.

    Raises:
        ValueError: a configuration that fits on no machine of the cluster, or names work that does not exist.
        OSError: a result cannot be written; what is under way is given up.
    """
    nodes = nodes_of(ray)
    check_needs(configurations, nodes)
    runner = _Runner(ray, folder, settings, list(argv), watcher, retries, nodes)
    runner.put_in_order(configurations)
    try:
        runner.loop()
    except KeyboardInterrupt:
        runner.summary.interrupted = True
    finally:
        runner.stop()
    return runner.summary


def check_needs(configurations: Sequence[Configuration], nodes: Sequence[Node]) -> None:
    """Raises ValueError where no machine has what a configuration occupies, or its work does not exist."""
    for needs in {(c.cpus, c.gpus, c.work): c for c in configurations}.values():
        load_work(needs.work)
        if not any(node.fits(cpus=needs.cpus, gpus=needs.gpus) for node in nodes):
            offered = ", ".join(f"{node.cpus:g} CPUs and {node.gpus:g} GPUs" for node in nodes)
            raise ValueError(
                f"configuration {needs.id!r} occupies {needs.cpus:g} CPUs and {needs.gpus:g} GPUs, "
                f"which no machine of the cluster has; they have {offered}"
            )


Computed = tuple[Outcome, dict[str, Any], float]
"""What a worker returns: the outcome, where it was computed, and its seconds."""


def compute(configuration: Configuration, settings: Settings, attempt: int, *files: Mapping[str, bytes]) -> Computed:
    """On a worker: one configuration. `files` are those of what it needs, in that order."""
    task = Task(configuration, settings, dict(zip(configuration.needs, files, strict=True)), attempt)
    return _timed(load_work(configuration.work), task)


class Holder:
    """On a worker: keeps one instance of a work class, and with it a loaded model, for many configurations."""

    def __init__(self, work: str, settings: Settings, threads: int) -> None:
        self._work, self._settings, self._threads = work, settings, threads
        self._instance: Any = None

    def compute(
        self, configuration: Configuration, settings: Settings, attempt: int, *files: Mapping[str, bytes]
    ) -> Computed:
        """One configuration, as the function of that name."""
        if self._instance is None:  # here and not above, so that what goes wrong is told of the configuration
            self._instance = load_work(self._work)(self._settings, threads=self._threads)
        task = Task(configuration, settings, dict(zip(configuration.needs, files, strict=True)), attempt)
        return _timed(self._instance.run, task)


def _timed(work: Callable[[Task], Outcome], task: Task) -> Computed:
    begun, cpu = time.perf_counter(), time.process_time()
    outcome = work(task)
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    return outcome, {"host": socket.gethostname(), "pid": os.getpid(), "cpu_seconds": round(cpu, 3)}, seconds


@dataclass(slots=True)
class _Actor:
    handle: Any
    group: tuple[str, float, float]
    busy: bool = False


@dataclass(slots=True)
class _Runner:
    ray: Any
    folder: RunFolder
    settings: Settings
    argv: list[str]
    watcher: Watcher
    retries: int
    nodes: list[Node]
    summary: Summary = field(default_factory=Summary)
    waiting: list[Configuration] = field(default_factory=list)
    running: dict[Any, tuple[Configuration, _Actor | None]] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    actors: list[_Actor] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)
    _shared: Any = None
    _inputs: dict[str, Any] = field(default_factory=dict)
    _provenance: dict[str, Any] = field(default_factory=dict)
    _functions: dict[tuple[float, float], Any] = field(default_factory=dict)
    _slots: dict[tuple[float, float], int] = field(default_factory=dict)
    _looked: float = field(default_factory=time.monotonic)
    _homeless: dict[tuple[float, float], float] = field(default_factory=dict)

    def put_in_order(self, configurations: Sequence[Configuration]) -> None:
        """Leave out what is finished."""
        self.finished = self.folder.finished()
        self.waiting = [c for c in configurations if c.id not in self.finished]
        done = len(configurations) - len(self.waiting)
        self.summary.finished = done
        self.watcher.begin(len(configurations), done)
        self._shared = self.ray.put(self.settings)
        self._provenance = run_provenance(argv=self.argv, seed=0)
        self._provenance["argv"] = self.argv

    def loop(self) -> None:
        """Until nothing is left."""
        while self.waiting or self.running:
            self._look()
            self._submit()
            if self.running:
                ready, _ = self.ray.wait(list(self.running), num_returns=1, timeout=POLL_SECONDS)
                for reference in ready:
                    self._take(reference)
            problems = len(self.summary.failed) + len(self.summary.unavailable)
            ids = [configuration.id for configuration, _ in self.running.values()]
            self.watcher.update(done=self.summary.finished, problems=problems, running=ids)

    def _look(self) -> None:
        """See which machines there are now, and give up what has fitted on none of them for too long."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        self.nodes = nodes_of(self.ray)
        self._slots.clear()
        under_way = {configuration.id: reference for reference, (configuration, _) in self.running.items()}
        for configuration in [*self.waiting, *(configuration for configuration, _ in self.running.values())]:
            needs = configuration.cpus, configuration.gpus
            if self._slots_for(*needs):
                self._homeless.pop(needs, None)
                continue
            if needs not in self._homeless:
                self._homeless[needs] = now
                self.watcher.note(f"no machine has {needs[0]:g} CPUs and {needs[1]:g} GPUs any more; waiting for one")
            elif now - self._homeless[needs] > PATIENCE_SECONDS:
                if reference := under_way.get(configuration.id):
                    _, actor = self.running.pop(reference)
                    self._drop(actor)
                self.waiting = [c for c in self.waiting if c.id != configuration.id]
                reason = f"for {PATIENCE_SECONDS:.0f} s no machine had the CPUs and GPUs that it occupies"
                self._give_up(configuration, reason, unavailable=False)

    def _drop(self, actor: _Actor | None) -> None:
        """An actor that is no good any more."""
        if actor is not None and actor in self.actors:
            self.actors.remove(actor)
            self.ray.kill(actor.handle)

    def stop(self) -> None:
        """Give up what is under way."""
        for reference, (_, actor) in self.running.items():
            if actor is None:
                self.ray.cancel(reference, force=True)
        for actor in self.actors:
            self.ray.kill(actor.handle)
        self.running.clear()
        self.actors.clear()

    # What to start ----------------------------------------------------------------------------------------------------

    def _submit(self) -> None:
        """Start what can start: no more than fits, so that little is lost when the run is stopped."""
        without = self.summary.failed.keys() | self.summary.unavailable.keys()
        left, ready_groups = [], set()
        for configuration in self.waiting:
            if lacking := [need for need in configuration.needs if need in without]:
                self._give_up(configuration, f"it needs {lacking[0]}, which has no result", unavailable=True)
                without = without | {configuration.id}
            elif not all(need in self.finished for need in configuration.needs):
                left.append(configuration)
            elif isinstance(load_work(configuration.work), type):
                if not self._submit_to_actor(configuration):
                    ready_groups.add(_group(configuration))
                    left.append(configuration)
            elif not self._submit_function(configuration):
                left.append(configuration)
        self.waiting = left
        # An idle model would hold processors that others wait for.
        for actor in [a for a in self.actors if not a.busy and a.group not in ready_groups]:
            self._drop(actor)

    def _submit_function(self, configuration: Configuration) -> bool:
        needs = configuration.cpus, configuration.gpus
        under_way = sum(1 for c, actor in self.running.values() if actor is None and (c.cpus, c.gpus) == needs)
        if under_way >= self._slots_for(*needs) + 1:  # one more, so that a worker need not wait for this process
            return False
        if needs not in self._functions:
            remote = self.ray.remote(num_cpus=needs[0], num_gpus=needs[1], max_retries=0)
            self._functions[needs] = remote(compute)
        reference = self._functions[needs].remote(configuration, self._shared, *self._arguments(configuration))
        self.running[reference] = configuration, None
        return True

    def _submit_to_actor(self, configuration: Configuration) -> bool:
        group = _group(configuration)
        mine = [actor for actor in self.actors if actor.group == group]
        free = next((actor for actor in mine if not actor.busy), None)
        if free is None:
            if len(mine) >= self._slots_for(configuration.cpus, configuration.gpus):
                return False
            make = self.ray.remote(num_cpus=configuration.cpus, num_gpus=configuration.gpus, max_restarts=0)(Holder)
            free = _Actor(make.remote(configuration.work, self._shared, max(1, round(configuration.cpus))), group)
            self.actors.append(free)
        free.busy = True
        arguments = self._arguments(configuration)
        self.running[free.handle.compute.remote(configuration, self._shared, *arguments)] = configuration, free
        return True

    def _slots_for(self, cpus: float, gpus: float) -> int:
        if (cpus, gpus) not in self._slots:
            self._slots[cpus, gpus] = sum(node.fits(cpus=cpus, gpus=gpus) for node in self.nodes)
        return self._slots[cpus, gpus]

    def _arguments(self, configuration: Configuration) -> list[Any]:
        """Attempt, and references to the files of what it needs, which Ray hands over as values."""
        for need in configuration.needs:
            if need not in self._inputs:
                self._inputs[need] = self.ray.put(self.folder.files_of(need))
        return [self.attempts.get(configuration.id, 0), *(self._inputs[need] for need in configuration.needs)]

    # What came back ---------------------------------------------------------------------------------------------------

    def _take(self, reference: Any) -> None:
        configuration, actor = self.running.pop(reference)
        if actor is not None:
            actor.busy = False
        try:
            outcome, place, seconds = self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            self._explain(configuration, error)
        except self.ray.exceptions.RayError as error:  # the worker or its machine is gone
            self._drop(actor)
            self._try_again(configuration, _first_line(error))
        else:
            provenance = {**self._provenance, **place, "seed": configuration.seed}
            provenance["parameters"] = dict(configuration.parameters)
            self.folder.save(configuration.id, outcome, provenance=provenance, seconds=seconds)
            self.finished.add(configuration.id)
            self.summary.finished += 1

    def _explain(self, configuration: Configuration, error: Any) -> None:
        cause = error.cause
        if isinstance(cause, NotAvailable):
            self._give_up(configuration, str(cause), unavailable=True)
        elif isinstance(cause, MemoryError):
            self._try_again(configuration, f"out of memory: {cause}")
        else:
            self._give_up(configuration, f"{type(cause).__name__}: {cause}", unavailable=False)

    def _try_again(self, configuration: Configuration, reason: str) -> None:
        tries = self.attempts[configuration.id] = self.attempts.get(configuration.id, 0) + 1
        if tries > self.retries:
            self._give_up(configuration, f"its worker died {tries} times; last: {reason}", unavailable=False)
        else:
            self.watcher.note(f"{configuration.id}: its worker died ({reason}); trying again")
            self.waiting.insert(0, configuration)

    def _give_up(self, configuration: Configuration, reason: str, *, unavailable: bool) -> None:
        kind = "not available" if unavailable else "failed"
        (self.summary.unavailable if unavailable else self.summary.failed)[configuration.id] = reason
        self.folder.save_problem(
            configuration.id, {"kind": kind, "reason": reason, "parameters": dict(configuration.parameters)}
        )
        self.watcher.note(f"{configuration.id}: {kind}: {reason}")


def _group(configuration: Configuration) -> tuple[str, float, float]:
    """Configurations that one actor may serve."""
    return configuration.work, configuration.cpus, configuration.gpus


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
