"""GRIFFIN+GS: the depth and size that were fastest on a machine, the same at every step."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaptspec.drafters.base import Drafter
from adaptspec.drafters.lookup import whole_number
from adaptspec.drafters.registry import register_drafter
from adaptspec.drafters.sized import SizedDrafter, make_backbone, shipped_rule_of
from adaptspec.types import DraftContext, DraftTree

if TYPE_CHECKING:
    from adaptspec.target.base import Target

FORMAT = "adaptspec-static-tree"
VERSION = 1


@dataclass(frozen=True, slots=True)
class StaticTree:
    """One depth and one size for all steps.

    Attributes:
        depth: tokens drafted in a row at most.
        size: nodes proposed at most.
        drafter: whose trees they are, as `make_drafter` takes it.
        card: what is known about the search: the target's fingerprint ("target"), the machine's ("machine"), and every
            setting that was measured ("table").
    """

    depth: int
    size: int
    drafter: str = "griffin"
    card: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("depth", "size"):
            whole_number(name, getattr(self, name), 1)
        if not isinstance(self.drafter, str) or not self.drafter:
            raise ValueError(f"drafter must be a name, got {self.drafter!r}")

    def to_json(self) -> str:
        """The content of a file that `read_static_tree` reads."""
        own = {"format": FORMAT, "version": VERSION, "drafter": self.drafter, "depth": self.depth, "size": self.size}
        return json.dumps({**own, **self.card}, indent=1) + "\n"


def read_static_tree(path: str | os.PathLike[str]) -> StaticTree:
    """Read a file of `adaptspec train griffin-gs`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is something else, or of another version.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}; make one with: adaptspec train griffin-gs")
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no static tree: {error}") from error
    if not isinstance(found, dict) or (found.get("format"), found.get("version")) != (FORMAT, VERSION):
        raise ValueError(f"{path} is no static tree of version {VERSION}; make one with: adaptspec train griffin-gs")
    known = {name: found.pop(name, None) for name in ("drafter", "depth", "size")}
    del found["format"], found["version"]
    try:
        return StaticTree(**known, card=found)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


@register_drafter("griffin-gs")
class GriffinGS(SizedDrafter):
    """GRIFFIN+GS, the static baseline of the GRIFFIN tables: trees of the one depth and size that a grid search
    (`adaptspec train griffin-gs`) measured to be fastest for a target on a machine; of the arm's budget where that is
    smaller. Any feature-recursive drafter can be searched for.

    On another machine the file is taken as it is: which setting is fastest there is another question, not another
    output.

    Args:
        path: a file of that command, or a `StaticTree`; None for what was found for the embedded model on a CPU.
        drafter: in place of the one that the file names.

    Raises:
        ValueError: a damaged file, or another kind of drafter; on `bind`, another target than the one searched on.
    """

    summary = "GRIFFIN's trees with the depth and size that a grid search found fastest"
    weights = "griffin-gs"

    def __init__(
        self, path: str | os.PathLike[str] | StaticTree | None = None, *, drafter: str | Drafter | None = None
    ) -> None:
        if path is None:
            path = shipped_rule_of(self.name)
        self.setting = path if isinstance(path, StaticTree) else read_static_tree(path)
        self._where = "the static tree" if isinstance(path, StaticTree) else str(path)
        named = self.setting.drafter if drafter is None else drafter
        super().__init__(make_backbone(named, max_depth=self.setting.depth))

    def bind(self, target: Target) -> None:
        self._check_target(self.setting.card, target, where=self._where)
        super().bind(target)

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        within = replace(context, max_depth=min(context.max_depth, self.setting.depth))
        return self.backbone.propose(within, min(budget, self.setting.size))
