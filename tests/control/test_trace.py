"""Traces in memory: trees in and out again, and everything that is impossible is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptspec.control.trace import Proposals, Trace
from adaptspec.types import DraftTree
from tests.control.trace_cases import example, traces, trees, with_proposals

COUNT = len(example().requests[0].proposals["copy"].token_ids)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(trees(nodes=6, evidence=("rank",)), max_size=5))
def test_trees_come_back_as_they_went_in(some: list[DraftTree]) -> None:
    proposals = Proposals.of(some)
    proposals.validate(positions=len(some), nodes=6)
    assert proposals.sizes().tolist() == [len(tree) for tree in some]
    for position, tree in enumerate(some):
        back = proposals.tree(position)
        assert back.state_bytes() == tree.state_bytes() and back.scores.tobytes() == tree.scores.tobytes()
        assert back.siblings == "deterministic"
        if len(tree):
            assert back.evidence["rank"].tobytes() == tree.evidence["rank"].tobytes()


def test_evidence_that_some_trees_lack_is_missing_there() -> None:
    with_count = DraftTree.chain([1, 2], [-1.0, -2.0], evidence={"count": np.array([4.0, 2.0])})
    proposals = Proposals.of([DraftTree.chain([3], [-1.0]), with_count, DraftTree.empty()])
    assert np.isnan(proposals.tree(0).evidence["count"]).tolist() == [True]
    assert proposals.tree(1).evidence["count"].tolist() == [4.0, 2.0]


def test_sampled_trees_are_refused() -> None:
    sampled = DraftTree.chain(
        [1], [-1.0], siblings="iid", draft_probs=np.full((1, 4), 0.25), draft_rows=np.array([0, -1])
    )
    with pytest.raises(ValueError, match="siblings of a traced tree must be 'deterministic', got 'iid'"):
        Proposals.of([sampled])


@settings(derandomize=True, deadline=None, max_examples=50)
@given(traces())
def test_possible_traces_pass(trace: Trace) -> None:
    trace.validate()


def changed(array: np.ndarray, place: int, value: float) -> np.ndarray:
    array = array.copy()
    array[place] = value
    return array


def arrays() -> Proposals:
    return example().requests[0].proposals["copy"]


WRONG_PROPOSALS: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": changed(arrays().token_ids, 1, -1)}, r"token_ids must be in \[0, 2\*\*31\), got -1 at node"),
    ({"token_ids": changed(arrays().token_ids, 1, 2**31)}, r"token_ids must be in \[0, 2\*\*31\), got 2147483648"),
    ({"token_ids": arrays().token_ids[:-1]}, "parents must be int64"),
    ({"token_ids": arrays().token_ids.astype(np.int32)}, "token_ids must be int64"),
    ({"parents": changed(arrays().parents, COUNT - 1, 7)}, r"parents must satisfy -1 <= parents\[i\] < i, got 7"),
    ({"parents": changed(arrays().parents, 0, 0)}, r"parents must satisfy .* got 0 at node 0 of position"),
    ({"parents": changed(arrays().parents, 0, -2)}, r"parents must satisfy .* got -2"),
    ({"parents": arrays().parents[1:]}, "parents must be int64"),
    ({"scores": changed(arrays().scores, 0, 0.5)}, "scores must be log-probabilities <= 0, got 0.5"),
    ({"scores": changed(arrays().scores, 0, np.nan)}, "scores must be log-probabilities <= 0, got nan"),
    ({"scores": arrays().scores.astype(np.float32)}, "scores must be float64"),
    ({"offsets": changed(arrays().offsets, 0, 1)}, "offsets must run from 0"),
    ({"offsets": changed(arrays().offsets, -1, COUNT + 1)}, "offsets must run from 0"),
    ({"offsets": changed(arrays().offsets, 4, COUNT)}, "offsets must run from 0 to .* and never decrease"),
    ({"offsets": arrays().offsets[:-1]}, r"offsets must be int64 \[9\]"),
    ({"evidence": {"count": arrays().scores[1:]}}, "evidence 'count' must be float64"),
    ({"evidence": {"": arrays().scores}}, "evidence must be named by texts"),
]


@pytest.mark.parametrize(("changes", "problem"), WRONG_PROPOSALS)
def test_impossible_proposals_are_named(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=f"request '81': drafter 'copy': {problem}"):
        with_proposals(example(), "copy", **changes).validate()


def test_twins_and_trees_beyond_the_budget_are_named() -> None:
    twins = Proposals.of([DraftTree(np.array([4, 4]), np.array([-1, -1]), np.array([-1.0, -1.0]))])
    with pytest.raises(ValueError, match="siblings must carry different tokens"):
        twins.validate(positions=1, nodes=2)
    cousins = Proposals.of([DraftTree(np.array([4, 4, 4]), np.array([-1, 0, 1]), np.zeros(3)), DraftTree.chain([4])])
    cousins.validate(positions=2, nodes=3)
    with pytest.raises(ValueError, match="a tree may have at most 2 nodes, got 3 at position 0"):
        cousins.validate(positions=2, nodes=2)


WRONG_TRACES: list[tuple[dict[str, Any], str]] = [
    ({"nodes": {}}, "nodes must name at least one drafter"),
    ({"nodes": {"copy": 8, "": 4}}, "nodes must be by the names of drafters, got ''"),
    (
        {"nodes": {"copy": 8, "mute": 2**15}},
        r"nodes of drafter 'mute' must be a whole number in \[1, 32767\], got 32768",
    ),
    ({"nodes": {"copy": 8, "mute": 0}}, "nodes of drafter 'mute' must be a whole number .* got 0"),
    ({"nodes": {"copy": 8}}, "request '81': proposals must be of the drafters copy, got copy, mute"),
    ({"max_new_tokens": 8}, "request '81': tokens must be 1 to max_new_tokens = 8 tokens, got 9"),
    ({"max_new_tokens": 0}, "max_new_tokens must be a whole number"),
    ({"temperature": -1.0}, "temperature must be >= 0 and finite, got -1.0"),
    ({"temperature": float("nan")}, "temperature must be >= 0 and finite, got nan"),
    ({"requests": (example().requests[0],) * 2}, "names of requests must be different, got '81' twice"),
]
WRONG_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "name must be a text that is not empty"),
    ({"domain": ""}, "domain must be a text that is not empty"),
    ({"prompt_length": 0}, r"prompt_length must be a whole number in \[1, 2147483647\], got 0"),
    ({"tokens": np.zeros(0, np.int64)}, "tokens must be 1 to max_new_tokens"),
    ({"tokens": np.zeros(9, np.int32)}, "tokens must be int64"),
    ({"tokens": np.full(9, -1)}, r"tokens must be in \[0, 2\*\*31\)"),
    ({"tokens": np.zeros(8, np.int64)}, r"offsets must be int64 \[8\], got int64 \[9\]"),
    ({"proposals": {}}, "proposals must be of the drafters copy, mute, got none"),
]


@pytest.mark.parametrize(("changes", "problem"), WRONG_TRACES)
def test_impossible_traces_are_named(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        replace(example(), **changes).validate()


@pytest.mark.parametrize(("changes", "problem"), WRONG_REQUESTS)
def test_impossible_requests_are_named(changes: dict[str, Any], problem: str) -> None:
    trace = example()
    with pytest.raises(ValueError, match=problem):
        replace(trace, requests=(replace(trace.requests[0], **changes),)).validate()
