"""`kv_compact` in plain torch: the specification, and what runs without a GPU."""

from __future__ import annotations

import torch


def kv_compact(cache: torch.Tensor, path: torch.Tensor, starts: torch.Tensor) -> None:
    """See `adaptspec.kernels.kv_compact`."""
    for sequence, start in enumerate(starts.tolist()):
        rows = path[sequence][path[sequence] >= 0] + start
        part = cache[:, sequence]
        part[:, :, start : start + len(rows)] = part.index_select(2, rows)  # a copy: nothing is read after it changed
