"""Whether a compiled kernel computes addresses in 64 bits, read from its Triton IR. No GPU and no memory needed."""

from __future__ import annotations

import re
from typing import Any

from adaptspec.kernels.ahead_of_time import Specialisation, compile_kernel, find_gpu


def narrow_addresses(specialisation: Specialisation, *, data: str) -> list[str]:
    """Lines of the IR in which a stride is multiplied in 32 bits, or a pointer to `data` (a pattern of element types)
    is moved by a 32-bit offset."""
    compiled: Any = compile_kernel(specialisation, find_gpu("sm_90"))
    strides = [name for name in specialisation.signature if re.search(r"_[a-z]$", name)]
    assert strides or "merge" in specialisation.name, "strides are recognised by their names"
    uses = re.compile(rf"%({'|'.join(strides)})\b") if strides else re.compile(r"(?!)")
    moves = re.compile(rf"tt\.addptr .*!tt\.ptr<({data})>+, (i32|tensor<.*xi32>)")
    return [
        line.strip()
        for line in compiled.asm["ttir"].splitlines()
        if "tt.func" not in line and (moves.search(line) or (uses.search(line) and "arith.extsi" not in line))
    ]
