"""One request of a block-parallel drafter: keys and values of the committed context, and blocks behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from adaptspec.drafters.block.backbone import Backbone, Pair
from adaptspec.drafters.cells.cache import CellCache

_CHUNK = 2048
"""Rows of context projected at a time."""
_SPARE = 64
"""Rows beyond twice the widest window that may lie in the cache."""


class BlockContext:
    """Keys and values of every draft layer for all committed positions but the root's. Only positions that are new get
    projected; the rows of a block are taken out again after its pass.

    Args:
        backbone: with its weights, on the target's device and of its type.
        embed: token ids int64 [...] -> [..., H].
        window: all layers see context of the last so many positions at most; None: as the config says.
    """

    def __init__(
        self, backbone: Backbone, embed: Callable[[torch.Tensor], torch.Tensor], *, window: int | None = None
    ) -> None:
        self.backbone = backbone
        self.embed = embed
        self.windows = tuple(min(filter(None, (own, window)), default=None) for own in backbone.config.windows)
        self.start()

    def start(self) -> None:
        """Forget everything: a request begins."""
        self.cache = CellCache(self.backbone.config.num_layers)
        self.rows = 0
        self._pending: list[list[torch.Tensor]] = []

    @property
    def pending(self) -> int:
        """Committed positions that have not been projected."""
        return sum(len(part[0]) for part in self._pending)

    @property
    def lag(self) -> int:
        """Those of them that came before the last `push`."""
        return sum(len(part[0]) for part in self._pending[:-1])

    @property
    def ready(self) -> bool:
        """There is context to draft from."""
        return self.rows + self.pending > 0

    def push(self, features: Mapping[int, torch.Tensor], *, count: int) -> None:
        """Take in committed positions, to be projected later.

        Args:
            features: per tap [count, H].

        Raises:
            ValueError: a tap is missing, or has another number of rows.
        """
        taps = self.backbone.config.taps
        for tap in taps:
            if tap not in features:
                raise ValueError(f"features must hold the taps {list(taps)}, got {sorted(features)}")
            if len(features[tap]) != count:
                raise ValueError(
                    f"features of tap {tap} must have {count} rows, one per position, got {len(features[tap])}"
                )
        if count:
            self._pending.append([features[tap] for tap in taps])

    @torch.inference_mode()
    def settle(self, *, but_last: bool = False) -> None:
        """Project all pending positions, or all but those of the last `push`, in one batch."""
        parts = self._pending[: len(self._pending) - but_last]
        if not parts:
            return
        del self._pending[: len(parts)]
        weight = self.backbone.fc.weight
        states = [torch.cat(tap).to(device=weight.device, dtype=weight.dtype) for tap in zip(*parts, strict=True)]
        count = len(states[0])
        for first in range(0, count, _CHUNK):
            fused = self.backbone.fuse([tap[first : first + _CHUNK] for tap in states])[None]
            positions = torch.arange(self.rows, self.rows + fused.shape[1], device=weight.device)[None]
            for layer in range(self.backbone.config.num_layers):
                self.cache.append(layer, *self.backbone.context(layer, fused, positions))
            self.rows += fused.shape[1]
        self._forget_distant()

    @torch.inference_mode()
    def draft(self, root: int) -> torch.Tensor:
        """Un-normed hidden states [S - 1, H] of the places behind the root.

        Raises:
            RuntimeError: there are positions left to project, or no context at all.
        """
        if self._pending:
            raise RuntimeError("there are committed positions left to project; call settle first")
        if not self.rows:
            raise RuntimeError("no request is open; call push first")
        device = self.backbone.fc.weight.device
        embeddings = self.backbone.blocks(self.embed, torch.tensor([root], device=device))
        positions = torch.arange(self.rows, self.rows + embeddings.shape[1], device=device)[None]
        kept = self.cache.length()
        hidden = self.backbone(
            embeddings,
            positions=positions,
            store=self._store,
            key_positions=torch.arange(self.rows - kept, self.rows + embeddings.shape[1], device=device)[None],
            windows=self.windows,
        )
        return hidden[0, 1:]

    def _store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """All keys and values of a layer; those of the block do not stay."""
        length = self.cache.length(layer)
        pair = self.cache.append(layer, keys, values)
        self.cache.truncate(length, layer=layer)
        return pair

    def _forget_distant(self) -> None:
        """Drop rows that no layer will see again, now and then, so that it costs little per row."""
        if None in self.windows:
            return
        widest, length = max(self.windows), self.cache.length()
        if length > 2 * widest + _SPARE:
            rows = torch.arange(length - widest, length)
            for layer in range(self.backbone.config.num_layers):
                self.cache.keep(rows, layer=layer)
