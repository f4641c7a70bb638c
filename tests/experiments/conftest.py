"""One Ray cluster of two machines, which are this one, for all tests that need it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from adaptspec.control.cost import CostModel
from adaptspec.control.trace import Trace
from tests.control import replay_cases

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

PATIENT = {"health_check_initial_delay_ms": 60_000, "health_check_timeout_ms": 60_000}
"""A busy machine must not pass for one that is gone."""


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Of a cluster with a machine of 1 CPU and one of 1 CPU and 2 GPUs that are pretended."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": PATIENT, **agent_ports()}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=1, num_gpus=2, **agent_ports())
        yield cluster.address
    finally:
        cluster.shutdown()


def agent_ports() -> dict[str, int]:
    """Ports for a machine's agents. Where they are given Ray does not wait for the agents to say which they took, for
    which a busy machine may need longer than it waits."""
    names = ("metrics_agent_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in names]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return {name: free.getsockname()[1] for name, free in zip(names, sockets, strict=True)}


@pytest.fixture(scope="session")
def ray(address: str) -> Iterator[Any]:
    """The module, connected to that cluster as runs are."""
    from experiments.cluster import ray_cluster

    with ray_cluster(address) as module:
        yield module


@pytest.fixture(scope="session")
def small_trace() -> Trace:
    """Random text and trees of two drafters, with costs."""
    return costed(replay_cases.random_trace(3, lengths=(40, 25, 30, 18), nodes=4, words=3))


def costed(trace: Trace) -> Trace:
    """A trace with measured costs of verification and of its drafters."""
    from dataclasses import replace

    costs = CostModel()
    for nodes in (0, 2, 4):
        for _ in range(3):
            costs.observe_verify(nodes, 0.03 + 0.002 * nodes, context=256)
    for name in trace.nodes:
        for _ in range(3):
            costs.observe_draft(name, 4, 0.0003)
    return replace(trace, costs=costs.state_dict())


@pytest.fixture(scope="session")
def trace_file(small_trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small trace on disk."""
    from adaptspec.control.trace_file import write_trace

    path = tmp_path_factory.mktemp("trace") / "small.parquet"
    write_trace(path, small_trace)
    return path
