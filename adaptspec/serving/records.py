"""One line per step: flat attributes of plain values, as OpenTelemetry wants them, fit for JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from adaptspec.serving.types import Decision, StepOutcome

PREFIX = "adaptspec."

Attribute = str | bool | int | float | list[str] | list[int]


def step_attributes(
    decision: Decision, outcome: StepOutcome | None = None, *, tokens: int | None = None
) -> dict[str, Attribute]:
    """What was decided, and what came of it if that is known, for a span or a log line.

    Missing values are left out, since attributes have no null. `adaptspec.accepted` does not count bonus tokens.

    Args:
        tokens: emitted by all rows, bonus tokens counted; becomes `adaptspec.tokens`.
    """
    rows = np.bincount(decision.arms[decision.lengths > 0]).tolist()
    attributes: dict[str, Attribute] = {
        "step": decision.step_id,
        "plan": decision.plan,
        "reason": decision.reason,
        "propensity": float(decision.propensity),
        "rows": len(decision),
        "drafting_rows": sum(rows),
        "asked": int(decision.lengths.sum()),
        "arms": [decision.names[arm] for arm, count in enumerate(rows) if count],
        "arm_rows": [count for count in rows if count],
        "digest": decision.digest,
    }
    if decision.refresh:
        attributes["refresh"] = list(decision.refresh)
    if decision.expected_tokens is not None:
        attributes["expected_tokens"] = float(decision.expected_tokens)
    if decision.expected_seconds is not None:
        attributes["expected_seconds"] = float(decision.expected_seconds)
    if tokens is not None:
        attributes["tokens"] = int(tokens)
    if outcome is not None:
        for name in ("proposed", "verified", "accepted"):
            attributes[name] = int(getattr(outcome, name).sum())
        if (seconds := outcome.wall_seconds) is not None:
            attributes["seconds"] = float(seconds)
        attributes["draft_seconds"] = float(sum(outcome.draft_seconds.values()))
        attributes["policy_seconds"] = float(outcome.policy_seconds)
    return {PREFIX + name: value for name, value in attributes.items()}


def write_records(path: str | os.PathLike[str], records: Iterable[Mapping[str, Any]]) -> Path:
    """Append records to a file, one JSON object per line."""
    file = Path(path)
    with file.open("a", encoding="utf-8") as lines:
        for record in records:
            lines.write(json.dumps(dict(record)) + "\n")
    return file


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """What `write_records` wrote.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line that is no JSON object.
    """
    records = []
    text = Path(path).read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: line {number} is no step record: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}: line {number} must be a JSON object, got {type(record).__name__}")
        records.append(record)
    return records
