"""A target whose passes are replayed says what it says without: over steps, arms, requests, and all that may happen to
the memory that the replays were written down on. Graphs are tapes here (`tests.target.tape`)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from adaptspec import AdaptiveSpec
from adaptspec.drafters import make_drafter
from adaptspec.target import graphed, hf
from adaptspec.target.graphed import choose_capture, graph_problem, graphed_model, release_graphs
from adaptspec.target.graphs import NODE_TIERS, CudaCapture, Outputs
from adaptspec.target.hf import HFTarget
from adaptspec.target.layout import inspect_model
from adaptspec.types import DraftTree, ExtraRows
from tests import tiny_models
from tests.kernels.mutants import mutated
from tests.target.families import FAMILIES
from tests.target.tape import Tape, TapeCapture

TOLERANCE = 5e-6
"""Of logits of order 1: float32 rounding in another order."""

TIERS = len(NODE_TIERS)


@pytest.fixture
def model() -> Any:
    return tiny_models.make_llama()


def prompt(length: int) -> torch.Tensor:
    return torch.arange(length) * 7 % 60 + 1


def some_tree(rng: np.random.Generator, nodes: int) -> tuple[DraftTree, np.ndarray]:
    """A random tree and a path down it."""
    parents = np.array([rng.integers(-1, i) for i in range(nodes)], dtype=np.int64)
    path: list[int] = []
    for node, parent in enumerate(parents.tolist()):
        if parent == (path[-1] if path else -1) and rng.random() < 0.7:
            path.append(node)
    return DraftTree(rng.integers(1, 60, nodes), parents, np.zeros(nodes)), np.array(path, dtype=np.int64)


def assert_close(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, atol=TOLERANCE, rtol=0)


ROWS = (
    ([4], [0], [[1]]),
    ([5], [1], [[1, 1]]),
    ([6, 7], [2, 2], [[1, 1, 1, 0], [1, 1, 0, 1]]),
    ([8], [3], [[1, 1, 0, 1, 1]]),
)
"""Tokens, depths, and what they see of the rows behind the prefix."""


def check_steps(module: ModuleType, model: Any) -> tuple[Any, TapeCapture]:
    """Two requests with trees of all sizes, chains and trees that a drafter runs row by row, and extra rows."""
    capture = TapeCapture()
    with_graphs = module.HFTarget(model, graphs=capture)
    plain = HFTarget(model, graphs=False)
    rng = np.random.default_rng(0)
    for request in range(2):
        for target in (with_graphs, plain):
            target.tap((2,))
            target.prefill(prompt(9 + 4 * request))
        for step in range(10):
            tree, path = some_tree(rng, int(rng.choice([0, 1, 3, 6, 12, 30])))
            if step % 3 == 1:  # rows one after the other, each seeing all before; then one that does not
                found = [
                    [
                        target.run_rows(np.array(ids), np.array(depths), np.array(seen, bool))
                        for ids, depths, seen in ROWS
                    ]
                    for target in (with_graphs, plain)
                ]
                for left, right in zip(*found, strict=True):
                    assert_close(left, right)
                kept = np.array([[0], [0, 1, 2], [0, 1, 3]][step // 3 % 3])
                for target in (with_graphs, plain):
                    target.keep(kept)
            extra = None
            if step % 3 == 2:
                extra = ExtraRows(np.array([20, 21]), np.array([1, 2]), np.array([[True, False], [True, True]]))
            scored = [target.score(9, tree, extra) for target in (with_graphs, plain)]
            assert_close(scored[0].logits, scored[1].logits)
            assert_close(scored[0].features[2], scored[1].features[2])
            if extra is not None:
                assert_close(scored[0].extra_logits, scored[1].extra_logits)
            for target in (with_graphs, plain):
                target.commit(path)
        assert with_graphs.length == plain.length
        with_graphs.close()
    return with_graphs, capture


def test_passes_are_those_without_graphs(model: Any) -> None:
    target, capture = check_steps(hf, model)
    counts = target.graph_counts
    assert counts.captured == len(capture.tapes) == TIERS, "once each, and not again in the second request"
    assert (counts.evicted, counts.invalidated, counts.plain) == (0, 0, 0)
    assert counts.replayed == sum(tape.replays for tape in capture.tapes) == 20 + 6 * 3


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return logits if self._graphs is None else logits.clone()", "return logits"),
        ("self._open_cache().set_length(self.length + width)", "pass"),
        ("or not visible[:, :before].all()", ""),
        ("TreeRows(ids, depths - before,", "TreeRows(ids, depths,"),
        ("visible[:, before:], self.length + before)", "visible[:, before:], self.length)"),
        ('self._tapped = {k: outputs[f"tap {k}"] for k in self._taps}', "pass"),
    ],
)
def test_wrong_wiring_is_noticed(model: Any, old: str, new: str) -> None:
    with mutated("adaptspec.target.hf", old, new) as mutant, pytest.raises((AssertionError, KeyError, RuntimeError)):
        check_steps(mutant, model)


def test_a_tape_is_as_strict_as_a_graph(model: Any) -> None:
    """What only Python knows is frozen at the capture, and looking at values is refused."""
    count, values = [1.0], torch.zeros(2)

    def run() -> Outputs:
        return {"logits": values + count[0]}

    graph = TapeCapture().capture(run)
    count[0], values[0] = 100.0, 5.0
    assert graph.replay()["logits"].tolist() == [6.0, 1.0]
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        TapeCapture().capture(lambda: {"logits": values * values.sum().item()})


@pytest.fixture
def taped(monkeypatch: pytest.MonkeyPatch) -> TapeCapture:
    """All targets use tapes, where they could use graphs."""
    capture = TapeCapture()

    def choose(model: Any, layout: Any, wish: Any) -> Any:
        assert wish is None
        return capture if graph_problem(model, layout) is None else None

    monkeypatch.setattr(hf, "choose_capture", choose)
    return capture


POOLS: dict[str, Callable[[], list[Any]]] = {
    "lookups": lambda: ["suffix", "token-recycling", "prompt-lookup"],
    "extra rows": lambda: ["lookahead", "suffix"],
    "a view of the model": lambda: [make_drafter("layer-skip", min_confidence=0.0), "suffix"],
    "first layers": lambda: [make_drafter("layer-skip", exit=1, min_confidence=0.0), "suffix"],
    "a draft model": lambda: [make_drafter("draft-model", path=tiny_models.make_llama(seed=5)), "suffix"],
    "a branching draft model": lambda: [make_drafter("draft-model", path=tiny_models.make_llama(seed=5), branching=3)],
    "the model drafts for itself": lambda: [],
}


@pytest.mark.parametrize(
    ("pool", "strategy", "temperature"),
    [
        *((pool, "hedge", 0.0) for pool in POOLS),
        ("lookups", "mixture", 0.0),
        ("a branching draft model", "mixture", 0.0),
        ("lookups", "fixed:suffix@12", 0.8),
        ("a draft model", "fixed:draft-model@12", 0.8),
    ],
)
def test_generation_is_the_same(
    model: Any, taped: TapeCapture, monkeypatch: pytest.MonkeyPatch, pool: str, strategy: str, temperature: float
) -> None:
    """Whole requests, one after the other, with arms of different budgets."""

    def generate() -> list[list[int]]:
        members = POOLS[pool]() or [make_drafter("draft-model", path=model)]
        spec = AdaptiveSpec(members, strategy, budgets=(3, 12), seed=3)
        answers = []
        for length in (11, 24):
            torch.manual_seed(length)
            result = spec.generate(model, prompt(length)[None], max_new_tokens=24, temperature=temperature)
            answers.append(result.sequences[0].tolist())
        return answers

    with_graphs = generate()
    counts = graphed_model(model, inspect_model(model), taped).counts
    assert counts.captured == TIERS and counts.invalidated == 0
    assert counts.replayed >= 6 and counts.plain == 0
    monkeypatch.setattr(hf, "choose_capture", lambda model, layout, wish: None)
    assert with_graphs == generate()


def test_a_sequence_that_outgrows_the_cache_goes_on_without_graphs(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed, "FIRST_CAPACITY", 48)
    monkeypatch.setattr(graphed, "ROOM", 8)
    capture = TapeCapture()
    target, plain = HFTarget(model, graphs=capture), HFTarget(model, graphs=False)
    rng = np.random.default_rng(1)

    def steps(length: int, count: int) -> list[type]:
        caches = []
        for one in (target, plain):
            one.prefill(prompt(length))
        for _ in range(count):
            tree, path = some_tree(rng, 5)
            assert_close(target.score(3, tree).logits, plain.score(3, tree).logits)
            if len(caches) % 2:
                visible = np.ones((1, 1), dtype=bool)
                for one in (target, plain):
                    one.rollback(one.length)
                    one.run_rows(np.array([2]), np.array([0]), visible)
                    one.rollback(one.length)
                    one.score(3, tree)
            for one in (target, plain):
                one.commit(path)
            caches.append(type(target.cache).__name__)
        return caches

    caches = steps(20, 16)
    assert caches[0] == "FixedCache" and caches[-1] == "GrowingCache" and target.length > 48
    counts = target.graph_counts
    assert counts.captured == TIERS - 2, "the largest two tiers do not fit behind 20 tokens"
    assert steps(20, 16) == ["FixedCache"] * 16, "the second one begins on a larger cache"
    assert counts.invalidated == TIERS - 2 and counts.captured == 2 * TIERS - 2
    monkeypatch.setattr(graphed, "MOST_CAPACITY", 100)
    assert steps(101, 2) == ["GrowingCache"] * 2
    assert steps(20, 2) == ["FixedCache"] * 2


def test_hidden_states_that_requests_ask_for(model: Any) -> None:
    capture = TapeCapture()
    plain = HFTarget(model, graphs=False)
    tree, _ = some_tree(np.random.default_rng(2), 5)
    for taps, invalidated in (((), 0), ((1,), TIERS), ((2, 1), 2 * TIERS), ((2,), 2 * TIERS), ((), 2 * TIERS)):
        target = HFTarget(model, graphs=capture)
        for one in (target, plain):
            one.tap(taps)
            one.prefill(prompt(8))
        found, wanted = target.score(3, tree), plain.score(3, tree)
        assert set(found.features) == set(taps)
        for tap in taps:
            assert_close(found.features[tap], wanted.features[tap])
        assert target.graph_counts.invalidated == invalidated
    replayed = target.graph_counts.replayed
    target.tap((1,))  # recorded already
    plain.tap((1,))
    for one in (target, plain):
        one.rollback(8)
    assert_close(target.score(3, tree).features[1], plain.score(3, tree).features[1])
    assert target.graph_counts.replayed == replayed + 1


def test_taps_that_come_in_the_middle_of_a_sequence(model: Any) -> None:
    target = HFTarget(model, graphs=TapeCapture())
    target.prefill(prompt(8))
    target.tap((1,))
    assert target.score(3, DraftTree.empty()).features[1].shape == (1, 32)
    assert target.graph_counts.replayed == 0


def test_one_sequence_at_a_time_has_the_cache(model: Any) -> None:
    capture = TapeCapture()
    first, second, plain = (HFTarget(model, graphs=wish) for wish in (capture, capture, False))
    tree, path = some_tree(np.random.default_rng(3), 6)
    first.prefill(prompt(10))
    second.prefill(prompt(17))
    plain.prefill(prompt(10))
    assert [type(one.cache).__name__ for one in (first, second)] == ["FixedCache", "GrowingCache"]
    for _ in range(2):
        second.score(8, tree)
        second.commit(path)
        assert_close(first.score(3, tree).logits, plain.score(3, tree).logits)
        for one in (first, plain):
            one.commit(path)
    first.close()
    second.prefill(prompt(17))
    assert type(second.cache).__name__ == "FixedCache", "free again"
    del second  # without having been closed
    gc.collect()
    first.prefill(prompt(10))
    plain.prefill(prompt(10))
    assert type(first.cache).__name__ == "FixedCache"
    assert_close(first.score(3, tree).logits, plain.score(3, tree).logits)
    assert first.graph_counts.captured == TIERS
    first.prefill(prompt(12))  # anew without closing
    assert type(first.cache).__name__ == "FixedCache"


def test_weights_that_change_in_place_or_are_replaced(model: Any) -> None:
    capture = TapeCapture()

    def differ() -> Any:
        target, plain = HFTarget(model, graphs=capture), HFTarget(model, graphs=False)
        tree, _ = some_tree(np.random.default_rng(4), 5)
        for one in (target, plain):
            one.prefill(prompt(8))
        assert_close(target.score(3, tree).logits, plain.score(3, tree).logits)
        target.close()
        return target.graph_counts

    assert differ().captured == TIERS
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight.mul_(-2.0)
    assert differ().captured == TIERS, "graphs read the weights where they lie"
    assert len(capture.tapes) == TIERS
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(weight.detach().clone() * 0.5)
    differ()
    assert len(capture.tapes) == 2 * TIERS


def test_hooks_are_not_skipped(model: Any) -> None:
    capture = TapeCapture()
    target = HFTarget(model, graphs=capture)
    seen: list[int] = []
    handle = model.model.layers[1].register_forward_hook(lambda module, args, output: seen.append(1))
    target.prefill(prompt(8))
    target.score(3, DraftTree.empty())
    assert len(seen) == 2 and capture.tapes == []
    handle.remove()
    target.prefill(prompt(8))
    target.score(3, DraftTree.empty())
    assert len(seen) == 2 and target.graph_counts.replayed == 1


def test_a_capture_that_fails_is_said_and_lived_with(model: Any) -> None:
    class Failing(TapeCapture):
        def capture(self, run: Callable[[], Outputs]) -> Tape:
            if len(self.tapes) == 2:
                raise RuntimeError("out of memory")
            return super().capture(run)

    target, plain = HFTarget(model, graphs=Failing()), HFTarget(model, graphs=False)
    with pytest.warns(UserWarning, match="without CUDA graphs, because capturing one failed: out of memory"):
        target.prefill(prompt(8))
    plain.prefill(prompt(8))
    tree, path = some_tree(np.random.default_rng(5), 5)
    for _ in range(2):
        assert_close(target.score(3, tree).logits, plain.score(3, tree).logits)
        for one in (target, plain):
            one.commit(path)
    assert target.graph_counts.replayed == 0
    target.prefill(prompt(8))
    assert type(target.cache).__name__ == "GrowingCache"


def test_graphs_go_with_the_model_or_when_they_are_released(model: Any) -> None:
    capture = TapeCapture()
    target = HFTarget(model, graphs=capture)
    target.prefill(prompt(8))
    with pytest.raises(RuntimeError, match="while a sequence is open"):
        release_graphs(model)
    target.close()
    release_graphs(model)
    release_graphs(model)  # nothing there
    target.prefill(prompt(8))
    assert len(capture.tapes) == 2 * TIERS
    target.close()
    kept = weakref.ref(graphed_model(model, target.layout, capture))
    assert target.cache is None and target.length == 0
    own = tiny_models.make_llama(seed=8)
    other = HFTarget(own, graphs=TapeCapture())
    other.prefill(prompt(8))
    other.close()
    mine = weakref.ref(graphed_model(own, other.layout, other._capture))
    del other, own
    gc.collect()
    assert mine() is None, "nothing that is kept per model keeps the model"
    assert kept() is not None


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.delenv(graphed.VARIABLE, raising=False)
    yield monkeypatch


def test_off_where_there_is_no_gpu(model: Any, settings: pytest.MonkeyPatch) -> None:
    layout = inspect_model(model)
    assert choose_capture(model, layout, None) is None and choose_capture(model, layout, False) is None
    assert HFTarget(model).graph_counts is None
    with pytest.raises(ValueError, match="graphs must be None or False here: the model is on cpu"):
        HFTarget(model, graphs=True)
    nothing = TapeCapture()
    nothing.available = False
    assert choose_capture(model, layout, nothing) is None


def test_on_where_there_is_a_gpu(model: Any, settings: pytest.MonkeyPatch) -> None:
    """With a device that says it is one."""
    layout = inspect_model(model)

    class Weight:
        device = torch.device("cuda")

    settings.setattr(model, "get_input_embeddings", lambda: type("Embeddings", (), {"weight": Weight})())
    settings.setattr(graphed, "uses_kernel", lambda model, layout: True)
    assert isinstance(choose_capture(model, layout, None), CudaCapture)
    assert isinstance(choose_capture(model, layout, True), CudaCapture)
    assert choose_capture(model, layout, False) is None
    settings.setenv(graphed.VARIABLE, "off")
    assert choose_capture(model, layout, None) is None
    assert isinstance(choose_capture(model, layout, True), CudaCapture)
    settings.setenv(graphed.VARIABLE, "no")
    with pytest.raises(ValueError, match="ADAPTSPEC_GRAPHS must be 'off' or not set, got 'no'"):
        choose_capture(model, layout, None)
    settings.delenv(graphed.VARIABLE)
    settings.setattr(graphed, "uses_kernel", lambda model, layout: False)
    assert choose_capture(model, layout, None) is None
    with pytest.raises(ValueError, match="the tree-attention kernel does not run here"):
        choose_capture(model, layout, True)


@pytest.mark.parametrize(
    ("family", "attention", "problem"),
    [
        ("mistral-window", "sdpa", "MistralForCausalLM has layers with a sliding window"),
        ("llama", "eager", "LlamaForCausalLM was loaded with eager attention"),
        ("qwen3-moe", "sdpa", "asks on the host which experts have tokens"),
        ("gpt2", "sdpa", "asks on the host whether tokens are padding"),
    ],
)
def test_models_that_cannot_be_captured(
    settings: pytest.MonkeyPatch, family: str, attention: str, problem: str
) -> None:
    model = FAMILIES[family](attention)
    with pytest.raises(ValueError, match=f"graphs must be None or False here: .*{problem}"):
        HFTarget(model, graphs=TapeCapture())


def test_rotary_embeddings_that_look_at_the_length(model: Any, settings: pytest.MonkeyPatch) -> None:
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ValueError, match="rotary embeddings of type 'dynamic', which look at the length"):
        HFTarget(model, graphs=TapeCapture())
    model.config.model_type = "never-heard-of"
    assert "of the family 'never-heard-of'" in str(graph_problem(model, inspect_model(model)))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "phi", "phi3", "llama-no-groups"])
def test_families_that_can_be_captured(family: str) -> None:
    built = FAMILIES[family]("sdpa")
    target, plain = HFTarget(built, graphs=TapeCapture()), HFTarget(built, graphs=False)
    rng = np.random.default_rng(6)
    for one in (target, plain):
        one.prefill(prompt(9))
    for nodes in (6, 0, 11):
        tree, path = some_tree(rng, nodes)
        left, right = target.score(3, tree).logits, plain.score(3, tree).logits
        assert float((left - right).abs().max()) <= 2e-4 * float(right.abs().max().clamp_min(1.0))
        for one in (target, plain):
            one.commit(path)
    assert target.graph_counts.replayed == 3 and target.graph_counts.plain == 0
