"""Rules for depth and size around a feature-recursive drafter: what is proposed differs in nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from adaptspec.drafters.base import Drafter
from adaptspec.drafters.feature_recursive import FeatureRecursive
from adaptspec.drafters.registry import DRAFTERS, make_drafter
from adaptspec.pretrained import shipped_rule
from adaptspec.types import DraftContext, ExtraRows, Observation, PairedRows

if TYPE_CHECKING:
    from adaptspec.target.base import Target


class SizedDrafter(Drafter):
    """A feature-recursive drafter whose trees grow as EAGLE-2's and are cut by a rule of the subclass. All that a
    rule is compared by is the backbone's: weights, budget, vocabularies, what is charged.

    Args:
        backbone: a feature-recursive drafter with a dynamic tree.
    """

    isolate = False
    takes_vocab = True

    def __init__(self, backbone: FeatureRecursive) -> None:
        self.backbone = backbone

    def use_vocab(self, names: Sequence[str]) -> None:
        super().use_vocab(names)
        self.backbone.use_vocab(names)

    def bind(self, target: Target) -> None:
        self.backbone.bind(target)
        self.needs = self.backbone.needs

    def _check_target(self, card: Mapping[str, Any], target: Target, *, where: str) -> None:
        """Raise ValueError unless the target is the one of a card, if it names one."""
        if "target" in card:
            from adaptspec.drafters.cell_weights import check_target
            from adaptspec.drafters.target_parts import target_parts

            target_parts(target, drafter=self.name)  # says so if it is none of transformers
            try:
                check_target(card, target, where=where)  # type: ignore[arg-type]
            except ValueError as error:
                hint = f"make one with `adaptspec train {self.name}` and write {self.name}:FILE"
                raise ValueError(f"{error}; {hint}") from error

    def prefill(
        self,
        token_ids: np.ndarray,
        features: Mapping[int, Any] | None = None,
        top_ids: np.ndarray | None = None,
    ) -> None:
        self.backbone.prefill(token_ids, features, top_ids)

    def extra_rows(self, context: DraftContext, budget: int) -> ExtraRows | PairedRows | None:
        return self.backbone.extra_rows(context, budget)

    def observe(self, observation: Observation) -> None:
        self.backbone.observe(observation)

    @property
    def lag(self) -> int:
        return self.backbone.lag

    def catch_up(self) -> None:
        self.backbone.catch_up()

    def finish(self) -> None:
        self.backbone.finish()

    def reset(self) -> None:
        self.backbone.reset()

    def state_dict(self) -> dict[str, Any]:
        return self.backbone.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.backbone.load_state_dict(state)


def shipped_rule_of(name: str) -> Path:
    """The file of the rule that is shipped for the embedded model.

    Raises:
        FileNotFoundError: none is.
    """
    if (path := shipped_rule(name)) is None:
        raise FileNotFoundError(f"{name} needs a file and none is shipped; make one with: adaptspec train {name}")
    return path


def make_backbone(drafter: str | Drafter, *, max_depth: int) -> FeatureRecursive:
    """A feature-recursive drafter that grows trees of at most this depth.

    Args:
        drafter: "name" or "name:PATH", or a drafter whose own depth may not be smaller.

    Raises:
        ValueError: another kind of drafter, or one that grows no dynamic trees of that depth.
    """
    if isinstance(drafter, str):
        cls = DRAFTERS.get(drafter.partition(":")[0], FeatureRecursive)
        if not issubclass(cls, FeatureRecursive):
            raise ValueError(f"drafter must be a feature-recursive one, like 'griffin' or 'eagle3', got {drafter!r}")
        made = make_drafter(drafter, tree="dynamic", siblings="deterministic", max_depth=max_depth)
        assert isinstance(made, FeatureRecursive)
        return made
    if not isinstance(drafter, FeatureRecursive):
        raise ValueError(f"drafter must be a feature-recursive one, got {type(drafter).__name__}")
    if drafter.tree != "dynamic" or drafter.max_depth < max_depth:
        raise ValueError(
            f"drafter must grow dynamic trees of max_depth >= {max_depth}, got {drafter.tree!r} and {drafter.max_depth}"
        )
    return drafter
