"""Trained weights as folders: where the shipped ones lie, and how to write and read one. Imports nothing heavy."""

from adaptspec.pretrained.store import (
    CARD_FILE,
    WEIGHTS_FILE,
    is_weights_folder,
    load_weights,
    read_card,
    save_weights,
    shipped_folder,
    shipped_names,
    shipped_rule,
    without_base,
)

__all__ = [
    "CARD_FILE",
    "WEIGHTS_FILE",
    "is_weights_folder",
    "load_weights",
    "read_card",
    "save_weights",
    "shipped_folder",
    "shipped_names",
    "shipped_rule",
    "without_base",
]
