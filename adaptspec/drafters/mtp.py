"""Multi-token prediction layers by name."""

from __future__ import annotations

from adaptspec.drafters.feature_recursive import FeatureRecursive
from adaptspec.drafters.registry import register_drafter


class MTP(FeatureRecursive):
    """Multi-token prediction (arXiv 2412.19437) used as a draft: norms and a projection around a decoder layer."""

    kind = "mtp"
    default_branching = 8
    default_depth = 5


@register_drafter("mtp1")
class MTP1(MTP):
    """One prediction layer, applied again and again. Published ones are trained with cross-entropy on the data's
    tokens, the one that comes along with the KL loss."""

    summary = "one multi-token-prediction layer, reused (2412.19437)"
    layers = 1
    weights = "mtp1"


@register_drafter("mtp1-kl")
class MTP1KL(MTP):
    """One prediction layer trained to the target's distribution."""

    summary = "one multi-token-prediction layer trained with the KL loss"
    layers = 1
    weights = "mtp1"


@register_drafter("mtp1-lk")
class MTP1LK(MTP):
    """One prediction layer trained on the acceptance itself (LK loss, arXiv 2602.23881)."""

    summary = "one multi-token-prediction layer trained with the LK loss (2602.23881)"
    layers = 1
    weights = "mtp1-lk"


@register_drafter("mtp3")
class MTP3(MTP):
    """Three prediction layers: step k of the draft runs layer k, which keeps rows of its own; the last one goes on."""

    summary = "three multi-token-prediction layers, one per step"
    layers = 3
    weights = "mtp3"
