"""DFlash's draft model (arXiv 2602.06036): a whole block of tokens in one pass, read off the target's hidden states.

With the target's states F_1 .. F_n of the taps at every committed position but the root's,

    context = hidden_norm(fc([F_1; ..; F_n])),        one row per position,
    block   = [embedding of the root, mask, .., mask], S rows at the positions that follow.

Every draft layer is a decoder layer over the block whose attention is not causal, and whose keys and values are those
of the context, made with the layer's own projections, followed by those of the block itself. Row j of the last layer
gives what the target's head multiplies to predict the token of its own place. The context has no rows of its own in
the layers, so what has been projected once stays right however the block went on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from adaptspec.drafters.block.config import BackboneConfig
from adaptspec.drafters.cells.attention import GroupedConfig
from adaptspec.drafters.cells.base import RMSNorm
from adaptspec.drafters.cells.blocks import Block, BlockConfig

Pair = tuple[torch.Tensor, torch.Tensor]
Store = Callable[[int, torch.Tensor, torch.Tensor], Pair]
"""Takes a layer's keys and values of the block [B, heads, T, D] and returns all of that layer, the context's first."""


class Backbone(nn.Module):
    """What drafting and training share. Parameter names are those of published checkpoints.

    Shapes: B batch, T rows of blocks, C rows of context, S rows of one block, H hidden.
    """

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        layer = BlockConfig(
            GroupedConfig(
                hidden,
                heads=config.num_attention_heads,
                key_value_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                rope_theta=config.rope_theta,
                eps=eps,
                rope_scaling=config.rope_scaling,
                qk_norm=config.qk_norm,
                bias=config.attention_bias,
                output_bias=config.attention_bias,
            ),
            config.intermediate_size,
            eps,
        )
        self.layers = nn.ModuleList(Block(layer) for _ in range(config.num_layers))
        self.fc = nn.Linear(len(config.taps) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.norm = RMSNorm(hidden, eps)
        self.tap_norms = nn.ModuleList(RMSNorm(hidden, eps) for _ in config.taps) if config.tap_norm else None
        own_masks = config.mask_token_id is None
        self.mask_embeddings = nn.Embedding(config.block_size - 1, hidden) if own_masks else None

    def fuse(self, features: Sequence[torch.Tensor]) -> torch.Tensor:
        """Context [..., H] from the target's hidden states, one tensor [..., H] per tap in the order of `config.taps`.

        Raises:
            ValueError: another number of tensors than taps.
        """
        if len(features) != len(self.config.taps):
            raise ValueError(f"features must be one tensor per tap {list(self.config.taps)}, got {len(features)}")
        if self.tap_norms is not None:
            features = [norm(states) for norm, states in zip(self.tap_norms, features, strict=True)]
        return self.hidden_norm(self.fc(torch.cat(list(features), dim=-1)))

    def context(self, layer: int, fused: torch.Tensor, positions: torch.Tensor) -> Pair:
        """Keys and values [B, heads, C, D] of a layer for fused rows [B, C, H] at positions int64 [B, C]."""
        attention = self.layers[layer].self_attn
        heads = attention.config.key_value_heads
        keys, values = (
            project(fused).unflatten(-1, (heads, -1)).transpose(1, 2)
            for project in (attention.k_proj, attention.v_proj)
        )
        if attention.config.qk_norm:
            keys = attention.k_norm(keys)
        return attention.rotary(keys, positions), values

    def blocks(self, embed: Callable[[torch.Tensor], torch.Tensor], roots: torch.Tensor) -> torch.Tensor:
        """What goes into the first layer, [..., S, H], for blocks that follow the tokens int64 [...]."""
        first = embed(roots[..., None])
        if self.mask_embeddings is not None:
            masks = self.mask_embeddings.weight
        else:
            masks = embed(roots.new_full((self.config.block_size - 1,), self.config.mask_token_id))
        return torch.cat([first, masks.to(first.dtype).expand(*roots.shape, -1, -1)], dim=-2)

    def forward(
        self,
        embeddings: torch.Tensor,
        *,
        positions: torch.Tensor,
        store: Store,
        mask: torch.Tensor | None = None,
        key_positions: torch.Tensor | None = None,
        windows: Sequence[int | None] = (),
    ) -> torch.Tensor:
        """Run rows of blocks; un-normed hidden states [B, T, H]. `norm` of them is what the head multiplies.

        Args:
            embeddings: [B, T, H], of `blocks`.
            positions: int64 [B, T].
            store: gives the context's keys and values along with the new ones.
            mask: bool [B or 1, T, C + T], what each row sees; None: everything.
            key_positions: int64 [B or 1, C + T]; needed if a layer has a window.
            windows: of every layer, those of the config if empty.
        """
        hidden = embeddings
        for number, (layer, window) in enumerate(zip(self.layers, windows or self.config.windows, strict=True)):
            visible = mask
            if window is not None:
                assert key_positions is not None
                near = positions[:, :, None] - key_positions[:, None, :] < window
                visible = near if mask is None else near & mask
            hidden = layer(
                hidden,
                positions=positions,
                mask=_everything(hidden) if visible is None else visible[:, None],
                store=partial(store, number),
            )
        return hidden


def _everything(hidden: torch.Tensor) -> torch.Tensor:
    """A mask that hides nothing, whatever the number of keys."""
    return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=hidden.device)
