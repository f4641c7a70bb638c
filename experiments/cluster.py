"""Ray, started here or joined by address, in a way that works offline and behind firewalls."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OBJECT_STORE_BYTES = 512 * 2**20
"""Of a local Ray: what workers and driver hand each other is a few traces."""

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent anywhere
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # tasks without a GPU must not see one
    "RAY_worker_niceness": "0",  # live runs are timed, and must not wait behind whatever else runs here
    "OMP_NUM_THREADS": "1",  # more threads only where a configuration says so
}


@dataclass(frozen=True, slots=True)
class Node:
    """What one machine of the cluster offers."""

    cpus: float
    gpus: float

    def fits(self, *, cpus: float, gpus: float) -> int:
        """How many tasks of these needs it holds at once."""
        counts = [int((have + 1e-9) / need) for have, need in ((self.cpus, cpus), (self.gpus, gpus)) if need > 0]
        return min(counts, default=64)


@contextmanager
def ray_cluster(address: str | None, *, cpus: int | None = None, dashboard: bool = False) -> Iterator[Any]:
    """The module `ray`, connected.

    Args:
        address: None starts Ray on this machine; "auto" or HOST:PORT joins one that runs.
        cpus: of a local Ray; as many as this process may use without it.
        dashboard: of a local Ray; it opens a port.

    Raises:
        ImportError: Ray is not installed.
        ConnectionError: nothing answers at the address.
    """
    try:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import ray
    except ImportError as error:
        raise ImportError("experiments need Ray: pip install 'adaptspec[experiments]'") from error
    if ray.is_initialized():
        raise RuntimeError("this process is already connected to Ray")
    try:
        if address is None:
            ray.init(
                address="local",  # whatever RAY_ADDRESS says
                num_cpus=len(os.sched_getaffinity(0)) if cpus is None else cpus,
                include_dashboard=dashboard,
                object_store_memory=OBJECT_STORE_BYTES,
                logging_level=logging.ERROR,
                log_to_driver=False,
            )
        else:
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, runtime_env=_this_code(address))
    except ConnectionError as error:
        raise ConnectionError(f"no Ray cluster answers at {address!r}: {error}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def nodes_of(ray: Any) -> list[Node]:
    """The machines that are alive."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Node(found.get("CPU", 0.0), found.get("GPU", 0.0)) for found in alive]


def _this_code(address: str) -> dict[str, Any]:
    """Workers on other machines run the very code of this process and not what may be installed there."""
    import adaptspec

    here = Path(__file__).parent
    excluded = ["**/__pycache__", "**/*.png"]
    return {
        "py_modules": [str(here), str(Path(adaptspec.__file__).parent)],
        "excludes": excluded,
        "env_vars": {"OMP_NUM_THREADS": "1"},
    }
