"""Rows that have gone through the first layers of a target already, and a verify pass that goes on from there.

Early-exit drafters (Kangaroo, LayerSkip, CATS) draft with the target's own first layers. The keys and values of these
layers and the hidden states behind them are exactly what the verify pass would compute again, so it takes them over:
no row goes through a layer twice.

A trunk holds rows behind the committed prefix, the root first, and how many layers each of them has gone through, its
level. Levels never rise from row to row, so that the rows in the cache of every layer are the first ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from adaptspec.target.layout import TESTED_FAMILIES
from adaptspec.target.views import headless, with_layers
from adaptspec.types import DraftTree

if TYPE_CHECKING:
    from adaptspec.target.hf import HFTarget

_RESUMABLE: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()
_TOLERANCE = 2e-2
"""Largest difference, relative to the spread of the logits, between a resumed pass and a whole one."""


class Trunk:
    """The rows of one proposal; made by `HFTarget.trunk`.

    It lasts until the next `score`, which goes on from it, or until anything else is written behind the prefix.

    Args:
        target: with an open sequence; the rows go behind its `length` tokens.
    """

    def __init__(self, target: HFTarget) -> None:
        self._target = target
        self._length = target.length
        self._ids = np.zeros(0, np.int64)
        self._parents = np.zeros(0, np.int64)
        self._depths = np.zeros(0, np.int64)
        self._levels = np.zeros(0, np.int64)
        self._visible = np.zeros((0, 0), dtype=bool)
        self._hidden: torch.Tensor | None = None  # [M, H], of every row after its level
        self._tapped: dict[int, torch.Tensor] = {}  # [rows that came so far, H]

    def __len__(self) -> int:
        return len(self._ids)

    @torch.inference_mode()
    def run(self, token_ids: np.ndarray, parents: np.ndarray, *, layers: int) -> torch.Tensor:
        """Run new rows through the first layers.

        Args:
            token_ids: int64 [R].
            parents: int64 [R], rows of the trunk in the order in which they were run; -1 for the root, which is the
                first row of all.
            layers: how many, at most the level of the rows before.

        Returns:
            [R, H], the hidden states after so many layers, un-normed.

        Raises:
            ValueError: too many layers, or a parent that does not come before.
        """
        before, count = len(self), len(token_ids)
        most = len(self._target.layout.layers) - 1 if not before else int(self._levels[-1])
        if not 1 <= layers <= most:
            raise ValueError(f"layers must be in [1, {most}], got {layers}")
        if not (int(parents.min()) >= -1 and int(parents.max()) < before) or (parents.min() < 0) != (before == 0):
            raise ValueError(f"parents must be rows in [0, {before}), or -1 for the root, got {parents.tolist()}")
        visible = np.zeros((before + count, before + count), dtype=bool)
        visible[:before, :before] = self._visible
        if before:
            visible[before:, :before] = self._visible[parents]
        visible[before:, before:] = np.eye(count, dtype=bool)
        depths = self._depths[parents] + 1 if before else np.zeros(count, np.int64)
        rows = _Rows(np.append(self._ids, token_ids), np.append(self._depths, depths), visible)
        hidden = self._pass(rows, before, self._levels, 0, layers, None)
        self._ids, self._depths, self._visible = rows.ids, rows.depths, visible
        self._parents = np.append(self._parents, parents)
        self._levels = np.append(self._levels, np.full(count, layers, np.int64))
        self._hidden = hidden if self._hidden is None else torch.cat([self._hidden, hidden])
        return hidden

    @torch.inference_mode()
    def deepen(self, rows: int, *, layers: int) -> torch.Tensor:
        """Run the first `rows` rows, which are all of one level, on to a higher one.

        Returns:
            [rows, H], the hidden states after `layers` layers, un-normed.

        Raises:
            ValueError: other rows than there are, of several levels, or layers that they have gone through already.
        """
        if not 1 <= rows <= len(self) or self._levels[0] != self._levels[rows - 1]:
            raise ValueError(f"rows must be the first ones of one level, in [1, {len(self)}], got {rows}")
        level, most = int(self._levels[0]), len(self._target.layout.layers) - 1
        if not level < layers <= most:
            raise ValueError(f"layers must be in [{level + 1}, {most}], got {layers}")
        assert self._hidden is not None
        first = _Rows(self._ids[:rows], self._depths[:rows], self._visible[:rows, :rows])
        hidden = self._pass(first, 0, self._levels, level, layers, self._hidden[:rows])
        self._levels = np.append(np.full(rows, layers, np.int64), self._levels[rows:])
        self._hidden = torch.cat([hidden, self._hidden[rows:]])
        return hidden

    @torch.inference_mode()
    def finish(
        self, ids: np.ndarray, depths: np.ndarray, visible: np.ndarray, parents: np.ndarray
    ) -> torch.Tensor | None:
        """Logits [N, V] of a verify pass that goes on from the trunk; None if it must be a plain one.

        Rows of the pass that are not in the trunk go through the first layers before all go on together. The cache
        then holds the rows in the order of the pass, and the target the hidden states that were asked for, as after a
        plain pass.

        Args:
            ids, depths, visible: of the pass, see `HFTarget.run_rows`.
            parents: int64 [N], row of the pass that each row follows, -1 for the root and for rows that no drafter can
                have run.
        """
        target = self._target
        if not len(self) or target.length != self._length or ids[0] != self._ids[0] or not resumable(target):
            return None
        known = self._known(ids, parents)
        levels = np.where(known < 0, 0, self._levels[known])
        order = np.argsort(-levels, kind="stable")  # parents stay before their children
        known, levels = known[order], levels[order]
        top = int(levels[0])
        for layer in range(top):
            self._place(layer, known[: int((levels > layer).sum())])
        rows = _Rows(ids[order], depths[order], visible[np.ix_(order, order)])
        there = torch.from_numpy(np.maximum(known, 0)).to(target.device)
        assert self._hidden is not None
        hidden = self._hidden.index_select(0, there)
        tapped = self._tapped
        self._tapped = {k: tapped[k].index_select(0, there[: int((levels >= k).sum())]) for k in tapped}
        bounds = np.unique(levels).tolist()
        for start, end in zip(bounds[:-1], bounds[1:], strict=True):
            first = int((levels > start).sum())
            hidden = torch.cat([hidden[:first], self._pass(rows, first, levels, start, end, hidden[first:])])
            levels = np.maximum(levels, end)
        back = np.argsort(order)
        if not np.array_equal(back, np.arange(len(back))):
            for layer in range(top):
                self._place(layer, back)
            there = torch.from_numpy(back).to(target.device)
            hidden = hidden.index_select(0, there)
            self._tapped = {k: states.index_select(0, there) for k, states in self._tapped.items()}
        logits = self._pass(_Rows(ids, depths, visible), 0, levels, top, len(target.layout.layers), hidden)
        target._tapped = self._tapped
        return logits

    def _known(self, ids: np.ndarray, parents: np.ndarray) -> np.ndarray:
        """int64 [N], the row of the trunk that each row of a pass is, -1 if it is none."""
        children = {key: row for row, key in enumerate(zip(self._parents.tolist(), self._ids.tolist(), strict=True))}
        known = [0]
        for token, parent in zip(ids[1:].tolist(), parents[1:].tolist(), strict=True):
            known.append(children.get((known[parent], token), -1) if parent >= 0 and known[parent] >= 0 else -1)
        return np.asarray(known, dtype=np.int64)

    def _place(self, layer: int, rows: np.ndarray) -> None:
        """Put keys and values of `rows` one after the other behind the prefix."""
        if np.array_equal(rows, np.arange(len(rows))):
            return
        store = self._target._open_cache().layers[layer]
        there = torch.from_numpy(rows + self._length).to(store.keys.device)
        place = slice(self._length, self._length + len(rows))
        store.keys[:, :, place] = store.keys.index_select(2, there)
        store.values[:, :, place] = store.values.index_select(2, there)

    def _pass(
        self, rows: _Rows, first: int, levels: np.ndarray, start: int, end: int, hidden: torch.Tensor | None
    ) -> torch.Tensor:
        """Run the rows from `first` on through the layers `start` to `end`.

        Args:
            levels: of the rows in the cache.
            hidden: [R, H], after `start` layers; of no account for new rows.

        Returns:
            [R, H] after `end` layers; after the last of all [R, V].
        """
        target = self._target
        layers = target.layout.layers
        cache = target._open_cache()
        for number, layer in enumerate(cache.layers):
            layer.cursor = self._length + (first if start <= number < end else int((levels > number).sum()))
        seen = rows.visible[first:]
        taken: list[torch.Tensor] = []
        with _entering(layers[start], hidden if start else None), _leaving(layers[end - 1], taken):
            logits = target._forward(
                torch.from_numpy(rows.ids[first:]).to(target.device),
                rows.depths[first:],
                seen,
                columns=rows.depths,
                plain=start == 0 and len(seen) == 1 and bool(seen.all()) and target.layout.window is None,
                model=self._view(start, end),
            )
        for tap in target._taps:
            if start < tap <= end:
                states = target._tapped[tap]
                self._tapped[tap] = torch.cat([self._tapped[tap], states]) if first else states
        return logits if end == len(layers) else taken[0]

    def _view(self, start: int, end: int) -> torch.nn.Module:
        views, model = self._target._views, self._target.model
        if (start, end) not in views:
            count = len(self._target.layout.layers)
            views[start, end] = with_layers(model if end == count else headless(model), range(start, end))
        return views[start, end]


class _Rows:
    """Token ids [N], depths [N] and visibility [N, N] of rows behind the prefix."""

    __slots__ = ("depths", "ids", "visible")

    def __init__(self, ids: np.ndarray, depths: np.ndarray, visible: np.ndarray) -> None:
        self.ids, self.depths, self.visible = ids, depths, visible


@contextmanager
def _entering(layer: torch.nn.Module, hidden: torch.Tensor | None) -> Iterator[None]:
    """The layer is given these hidden states [R, H], whatever the model made of the token ids."""
    if hidden is None:
        yield
        return

    def replace(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (hidden[None], *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden[None]}

    handle = layer.register_forward_pre_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _leaving(layer: torch.nn.Module, taken: list[torch.Tensor]) -> Iterator[None]:
    """Collect what the layer gives, [R, H]."""

    def record(module: torch.nn.Module, args: Any, output: Any) -> None:
        taken.append((output[0] if isinstance(output, tuple) else output).view(-1, _width(output)))

    handle = layer.register_forward_hook(record)
    try:
        yield
    finally:
        handle.remove()


def _width(output: Any) -> int:
    return (output[0] if isinstance(output, tuple) else output).shape[-1]


def resumable(target: HFTarget) -> bool:
    """Whether a pass of this model can go on in the middle. Families of the test suite can; others are tried once,
    and where that gives other logits, every verify pass is a whole one."""
    model = target.model
    if getattr(model.config, "model_type", "") in TESTED_FAMILIES:
        return True
    if model not in _RESUMABLE:
        _RESUMABLE[model] = _try(target)
    return _RESUMABLE[model]


def _try(target: HFTarget) -> bool:
    """Compare a resumed pass with a whole one."""
    probe = type(target)(target.model, graphs=False)
    ids = (torch.arange(6) * 37 + 11) % target.vocab_size
    tree = DraftTree(ids[3:].numpy(), np.array([-1, 0, -1]), np.zeros(3))
    tolerance = _TOLERANCE if target.dtype == torch.float32 else 10 * _TOLERANCE
    _RESUMABLE[target.model] = True  # for the probe itself
    try:
        probe.prefill(ids[:2])
        whole = probe.score(int(ids[2]), tree).logits.float()
        probe.rollback(2)
        trunk = probe.trunk()
        trunk.run(ids[2:3].numpy(), np.array([-1]), layers=1)
        trunk.run(ids[3:4].numpy(), np.array([0]), layers=1)
        resumed = probe.score(int(ids[2]), tree).logits.float()
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError):
        return False
    finally:
        probe.close()
    return bool((resumed - whole).abs().max() < tolerance * whole.std().clamp_min(1e-6))
