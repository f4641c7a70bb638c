"""CUDA graphs for the passes of all arms: one per tier of node budget and vocabulary size, so that changing arms is a
switch of graphs and never a capture.

A graph replays kernels on fixed memory. So the pass of a tier has a fixed number of rows; a smaller tree is filled up
with rows that nothing attends to (see `TreeRows.padded`), whose results are cut off again before anybody sees them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

Outputs = Mapping[str, torch.Tensor]
"""What a pass computes, by name; tensors with one row per row of the tree."""

NODE_TIERS = (0, 4, 8, 16, 32, 64)
_WARM_UP_RUNS = 3


@dataclass(frozen=True, slots=True, order=True)
class Tier:
    """`nodes`: draft nodes, the root not counted. `vocab_size`: rows of the head in use."""

    nodes: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class TreeRows:
    """The rows of one pass, the root first.

    Attributes:
        token_ids: int64 [R].
        depths: int64 [R], position minus `length`.
        visible: bool [R, R], what each row sees of the others and of itself. All see the prefix.
        length: tokens of prefix.
    """

    token_ids: np.ndarray
    depths: np.ndarray
    visible: np.ndarray
    length: int

    def __len__(self) -> int:
        return len(self.token_ids)

    def padded(self, rows: int) -> TreeRows:
        """As many rows as `rows`: those added come last, stand at the root's position, and see the prefix and
        themselves; nothing sees them."""
        more = rows - len(self)
        if more < 0:
            raise ValueError(f"rows must be >= {len(self)}, got {rows}")
        visible = np.eye(rows, dtype=bool)
        visible[: len(self), : len(self)] = self.visible
        added = np.zeros(more, np.int64)
        return TreeRows(
            np.concatenate([self.token_ids, added]), np.concatenate([self.depths, added]), visible, self.length
        )


class StaticPass(Protocol):
    """The pass of one tier on memory that stays where it is."""

    def load(self, rows: TreeRows) -> None:
        """Copy exactly as many rows as the tier has into the memory that `run` reads."""

    def run(self) -> Outputs:
        """Launch the work. Must not wait for the device, or read anything on the host that `load` changes."""


class Graph(Protocol):
    """A captured pass."""

    def replay(self) -> Outputs:
        """Launch it again. The outputs are the same memory each time."""


class Capture(Protocol):
    """Makes graphs. `available` is False where there are none."""

    available: bool

    def capture(self, run: Callable[[], Outputs]) -> Graph:
        """Run the work a few times, then record it."""


@dataclass(slots=True)
class GraphCounts:
    """`captured`, `evicted` and `invalidated` graphs; passes `replayed`, and `plain` ones that had no graph."""

    captured: int = 0
    evicted: int = 0
    invalidated: int = 0
    replayed: int = 0
    plain: int = 0


class GraphTiers:
    """Passes of a few fixed sizes, each captured once when it is first needed.

    Args:
        make_pass: makes the pass of a tier.
        node_tiers: numbers of nodes, ascending; larger trees run plainly.
        limit: graphs kept; the one that was not used for longest goes first. Each holds its inputs and outputs, and
            all share the memory between.
        capture: what makes graphs, None for CUDA on the current device.

    Example:
        graphs = GraphTiers(lambda tier: StaticForward(model, cache, rows=tier.nodes + 1))
        logits = graphs.run(rows, vocab_size=49152, plain=lambda: {"logits": forward(rows)})["logits"]
    """

    def __init__(
        self,
        make_pass: Callable[[Tier], StaticPass],
        *,
        node_tiers: Sequence[int] = NODE_TIERS,
        limit: int = 16,
        capture: Capture | None = None,
    ) -> None:
        if not node_tiers or list(node_tiers) != sorted(set(node_tiers)) or node_tiers[0] < 0:
            raise ValueError(f"node_tiers must be ascending numbers >= 0, got {list(node_tiers)}")
        if limit < 1:
            raise ValueError(f"limit must be >= 1, got {limit}")
        self.make_pass = make_pass
        self.node_tiers = tuple(node_tiers)
        self.limit = limit
        self.counts = GraphCounts()
        self._capture = CudaCapture() if capture is None else capture
        self._captured: OrderedDict[Tier, tuple[StaticPass, Graph]] = OrderedDict()

    @property
    def available(self) -> bool:
        """Whether there are graphs here; if not, every pass is plain."""
        return self._capture.available

    @property
    def captured(self) -> tuple[Tier, ...]:
        """The tiers that have a graph, the one used last at the end."""
        return tuple(self._captured)

    def tier(self, nodes: int, vocab_size: int) -> Tier | None:
        """The smallest tier that holds `nodes`; None if none does."""
        index = bisect_left(self.node_tiers, nodes)
        return Tier(self.node_tiers[index], vocab_size) if index < len(self.node_tiers) else None

    def run(self, rows: TreeRows, *, vocab_size: int, plain: Callable[[], Outputs], room: int | None = None) -> Outputs:
        """The outputs for exactly these rows, by replaying the graph of their tier, or else by `plain`.

        Outputs of a graph are valid until the next replay.

        Args:
            rows: the root and the nodes.
            vocab_size: rows of the head in use; a part of the key only.
            plain: the same pass without a graph.
            room: rows that the cache can take behind the prefix; a tier that needs more is not used. None: enough.
        """
        tier = self.tier(len(rows) - 1, vocab_size) if self.available else None
        if tier is None or (room is not None and tier.nodes + 1 > room):
            self.counts.plain += 1
            return plain()
        static, graph = self._graph(tier, rows)
        static.load(rows.padded(tier.nodes + 1))
        self.counts.replayed += 1
        return {name: values[: len(rows)] for name, values in graph.replay().items()}

    def prepare(self, tiers: Sequence[Tier], rows: TreeRows) -> None:
        """Capture ahead of time, so that no step of a request pays for it.

        Args:
            tiers: at most `limit` are kept.
            rows: any rows, at most those of the smallest tier; they are run, and overwrite the cache behind the prefix.
        """
        for tier in tiers if self.available else ():
            self._graph(tier, rows)

    def invalidate(self) -> None:
        """Forget all graphs: memory that they use has moved, or weights have been replaced."""
        self.counts.invalidated += len(self._captured)
        self._captured.clear()

    def _graph(self, tier: Tier, rows: TreeRows) -> tuple[StaticPass, Graph]:
        if tier in self._captured:
            self._captured.move_to_end(tier)
            return self._captured[tier]
        if len(self._captured) >= self.limit:
            self._captured.popitem(last=False)  # before the new one takes memory
            self.counts.evicted += 1
        static = self.make_pass(tier)
        static.load(rows.padded(tier.nodes + 1))
        self._captured[tier] = static, self._capture.capture(static.run)
        self.counts.captured += 1
        return self._captured[tier]


@dataclass(frozen=True, slots=True)
class CudaGraph:
    """A `torch.cuda.CUDAGraph` and the memory that it writes its outputs to."""

    graph: torch.cuda.CUDAGraph
    outputs: Outputs

    def replay(self) -> Outputs:
        """Launch it on the current stream."""
        self.graph.replay()
        return self.outputs


class CudaCapture:
    """Captures on the current CUDA device; all graphs share one memory pool."""

    def __init__(self) -> None:
        self.available = torch.cuda.is_available()
        self._pool: Any = None

    @torch.inference_mode()
    def capture(self, run: Callable[[], Outputs]) -> CudaGraph:
        """Runs a few times on a side stream first, where kernels are compiled and libraries take their workspaces."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may run drafters meanwhile; what they do on the device is no part of this graph.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = run()
        # Graphs run one after the other, so they may share what lies between inputs and outputs.
        self._pool = graph.pool()
        return CudaGraph(graph, outputs)
