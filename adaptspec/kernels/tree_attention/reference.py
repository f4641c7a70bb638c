"""`tree_attention` in plain torch: the specification, and what runs without a GPU."""

from __future__ import annotations

import torch

WORD = 64


def tree_attention(
    query: torch.Tensor,
    prefix_keys: torch.Tensor,
    prefix_values: torch.Tensor,
    tree_keys: torch.Tensor,
    tree_values: torch.Tensor,
    *,
    lengths: torch.Tensor,
    ancestors: torch.Tensor,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """See `adaptspec.kernels.tree_attention`. Computes in float32."""
    batch, heads, rows, size = query.shape
    groups, prefix, width = prefix_keys.shape[1], prefix_keys.shape[2], tree_keys.shape[2]
    used = torch.arange(prefix, device=query.device) < lengths[:, None]  # [B, P]
    visible = torch.cat([used[:, None].expand(batch, rows, prefix), unpack_ancestors(ancestors, width)], dim=-1)

    keys = torch.cat([prefix_keys, tree_keys], dim=2).float()
    values = torch.cat([prefix_values, tree_values], dim=2).float()
    # Zero weights do not silence what lies behind the used length: 0 * NaN is NaN.
    values = values.masked_fill(~visible.any(dim=1)[:, None, :, None], 0.0)

    packed = query.float().reshape(batch, groups, heads // groups, rows, size)
    scores = torch.einsum("bhgnd,bhkd->bhgnk", packed, keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)  # NaN: a row that sees nothing
    output = torch.einsum("bhgnk,bhkd->bnhgd", weights, values)
    return output.reshape(batch, rows, heads, size).to(query.dtype).transpose(1, 2)


def unpack_ancestors(ancestors: torch.Tensor, width: int) -> torch.Tensor:
    """Words int64 [B, N, ceil(width / 64)] as visibility bool [B, N, width]."""
    bits = torch.arange(WORD, device=ancestors.device)
    return ((ancestors[..., None] >> bits) & 1).bool().flatten(-2)[..., :width]
