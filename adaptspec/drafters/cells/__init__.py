"""Cells of the feature-recursive drafters, used for training and for drafting. Needs torch."""

from adaptspec.drafters.cells.base import Cell
from adaptspec.drafters.cells.cache import CellCache
from adaptspec.drafters.cells.config import KINDS, CellConfig
from adaptspec.drafters.cells.confu import ConFuCell
from adaptspec.drafters.cells.eagle1 import Eagle1Cell
from adaptspec.drafters.cells.eagle3 import Eagle3Cell
from adaptspec.drafters.cells.griffin import GriffinCell
from adaptspec.drafters.cells.mtp import MTPCell

__all__ = ["KINDS", "Cell", "CellCache", "CellConfig", "ConFuCell", "make_cell"]

_CELLS: dict[str, type[Cell]] = {
    "eagle1": Eagle1Cell,
    "eagle3": Eagle3Cell,
    "griffin": GriffinCell,
    "mtp": MTPCell,
    "confu": ConFuCell,
}


def make_cell(config: CellConfig) -> Cell:
    """A new cell with torch's default initialisation.

    >>> config = CellConfig(kind="eagle3", hidden_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
    ...                     intermediate_size=16, taps=(1, 2, 3))
    >>> make_cell(config).fc.weight.shape
    torch.Size([8, 24])
    """
    if not isinstance(config, CellConfig):
        raise ValueError(f"config must be a CellConfig, got {type(config).__name__}")
    return _CELLS[config.kind](config)
