"""Embedding in serving stacks: the stack-neutral core, and thin adapters that import their stack when they are used.

The core (`types`, `policy`) needs numpy alone. `from adaptspec.serving import ServingPolicy` loads nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adaptspec.serving.policy import ServingPolicy
    from adaptspec.serving.types import Decision, StepContext, StepOutcome

_MODULE_OF = {
    "Decision": "adaptspec.serving.types",
    "ServingPolicy": "adaptspec.serving.policy",
    "StepContext": "adaptspec.serving.types",
    "StepOutcome": "adaptspec.serving.types",
}

__all__ = ["Decision", "ServingPolicy", "StepContext", "StepOutcome"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'adaptspec.serving' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
