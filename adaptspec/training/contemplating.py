"""Training ConFu's cell: the target contemplates at some positions of every text, and gradients go back through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache

from adaptspec.drafters.cells import ConFuCell
from adaptspec.target.compat import cache_argument
from adaptspec.target.layout import Layout, inspect_model
from adaptspec.training.batches import Batch
from adaptspec.training.unroll import CellRollout, Embed

ANCHORS = 0.25
"""Share of a text's rows that get a contemplate token in training; the cell learns to do without from the others."""


class ConFuRollout(CellRollout):
    """`CellRollout` for ConFu (arXiv 2603.08899): anchor rows, drawn anew for every batch, get the future token of
    their position, and keep it over all steps of their recursion, as a draft does. On held-out texts all rows are
    anchors.

    The target's keys and values of the text are computed without gradients; contemplate tokens and soft prompts then
    run on them with gradients, which reach what they were made of and leave the target alone.

    Args:
        cell: trained in place.
        embed: the target's embedding.
        model: the target. It is not changed.
    """

    def __init__(self, cell: ConFuCell, embed: Embed, model: Any) -> None:
        super().__init__(cell, embed)
        self._model = model
        self._layout: Layout = inspect_model(model)

    def prepared(self, batch: Batch) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        anchors, known = self.anchors(batch)
        found = self.futures(batch, anchors)
        future = found.new_zeros((*batch.own.shape, found.shape[-1]))
        places = anchors[..., None].expand_as(found)
        future = future.scatter(1, places, found)
        chosen = torch.zeros_like(batch.own, dtype=torch.bool).scatter(1, anchors, known)
        return partial(self.cell, future=future, known=chosen)

    def anchors(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows int64 [B, A] that get a future token, and bool [B, A], which of them are more than padding. A function
        of the batch, so that a resumed run draws what an uninterrupted one draws."""
        counted = batch.weights[:, :, 0] > 0
        if not self.cell.training:
            rows = torch.arange(counted.shape[1], device=counted.device).expand(len(counted), -1)
            return rows, torch.ones_like(counted)
        seed = int((batch.own * (batch.positions + 1)).sum() % 2**31)
        draws = torch.rand(counted.shape, generator=torch.Generator().manual_seed(seed)).to(counted.device)
        count = max(1, round(ANCHORS * counted.shape[1]))
        rows = (draws + counted.float()).topk(count, dim=1).indices
        return rows, counted.gather(1, rows)

    def futures(self, batch: Batch, anchors: torch.Tensor) -> torch.Tensor:
        """The target's hidden states [B, A, H] after its last layer at contemplate tokens behind the rows [B, A]."""
        cell, own = self.cell, batch.own
        assert isinstance(cell, ConFuCell)
        size, count = len(own), anchors.shape[1]
        prompts, rows = cell.soft_prompts.num_embeddings, own.shape[1]
        cache = DynamicCache()
        with torch.no_grad():
            self._run(cache, batch.positions, visible=batch.mask, keys=batch.positions, input_ids=own)
        contemplates = cell.contemplate(self.embed(own.gather(1, anchors)))
        vectors = torch.cat([cell.soft_prompts.weight.expand(size, -1, -1), contemplates], dim=1)
        first = torch.arange(prompts, device=own.device).expand(size, -1)
        positions = torch.cat([first, batch.positions.gather(1, anchors) + 1], dim=1)
        visible = torch.zeros((size, prompts + count, rows + prompts + count), dtype=torch.bool, device=own.device)
        visible[:, prompts:, :rows] = batch.mask.gather(1, anchors[..., None].expand(-1, -1, rows))
        among = visible[:, :, rows:]
        among[:] = torch.eye(prompts + count, dtype=torch.bool, device=own.device)
        among[:, :, :prompts] = torch.ones_like(among[:, :, :prompts]).tril()
        # Soft prompts are seen from everywhere, so no window may take them for past.
        keys = torch.cat([batch.positions, torch.full_like(first, 2**31), positions[:, prompts:]], dim=1)
        with _without_gradients(self._model):
            hidden = self._run(cache, positions, visible=visible, keys=keys, inputs_embeds=vectors)
        return hidden[:, prompts:].float()

    def _run(
        self,
        cache: DynamicCache,
        positions: torch.Tensor,
        *,
        visible: torch.Tensor,
        keys: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [B, T, H] after the last layer, before the final norm, of rows behind those in the cache.

        Args:
            positions: int64 [B, T].
            visible: bool [B, T, S].
            keys: int64 [B, S], positions of all rows that there are then.
        """
        decoder = self._model.get_decoder()
        states: list[torch.Tensor] = []

        def record(module: torch.nn.Module, args: Any, output: Any) -> None:
            states.append(output[0] if isinstance(output, tuple) else output)

        read = {"input_ids": input_ids}
        if inputs_embeds is not None:
            read = {"inputs_embeds": inputs_embeds.to(self._model.get_input_embeddings().weight.dtype)}
        handle = self._layout.layers[-1].register_forward_hook(record)
        try:
            decoder(
                **read,
                position_ids=positions,
                attention_mask=self._masks(visible, positions, keys),
                use_cache=True,
                **{cache_argument(type(decoder)): cache},
            )
        finally:
            handle.remove()
        return states[0]

    def _masks(
        self, visible: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Additive masks [B, 1, T, S], one per attention kind."""
        layout, dtype = self._layout, self._model.get_input_embeddings().weight.dtype
        masks = {}
        for kind in layout.kinds:
            seen = visible
            if kind == "sliding_attention" and layout.window is not None:
                seen = visible & (positions[:, :, None] - keys[:, None, :] < layout.window)
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            masks[kind] = mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]
        return masks if layout.mapping else next(iter(masks.values()))


@contextmanager
def _without_gradients(model: torch.nn.Module) -> Iterator[None]:
    """Record no gradients of the model's own weights inside the block."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
