"""Compile every kernel for the GPUs we care about, on a machine that needs none: registers, spills, shared memory.

    python -m adaptspec.kernels.ahead_of_time                         print the table
    python -m adaptspec.kernels.ahead_of_time --check docs/kernels.json   and compare it with the committed one
    python -m adaptspec.kernels.ahead_of_time --write docs/kernels.json   and replace the committed one

Each op lists its kernels as `SPECIALISATIONS` in `<op>/triton.py`. The time in the table is not measured: it is the
roofline at the vendor's peak figures, max(bytes moved / peak bandwidth, operations / peak dense bf16 rate).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adaptspec.kernels.backend import operations
from adaptspec.names import unknown_name

WRITE_COMMAND = "python -m adaptspec.kernels.ahead_of_time --write docs/kernels.json"
_SECONDS = 900


@dataclass(frozen=True, slots=True, kw_only=True)
class Specialisation:
    """One kernel with the types and compile-time constants it has at a decode shape.

    Attributes:
        name: unique in the table, "<op>/<kernel> <what is special>".
        kernel: the `triton.jit` function.
        signature: Triton type of every argument that is not a compile-time constant, in order: "*bf16", "i32", ...
        constexprs: the compile-time constants.
        num_warps, num_stages: launch options, as the op launches it.
        shape: the decode shape that the next two figures are for, in words.
        bytes_moved: bytes that have to be read and written at least.
        flops: floating-point operations in matrix products, 0 without.
        aligned: numbers that are multiples of 16, which lets the compiler vectorise; all pointers are taken to be.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int
    shape: str
    bytes_moved: int
    flops: int = 0
    aligned: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Gpu:
    """A compilation target and the peak figures its vendor names.

    Attributes:
        shared_limit: bytes of shared memory (LDS) that one block may use.
        bandwidth: peak bytes per second of device memory.
        rate: peak dense bf16 operations per second.
    """

    name: str
    product: str
    backend: str
    architecture: int | str
    warp_size: int
    shared_limit: int
    bandwidth: float
    rate: float

    def roofline_seconds(self, bytes_moved: int, flops: int) -> float:
        """The least time that memory and arithmetic allow."""
        return max(bytes_moved / self.bandwidth, flops / self.rate)


GPUS = (
    Gpu("sm_80", "A100", "cuda", 80, 32, 163 << 10, 2.0e12, 312e12),
    Gpu("sm_90", "H100", "cuda", 90, 32, 227 << 10, 3.35e12, 989e12),
    Gpu("sm_100", "B200", "cuda", 100, 32, 227 << 10, 8.0e12, 2250e12),
    Gpu("gfx942", "MI300X", "hip", "gfx942", 64, 64 << 10, 5.3e12, 1307e12),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel on one GPU. `registers` and `spilled_bytes` are per thread, `shared_bytes` per block."""

    kernel: str
    gpu: str
    warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    roofline_microseconds: float

    def problems(self) -> list[str]:
        """What makes this kernel unfit for the GPU."""
        limit = find_gpu(self.gpu).shared_limit
        found = []
        if self.spilled_bytes:
            found.append(f"{self.kernel} on {self.gpu} spills {self.spilled_bytes} bytes per thread")
        if self.shared_bytes > limit:
            found.append(
                f"{self.kernel} on {self.gpu} takes {self.shared_bytes} bytes of shared memory, allowed are {limit}"
            )
        return found


@dataclass(frozen=True, slots=True)
class Table:
    """What a version of Triton makes of all kernels."""

    triton: str
    rows: tuple[Row, ...]

    def to_json(self) -> str:
        """One row per line, so that a change is a readable diff."""
        rows = ",\n".join("  " + json.dumps(asdict(row)) for row in self.rows)
        return f'{{"triton": {json.dumps(self.triton)}, "rows": [\n{rows}\n]}}\n'

    @classmethod
    def from_json(cls, text: str) -> Table:
        data = json.loads(text)
        return cls(data["triton"], tuple(Row(**row) for row in data["rows"]))

    def differences(self, committed: Table) -> list[str]:
        """What the committed table says otherwise, nothing tolerated. Another Triton makes other code: regenerate."""
        if self.triton != committed.triton:
            return [
                f"the committed table is of triton {committed.triton}, installed is {self.triton}: "
                f"regenerate it with {WRITE_COMMAND}"
            ]
        new = {(row.kernel, row.gpu): row for row in self.rows}
        old = {(row.kernel, row.gpu): row for row in committed.rows}
        found = [f"{kernel} on {gpu} is not in the committed table" for kernel, gpu in new if (kernel, gpu) not in old]
        found += [f"{kernel} on {gpu} is committed but not compiled" for kernel, gpu in old if (kernel, gpu) not in new]
        for key in new.keys() & old.keys():
            if new[key] != old[key]:
                found.append(f"compiled {new[key]}, committed {old[key]}")
        return sorted(found)


def compile_all(ops: Sequence[str] | None = None, gpus: Sequence[str] | None = None) -> Table:
    """Compile the specialisations of `ops` for `gpus` (default: all), one process per GPU.

    The processes run without `TRITON_INTERPRET`, whatever this one does.

    Raises:
        ValueError: unknown op or GPU.
        RuntimeError: a kernel does not compile, with the compiler's words.
    """
    names = list(gpus or (gpu.name for gpu in GPUS))
    for name in names:
        find_gpu(name)
    for op in ops or ():
        if op not in operations():
            raise unknown_name("kernel", op, operations())
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(Path(__file__).parents[2]), environment.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)

    def work(gpu: str) -> Table:
        command = [sys.executable, "-m", "adaptspec.kernels.ahead_of_time", "--worker", gpu, *(ops or ())]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS)
        if result.returncode:
            raise RuntimeError(f"compilation for {gpu} failed:\n{result.stderr[-4000:]}")
        return Table.from_json(result.stdout)

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        tables = list(pool.map(work, names))
    return Table(tables[0].triton, tuple(row for table in tables for row in table.rows))


def compile_kernel(specialisation: Specialisation, gpu: Gpu) -> Any:
    """Compile in this process, which must not run the interpreter; `asm` of the result holds every stage."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = specialisation.kernel.arg_names
    source = ASTSource(
        fn=specialisation.kernel,
        signature={name: specialisation.signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in specialisation.constexprs.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if specialisation.signature.get(name, "").startswith("*") or name in specialisation.aligned
        },
    )
    return triton.compile(
        source,
        target=GPUTarget(gpu.backend, gpu.architecture, gpu.warp_size),
        options={"num_warps": specialisation.num_warps, "num_stages": specialisation.num_stages},
    )


def measure(specialisation: Specialisation, gpu: Gpu) -> Row:
    """Compile and read what the kernel needs."""
    compiled = compile_kernel(specialisation, gpu)
    registers, spilled = (_cuda_usage if gpu.backend == "cuda" else _hip_usage)(compiled.asm)
    seconds = gpu.roofline_seconds(specialisation.bytes_moved, specialisation.flops)
    return Row(
        kernel=specialisation.name,
        gpu=gpu.name,
        warps=specialisation.num_warps,
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=compiled.metadata.shared,
        roofline_microseconds=round(seconds * 1e6, 2),
    )


def specialisations(ops: Sequence[str] | None = None) -> list[Specialisation]:
    """Those of the given ops, default all. Imports triton."""
    found: list[Specialisation] = []
    for op in ops or operations():
        found += importlib.import_module(f"adaptspec.kernels.{op}.triton").SPECIALISATIONS
    names = [specialisation.name for specialisation in found]
    assert len(set(names)) == len(names), "names of specialisations are unique"
    return found


def _cuda_usage(asm: Mapping[str, Any]) -> tuple[int, int]:
    """Registers and stack bytes per thread; our kernels have no local arrays, so a stack is a spill."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def _hip_usage(asm: Mapping[str, Any]) -> tuple[int, int]:
    """Vector registers and scratch bytes per thread."""
    usage = dict(re.findall(r"^ +\.(vgpr_count|private_segment_fixed_size): +(\d+)", asm["amdgcn"], re.MULTILINE))
    return int(usage["vgpr_count"]), int(usage["private_segment_fixed_size"])


def find_gpu(name: str) -> Gpu:
    """The target called `name`.

    Raises:
        ValueError: there is none.
    """
    for gpu in GPUS:
        if gpu.name == name:
            return gpu
    raise unknown_name("GPU", name, [gpu.name for gpu in GPUS])


def format_table(table: Table, shapes: Mapping[str, str]) -> str:
    """The table for people."""
    lines = [
        f"{'kernel':<46} {'GPU':<16} {'warps':>5} {'registers':>9} {'spilled':>7} {'shared':>7} {'roofline us':>11}"
    ]
    products = {gpu.name: f"{gpu.name} {gpu.product}" for gpu in GPUS}
    for row in sorted(table.rows, key=lambda row: row.kernel):
        lines.append(
            f"{row.kernel:<46} {products[row.gpu]:<16} {row.warps:>5} {row.registers:>9} {row.spilled_bytes:>7} "
            f"{row.shared_bytes:>7} {row.roofline_microseconds:>11.2f}"
        )
    peaks = ", ".join(f"{gpu.product} {gpu.bandwidth / 1e12:g} TB/s and {gpu.rate / 1e12:g} TFLOP/s" for gpu in GPUS)
    lines += ["", f"triton {table.triton}. Rooflines are estimates at the vendors' peak figures ({peaks}) for:"]
    lines += [f"  {name}: {shape}" for name, shape in sorted(shapes.items())]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m adaptspec.kernels.ahead_of_time", description=__doc__)
    parser.add_argument("ops", nargs="*", help="default: all")
    parser.add_argument("--check", type=Path, metavar="FILE", help="fail if the table in FILE is another")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table to FILE")
    parser.add_argument("--worker", metavar="GPU", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker is not None:
        import triton

        rows = [measure(each, find_gpu(options.worker)) for each in specialisations(options.ops)]
        print(Table(triton.__version__, tuple(rows)).to_json())
        return 0
    if options.ops and (options.write or options.check):
        parser.error("--check and --write are about the table of all ops: name none")
    table = compile_all(options.ops)
    shapes = {each.name: each.shape for each in specialisations(options.ops)}
    print(format_table(table, shapes))
    problems = [problem for row in table.rows for problem in row.problems()]
    if options.check is not None:
        problems += table.differences(Table.from_json(options.check.read_text(encoding="utf-8")))
    for problem in problems:
        print(problem, file=sys.stderr)
    if options.write is not None:
        options.write.write_text(table.to_json(), encoding="utf-8")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
