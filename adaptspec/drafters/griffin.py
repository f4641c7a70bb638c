"""GRIFFIN by name."""

from __future__ import annotations

from adaptspec.drafters.feature_recursive import FeatureRecursive
from adaptspec.drafters.registry import register_drafter


@register_drafter("griffin")
class Griffin(FeatureRecursive):
    """GRIFFIN (arXiv 2502.11018): EAGLE with token guidance in the cell and token alignment in training."""

    summary = "EAGLE with token guidance and alignment (GRIFFIN, 2502.11018)"
    kind = "griffin"
    weights = "griffin"
    default_branching = 8
    default_depth = 5
