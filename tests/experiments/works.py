"""Works for tests of the runner; they leave a line in a file for every time they run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from experiments.tasks import NotAvailable, Outcome, Settings, Task


def _note(task: Task) -> None:
    log = task.parameter("log")
    if log:
        with Path(log).open("a", encoding="utf-8") as file:
            file.write(f"{task.configuration.id}\n")


def value(task: Task) -> Outcome:
    """Its parameter `value`, or the sum of what it needs."""
    _note(task)
    time.sleep(task.parameter("sleep", 0.0))
    found = sum(int(files["value"]) for files in task.inputs.values()) if task.inputs else task.parameter("value", 1)
    return Outcome(rows=[{"value": found, "attempt": task.attempt}], files={"value": str(found).encode()})


def place(task: Task) -> Outcome:
    """Where it ran and which GPUs it saw."""
    import ray

    context = ray.get_runtime_context()
    time.sleep(task.parameter("sleep", 0.3))
    row = {
        "node": context.get_node_id(),
        "gpus": ",".join(context.get_accelerator_ids().get("GPU", [])),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES", "unset"),
    }
    return Outcome(rows=[row])


def dies(task: Task) -> Outcome:
    """The worker is killed in its first `deaths` attempts."""
    _note(task)
    if task.attempt < task.parameter("deaths"):
        os.kill(os.getpid(), signal.SIGKILL)
    return Outcome(rows=[{"attempt": task.attempt}])


def wrong(task: Task) -> Outcome:
    """A configuration that makes no sense."""
    raise ValueError("budget must be >= 0, got -3")


def absent(task: Task) -> Outcome:
    """A configuration whose weights are not there."""
    raise NotAvailable("no weights of 'eagle3' for this target")


class Loaded:
    """Stands for a loaded model."""

    def __init__(self, settings: Settings, *, threads: int) -> None:
        self.name = f"{os.getpid()}-{time.time_ns()}"
        self.threads = threads
        self.served = 0

    def run(self, task: Task) -> Outcome:
        """Which instance it is; the process is killed in the first `deaths` attempts."""
        self.served += 1
        if task.attempt < task.parameter("deaths", 0):
            os.kill(os.getpid(), signal.SIGKILL)
        return Outcome(rows=[{"instance": self.name, "served": self.served, "threads": self.threads}])


class Unloadable:
    """A model that cannot be loaded."""

    def __init__(self, settings: Settings, *, threads: int) -> None:
        raise FileNotFoundError("no such model")

    def run(self, task: Task) -> Outcome:
        """Never."""
        raise AssertionError
