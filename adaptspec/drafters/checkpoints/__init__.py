"""Published checkpoints of trained drafters: load them, and save our own in their formats."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from adaptspec.drafters.checkpoints.common import Extras, Facts
from adaptspec.drafters.checkpoints.dflash import load_dflash, load_treeflash
from adaptspec.drafters.checkpoints.eagle import load_eagle1, load_eagle3
from adaptspec.drafters.checkpoints.heads import HYDRA_FILES, MEDUSA_FILES, load_hydra, load_medusa
from adaptspec.drafters.checkpoints.mtp import load_mtp
from adaptspec.drafters.checkpoints.reader import Checkpoint
from adaptspec.drafters.checkpoints.write import save_checkpoint
from adaptspec.drafters.target_parts import target_parts
from adaptspec.names import unknown_name

if TYPE_CHECKING:
    import torch

    from adaptspec.target.base import Target

__all__ = ["KINDS", "Checkpoint", "Extras", "Facts", "load_checkpoint", "save_checkpoint"]

KINDS = ("dflash", "eagle1", "eagle3", "griffin", "hydra", "medusa", "mtp", "treeflash")


def load_checkpoint(
    path: str | Path, *, kind: str, target: Target, taps: tuple[int, ...] | None = None
) -> tuple[torch.nn.Module, Extras]:
    """A published checkpoint as a module on the CPU.

    Args:
        path: a folder, a file, or a hub id.
        kind: one of `KINDS`; EAGLE-2 checkpoints are "eagle1".
        target: what it was trained for; sizes, the vocabulary and repeated matrices are compared.
        taps: of "eagle3", in place of what its config says: hidden states after so many layers.

    Returns:
        A `Cell`, `MedusaHeads`, `HydraHeads`, `Backbone` or `TreeFlashModel`, and what else the checkpoint holds.

    Raises:
        ValueError: unknown kind, nothing found, missing, foreign or wrongly shaped tensors, another hidden size or
            vocabulary than the target's, or parts that are not computed here; always with names.
    """
    if kind not in KINDS:
        raise unknown_name("kind of checkpoint", kind, KINDS)
    if taps is not None and kind != "eagle3":
        raise ValueError(f"taps are an option of eagle3, not of {kind!r}")
    parts = target_parts(target, drafter=kind)
    embedding = getattr(parts.embed, "weight", None)
    facts = Facts(
        hidden_size=parts.hidden_size,
        vocab_size=parts.vocab_size,
        layers=parts.layers,
        embeddings=embedding,
        head=parts.head,
        dtype=parts.dtype,
        config=parts.config,
    )
    if kind == "medusa":
        return load_medusa(Checkpoint(path, files=MEDUSA_FILES), facts)
    if kind == "hydra":
        return load_hydra(Checkpoint(path, files=HYDRA_FILES), facts)
    checkpoint = Checkpoint(path)
    if kind == "eagle3":
        return load_eagle3(checkpoint, facts, taps=taps)
    if kind == "mtp":
        return load_mtp(checkpoint, facts)
    if kind == "dflash":
        return load_dflash(checkpoint, facts)
    if kind == "treeflash":
        return load_treeflash(checkpoint, facts)
    return load_eagle1(checkpoint, facts, kind=kind)
