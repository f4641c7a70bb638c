"""One request of a cell: rows of the committed text, run on the target's features, and draft rows behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from adaptspec.drafters.cells.base import Cell
from adaptspec.drafters.cells.cache import CellCache

_CHUNK = 512
"""Committed rows per forward pass, which bounds the memory of their mask."""


class Recursion:
    """Cached rows of verified tokens and the rows of one proposal, which are thrown away by the next call.

    Row i of layer k takes token i + 1 + k and, for k = 0, the target's feature of position i, else what layer k - 1
    returned for row i. A cell with one layer has k = 0 only. Draft rows run along the nodes of a tree: step d of the
    recursion uses layer min(d, last). While each step has a layer of its own, that layer needs all the nodes above the
    new ones too, because its rows before the root's already take draft tokens; the last layer then goes on with new
    nodes only, one position further per step, reading what it returned itself.

    Args:
        cell: with its weights, on the target's device and of its type.
        embed: token ids int64 [...] -> [..., H].
    """

    def __init__(self, cell: Cell, embed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.cell = cell
        self.embed = embed
        self.layers = cell.config.num_layers
        self.taps = cell.config.taps
        self.window = cell.config.sliding_window
        self.start()

    def start(self) -> None:
        """Forget everything: a request begins."""
        self.cache = CellCache(self.layers)
        self.rows = 0
        self._tokens: list[np.ndarray] = []
        self._features: list[Mapping[int, torch.Tensor]] = []
        self._head_input: torch.Tensor | None = None
        self._carry: list[torch.Tensor | None] = [None] * self.layers
        self._forget_draft()

    @property
    def pending(self) -> int:
        """Committed tokens whose rows have not been run."""
        return sum(map(len, self._tokens))

    @property
    def lag(self) -> int:
        """Those of them that came before the last `push`."""
        return sum(map(len, self._tokens[:-1]))

    @property
    def ready(self) -> bool:
        """Every layer has a row to draft from."""
        return self.rows + self.pending >= self.layers

    def push(self, token_ids: np.ndarray, features: Mapping[int, torch.Tensor]) -> None:
        """Take in verified rows, to be run later.

        Args:
            token_ids: int64 [n], the token after each row's position.
            features: per tap [n, H], of the rows' positions.

        Raises:
            ValueError: a tap is missing, or has another number of rows.
        """
        for tap in self.taps:
            if tap not in features:
                raise ValueError(f"features must hold the taps {list(self.taps)}, got {sorted(features)}")
            if len(features[tap]) != len(token_ids):
                raise ValueError(
                    f"features of tap {tap} must have {len(token_ids)} rows, one per token, got {len(features[tap])}"
                )
        if len(token_ids):
            self._tokens.append(token_ids)
            self._features.append({tap: features[tap] for tap in self.taps})

    @torch.inference_mode()
    def settle(self, *, but_last: bool = False) -> None:
        """Run all pending rows, or all but those of the last `push`, in one batched pass."""
        blocks = len(self._tokens) - but_last
        if blocks < 1:
            return
        self._forget_draft()
        device, parts = self._device(), self._features[:blocks]
        tokens = torch.from_numpy(np.concatenate(self._tokens[:blocks])).to(device)
        features = [torch.cat([part[tap] for part in parts]).to(device) for tap in self.taps]
        for first in range(0, len(tokens), _CHUNK):
            self._advance(tokens[first : first + _CHUNK], [tap[first : first + _CHUNK] for tap in features])
        del self._tokens[:blocks], self._features[:blocks]

    def _advance(self, tokens: torch.Tensor, features: list[torch.Tensor]) -> None:
        embeddings = self.embed(tokens)
        hidden = self.cell.fuse(features)
        for layer in range(self.layers):
            if layer:
                before = self._carry[layer - 1]
                following = hidden[:-1] if before is None else torch.cat([before, hidden[:-1]])
                self._carry[layer - 1] = hidden[-1:]
                hidden = following
            count = len(hidden)
            if not count:
                break
            self.cache.truncate(max(0, self.rows - layer), layer=layer)
            first = self.cache.length(layer)
            positions = torch.arange(first, first + count, device=hidden.device)
            head_input, hidden = self._run(
                embeddings[-count:], hidden, positions=positions, mask=self._causal(positions), step=layer
            )
            if layer == 0:
                self._head_input = head_input[-1:]
            if layer == self.layers - 1:
                self._carry[layer] = hidden[-1:]
        self.rows += len(tokens)

    def _causal(self, positions: torch.Tensor) -> torch.Tensor | None:
        """The mask of committed rows, None where causality is all there is to it."""
        if self.window is None or int(positions[-1]) < self.window:
            return None
        keys = torch.arange(int(positions[-1]) + 1, device=positions.device)
        return (keys <= positions[:, None]) & (keys > positions[:, None] - self.window)

    def root(self) -> torch.Tensor:
        """What the head multiplies to get the children of the root, [1, H]; begins a new proposal."""
        if self._tokens:
            raise RuntimeError("there are committed tokens left to run; call settle first")
        if self._head_input is None:
            raise RuntimeError("no request is open; call push first")
        self._forget_draft()
        return self._head_input

    @torch.inference_mode()
    def draft(self, token_ids: np.ndarray, parents: np.ndarray) -> torch.Tensor:
        """Run the nodes of one more depth; what the head multiplies to get their children, [F, H].

        Args:
            token_ids: int64 [F].
            parents: int64 [F], numbers of nodes run in this proposal: 0 is the root, then in the order of the calls.
        """
        device = self._device()
        count, before = len(token_ids), len(self._nodes)
        self._depth += 1
        layer = min(self._depth, self.layers - 1)
        above = torch.from_numpy(parents)
        self._nodes = torch.cat([self._nodes, torch.from_numpy(token_ids)])
        self._parents = torch.cat([self._parents, above])
        self._depths = torch.cat([self._depths, self._depths.new_full((count,), self._depth)])
        # Row 0 of `visible` is the root, which is part of the prefix; column j is node j + 1.
        visible = torch.zeros((before + count + 1, before + count), dtype=torch.bool)
        visible[: before + 1, :before] = self._visible
        visible[before + 1 :, :before] = self._visible[above]
        visible[before + 1 :].diagonal(before).fill_(True)
        self._visible = visible

        first = before if self._depth >= self.layers else 0  # of the nodes to run
        prefix = max(0, self.rows - layer)
        if first == 0:
            self.cache.truncate(prefix, layer=layer)
            if self._depth > 1 or self._outputs is None:
                source = self._carry[max(0, layer - 1)]
                assert source is not None
                inner = [] if self._outputs is None else [self._outputs[1:]]
                self._outputs = torch.cat([source, *inner])
        assert self._outputs is not None
        hidden = self._outputs[self._parents[first:].to(device)]
        positions = (self._depths[first:] + (self.rows - 1 - layer)).to(device)
        mask = self._draft_mask(visible[first + 1 :], prefix, positions)
        head_input, outputs = self._run(
            self.embed(self._nodes[first:].to(device)), hidden, positions=positions, mask=mask, step=layer
        )
        self._outputs = torch.cat([self._outputs[: first + 1], outputs])
        return head_input[-count:]

    def _draft_mask(self, visible: torch.Tensor, prefix: int, positions: torch.Tensor) -> torch.Tensor | None:
        """bool [rows, prefix + nodes]; None for a single row that sees everything."""
        if self.window is None and len(visible) == 1 and bool(visible.all()):
            return None
        mask = torch.nn.functional.pad(visible, (prefix, 0), value=True).to(positions.device)
        if self.window is not None:
            # Draft rows lie within the window of each other: no draft is that deep.
            keys = torch.arange(prefix, device=positions.device)
            mask[:, :prefix] &= keys > positions[:, None] - self.window
        return mask

    def _run(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        *,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        step: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The cell on a batch of one, given and returned without the batch dimension."""
        head_input, outputs = self.cell(
            embeddings[None],
            hidden[None],
            positions=positions[None],
            mask=None if mask is None else mask[None, None],
            cache=self.cache,
            step=step,
        )
        return head_input[0], outputs[0]

    def _forget_draft(self) -> None:
        for layer in range(self.layers):
            self.cache.truncate(min(self.cache.length(layer), max(0, self.rows - layer)), layer=layer)
        self._depth = 0
        self._nodes = torch.zeros(0, dtype=torch.int64)
        self._parents = torch.zeros(0, dtype=torch.int64)
        self._depths = torch.zeros(0, dtype=torch.int64)
        self._visible = torch.zeros((1, 0), dtype=torch.bool)
        self._outputs: torch.Tensor | None = None

    def _device(self) -> torch.device:
        return next(self.cell.parameters()).device
