"""What a forward pass takes on other hardware, from public measurements: `experiments/hardware_profiles/*.json`.

Every number in a profile stands beside its source. A GPU's profile holds two measured rates of one model and program:
decoding one request (bound by memory) and reading a prompt (bound by arithmetic). A pass over `rows` tokens of `batch`
requests takes, by the roofline of these two,

    seconds = max(weights + batch * context * kv_bytes_per_token, in bytes, / bandwidth, rows / prefill rate)

where bandwidth = weight bytes * decode rate is what decoding was measured to reach. A CPU's profile holds measured
seconds by rows instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from adaptspec.control.cost import MAX_NODES
from adaptspec.control.cost_worlds import StepCosts
from adaptspec.names import unknown_name

FOLDER = Path(__file__).parent / "hardware_profiles"

_GPU = (
    *("decode_tokens_per_second", "prefill_tokens_per_second"),
    *("weight_bytes", "kv_bytes_per_token", "context", "host_threads"),
)
_CPU = ("rows_seconds", "host_threads")


@dataclass(frozen=True, slots=True)
class Hardware:
    """A profile.

    Attributes:
        name, title, model: of the profile, for people, and what was measured with.
        values: by field.
        sources: by field, where the value is from.
    """

    name: str
    title: str
    model: str
    values: Mapping[str, Any]
    sources: Mapping[str, str]

    def seconds(self, rows: np.ndarray, *, batch: np.ndarray | int) -> np.ndarray:
        """Seconds of passes over so many rows (tokens) of so many requests, elementwise."""
        values = self.values
        rows = np.asarray(rows, dtype=np.float64)
        if "rows_seconds" in values:
            known, seconds = np.array(values["rows_seconds"], dtype=np.float64).T
            slope = (seconds[-1] - seconds[-2]) / (known[-1] - known[-2])
            return np.interp(rows, known, seconds) + slope * np.maximum(rows - known[-1], 0.0)
        bandwidth = values["weight_bytes"] * values["decode_tokens_per_second"]
        moved = values["weight_bytes"] + np.asarray(batch) * values["context"] * values["kv_bytes_per_token"]
        return np.maximum(moved / bandwidth, rows / values["prefill_tokens_per_second"])

    def draft_seconds(self, per_request: np.ndarray | float, *, batch: int) -> np.ndarray:
        """Seconds in which `batch` requests are drafted for, each of which takes one thread of the host so long."""
        return np.asarray(per_request) * -(-batch // int(self.values["host_threads"]))


def hardware_names() -> tuple[str, ...]:
    """Of the profiles in the project."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def find_hardware(name: str) -> Hardware:
    """A profile of the project by name, or any by the path of its file.

    Raises:
        ValueError: no such profile, or a damaged one.
    """
    path = Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
    if not path.is_file():
        raise unknown_name("hardware", name, hardware_names())
    return parse_hardware(json.loads(path.read_text(encoding="utf-8")), where=str(path))


def parse_hardware(content: Mapping[str, Any], *, where: str = "profile") -> Hardware:
    """A profile from its JSON.

    Raises:
        ValueError: a field is missing, unknown, not positive, or without a source.
    """
    fields = _CPU if "rows_seconds" in content else _GPU
    known = {"name", "title", "model", "note", *fields}
    for name in content:
        if name not in known:
            raise unknown_name(f"field of {where}", name, known)
    for name in ("name", "title", "model", *fields):
        if name not in content:
            raise ValueError(f"{where}: the field {name!r} is missing")
    values, sources = {}, {}
    for name in fields:
        entry = content[name]
        if not isinstance(entry, Mapping) or not str(entry.get("source", "")).strip() or "value" not in entry:
            raise ValueError(f"{where}: {name} must have a value and its source, got {entry!r:.80}")
        if not (np.asarray(entry["value"], dtype=np.float64) > 0.0).all():
            raise ValueError(f"{where}: {name} must be > 0, got {entry['value']!r:.80}")
        values[name], sources[name] = entry["value"], str(entry["source"])
    return Hardware(content["name"], content["title"], content["model"], values, sources)


def batch_costs(hardware: Hardware, batch: int, recorded: StepCosts) -> StepCosts:
    """Costs of a step in which `batch` requests verify trees of the same size; drafting as recorded, on the host.

    Raises:
        ValueError: no request.
    """
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise ValueError(f"batch must be a whole number >= 1, got {batch!r}")
    curve = hardware.seconds(batch * (np.arange(MAX_NODES + 1) + 1), batch=batch)
    draft = {
        name: hardware.draft_seconds(seconds, batch=batch)
        if isinstance(seconds, np.ndarray)
        else float(hardware.draft_seconds(seconds, batch=batch))
        for name, seconds in recorded.draft.items()
    }
    return replace(recorded, verify=curve, contexts=(2**40,), draft=draft, overhead=0.0, catch_up_per_token={})
