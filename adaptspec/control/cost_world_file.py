"""Costs of a replay as a JSON file, written by hand or by `CostModel.save_profile`.

By hand, all times in seconds; whatever is left out is as recorded with the trace:

    {"verify": [[0, 0.037], [63, 0.060]],
     "draft": {"suffix": 0.0003, "eagle3": [[8, 0.010], [32, 0.022]]},
     "overhead": 0.0005,
     "prefill_per_token": 0.001,
     "catch_up_per_token": {"eagle3": 0.002},
     "noise": 0.1,
     "changes": [{"from_token": 5000, "factor": 2.0},
                 {"from_token": 9000, "verify": [[0, 0.030], [64, 0.670]]}]}

Curves are pairs of draft nodes (or a budget) and seconds, linear in between; the last two give the slope beyond.
"verify" may hold a curve per context instead: {"1024": [[0, 0.037], ...], "8192": [...]}, for up to so many committed
tokens. Each of the "changes" begins when so many tokens of the stream are out, and changes what the file's costs are at
the start of the stream: its own "verify", "draft" and so on take their place, and "factor" slows everything down.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from adaptspec.control.cost_cell import check_seconds
from adaptspec.control.cost_curve import MAX_NODES
from adaptspec.control.cost_worlds import CostPhases, Costs, StepCosts, recorded_costs
from adaptspec.names import unknown_name

_PARTS = ("verify", "draft", "overhead", "prefill_per_token", "catch_up_per_token", "noise")


def read_costs(path: str | os.PathLike[str], recorded: StepCosts) -> Costs:
    """The costs in a file; what it leaves out is as `recorded`.

    Raises:
        ValueError: not such a file, with the field, the value and what is allowed.
        OSError: it cannot be read.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, Mapping) and "fingerprint" in content:
            return _of_profile(content, recorded)
        return _of_file(content, recorded)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a file of costs: not readable as JSON ({error})") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a file of costs: {error}") from error


def _of_profile(content: Mapping[str, Any], recorded: StepCosts) -> StepCosts:
    measured = recorded_costs(content.get("state", {}))
    return replace(
        measured,
        draft={**recorded.draft, **measured.draft},
        catch_up_per_token={**recorded.catch_up_per_token, **measured.catch_up_per_token},
    )


def _of_file(content: Any, recorded: StepCosts) -> Costs:
    fields = _fields(content, (*_PARTS, "changes"), what="the file")
    start = _with(recorded, fields)
    changes = fields.get("changes", [])
    if not isinstance(changes, list):
        raise ValueError(f"changes must be a list, got {changes!r:.80}")
    phases = [(0, start)]
    for change in changes:
        parts = _fields(change, (*_PARTS, "from_token", "factor"), what="a change")
        token = parts.get("from_token")
        if isinstance(token, bool) or not isinstance(token, int) or token < 1:
            raise ValueError(f"from_token must be a whole number >= 1, got {token!r}")
        factor = parts.get("factor", 1.0)
        if isinstance(factor, bool) or not isinstance(factor, int | float):
            raise ValueError(f"factor must be a number > 0, got {factor!r}")
        phases.append((token, _with(start, parts).scaled(float(factor))))
    return start if len(phases) == 1 else CostPhases(tuple(phases))


def _with(costs: StepCosts, fields: Mapping[str, Any]) -> StepCosts:
    """`costs` with what the fields say."""
    changed: dict[str, Any] = {
        name: check_seconds(name, fields[name]) for name in ("overhead", "prefill_per_token", "noise") if name in fields
    }
    if "verify" in fields:
        changed |= _verify(fields["verify"])
    if "draft" in fields:
        draft = _mapping("draft", fields["draft"])
        seconds = {
            n: _curve(f"draft of {n}", v) if isinstance(v, list) else check_seconds(f"draft of {n}", v)
            for n, v in draft.items()
        }
        changed["draft"] = {**costs.draft, **seconds}
    if "catch_up_per_token" in fields:
        caught = _mapping("catch_up_per_token", fields["catch_up_per_token"])
        seconds = {name: check_seconds(f"catch_up_per_token of {name}", value) for name, value in caught.items()}
        changed["catch_up_per_token"] = {**costs.catch_up_per_token, **seconds}
    return replace(costs, **changed)


def _verify(value: Any) -> dict[str, Any]:
    """The fields `verify` and `contexts`."""
    if isinstance(value, list):
        return {"verify": _curve("verify", value), "contexts": (2**40,)}
    curves = _mapping("verify", value)
    for context in curves:
        if not (context.isdecimal() and int(context) > 0):
            raise ValueError(f"contexts of verify must be whole numbers > 0, got {context!r}")
    contexts = sorted(curves, key=int)
    verify = np.array([_curve(f"verify up to {context} tokens", curves[context]) for context in contexts])
    return {"verify": verify, "contexts": tuple(int(context) for context in contexts)}


def _curve(name: str, value: Any) -> np.ndarray:
    """float64 [MAX_NODES + 1] through pairs of nodes and seconds."""
    if not isinstance(value, list) or not value or not all(isinstance(p, list) and len(p) == 2 for p in value):
        raise ValueError(f"{name} must be a list of pairs [nodes, seconds], got {value!r:.80}")
    nodes = [pair[0] for pair in value]
    seconds = [check_seconds(name, pair[1]) for pair in value]
    for number in nodes:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MAX_NODES:
            raise ValueError(f"nodes of {name} must be whole numbers in [0, {MAX_NODES}], got {number!r}")
    if any(low >= high for low, high in pairwise(nodes)):
        raise ValueError(f"nodes of {name} must rise, got {nodes}")
    if any(low > high for low, high in pairwise(seconds)):
        raise ValueError(f"seconds of {name} must not fall, got {seconds}")
    sizes = np.arange(MAX_NODES + 1)
    curve = np.interp(sizes, nodes, seconds)
    if len(nodes) > 1:
        slope = (seconds[-1] - seconds[-2]) / (nodes[-1] - nodes[-2])
        curve[nodes[-1] :] = seconds[-1] + slope * (sizes[nodes[-1] :] - nodes[-1])
    return curve


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f"{name} must be an object that is not empty, got {value!r:.80}")
    return value


def _fields(content: Any, allowed: Collection[str], *, what: str) -> Mapping[str, Any]:
    if not isinstance(content, Mapping):
        raise ValueError(f"{what} must be a JSON object, got {content!r:.80}")
    for name in content:
        if name not in allowed:
            raise unknown_name(f"field of {what}", name, allowed)
    return content
