"""Everything that only a GPU can show, on any CUDA device, in a few minutes:

    python benchmarks/gpu_check.py --out h100.json

values      the four kernels against their references
speed       the same beside plain torch, and as a share of the memory's bandwidth
graphs      CUDA graphs of all tiers, what changing them costs, on a random Llama of 1B shape
generation  AdaptiveSpec beside no speculation on the same model, with identical tokens in float32

Writes one JSON file and prints it. Each section runs in a process of its own: one that fails is recorded with its error
and the others still run. Exit status: 0 all well, 1 something failed or is wrong, 2 no CUDA device or bad arguments.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also found without being installed

import torch  # noqa: E402

from benchmarks.gpu_check_model import check_generation, check_graphs  # noqa: E402
from benchmarks.gpu_check_setting import Setting, measure_copy_bandwidth, peak_bandwidth  # noqa: E402
from benchmarks.gpu_check_speed import check_speed  # noqa: E402
from benchmarks.gpu_check_values import check_values  # noqa: E402

SECTIONS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "values": check_values,
    "speed": check_speed,
    "graphs": check_graphs,
    "generation": check_generation,
}

SECONDS_PER_SECTION = 150
"""A section that takes longer hangs."""

RunSection = Callable[[str], dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: gpu_check_<device>_<time>.json here")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="default: %(default)s")
    parser.add_argument("--child", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--peak", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    sections = options.sections.split(",")
    if unknown := [name for name in sections if name not in SECTIONS]:
        parser.error(f"unknown section {unknown[0]!r}; valid: {', '.join(SECTIONS)}")
    if options.out is not None and options.child is None and options.out.exists():
        parser.error(f"{options.out} exists already; results are never overwritten")
    if not torch.cuda.is_available():
        print("gpu_check: no CUDA device; nothing was checked", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    if options.child is not None:
        setting = Setting(device, "triton", options.peak)
        options.out.write_text(json.dumps(SECTIONS[options.child](setting)), encoding="utf-8")
        return 0
    found = describe_device(device)
    result = collect(sections, found, run=lambda name: run_child(name, peak=found["bandwidth"]))
    result = {"provenance": describe_run(arguments, device), **result}
    path = options.out or default_path(found["name"])
    text = json.dumps(result, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
    print(text)
    print(summary(result), file=sys.stderr)
    print(f"written to {path}", file=sys.stderr)
    return 0 if result["ok"] else 1


def collect(sections: Sequence[str], device: dict[str, Any], *, run: RunSection) -> dict[str, Any]:
    """Run the sections one after the other. `ok` only if each of them ran and found nothing wrong."""
    started = perf_counter()
    results = {}
    for name in sections:
        section_started = perf_counter()
        section = run(name)
        results[name] = {**section, "seconds": round(perf_counter() - section_started, 1)}
    return {
        "ok": all(section["ok"] for section in results.values()),
        "device": device,
        "sections": results,
        "seconds": round(perf_counter() - started, 1),
    }


def run_child(name: str, *, peak: float, script: Path = Path(__file__), seconds: float = SECONDS_PER_SECTION) -> Any:
    """The section's result from a process of its own: an illegal access would poison this one for all others."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "section.json"
        command = [sys.executable, str(script), "--child", name, "--peak", str(peak), "--out", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"ok": False, "error": f"took longer than {seconds} seconds"}
        if done.returncode or not path.is_file():
            lines = done.stderr.strip().splitlines() or ["no message"]
            return {"ok": False, "error": f"exit status {done.returncode}: {lines[-1]}", "stderr": lines[-40:]}
        return json.loads(path.read_text(encoding="utf-8"))


def describe_device(device: torch.device) -> dict[str, Any]:
    """Name and sizes; `bandwidth` is the vendor's figure, or what a large copy reaches if the device is not known."""
    properties = torch.cuda.get_device_properties(device)
    copied = measure_copy_bandwidth(device)
    named = peak_bandwidth(properties.name)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "bandwidth": named or copied,
        "bandwidth_is": "the vendor's" if named else "that of a copy",
        "copy_bandwidth": copied,
    }


def describe_run(arguments: Sequence[str] | None, device: torch.device) -> dict[str, Any]:
    """Commit, versions, date and command line."""
    import triton

    from adaptspec.cli.provenance import provenance

    given = list(sys.argv[1:] if arguments is None else arguments)
    found = provenance(argv=given, model="random Llama of 1B shape", device=device, dtype="several", seed=0)
    found["argv"] = ["benchmarks/gpu_check.py", *given]
    found["versions"] |= {"triton": triton.__version__, "cuda": torch.version.cuda or torch.version.hip}
    return found


def default_path(device_name: str) -> Path:
    """A new file in the current folder."""
    slug = re.sub(r"[^A-Za-z0-9]+", "-", device_name).strip("-").lower()
    return Path(f"gpu_check_{slug}_{datetime.now(UTC):%Y%m%d-%H%M%S}.json")


def summary(result: dict[str, Any]) -> str:
    """A few lines for people."""
    device = result["device"]
    lines = [f"{device['name']}, {device['bandwidth'] / 1e9:.0f} GB/s ({device['bandwidth_is']})"]
    for name, section in result["sections"].items():
        lines.append(f"{name:11s} {'ok' if section['ok'] else 'FAILED':7s} {section['seconds']:6.1f} s")
        if "error" in section:
            lines.append(f"    {section['error']}")
        for case in section.get("cases", ()):
            if not case["ok"]:
                lines.append(f"    wrong: {case['op']}, {case['case']}: {case['error']:.3g} of what is tolerated")
        for line in section.get("lines", ()):
            if "share_of_peak" in line:
                share = f"{100 * line['share_of_peak']:3.0f} % of peak"
                beside = f", {line['times_torch']:.2f} times torch" if "times_torch" in line else ""
                lines.append(f"    {line['op']:15s} {line['cold_us']:8.1f} us, {share}{beside}  ({line['shape']})")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
