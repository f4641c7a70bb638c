"""Kernels are run by Triton's interpreter, in a pytest process of their own: triton reads `TRITON_INTERPRET` once.

`interpreter/test_<op>.py` is collected only there; `test_<op>.py` starts that process with `run_interpreted`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 900  # two such processes may share two cores with other tests

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreter"]


@pytest.fixture
def run_interpreted() -> Callable[..., None]:
    """`run_interpreted("test_<op>.py", at_least=20)` runs a file of `interpreter/`: at least so many tests must pass,
    none fail and none be skipped."""

    def run(file: str, *, at_least: int) -> None:
        path = Path(__file__).parent / "interpreter" / file
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(path)]
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        environment.pop("ADAPTSPEC_KERNELS", None)
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)
        assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
        summary = result.stdout.strip().splitlines()[-1]
        counts = {word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", summary)}
        assert counts.get("passed", 0) >= at_least, f"only {summary!r}, expected at least {at_least} tests"
        assert set(counts) <= {"passed", "warning", "warnings"}, summary

    return run
