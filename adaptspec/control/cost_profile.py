"""Measured costs as a JSON file that says on which machine and with which model they were measured."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adaptspec.bandits.state import check_equal
from adaptspec.control.cost_cell import check_fields
from adaptspec.files import whole_file

PROFILE_VERSION = 1


def fingerprint(*, device: str, dtype: str, model: str, versions: Mapping[str, str]) -> str:
    """What costs depend on, as one line of text: costs with another fingerprint say little about this machine.

    >>> fingerprint(device="cpu", dtype="float32", model="tiny", versions={"torch": "2.13", "adaptspec": "0.1"})
    'device=cpu; dtype=float32; model=tiny; adaptspec=0.1; torch=2.13'
    """
    parts = {"device": device, "dtype": dtype, "model": model, **dict(sorted(versions.items()))}
    for name, value in parts.items():
        if not isinstance(value, str) or not value or "; " in value:
            raise ValueError(f"{name} must be text that is not empty and without '; ', got {value!r}")
    return "; ".join(f"{name}={value}" for name, value in parts.items())


def write_profile(path: str | os.PathLike[str], *, fingerprint: str, state: Mapping[str, Any]) -> None:
    """Write at once or not at all; a profile with another fingerprint is never overwritten.

    Raises:
        ValueError: `path` holds something else than a profile with this fingerprint.
    """
    path = Path(path)
    if path.exists():
        found, _ = _read(path)
        _check_same(path, found=found, expected=fingerprint, remedy="give another path")
    profile = {"version": PROFILE_VERSION, "fingerprint": fingerprint, "state": state}
    text = json.dumps(profile, allow_nan=False)
    with whole_file(path) as file:
        file.write(text.encode())


def read_profile(path: str | os.PathLike[str], *, fingerprint: str, foreign: bool = False) -> Mapping[str, Any]:
    """The state in a profile.

    Raises:
        ValueError: damaged, of another version, or measured elsewhere and not `foreign`.
    """
    path = Path(path)
    found, state = _read(path)
    if not foreign:
        _check_same(path, found=found, expected=fingerprint, remedy="measure here, or pass foreign=True for its shape")
    return state


def _read(path: Path) -> tuple[str, Mapping[str, Any]]:
    try:
        profile = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a cost profile: not readable as JSON ({error})") from error
    try:
        check_fields(profile, ("version", "fingerprint", "state"), what="a cost profile")
        check_equal(profile, "version", PROFILE_VERSION)
    except ValueError as error:
        raise ValueError(f"{path} is not a cost profile: {error}") from error
    if not isinstance(profile["fingerprint"], str) or not isinstance(profile["state"], Mapping):
        raise ValueError(f"{path} is not a cost profile: fingerprint must be text and state a mapping")
    return profile["fingerprint"], profile["state"]


def _check_same(path: Path, *, found: str, expected: str, remedy: str) -> None:
    if found != expected:
        here, there = expected.split("; "), found.split("; ")
        only_there = "; ".join(part for part in there if part not in here) or "nothing else"
        only_here = "; ".join(part for part in here if part not in there) or "nothing else"
        raise ValueError(f"{path} was measured with {only_there}, here it is {only_here}: {remedy}")
