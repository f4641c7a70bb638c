"""The CUDA graphs of a model and the cache that they read and write, kept from request to request.

Capturing takes seconds and replaying microseconds, so graphs outlive the targets that use them: there is one
`GraphedModel` per model, and it goes when the model goes. One sequence at a time has its cache; a second target on the
same model at the same time runs without graphs.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch

from adaptspec.kernels.backend import on_device
from adaptspec.target.graphs import NODE_TIERS, Capture, CudaCapture, GraphCounts, GraphTiers, Outputs, Tier, TreeRows
from adaptspec.target.layout import Layout
from adaptspec.target.static_forward import FixedCache, StaticForward, length_dependent_rotation
from adaptspec.target.tree_kernel import kernel_problem, uses_kernel

VARIABLE = "ADAPTSPEC_GRAPHS"
"""Set to "off", no target of the process uses graphs."""

FIRST_CAPACITY = 4096
"""Tokens of the first cache of a model; a sequence that needs more gets one twice or four times as large."""

MOST_CAPACITY = 65536
"""Tokens of the largest cache. Longer sequences run without graphs: reading their keys takes longer than launching."""

ROOM = 512
"""Tokens that a sequence may gain, at least, before it outgrows the cache it began on."""

_NOT_CAPTURED = {"qwen3_moe": "which experts have tokens", "gpt2": "whether tokens are padding"}
"""Families that look at device memory on the host inside a forward, and for what."""


def graph_problem(model: torch.nn.Module, layout: Layout) -> str | None:
    """Why the passes of this model cannot be captured, None if they can."""
    name = type(model).__name__
    if problem := kernel_problem(model, layout):
        return problem
    if what := _NOT_CAPTURED.get(getattr(model.config, "model_type", "")):
        return f"{name} asks on the host {what}"
    if kind := length_dependent_rotation(model.config):
        return f"{name} has rotary embeddings of type {kind!r}, which look at the length on the host"
    if len(devices := {part.device for part in model.parameters()}) > 1:
        return f"{name} is spread over {len(devices)} devices"
    return None


def choose_capture(model: torch.nn.Module, layout: Layout, wish: bool | Capture | None) -> Capture | None:
    """What makes the graphs of a target, None for no graphs.

    Args:
        wish: None takes CUDA graphs where there is a GPU, the model's passes can be captured and its rows attend
            through the kernel; True insists on them; False wants none; a `Capture` is taken wherever the model's passes
            could be captured.

    Raises:
        ValueError: insisted, and it is not possible; or a bad value of `ADAPTSPEC_GRAPHS`.
    """
    setting = os.environ.get(VARIABLE, "")
    if setting not in ("", "off"):
        raise ValueError(f"{VARIABLE} must be 'off' or not set, got {setting!r}")
    if wish is False or (wish is None and setting == "off"):
        return None
    device = model.get_input_embeddings().weight.device
    problem = graph_problem(model, layout)
    if wish is None or wish is True:
        if device.type != "cuda":
            problem = f"the model is on {device.type}, graphs are for CUDA devices"
        elif problem is None and not uses_kernel(model, layout):
            problem = "the tree-attention kernel does not run here"
        if problem is None:
            return CudaCapture()
        if wish is None:
            return None
    if problem is not None:
        raise ValueError(f"graphs must be None or False here: {problem}")
    assert not isinstance(wish, bool) and wish is not None
    return wish if wish.available else None


class GraphedModel:
    """Graphs of one model, by tier of rows and vocabulary, on one cache.

    The model is referred to weakly. Hidden states that any request has asked for are recorded in all graphs from then
    on, so that requests with different drafters do not make each other's graphs worthless.

    Args:
        model: one without a `graph_problem`.
        layout: of the model.
        capture: makes graphs.
    """

    def __init__(self, model: torch.nn.Module, layout: Layout, capture: Capture) -> None:
        self.layout = layout
        self.capture = capture
        self.taps: tuple[int, ...] = ()
        self.cache: FixedCache | None = None
        self.vocab_size = model.get_output_embeddings().weight.shape[0]
        self.device = model.get_input_embeddings().weight.device
        self._model = weakref.ref(model)
        self._tiers = GraphTiers(self._make_pass, node_tiers=NODE_TIERS, capture=capture)
        self._facts = _facts(model)
        self._owner: weakref.ref[Any] | None = None
        self._longest = 0
        self._broken = False
        self._lock = threading.Lock()

    @property
    def counts(self) -> GraphCounts:
        """Since the model was first used."""
        return self._tiers.counts

    @property
    def captured(self) -> tuple[Tier, ...]:
        """The tiers that have a graph."""
        return self._tiers.captured

    def gives(self, taps: tuple[int, ...]) -> bool:
        """Whether the graphs record these layers; what is asked for in the middle of a sequence may be missing."""
        return set(taps) <= set(self.taps)

    def fits(self, model: torch.nn.Module, capture: Capture) -> bool:
        """Whether the graphs are still those of this model: its weights may have moved or been replaced since."""
        same = self.capture is capture or (isinstance(capture, CudaCapture) and isinstance(self.capture, CudaCapture))
        return same and self._facts == _facts(model)

    def open(self, owner: object, *, tokens: int, taps: tuple[int, ...]) -> FixedCache | None:
        """The cache for a sequence that starts with `tokens` tokens, empty; None if there is none for it: another
        target has it, the sequence is too long, or hooks are to run in every forward, which a replay would skip.

        Args:
            owner: has the cache until `close`.
            tokens: tokens that are certain to come.
            taps: layers whose outputs `run` must give.
        """
        model = self._model()
        assert model is not None, "a target holds its model"
        with self._lock:
            holder = None if self._owner is None else self._owner()
            capacity = self._capacity(tokens)
            taken = holder is not None and holder is not owner
            if taken or self._broken or capacity is None or _has_hooks(model):
                return None
            capacity = max(capacity, self._capacity(self._longest) or 0)
            self._owner = weakref.ref(owner)
            if self.cache is None or self.cache.capacity < capacity:
                self._tiers.invalidate()
                self.cache = None  # before the new one takes memory
                self.cache = FixedCache(len(self.layout.layers), capacity)
            if not self.gives(taps):
                self._tiers.invalidate()
                self.taps = tuple(sorted({*self.taps, *taps}))
        self.cache.set_length(0)
        return self.cache

    def close(self, owner: object, *, outgrown: int = 0) -> None:
        """Another target may have the cache.

        Args:
            outgrown: tokens that the sequence needs and the cache cannot hold; the next one gets a larger cache.
        """
        with self._lock:
            if self._owner is not None and self._owner() is owner:
                self._owner = None
                self._longest = max(self._longest, outgrown)

    def release(self) -> None:
        """Give back all memory. Raises RuntimeError while a sequence is open."""
        with self._lock:
            if self._owner is not None and self._owner() is not None:
                raise RuntimeError("graphs cannot be released while a sequence is open on them; close the target first")
            self._tiers.invalidate()
            self.cache = None

    def prepare(self, length: int) -> None:
        """Capture what is not captured yet, so that no step pays for it; to be called once the prompt is cached.

        Should the device refuse, there is a warning, and the model runs without graphs from then on.

        Args:
            length: tokens cached; rows behind them are overwritten.
        """
        assert self.cache is not None
        self.cache.share()
        room = self.cache.capacity - length
        tiers = [Tier(nodes, self.vocab_size) for nodes in self._tiers.node_tiers if nodes + 1 <= room]
        root = TreeRows(np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones((1, 1), dtype=bool), length)
        try:
            with on_device(self.device):
                self._tiers.prepare(tiers, root)
        except RuntimeError as error:  # no memory left, or an operation that waits for the device
            self._broken = True
            self._tiers.invalidate()
            warnings.warn(f"running without CUDA graphs, because capturing one failed: {error}", stacklevel=2)

    def run(self, rows: TreeRows, *, plain: Callable[[], Outputs]) -> Outputs:
        """Logits and hidden states of the rows, valid until the next call; see `GraphTiers.run`."""
        assert self.cache is not None
        if self._broken:
            return plain()
        room = self.cache.capacity - rows.length
        with on_device(self.device):
            return self._tiers.run(rows, vocab_size=self.vocab_size, plain=plain, room=room)

    def _make_pass(self, tier: Tier) -> StaticForward:
        model = self._model()
        assert model is not None and self.cache is not None
        return StaticForward(model, self.layout, self.cache, rows=tier.nodes + 1, taps=self.taps)

    def _capacity(self, tokens: int) -> int | None:
        """Tokens of the cache that such a sequence needs; None if it is too long for one."""
        limit = MOST_CAPACITY
        if self.layout.context_limit is not None:  # and the rows behind the last token, padding included
            limit = min(limit, self.layout.context_limit + self._tiers.node_tiers[-1] + 1)
        if tokens > limit:
            return None
        capacity = FIRST_CAPACITY
        while capacity < tokens + ROOM:
            capacity *= 2
        return min(capacity, limit)


_GRAPHED: weakref.WeakKeyDictionary[torch.nn.Module, GraphedModel] = weakref.WeakKeyDictionary()
_GRAPHED_LOCK = threading.Lock()


def graphed_model(model: torch.nn.Module, layout: Layout, capture: Capture) -> GraphedModel:
    """What is kept for this model, made anew if its weights are no longer those that were captured."""
    with _GRAPHED_LOCK:
        found = _GRAPHED.get(model)
        if found is None or not found.fits(model, capture):
            found = _GRAPHED[model] = GraphedModel(model, layout, capture)
        return found


def release_graphs(model: torch.nn.Module) -> None:
    """Give back the memory of a model's graphs and of their cache; they are made anew when they are needed again.

    Raises:
        RuntimeError: a sequence is open on them.
    """
    with _GRAPHED_LOCK:
        found = _GRAPHED.get(model)
        if found is not None:
            found.release()
            del _GRAPHED[model]


def _facts(model: torch.nn.Module) -> tuple[Any, ...]:
    """Where the weights lie. Graphs read them there, whatever the model refers to by now."""
    tensors: Iterator[torch.Tensor] = chain(model.parameters(), model.buffers())
    return (model.training, *((tensor.data_ptr(), tensor.dtype) for tensor in tensors))


def _has_hooks(model: torch.nn.Module) -> bool:
    """Whether something is to run in every forward besides the model; the hooks of transformers itself only collect
    what its callers ask for."""
    for part in model.modules():
        hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
        if hasattr(part, "_hf_hook") or any(not _of_transformers(hook) for hook in hooks):
            return True
    return False


def _of_transformers(hook: Any) -> bool:
    return getattr(hook, "__module__", "").startswith("transformers.")
