"""Adding up what the policies of several replicas learnt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from adaptspec.control.cost_cell import CostCell, merge_cells

State = Mapping[str, Any]


def merge_states(states: Sequence[State], *, base: State | None = None) -> dict[str, Any]:
    """One state with what all replicas learnt since `base` (None: since nothing).

    Counts of acceptance add up; costs are averaged by how often each replica measured them. What belongs to one replica
    alone (requests, the guard's account, the strategy, randomness) is the first state's, so that a replica that gives
    its own state first can load the result.

    Args:
        states: `ServingPolicy.state_dict()` of policies with equal arms.

    Raises:
        ValueError: no states, or policies with different arms.
    """
    if not states:
        raise ValueError("states must hold at least one state, got none")
    every = [*states, *([] if base is None else [base])]
    for state in every:
        if not isinstance(state, Mapping) or not {"arms", "acceptance", "seconds"} <= state.keys():
            raise ValueError(f"states must be those of serving policies, got {state!r:.80}")
        if state["arms"] != states[0]["arms"]:
            raise ValueError(f"states must agree on arms, got {states[0]['arms']} and {state['arms']}")
    merged = dict(states[0])
    merged["acceptance"] = _add([state["acceptance"] for state in states], None if base is None else base["acceptance"])
    merged["seconds"] = _average([state["seconds"] for state in states], None if base is None else base["seconds"])
    return merged


def _add(states: Sequence[State], base: State | None) -> dict[str, Any]:
    merged = {}
    for name in states[0]:
        start = np.zeros_like(np.array(states[0][name], float)) if base is None else np.array(base[name], float)
        total = start + sum(np.array(state[name], float) - start for state in states)
        merged[name] = np.maximum(total, 0.0).tolist()
    return merged


def _average(states: Sequence[State], base: State | None) -> dict[str, Any]:
    merged = dict(states[0])
    for name in ("cells", "scales", "refresh"):
        found: dict[int, list[CostCell]] = {}
        for state in states:
            for key, cell in state[name]:
                found.setdefault(key, []).append(CostCell.from_state(cell))
        start = {} if base is None else {key: CostCell.from_state(cell) for key, cell in base[name]}
        merged[name] = [[key, merge_cells(cells, base=start.get(key)).state_dict()] for key, cells in found.items()]
    overheads = [CostCell.from_state(state["overhead"]) for state in states if state["overhead"] is not None]
    if overheads:
        before = None if base is None or base["overhead"] is None else CostCell.from_state(base["overhead"])
        merged["overhead"] = merge_cells(overheads, base=before).state_dict()
    merged["moments"] = np.sum([state["moments"] for state in states], axis=0).tolist()
    merged["measured"] = np.sum([state["measured"] for state in states], axis=0).tolist()
    return merged
