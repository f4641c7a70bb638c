"""The EAGLE family by name."""

from __future__ import annotations

from adaptspec.drafters.feature_recursive import FeatureRecursive
from adaptspec.drafters.registry import register_drafter


@register_drafter("eagle1")
class Eagle1(FeatureRecursive):
    """EAGLE (arXiv 2401.15077) as a chain: autoregression on the target's last features."""

    summary = "a cell on the target's last hidden state, as a chain (EAGLE, 2401.15077)"
    kind = "eagle1"
    weights = "eagle1"
    default_tree = "chain"
    default_depth = 5


@register_drafter("eagle2")
class Eagle2(FeatureRecursive):
    """EAGLE-2 (arXiv 2406.16858): the weights of EAGLE with a tree that follows the cell's confidence."""

    summary = "EAGLE's cell with a tree that follows its confidence (EAGLE-2, 2406.16858)"
    kind = "eagle1"
    weights = "eagle1"


@register_drafter("eagle-self")
class EagleSelf(FeatureRecursive):
    """The baseline that the CATS paper (arXiv 2605.11186) calls EAGLE-self: a chain of 5, or with `tree="static"` a
    static tree of at most 10 children per node."""

    summary = "EAGLE's cell as a chain of 5 or, by option, a static tree (as compared in 2605.11186)"
    kind = "eagle1"
    weights = "eagle1"
    default_tree = "chain"
    default_depth = 5


@register_drafter("eagle3")
class Eagle3(FeatureRecursive):
    """EAGLE-3 (arXiv 2503.01840): features of several layers, trained on its own recursion."""

    summary = "a cell on three of the target's layers, trained on its own recursion (EAGLE-3, 2503.01840)"
    kind = "eagle3"
    weights = "eagle3"
    default_depth = 7


@register_drafter("eagle3-lk")
class Eagle3LK(FeatureRecursive):
    """EAGLE-3's cell trained on the acceptance itself (LK loss, arXiv 2602.23881)."""

    summary = "EAGLE-3's cell trained with the LK loss (2602.23881)"
    kind = "eagle3"
    weights = "eagle3-lk"
    default_depth = 7
