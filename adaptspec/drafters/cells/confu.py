"""The ConFu cell (arXiv 2603.08899)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from adaptspec.drafters.cells.base import RMSNorm
from adaptspec.drafters.cells.cache import CellCache
from adaptspec.drafters.cells.config import CellConfig
from adaptspec.drafters.cells.eagle3 import Eagle3Cell
from adaptspec.drafters.cells.recursion import Recursion


class FutureRecursion(Recursion):
    """Draft rows, and the last row of the committed text, know a future token [H]; None for none."""

    future: torch.Tensor | None = None

    def _run(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        *,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        step: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        known = None
        if self._depth == 0:  # of committed rows only the last one is drafted from
            known = torch.arange(1 - len(embeddings), 1, device=embeddings.device)[None] == 0
        head_input, outputs = self.cell(
            embeddings[None],
            hidden[None],
            positions=positions[None],
            mask=None if mask is None else mask[None, None],
            cache=self.cache,
            step=step,
            future=self.future,
            known=known,
        )
        return head_input[0], outputs[0]


class ConFuCell(Eagle3Cell):
    """EAGLE-3's cell with a look at where the target is going.

    The target reads a contemplate token behind a token x, a mixture of E learnt vectors c that x chooses,
        w = softmax of the K largest of router RMSNorm(emb(x)),   sum_k w_k c_k,
    which also sees P soft prompts, learnt vectors too, that nothing else sees. Its hidden state g after all layers is
    the future token. All rows drafted from x get `future_proj(future_norm(g))` on their residual, behind the attention,
    so that keys and values of verified rows are those without it. `future_proj` begins at 0: the cell is EAGLE-3's
    then, as it is without a future token.

    How the paper mixes and where it adds is not public; these are ours, the roles are its own.
    """

    def __init__(self, config: CellConfig) -> None:
        super().__init__(config)
        assert config.soft_prompts and config.contemplates and config.mixed
        size = config.hidden_size
        self.soft_prompts = nn.Embedding(config.soft_prompts, size)
        self.contemplates = nn.Embedding(config.contemplates, size)
        self.router = nn.Linear(size, config.contemplates, bias=False)
        self.future_norm = RMSNorm(size, config.rms_norm_eps)
        self.future_proj = nn.Linear(size, size, bias=False)
        nn.init.zeros_(self.future_proj.weight)

    def contemplate(self, embeddings: torch.Tensor) -> torch.Tensor:
        """What the target reads at contemplate tokens [..., H] behind tokens of these embeddings [..., H]."""
        normed = functional.rms_norm(embeddings, embeddings.shape[-1:], eps=self.config.rms_norm_eps)
        top = self.router(normed).topk(self.config.mixed or 1, dim=-1)
        weights = torch.softmax(top.values.float(), dim=-1).to(embeddings.dtype)
        return (weights[..., None] * self.contemplates(top.indices)).sum(dim=-2)

    def forward(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        *,
        positions: torch.Tensor,
        mask: torch.Tensor | None = None,
        cache: CellCache | None = None,
        step: int = 0,
        future: torch.Tensor | None = None,
        known: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Cell.forward`.

        Args:
            future: g, [H] or [B, T, H]; None for none.
            known: bool [B, T], rows that have one, None for all.
        """
        added = None
        if future is not None:
            added = self.future_proj(self.future_norm(future))
            if known is not None:
                added = torch.where(known[..., None], added, 0.0)
        rotation = self.rotary.angles(positions, hidden.dtype)
        output = self.midlayer(embeddings, hidden, rotation=rotation, mask=mask, cache=cache, future=added)
        normed = self.norm(output)
        return normed, normed if self.config.norm_output else output
