"""Whether a compiled kernel multiplies strides in 64 bits, read from its Triton IR. No GPU and no memory needed."""

from __future__ import annotations

import re
from typing import Any

from adaptspec.kernels.ahead_of_time import Specialisation, compile_kernel, find_gpu


def narrow_strides(specialisation: Specialisation) -> list[str]:
    """Lines of the IR that use an argument called `stride` or `<something>_stride` before it is widened."""
    compiled: Any = compile_kernel(specialisation, find_gpu("sm_90"))
    uses = re.compile(r"%(\w+_)?stride\b")
    lines = [line.strip() for line in compiled.asm["ttir"].splitlines() if uses.search(line) and "tt.func" not in line]
    return [line for line in lines if "arith.extsi" not in line]


def has_strides(specialisation: Specialisation) -> bool:
    """Whether there is something to look for."""
    return any(re.fullmatch(r"(\w+_)?stride", name) for name in specialisation.signature)
