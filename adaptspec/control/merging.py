"""Adding up what the controllers of several replicas learnt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from adaptspec import bandits
from adaptspec.bandits.state import check_equal
from adaptspec.control.calibration import Calibrator
from adaptspec.control.cost import CostModel
from adaptspec.control.mixing import Mixer

State = Mapping[str, Any]


def merge_controllers(states: Sequence[State], *, base: State | None = None) -> dict[str, Any]:
    """One controller state with what all replicas learnt since `base` (None: since nothing).

    Policies, calibration counts and costs add up as their own merges say (`bandits.merge`, `Calibrator.merge`,
    `CostModel.merge`, `Mixer.merge`); running averages are averaged. Whatever belongs to one replica alone (a guard's
    balance, a survey under way, randomness) is the first state's, so a replica that gives its own state first can load
    the result.

    Args:
        states: `state_dict()` of controllers of the same strategy over the same arms or drafters.

    Raises:
        ValueError: no states, states that do not belong together, or a policy whose learnt state does not add up.
    """
    if not states:
        raise ValueError("states must hold at least one state, got none")
    own, *others = states
    if not own:
        raise ValueError("states must hold what was learnt; the first is of a strategy that learns nothing")
    for key in ("arms", "mode", "names"):
        for state in (*others, *([] if base is None else [base])):
            if state.get(key) != own.get(key):
                raise ValueError(f"states must agree on {key}, got {own.get(key)} and {state.get(key)}")
    parts = {"cost": CostModel.merge, "policy": _merge_policies, "mixer": Mixer.merge}
    merged = dict(own)
    for key, merge in parts.items():
        if own.get(key) is not None:
            merged[key] = merge([state[key] for state in states], base=None if base is None else base[key])
    merged["calibrators"] = {
        name: Calibrator.merge(
            [state["calibrators"][name] for state in states], base=None if base is None else base["calibrators"][name]
        )
        for name in own["calibrators"]
    }
    for key in ("rate", "expected_lengths", "gained", "judged", "added"):
        if key in own:
            merged[key] = np.mean([state[key] for state in states], axis=0).tolist()
    return merged


def _merge_policies(states: Sequence[State], *, base: State | None) -> dict[str, Any]:
    """The merged policy, inside the first one's wrappers (a guard's account is each replica's own)."""
    own = states[0]
    if not isinstance(own.get("learned"), Mapping) or "policy" not in own["learned"]:
        return bandits.merge(states, base=base)
    for state in (*states[1:], *([] if base is None else [base])):
        check_equal(state, "policy", own["policy"])
    inner = _merge_policies(
        [state["learned"]["policy"] for state in states], base=None if base is None else base["learned"]["policy"]
    )
    return {**own, "learned": {**own["learned"], "policy": inner}}
