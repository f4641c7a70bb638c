"""Running block-parallel drafters over whole texts: a block behind each of some anchors drawn at random.

An anchor is a row i of a text (see `adaptspec.training.batches`). Its block begins with token i + 1, reads the target's
states of positions 0 .. i, and its place k is to predict token i + 2 + k: what step k of other drafters predicts, so
batches, losses and held-out figures are the same, and a decay of 0.8 per place is DFlash's exp(-(k - 1) / gamma) with
gamma = 4.5 (arXiv 2602.06036). Blocks do not see each other. Only anchors are rows that count; positions per second,
however, are told of all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from adaptspec.drafters.block import Backbone, TapsModel, TreeFlashModel
from adaptspec.drafters.block.backbone import Pair
from adaptspec.drafters.block.scorer import edge_scalars
from adaptspec.training.batches import Batch
from adaptspec.training.unroll import Embed, Step

ANCHOR_EVERY = 8
"""Rows of a text per anchor."""
SIBLINGS = (48, 16, 8, 4, 2, 1)
"""How many of a place's tokens TAPS has for siblings in training, in turn: a trie gets narrower further down."""
_LEAST = -20.0


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of a batch. B packs, A anchors each, S - 1 places, H hidden.

    Attributes:
        anchors: int64 [B, A], rows.
        valid: bool [B, A]; a pack may have fewer rows to learn from than anchors.
        hidden: [B, A, S - 1, H], un-normed.
        shape: (B, R) of the batch.
    """

    anchors: torch.Tensor
    valid: torch.Tensor
    hidden: torch.Tensor
    shape: tuple[int, int]

    def chosen(self) -> torch.Tensor:
        """bool [B, R], the rows that are anchors."""
        rows = torch.zeros(self.shape, dtype=torch.bool, device=self.anchors.device)
        return rows.index_put(self._places(), rows.new_ones(()))

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """[B, R, H] with what belongs to the anchors, [B, A, H], in their rows, and zeros elsewhere."""
        rows = values.new_zeros((*self.shape, values.shape[-1]))
        return rows.index_put(self._places(), values[self.valid])

    def _places(self) -> tuple[torch.Tensor, torch.Tensor]:
        packs = torch.arange(self.shape[0], device=self.anchors.device)[:, None].expand_as(self.anchors)
        return packs[self.valid], self.anchors[self.valid]


def run_blocks(backbone: Backbone, embed: Embed, batch: Batch, *, count: int) -> Blocks:
    """One pass over the blocks of a batch.

    Args:
        count: places that are asked for.

    Raises:
        ValueError: more places than a block has.
    """
    places = backbone.config.block_size - 1
    if count > places:
        raise ValueError(f"unroll must be at most {places}, the places of a block, got {count}")
    anchors, valid = draw_anchors(batch)
    packs, rows = batch.positions.shape
    number, size = anchors.shape[1], backbone.config.block_size
    roots = batch.tokens[:, :, 0].gather(1, anchors)
    embeddings = backbone.blocks(embed, roots).flatten(1, 2)
    offsets = torch.arange(1, size + 1, device=anchors.device)
    positions = (batch.positions.gather(1, anchors)[:, :, None] + offsets).flatten(1)
    before = batch.mask.gather(1, anchors[:, :, None].expand(-1, -1, rows)).repeat_interleave(size, dim=1)
    block = torch.eye(number, dtype=torch.bool, device=anchors.device)
    block = block.repeat_interleave(size, 0).repeat_interleave(size, 1).expand(packs, -1, -1)
    fused = backbone.fuse(batch.features)
    context = [backbone.context(layer, fused, batch.positions) for layer in range(backbone.config.num_layers)]

    def store(layer: int, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        return torch.cat([context[layer][0], keys], dim=2), torch.cat([context[layer][1], values], dim=2)

    hidden = backbone(
        embeddings,
        positions=positions,
        store=store,
        mask=torch.cat([before, block], dim=2),
        key_positions=torch.cat([batch.positions, positions], dim=1),
    )
    return Blocks(anchors, valid, hidden.unflatten(1, (number, size))[:, :, 1:], (packs, rows))


def draw_anchors(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [B, A] out of those that count, all different, and which of them are some; a function of `Batch.draw`."""
    packs, rows = batch.positions.shape
    keys = torch.from_numpy(np.random.default_rng([1, *batch.draw]).random((packs, rows))).to(batch.weights.device)
    keys = keys.masked_fill(batch.weights[:, :, 0] <= 0, -1.0)
    drawn = keys.topk(max(1, rows // ANCHOR_EVERY), dim=1)
    return drawn.indices, drawn.values >= 0.0


class BlockRollout:
    """DFlash's backbone.

    Args:
        backbone: trained in place.
        embed: the target's embedding.
    """

    first = 0

    def __init__(self, backbone: Backbone, embed: Embed) -> None:
        self.module = self.backbone = backbone
        self.embed = embed

    def steps(self, batch: Batch, count: int) -> Iterator[Step]:
        blocks = run_blocks(self.backbone, self.embed, batch, count=count)
        chosen = blocks.chosen()
        for step in range(count):
            yield Step(blocks.spread(self.backbone.norm(blocks.hidden[:, :, step])), chosen=chosen)

    def target_feature(self, batch: Batch, step: int) -> torch.Tensor:
        raise ValueError("a block-parallel drafter predicts no hidden states of the target")


class TransitionRollout:
    """TreeFlash's correction, told the text's own token before each place; the backbone stays as it is.

    Args:
        model: its correction is trained in place.
        embed: the target's embedding.
    """

    first = 0

    def __init__(self, model: TreeFlashModel, embed: Embed) -> None:
        self.model = model
        self.module = model.ar_approximation
        model.model.requires_grad_(False).eval()
        self.embed = embed

    def steps(self, batch: Batch, count: int) -> Iterator[Step]:
        with torch.no_grad():
            blocks = run_blocks(self.model.model, self.embed, batch, count=count)
        chosen = blocks.chosen()
        for step in range(count):
            before = self.embed(batch.tokens[:, :, step].gather(1, blocks.anchors))
            yield Step(blocks.spread(self.model.corrected(blocks.hidden[:, :, step], before)), chosen=chosen)

    def target_feature(self, batch: Batch, step: int) -> torch.Tensor:
        raise ValueError("a block-parallel drafter predicts no hidden states of the target")


class PrefixRollout:
    """TAPS's scorer along the text's own path; the backbone stays as it is.

    Its distribution over siblings and "other", times what the marginals say within "other", is one over all rows of the
    head; within "other" nothing is trained, so the losses of such rows are those of the siblings and "other".

    Args:
        model: its scorer is trained in place.
        embed: the target's embedding.
        rows: int64 [R], tokens of the rows of the head in training.
    """

    first = 0

    def __init__(self, model: TapsModel, embed: Embed, *, rows: torch.Tensor) -> None:
        self.model = model
        self.module = model.scorer
        model.model.requires_grad_(False).eval()
        self.embed = embed
        self.row_embeddings = embed(rows)

    def steps(self, batch: Batch, count: int) -> Iterator[Step]:
        with torch.no_grad():
            blocks = run_blocks(self.model.model, self.embed, batch, count=count)
            states = [blocks.spread(self.model.model.norm(blocks.hidden[:, :, step])) for step in range(count)]
        children = self.model.scorer.project(self.row_embeddings)
        chosen = blocks.chosen()
        # Log-probabilities of the text's own tokens under the marginals, down to the parent and of the parent alone.
        path, above = (torch.zeros(blocks.shape, device=chosen.device) for _ in range(2))
        for step, hidden in enumerate(states):
            adjust = partial(
                self._adjust, batch=batch, step=step, hidden=hidden, children=children, path=path, above=above
            )
            yield Step(hidden, chosen=chosen, adjust=adjust)

    def target_feature(self, batch: Batch, step: int) -> torch.Tensor:
        raise ValueError("a block-parallel drafter predicts no hidden states of the target")

    def _adjust(
        self,
        logits: torch.Tensor,
        rows: tuple[torch.Tensor, ...],
        *,
        batch: Batch,
        step: int,
        hidden: torch.Tensor,
        children: torch.Tensor,
        path: torch.Tensor,
        above: torch.Tensor,
    ) -> torch.Tensor:
        """The backbone's logits [N, R] with siblings and "other" corrected; moves `path` and `above` on by a token."""
        scorer = self.model.scorer
        with torch.no_grad():
            marginals = torch.log_softmax(logits.float(), dim=-1)
            top = marginals.topk(min(SIBLINGS[0], marginals.shape[1]), dim=-1)
            ranks = torch.arange(top.indices.shape[1], device=logits.device)
            widths = torch.tensor(SIBLINGS, device=logits.device)[(batch.positions[rows] + step) % len(SIBLINGS)]
            sibling = ranks < (widths[:, None] if step else SIBLINGS[0])
            depths = torch.full((1, 1), step, device=logits.device)
            scalars = edge_scalars(
                log_probs=top.values,
                best=top.values[:, :1],
                ranks=ranks,
                path=path[rows][:, None],
                above=above[rows][:, None],
                depths=depths,
                entropy=-torch.special.xlogy(marginals.exp(), marginals.exp()).sum(dim=1, keepdim=True),
            )
            parents = self.embed(batch.tokens[:, :, step][rows])[:, None]
            labels = batch.labels[:, :, step][rows]
            own = marginals.gather(1, labels.clamp(min=0)[:, None])[:, 0].masked_fill(labels < 0, _LEAST)
            path[rows], above[rows] = path[rows] + own, own
        scores = scorer(children[top.indices], parents, hidden[rows][:, None], depths, scalars)
        other = scorer.other.weight[step]
        corrected = top.values + torch.where(sibling, scores, other)
        return (marginals + other).scatter(1, top.indices, corrected)
