"""Imports flow one way, the policy layer stays free of torch, and `import adaptspec` is cheap.

The rules are data: a new package below `adaptspec/` needs a row in `MAY_IMPORT` before it may exist.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Literal

import pytest

import adaptspec

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "adaptspec"

POLICY_LAYER = {"names", "types", "files", "bandits", "control"}
PARTS = {"trees", "verify", "vocab", "drafters", "target"}
NUMPY_ONLY = POLICY_LAYER | {"trees"}
LOOP = {"proposing", "results", "session", "generation", "state_file", "machine", "calibrating"}
BELOW_SPEC = POLICY_LAYER | PARTS | LOOP | {"files", "kernels", "pretrained", "processor", "reporting"}

MAY_IMPORT: dict[str, set[str]] = {
    "names": set(),
    "files": set(),
    "processor": set(),
    "types": {"names"},
    "bandits": {"names", "types"},
    "control": {"names", "types", "files", "bandits", "trees"},
    "kernels": {"names", "types"},
    "pretrained": {"files"},
    **{part: PARTS | {"names", "types", "files", "kernels", "pretrained"} for part in PARTS - {"trees"}},
    "trees": {"names", "types"},
    **{module: BELOW_SPEC for module in LOOP},
    "training": PARTS | {"names", "types", "files", "kernels", "pretrained"},
    "reporting": POLICY_LAYER,
    "serving": BELOW_SPEC,
    "spec": BELOW_SPEC | {"serving"},
    "tracing": BELOW_SPEC,
    "cli": BELOW_SPEC | {"spec", "tracing", "serving", "training"},
    "__init__": set(),
    "__main__": {"cli"},
}
"""What each part of the package may import besides itself, wherever the import stands."""

EXTRAS_AT_IMPORT = {"cli": {"rich", "typer"}}
"""Libraries of an extra that a part may import at its top; everything optional else is imported where it is used."""

EXTRAS_IN_FUNCTIONS = {"control": {"pyarrow"}}
"""Libraries besides numpy that a part of the policy layer may import in functions: to read and write files."""

Kind = Literal["top", "function", "typing"]


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module. "top" runs when the file is imported, "typing" never."""

    where: str
    part: str
    module: str
    kind: Kind

    @property
    def target_part(self) -> str | None:
        """The part of the package that is imported, None for other libraries."""
        names = self.module.split(".")
        return (names[1] if len(names) > 1 else "__init__") if names[0] == "adaptspec" else None


def read_imports(package: Path) -> list[Import]:
    """Every import statement and `import_module("...")` below a package folder called `adaptspec`."""
    found = []
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        part = relative.parts[0].removesuffix(".py")
        inside = ["adaptspec", *relative.with_suffix("").parts[:-1]]
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node, kind in _walk(tree, "top"):
            for module in _modules(node, inside, package):
                found.append(Import(f"{relative}:{node.lineno}", part, module, kind))
    return found


def _walk(node: ast.AST, kind: Kind) -> Iterator[tuple[ast.AST, Kind]]:
    for child in ast.iter_child_nodes(node):
        inner = kind
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and kind == "top":
            inner = "function"
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and child in node.body:
            inner = "typing"
        yield child, inner
        yield from _walk(child, inner)


def _modules(node: ast.AST, inside: list[str], package: Path) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = inside[: len(inside) - node.level + 1] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        if module != "adaptspec":
            return [module]
        return [_exported(alias.name, package) for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
        name = node.args[0]
        return [name.value] if isinstance(name, ast.Constant) and isinstance(name.value, str) else []
    return []


def _exported(name: str, package: Path) -> str:
    """Where `from adaptspec import name` leads."""
    if (package / name).is_dir() or (package / f"{name}.py").is_file():
        return f"adaptspec.{name}"
    return adaptspec._MODULE_OF.get(name, "adaptspec")


def broken_rules(package: Path, dependencies: set[str]) -> list[str]:
    """One line per import that breaks a rule.

    Args:
        dependencies: import names of the libraries that are always installed.
    """
    problems = []
    for found in read_imports(package):
        if found.part not in MAY_IMPORT:
            problems.append(f"{found.where}: {found.part} has no row in MAY_IMPORT of tests/test_imports.py")
            continue
        target = found.target_part
        library = found.module.split(".")[0]
        if target is not None:
            allowed = MAY_IMPORT[found.part] | {found.part, "__init__"}
            if target not in allowed and not (found.part == "__init__" and found.kind == "typing"):
                problems.append(f"{found.where}: {found.part} must not import {found.module}")
        elif library in sys.stdlib_module_names:
            continue
        elif found.part in NUMPY_ONLY | {"__init__", "__main__"}:
            if library != "numpy" and not (
                found.kind == "function" and library in EXTRAS_IN_FUNCTIONS.get(found.part, set())
            ):
                problems.append(f"{found.where}: {found.part} must not import {found.module}, only numpy and stdlib")
        elif library in ("tests", "experiments"):
            problems.append(f"{found.where}: the package must not import {found.module}")
        elif library == "triton" and found.part != "kernels":
            problems.append(f"{found.where}: triton belongs in kernels, not in {found.part}")
        elif found.kind == "top" and library not in dependencies | EXTRAS_AT_IMPORT.get(found.part, set()):
            problems.append(f"{found.where}: {library} is optional: import it in the function that uses it")
    return problems


def import_cycle(package: Path) -> list[str] | None:
    """Parts that import each other while they are being imported; None if there are none."""
    graph: dict[str, set[str]] = {}
    for found in read_imports(package):
        target = found.target_part
        if found.kind == "top" and target not in (None, "__init__", found.part):
            graph.setdefault(found.part, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def always_installed() -> set[str]:
    """Import names of the dependencies in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.match(r"[A-Za-z0-9._-]+", line)[0] for line in project["dependencies"]}
    return {name.replace("-", "_") for name in names}


def test_the_package_keeps_every_rule() -> None:
    assert read_imports(PACKAGE)
    assert broken_rules(PACKAGE, always_installed()) == []


def test_parts_do_not_import_each_other_in_a_circle() -> None:
    assert import_cycle(PACKAGE) is None


def test_the_rules_themselves_have_no_circle_among_layers() -> None:
    layers = {part: targets - PARTS if part in PARTS else targets for part, targets in MAY_IMPORT.items()}
    layers = {part: targets - LOOP if part in LOOP else targets for part, targets in layers.items()}
    assert list(TopologicalSorter(layers).static_order())
    assert set().union(*MAY_IMPORT.values()) <= set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("path", "code", "problem"),
    [
        ("types.py", "import torch", "types must not import torch"),
        ("bandits/hedge.py", "def f():\n    import torch.nn", "bandits must not import torch.nn"),
        ("bandits/hedge.py", "if TYPE_CHECKING:\n    from torch import Tensor", "bandits must not import torch"),
        ("bandits/hedge.py", "import scipy.stats", "bandits must not import scipy.stats"),
        ("bandits/hedge.py", "from adaptspec.drafters.base import Drafter", "bandits must not import adaptspec.dra"),
        ("bandits/hedge.py", "from ..control import arms", "bandits must not import adaptspec.control"),
        ("bandits/deep/er.py", "from ... import control", "bandits must not import adaptspec.control"),
        ("control/cost.py", "from adaptspec.kernels import topk", "control must not import adaptspec.kernels"),
        ("control/cost.py", "from adaptspec import AdaptiveSpec", "control must not import adaptspec.spec"),
        ("control/trace_file.py", "import pyarrow", "control must not import pyarrow"),
        ("control/cost.py", "def f():\n    import pandas", "control must not import pandas"),
        ("session.py", "from adaptspec.tracing import record_trace", "session must not import adaptspec.tracing"),
        ("control/cost.py", "import_module('adaptspec.target')", "control must not import adaptspec.target"),
        ("kernels/topk/triton.py", "import adaptspec.trees.algebra", "kernels must not import adaptspec.trees"),
        ("drafters/lookup.py", "from adaptspec.bandits import make_policy", "drafters must not import adaptspec.ba"),
        ("vocab/full.py", "from adaptspec.control import cost", "vocab must not import adaptspec.control"),
        ("target/hf.py", "def f():\n    from adaptspec.session import Session", "target must not import adaptspec.se"),
        ("session.py", "from adaptspec.spec import AdaptiveSpec", "session must not import adaptspec.spec"),
        ("spec.py", "try:\n    import adaptspec.cli\nexcept ImportError:\n    pass", "spec must not import adaptsp"),
        ("serving/vllm.py", "import vllm", "vllm is optional"),
        ("serving/metrics.py", "import prometheus_client", "prometheus_client is optional"),
        ("spec.py", "import matplotlib.pyplot", "matplotlib is optional"),
        ("session.py", "import rich", "rich is optional"),
        ("target/hf.py", "import triton", "triton belongs in kernels"),
        ("trees/beam.py", "import triton", "trees must not import triton"),
        ("trees/beam.py", "def f():\n    import torch", "trees must not import torch"),
        ("trees/beam.py", "from adaptspec.kernels import topk", "trees must not import adaptspec.kernels"),
        ("trees/beam.py", "from adaptspec.target import hf", "trees must not import adaptspec.target"),
        ("cli/app.py", "def f():\n    import experiments.run", "the package must not import experiments.run"),
        ("__init__.py", "from adaptspec.types import Arm", "__init__ must not import adaptspec.types"),
        ("__init__.py", "import torch", "__init__ must not import torch"),
        ("extra/new.py", "import json", "extra has no row in MAY_IMPORT"),
    ],
)
def test_breaking_a_rule_is_noticed(tmp_path: Path, path: str, code: str, problem: str) -> None:
    package = tmp_path / "adaptspec"
    for file in ("control/arms.py", path):
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text("")
    (package / path).write_text(f"import json\n{code}\n")
    problems = broken_rules(package, {"numpy", "scipy", "torch", "triton"})
    assert problems
    assert all(problem in line and f"{path}:" in line for line in problems)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("bandits/hedge.py", "import numpy as np\nfrom adaptspec.types import Arm\nfrom .base import Policy"),
        ("drafters/lookup.py", "from adaptspec.trees import chain\nfrom adaptspec import DraftTree"),
        ("serving/vllm.py", "def f():\n    import vllm\n    from adaptspec.drafters import make_drafter"),
        ("spec.py", "from adaptspec.serving.policy import ServingPolicy"),
        ("cli/app.py", "import typer\nfrom adaptspec import __version__"),
        ("control/trace_file.py", "def f():\n    import pyarrow.parquet"),
        ("kernels/topk/triton.py", "import torch, triton"),
        (
            "__init__.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from adaptspec.spec import AdaptiveSpec",
        ),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, path: str, code: str) -> None:
    file = tmp_path / "adaptspec" / path
    file.parent.mkdir(parents=True)
    file.write_text(code)
    assert broken_rules(tmp_path / "adaptspec", {"numpy", "torch", "triton"}) == []


def test_a_circle_is_noticed(tmp_path: Path) -> None:
    package = tmp_path / "adaptspec"
    for path, code in (
        ("trees/a.py", "from adaptspec.drafters import b"),
        ("drafters/b.py", "def f():\n    from adaptspec.trees import a"),
    ):
        (package / path).parent.mkdir(parents=True)
        (package / path).write_text(code)
    assert import_cycle(package) is None
    (package / "drafters/b.py").write_text("from adaptspec.trees import a")
    assert set(import_cycle(package) or []) == {"trees", "drafters"}


@pytest.mark.parametrize("module", ["adaptspec", *(f"adaptspec.{part}" for part in sorted(NUMPY_ONLY))])
def test_importing_what_decides_leaves_heavy_libraries_out(module: str) -> None:
    heavy = "{'torch', 'transformers', 'scipy', 'triton', 'accelerate', 'safetensors', 'matplotlib', 'rich', 'typer'}"
    code = f"import {module}, sys; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_every_export_is_what_it_says() -> None:
    assert adaptspec.__all__ == sorted(adaptspec._MODULE_OF)
    for name, module in adaptspec._MODULE_OF.items():
        value = getattr(adaptspec, name)
        assert (value.__name__, value.__module__) == (name, module)
        assert name in dir(adaptspec)
    for name in adaptspec._SUBMODULES:
        assert getattr(adaptspec, name).__name__ == f"adaptspec.{name}"


def test_exports_for_type_checkers_are_the_same() -> None:
    found = {
        alias.name: node.module
        for node, kind in _walk(ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")), "top")
        if kind == "typing" and isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert found == adaptspec._MODULE_OF


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'adaptspec' has no attribute 'Adaptivespec'"):
        adaptspec.Adaptivespec  # noqa: B018
