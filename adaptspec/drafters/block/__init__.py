"""Block-parallel drafters (DFlash and what builds trees on it): the modules, and one request of them. Needs torch."""

from adaptspec.drafters.block.backbone import Backbone
from adaptspec.drafters.block.config import BackboneConfig
from adaptspec.drafters.block.context import BlockContext
from adaptspec.drafters.block.scorer import PrefixScorer, ScorerConfig, TapsModel
from adaptspec.drafters.block.transition import TransitionConfig, TransitionCorrection, TreeFlashModel

__all__ = [
    "Backbone",
    "BackboneConfig",
    "BlockContext",
    "PrefixScorer",
    "ScorerConfig",
    "TapsModel",
    "TransitionConfig",
    "TransitionCorrection",
    "TreeFlashModel",
]
