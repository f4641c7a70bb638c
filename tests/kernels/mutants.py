"""Kernels with one deliberate fault, to show that a comparison notices it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType


@contextmanager
def mutated(module: str, old: str, new: str) -> Iterator[ModuleType]:
    """The module with `old`, which must occur exactly once in its file, replaced by `new`; imported apart from the
    real one, from a file, because triton reads its kernels' source."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {spec.origin}"
    with TemporaryDirectory() as folder:
        path = Path(folder) / "mutant.py"
        path.write_text(source.replace(old, new), encoding="utf-8")
        name = f"mutant_of_{module.replace('.', '_')}"
        mutant_spec = importlib.util.spec_from_file_location(name, path)
        assert mutant_spec is not None and mutant_spec.loader is not None
        mutant = importlib.util.module_from_spec(mutant_spec)
        sys.modules[name] = mutant  # triton looks a kernel's module up by its name
        try:
            mutant_spec.loader.exec_module(mutant)
            yield mutant
        finally:
            del sys.modules[name]
