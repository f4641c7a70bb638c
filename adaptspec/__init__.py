"""adaptspec: an online adaptive drafting policy for speculative decoding.

Names are imported on first use: `import adaptspec` loads neither torch nor transformers, so that the policy layer
(`adaptspec.types`, `adaptspec.bandits`, `adaptspec.control`) can run inside a serving stack at no cost.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adaptspec.drafters.base import Drafter, Needs
    from adaptspec.drafters.registry import register_drafter
    from adaptspec.spec import AdaptiveSpec
    from adaptspec.types import (
        Arm,
        Decision,
        DraftContext,
        DraftTree,
        ExtraRows,
        Observation,
        Sampling,
        StepRecord,
        Verdict,
    )

__version__ = "0.1.0"

_MODULE_OF = {
    "AdaptiveSpec": "adaptspec.spec",
    "Arm": "adaptspec.types",
    "Decision": "adaptspec.types",
    "DraftContext": "adaptspec.types",
    "DraftTree": "adaptspec.types",
    "Drafter": "adaptspec.drafters.base",
    "ExtraRows": "adaptspec.types",
    "Needs": "adaptspec.drafters.base",
    "Observation": "adaptspec.types",
    "Sampling": "adaptspec.types",
    "StepRecord": "adaptspec.types",
    "Verdict": "adaptspec.types",
    "register_drafter": "adaptspec.drafters.registry",
}
_SUBMODULES = ("bandits", "control", "drafters", "spec", "target", "trees", "types", "verify")

__all__ = [
    "AdaptiveSpec",
    "Arm",
    "Decision",
    "DraftContext",
    "DraftTree",
    "Drafter",
    "ExtraRows",
    "Needs",
    "Observation",
    "Sampling",
    "StepRecord",
    "Verdict",
    "register_drafter",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f"adaptspec.{name}")
    else:
        raise AttributeError(f"module 'adaptspec' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF, *_SUBMODULES})
