"""Graph tiers: which graph serves, how trees are filled up, what is kept and forgotten; and the pass that they capture,
run without a graph, against the ordinary target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from adaptspec.target import graphs
from adaptspec.target.compat import GrowingCache
from adaptspec.target.graphs import NODE_TIERS, CudaCapture, GraphTiers, Outputs, Tier, TreeRows
from adaptspec.target.hf import HFTarget, tree_rows
from adaptspec.target.static_forward import FixedCache, StaticForward, static_attention
from adaptspec.types import DraftTree
from adaptspec.verify import verify_greedy
from tests import tiny_models
from tests.kernels.mutants import mutated


class FakeGraph:
    def __init__(self, run: Callable[[], Outputs]) -> None:
        self.run = run

    def replay(self) -> Outputs:
        return self.run()


class FakeCapture:
    """Replays by running again."""

    def __init__(self, available: bool = True) -> None:
        self.available = available
        self.captures = 0

    def capture(self, run: Callable[[], Outputs]) -> FakeGraph:
        self.captures += 1
        run()
        return FakeGraph(run)


class Echo:
    """A pass that gives back what was loaded, and whose log says what happened to which tier."""

    def __init__(self, tier: Tier, log: list[tuple[str, Tier]]) -> None:
        self.tier, self.log = tier, log
        self.loaded: TreeRows | None = None

    def load(self, rows: TreeRows) -> None:
        assert len(rows) == self.tier.nodes + 1
        self.log.append(("load", self.tier))
        self.loaded = rows

    def run(self) -> Outputs:
        assert self.loaded is not None
        return {"token_ids": torch.from_numpy(self.loaded.token_ids), "width": torch.full((len(self.loaded),), 7)}


def some_rows(nodes: int, length: int = 5, seed: int = 0) -> TreeRows:
    rng = np.random.default_rng(seed)
    parents = np.array([rng.integers(-1, i) for i in range(nodes)], dtype=np.int64)
    tree = DraftTree(rng.integers(1, 60, nodes), parents, np.zeros(nodes))
    return TreeRows(*tree_rows(int(rng.integers(1, 60)), tree), length)


def no_plain() -> Mapping[str, torch.Tensor]:
    raise AssertionError("a graph was expected to serve")


def echoing(**options: Any) -> tuple[GraphTiers, list[tuple[str, Tier]]]:
    log: list[tuple[str, Tier]] = []
    options.setdefault("capture", FakeCapture())
    return GraphTiers(lambda tier: Echo(tier, log), **options), log


@pytest.mark.parametrize(
    ("nodes", "tier"),
    [(0, 0), (1, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16), (17, 32), (33, 64), (64, 64), (65, None), (999, None)],
)
def test_the_smallest_tier_that_holds_the_tree(nodes: int, tier: int | None) -> None:
    found = echoing()[0].tier(nodes, 100)
    assert found == (None if tier is None else Tier(tier, 100))


@pytest.mark.parametrize("nodes", [0, 1, 3, 4, 7, 64])
def test_outputs_are_those_of_the_real_rows(nodes: int) -> None:
    tiers, _ = echoing()
    rows = some_rows(nodes)
    outputs = tiers.run(rows, vocab_size=9, plain=no_plain)
    assert outputs["token_ids"].tolist() == rows.token_ids.tolist()
    assert outputs["width"].shape == (nodes + 1,)


def check_padding(module: Any) -> None:
    rows = some_rows(5)
    rows = module.TreeRows(rows.token_ids, rows.depths, rows.visible, rows.length)
    padded = rows.padded(9)
    assert len(padded) == 9 and padded.length == rows.length
    for name in ("token_ids", "depths"):
        assert getattr(padded, name)[:6].tolist() == getattr(rows, name).tolist()
        assert getattr(padded, name).dtype == np.int64
    assert padded.visible[:6, :6].tolist() == rows.visible.tolist()
    assert not padded.visible[:6, 6:].any(), "nothing sees an added row"
    assert padded.visible[6:, 6:].tolist() == np.eye(3, dtype=bool).tolist(), "an added row sees itself"
    assert not padded.visible[6:, :6].any(), "and nothing else of the tree"
    assert padded.depths[6:].tolist() == [0, 0, 0], "an added row has a position inside the context"
    assert rows.padded(6).visible.tolist() == rows.visible.tolist()
    with pytest.raises(ValueError, match="rows must be >= 6, got 5"):
        rows.padded(5)


def test_padding() -> None:
    check_padding(graphs)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("visible = np.eye(rows, dtype=bool)", "visible = np.ones((rows, rows), dtype=bool)"),
        ("visible = np.eye(rows, dtype=bool)", "visible = np.zeros((rows, rows), dtype=bool)"),
        ("visible = np.eye(rows, dtype=bool)", "visible = np.tri(rows, dtype=bool)"),
        ("visible[: len(self), : len(self)] = self.visible", "pass"),
        ("added = np.zeros(more, np.int64)", "added = np.arange(more)"),
    ],
)
def test_wrong_padding_is_noticed(old: str, new: str) -> None:
    with mutated("adaptspec.target.graphs", old, new) as mutant, pytest.raises(AssertionError):
        check_padding(mutant)


def test_changing_arms_captures_each_tier_once() -> None:
    capture = FakeCapture()
    tiers, log = echoing(capture=capture)
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(300):
        nodes, vocab_size = int(rng.integers(0, 33)), int(rng.choice([16384, 49152]))
        tiers.run(some_rows(nodes), vocab_size=vocab_size, plain=no_plain)
        seen.add(tiers.tier(nodes, vocab_size))
    assert capture.captures == tiers.counts.captured == len(seen) == len(tiers.captured) == 10
    assert tiers.counts.replayed == 300 and tiers.counts.plain == tiers.counts.evicted == 0
    assert len(log) == 310, "loaded once per pass, and once more before each capture"


def test_the_tier_not_used_for_longest_goes() -> None:
    tiers, _ = echoing(limit=2)
    small, middle, large = some_rows(0), some_rows(3), some_rows(7)
    for rows in (small, middle, small, large):
        tiers.run(rows, vocab_size=1, plain=no_plain)
    assert tiers.captured == (Tier(0, 1), Tier(8, 1))
    assert (tiers.counts.captured, tiers.counts.evicted) == (3, 1)
    tiers.run(small, vocab_size=1, plain=no_plain)
    tiers.run(middle, vocab_size=1, plain=no_plain)
    assert tiers.captured == (Tier(0, 1), Tier(4, 1))
    tiers.run(small, vocab_size=2, plain=no_plain)
    assert tiers.captured == (Tier(4, 1), Tier(0, 2)), "another vocabulary is another graph"
    assert tiers.counts.captured == 5


def test_the_old_graph_is_gone_before_the_new_one_takes_memory() -> None:
    held: list[tuple[Tier, ...]] = []

    class Watching(FakeCapture):
        def capture(self, run: Callable[[], Outputs]) -> FakeGraph:
            held.append(tiers.captured)
            return super().capture(run)

    tiers, _ = echoing(limit=1, capture=Watching())
    for nodes in (0, 4, 0):
        tiers.run(some_rows(nodes), vocab_size=1, plain=no_plain)
    assert held == [(), (), ()]


def test_after_invalidation_everything_is_captured_anew() -> None:
    tiers, _ = echoing()
    for nodes in (0, 4):
        tiers.run(some_rows(nodes), vocab_size=1, plain=no_plain)
    tiers.invalidate()
    assert tiers.captured == () and tiers.counts.invalidated == 2
    tiers.run(some_rows(4), vocab_size=1, plain=no_plain)
    assert tiers.counts.captured == 3


def test_captures_ahead_of_time() -> None:
    tiers, _ = echoing()
    tiers.prepare([Tier(nodes, 5) for nodes in NODE_TIERS], some_rows(0))
    assert tiers.counts.captured == len(NODE_TIERS) and tiers.counts.replayed == 0
    tiers.run(some_rows(20), vocab_size=5, plain=no_plain)
    assert tiers.counts.captured == len(NODE_TIERS)


def test_passes_without_a_graph_run_plainly() -> None:
    rows, marker = some_rows(70), {"logits": torch.ones(1)}
    tiers, _ = echoing()
    assert tiers.run(rows, vocab_size=1, plain=lambda: marker) is marker, "larger than every tier"
    small = some_rows(2)
    assert tiers.run(small, vocab_size=1, plain=lambda: marker, room=4) is marker, "the tier needs 5 rows"
    assert tiers.run(small, vocab_size=1, plain=no_plain, room=5)
    assert (tiers.counts.plain, tiers.counts.replayed) == (2, 1)
    off, log = echoing(capture=FakeCapture(available=False))
    off.prepare([Tier(0, 1)], small)
    assert not off.available and off.run(small, vocab_size=1, plain=lambda: marker) is marker
    assert log == [] and off.captured == ()


def test_without_a_gpu_there_are_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not GraphTiers(lambda tier: Echo(tier, [])).available


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"node_tiers": ()}, r"node_tiers must be ascending numbers >= 0, got \[\]"),
        ({"node_tiers": (4, 0)}, r"got \[4, 0\]"),
        ({"node_tiers": (0, 4, 4)}, r"got \[0, 4, 4\]"),
        ({"node_tiers": (-1, 4)}, r"got \[-1, 4\]"),
        ({"limit": 0}, "limit must be >= 1, got 0"),
    ],
)
def test_what_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        echoing(**options)


def test_cuda_captures_after_warming_up_on_a_side_stream_and_share_their_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order of calls, with CUDA's objects replaced: this machine may have none."""
    events: list[Any] = []

    class Stream:
        def wait_stream(self, other: Stream) -> None:
            events.append("wait")

    class CUDAGraph:
        def pool(self) -> str:
            return "pool"

        def replay(self) -> None:
            events.append("replay")

    @contextmanager
    def graph(captured: CUDAGraph, pool: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local", "drafters may run in other threads"
        events.append(("capture", pool))
        yield
        events.append("captured")

    current = Stream()
    for name, value in {
        "is_available": lambda: True,
        "Stream": Stream,
        "current_stream": lambda: current,
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": CUDAGraph,
        "graph": graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    outputs = {"logits": torch.zeros(1)}

    def run() -> Outputs:
        assert torch.is_inference_mode_enabled()
        events.append("run")
        return outputs

    capture = CudaCapture()
    first, second = capture.capture(run), capture.capture(run)
    once = ["wait", "run", "run", "run", "wait"]
    assert events == [*once, ("capture", None), "run", "captured", *once, ("capture", "pool"), "run", "captured"]
    events.clear()
    assert first.replay() is second.replay() is outputs
    assert events == ["replay", "replay"]


# The pass itself, on a tiny model ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_models.make_llama()


def start(cache: FixedCache, target: HFTarget) -> None:
    """Begin a sequence with what the target has cached."""
    cache.set_length(0)
    assert target.cache is not None
    for layer, other in zip(cache.layers, target.cache.layers, strict=True):
        layer.update(other.keys[:, :, : target.length], other.values[:, :, : target.length])
    cache.share()


def started(model: torch.nn.Module, tokens: int, capacity: int = 120) -> tuple[HFTarget, FixedCache]:
    target = HFTarget(model)
    target.prefill(torch.arange(tokens) % 60 + 1)
    cache = FixedCache(len(target.layout.layers), capacity)
    start(cache, target)
    return target, cache


def tiers_of(target: HFTarget, cache: FixedCache, taps: tuple[int, ...] = ()) -> GraphTiers:
    return GraphTiers(
        lambda tier: StaticForward(target.model, target.layout, cache, rows=tier.nodes + 1, taps=taps),
        capture=FakeCapture(),
    )


TOLERANCE = 2e-6
"""Of logits of order 1: float32 rounding in another order."""


@pytest.mark.parametrize("nodes", [0, 1, 4, 6, 33, 64])
def test_padded_passes_give_the_logits_of_the_ordinary_target(model: torch.nn.Module, nodes: int) -> None:
    target, cache = started(model, 20)
    target.tap((1, 2))
    tiers = tiers_of(target, cache, taps=(1, 2))
    for seed in range(2):
        rng = np.random.default_rng(seed)
        parents = np.array([rng.integers(-1, i) for i in range(nodes)], dtype=np.int64)
        tree = DraftTree(rng.integers(1, 60, nodes), parents, np.zeros(nodes))
        wanted = target.score(9, tree)
        target.rollback(20)
        found = tiers.run(TreeRows(*tree_rows(9, tree), 20), vocab_size=64, plain=no_plain, room=100)
        torch.testing.assert_close(found["logits"], wanted.logits, atol=TOLERANCE, rtol=0)
        for tap in (1, 2):
            torch.testing.assert_close(found[f"tap {tap}"], wanted.features[tap], atol=TOLERANCE, rtol=0)


def test_greedy_generation_over_graphs_is_greedy_generation(model: torch.nn.Module) -> None:
    """Several requests after each other on one cache, which does not move; trees of all sizes, prefixes that grow."""
    places = None
    capture, layout, cache = FakeCapture(), HFTarget(model).layout, FixedCache(2, 120)
    tiers = GraphTiers(lambda tier: StaticForward(model, layout, cache, rows=tier.nodes + 1), capture=capture)
    for prompt in (12, 30):
        target = HFTarget(model)
        logits = target.prefill(torch.arange(prompt) % 60 + 1).logits
        start(cache, target)
        places = places or [buffer.data_ptr() for buffer in cache.buffers]
        root, length, tokens = int(logits.argmax()), prompt, [int(logits.argmax())]
        plain = [root]
        for _ in range(40):
            step = target.score(plain[-1], DraftTree.empty())
            target.commit(np.zeros(0, np.int64))
            plain.append(int(step.logits.argmax()))
        rng = np.random.default_rng(prompt)
        while len(tokens) < 30:
            right = plain[len(tokens) : len(tokens) + int(rng.integers(0, 5))]
            wrong = rng.integers(1, 60, len(right) + 1).tolist()
            # A wrong node first, so that accepted rows have to move.
            ids = [wrong[0], *right]
            parents = [-1, -1, *range(1, len(right))][: len(ids)]
            tree = DraftTree(np.array(ids), np.array(parents), np.zeros(len(ids)))
            rows = TreeRows(*tree_rows(root, tree), length)
            logits = tiers.run(rows, vocab_size=64, plain=no_plain, room=120 - length)["logits"]
            verdict = verify_greedy(tree, logits.argmax(-1).numpy())
            if len(verdict.path):
                cache.keep_rows(length + 1, torch.from_numpy(verdict.path))
            length += 1 + len(verdict.path)
            tokens += verdict.token_ids.tolist()
            root = tokens[-1]
        assert tokens == plain[: len(tokens)]
    assert capture.captures == 2, "trees of 1 to 5 nodes take two tiers, in both requests"
    assert [buffer.data_ptr() for buffer in cache.buffers] == places


def test_a_pass_keeps_nothing_on_the_host_that_changes(model: torch.nn.Module) -> None:
    """A graph replays what was launched at its capture; so between captures only the contents of tensors may change."""
    target, cache = started(model, 10)
    static = StaticForward(target.model, target.layout, cache, rows=5)
    static.load(some_rows(2, length=10).padded(5))
    before = {name: (id(value), getattr(value, "data_ptr", int)()) for name, value in vars(static).items()}
    cursors = [layer.cursor for layer in cache.layers]
    first = static.run()["logits"].clone()
    static.load(some_rows(4, length=8, seed=3))
    after = {name: (id(value), getattr(value, "data_ptr", int)()) for name, value in vars(static).items()}
    assert before == after
    second = static.run()["logits"]
    assert not torch.allclose(first, second)
    assert [layer.cursor for layer in cache.layers] == cursors


def test_the_cache_serves_ordinary_forwards_and_moves_when_it_is_full(model: torch.nn.Module) -> None:
    target, cache = started(model, 10, capacity=16)
    ids, places = torch.tensor([[7, 8]]), [buffer.data_ptr() for buffer in cache.buffers]
    wanted = model(torch.cat([torch.arange(10)[None] % 60 + 1, ids], dim=1)).logits[0, 10:]
    for there in (cache, cache.moved(40)):
        there.set_length(10)
        found = model(input_ids=ids, **{target.layout.cache_argument: there}).logits[0]
        torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)
    assert [buffer.data_ptr() for buffer in cache.buffers] == places
    assert there.capacity == 40 and type(there) is GrowingCache


def test_what_a_pass_refuses(model: torch.nn.Module) -> None:
    target, cache = started(model, 10, capacity=16)
    static = StaticForward(target.model, target.layout, cache, rows=5)
    with pytest.raises(ValueError, match="rows must be 5, got 3"):
        static.load(some_rows(2, length=10))
    with pytest.raises(ValueError, match="length must be <= 11, got 12"):
        static.load(some_rows(4, length=12))
    with pytest.raises(ValueError, match="capacity must be <= 16, got 17"):
        cache.reserve(17)
    rows = torch.zeros(1, 2, 1, 8)
    with pytest.raises(RuntimeError, match="outside StaticForward, by LlamaAttention"):
        static_attention(model.model.layers[0].self_attn, rows, rows, rows, None)
    turning = tiny_models.make_llama()
    turning.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ValueError, match="rotary embeddings of type 'dynamic' look at the length"):
        StaticForward(turning, target.layout, cache, rows=5)
