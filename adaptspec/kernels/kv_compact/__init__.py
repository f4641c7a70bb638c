"""Moving the accepted rows of a draft tree next to the prefix in the key-value cache, in place."""

from __future__ import annotations

import torch

from adaptspec.kernels.backend import Backend, implementation


def kv_compact(
    cache: torch.Tensor, path: torch.Tensor, starts: torch.Tensor, *, backend: Backend | None = None
) -> None:
    """Copy row `starts[b] + path[b, i]` of sequence b to row `starts[b] + i`, for all i in ascending order.

    Because `path[b, i] >= i`, no row is overwritten before it was read. Rows behind the kept ones are left as they are.

    Shapes: L layers times two (keys and values), B sequences, H key-value heads, C capacity in tokens, D head size.

    Args:
        cache: [L, B, H, C, D], any strides but 1 along D; changed.
        path: int64 [B, A], the accepted rows counted from `starts`, ascending; filled up with -1 behind the last.
        starts: int64 [B], the first row of the tree.
        backend: see `adaptspec.kernels.backend`.

    The rows are not checked, because reading them would wait for the device.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        RuntimeError: the backend asked for is not there.
    """
    if cache.dim() != 5:
        raise ValueError(f"cache must have shape [L, B, H, C, D], got {list(cache.shape)}")
    if cache.stride(-1) != 1:
        raise ValueError(f"cache must have stride 1 along D, got {cache.stride(-1)}")
    for name, tensor, dimensions in (("path", path, 2), ("starts", starts, 1)):
        if tensor.dim() != dimensions or tensor.shape[0] != cache.shape[1] or tensor.dtype != torch.int64:
            shape = "[B, A]" if dimensions == 2 else "[B]"
            raise ValueError(
                f"{name} must be int64 {shape} with B = {cache.shape[1]}, got {tensor.dtype} {list(tensor.shape)}"
            )
    implementation("kv_compact", cache.device, backend=backend).kv_compact(cache, path, starts)
