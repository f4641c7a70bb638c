"""Running drafters over whole texts the way they will run when they draft: on their own outputs, several steps deep.

At step k every row has moved on by k tokens, which are the text's own (teacher forcing), while its hidden state is what
the drafter returned at step k - 1. It sees what a draft at that place would see: the verified rows up to where it
started, run on the target's features at step 0, and its own rows of steps 1 .. k, which no other row sees. So keys of
later steps are visible on the diagonal only, and rotary positions are k further on (EAGLE-3's training-time test,
arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from adaptspec.drafters.cells import Cell, CellCache
from adaptspec.drafters.hydra_heads import HydraHeads
from adaptspec.drafters.medusa_heads import MedusaHeads
from adaptspec.training.batches import Batch

Embed = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Step:
    """What one step gives.

    Attributes:
        head_input: [B, R, H], what the output matrix multiplies.
        feature: [B, R, H], the predicted hidden state, None where the drafter predicts none.
        chosen: bool [B, R], the rows that were run, None for all.
        adjust: takes logits [N, R] of rows (pack and row, int64 [N] each) and returns those that are meant; asked once.
        also: further inputs [B, R, H] of the output matrix that predict the same tokens, and are trained with it.
    """

    head_input: torch.Tensor
    feature: torch.Tensor | None = None
    chosen: torch.Tensor | None = None
    adjust: Callable[[torch.Tensor, tuple[torch.Tensor, ...]], torch.Tensor] | None = None
    also: tuple[torch.Tensor, ...] = ()

    def rows(self, wanted: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Pack and row, int64 [N] each, of the wanted rows, bool [B, R], that were run."""
        return (wanted if self.chosen is None else wanted & self.chosen).nonzero(as_tuple=True)

    def logits(self, rows: tuple[torch.Tensor, ...], head: torch.Tensor) -> torch.Tensor:
        """[N, V] of some rows under a head [V, H]."""
        found = self.head_input[rows] @ head.T
        return found if self.adjust is None else self.adjust(found, rows)


class Rollout(Protocol):
    """A drafter as the trainer sees it.

    Attributes:
        module: what is trained and saved.
        first: position of its first row, see `pack_rows`.
    """

    module: nn.Module
    first: int

    def steps(self, batch: Batch, count: int) -> Iterator[Step]:
        """The first `count` steps over a batch."""

    def target_feature(self, batch: Batch, step: int) -> torch.Tensor:
        """[B, R, H], the hidden state that `Step.feature` ought to be."""


class CellRollout:
    """A feature-recursive cell: EAGLE, GRIFFIN, MTP.

    With several layers (MTP), step k uses layer k while there is one, whose rows are all of one step and see each other
    causally; the last layer then goes on as a single one does.

    Args:
        cell: trained in place.
        embed: the target's embedding, not trained.
    """

    first = 0

    def __init__(self, cell: Cell, embed: Embed) -> None:
        self.module = self.cell = cell
        self.embed = embed

    def steps(self, batch: Batch, count: int) -> Iterator[Step]:
        cell, layers = self.cell, self.cell.config.num_layers
        mask = batch.mask
        if cell.config.sliding_window is not None:
            distance = batch.positions[:, :, None] - batch.positions[:, None, :]
            mask = mask & (distance < cell.config.sliding_window)
        diagonal = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device).expand_as(mask)
        cache = CellCache(layers)
        hidden = cell.fuse(batch.features)
        run = self.prepared(batch)
        for step in range(count):
            reused = step - min(step, layers - 1)  # steps that this layer has taken before
            if reused:
                mask = torch.cat([mask, diagonal], dim=2)
            head_input, hidden = run(
                self.embed(batch.tokens[:, :, step]),
                hidden,
                positions=batch.positions + reused,
                mask=mask[:, None],
                cache=cache,
                step=step,
            )
            yield Step(head_input, hidden)

    def prepared(self, batch: Batch) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """The cell with what it is given of this batch besides what all cells are."""
        return self.cell

    def target_feature(self, batch: Batch, step: int) -> torch.Tensor:
        if not self.cell.config.final_norm:
            raise ValueError(f"a cell of kind {self.cell.config.kind!r} predicts no hidden states of the target")
        wanted = [states[:, :, step] for states in batch.next_features]
        with torch.no_grad():
            return self.cell._final_norm[0](wanted[0])


class HeadsRollout:
    """Medusa's and Hydra's heads: head k predicts from the hidden state alone, or with the tokens before it.

    Args:
        module: trained in place; without output matrices of its own.
        embed: the target's embedding.
        norm: the target's final norm.
    """

    first = 0

    def __init__(self, module: MedusaHeads | HydraHeads, embed: Embed, norm: Embed) -> None:
        if module.output_weights() is not None:
            raise ValueError("heads with output matrices of their own are not trained here; use vocab_size=None")
        self.module = module
        self.embed, self.norm = embed, norm

    def steps(self, batch: Batch, count: int) -> Iterator[Step]:
        with torch.no_grad():
            hidden = self.norm(batch.features[0])
        module = self.module
        if isinstance(module, MedusaHeads):
            for block in module.blocks[:count]:
                yield Step(block(hidden))
            return
        if module.prefix is not None:
            hidden = module.prefix(hidden, positions=batch.positions, mask=batch.mask[:, None])
        read = [hidden]
        for step, block in enumerate(module.blocks[:count]):
            read.append(self.embed(batch.tokens[:, :, step]))
            yield Step(block(torch.cat(read, dim=-1)))

    def target_feature(self, batch: Batch, step: int) -> torch.Tensor:
        raise ValueError(f"{type(self.module).__name__} predict no hidden states of the target")


class ModelRollout:
    """An independent causal language model (two-model speculation), which reads tokens only: one step, teacher-forced.

    Args:
        model: a transformers causal language model with the target's token ids and output matrix, trained in place.
    """

    first = -1

    def __init__(self, model: Any) -> None:
        self.module = model

    def steps(self, batch: Batch, count: int) -> Iterator[Step]:
        if count != 1:
            raise ValueError(f"a draft model is trained with one step, got {count}")
        mask = torch.zeros(batch.mask.shape, dtype=torch.float32, device=batch.mask.device)
        mask.masked_fill_(~batch.mask, torch.finfo(torch.float32).min)
        output = self.module.get_decoder()(
            input_ids=batch.tokens[:, :, 0],
            position_ids=batch.positions + 1,
            attention_mask=mask[:, None],
            use_cache=False,
        )
        yield Step(output.last_hidden_state)

    def target_feature(self, batch: Batch, step: int) -> torch.Tensor:
        raise ValueError("a draft model predicts no hidden states of the target")
