"""Putting tensors of a file into a module, with errors that name what does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn


def fill(module: nn.Module, tensors: Mapping[str, torch.Tensor], *, where: str) -> None:
    """Load all parameters of a module.

    Raises:
        ValueError: tensors are missing, unknown or of another shape; with names.
    """
    expected = module.state_dict()
    wrong = {name for name in expected.keys() & tensors.keys() if expected[name].shape != tensors[name].shape}
    for problem, names in (
        ("lacks the tensors", expected.keys() - tensors.keys()),
        ("holds unknown tensors", tensors.keys() - expected.keys()),
        ("has tensors of another shape", wrong),
    ):
        if names:
            raise ValueError(f"{where} {problem} {', '.join(sorted(names))}")
    module.load_state_dict(dict(tensors))


def check_finite(tensors: Iterable[tuple[str, torch.Tensor]], *, where: str) -> None:
    """Raise ValueError that names the tensors with NaN or infinite values."""
    if broken := [name for name, tensor in tensors if not bool(torch.isfinite(tensor).all())]:
        raise ValueError(f"{where} has NaN or infinite values in the tensors {', '.join(broken)}")
